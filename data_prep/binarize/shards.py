"""Write tokens in segments, and put them together as the ``.bin`` and ``.idx`` of each shard.

A part leaves one file of segments, each for one shard: tokens, then the lengths of their lines (int32). Memory holds
one segment for each shard. :mod:`smlp.text.binarized` describes the final format.
Letters: ``N`` tokens, ``L`` lines.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import FilePart
from data_prep.flow.running import STATE
from data_prep.flow.streams import READ_BYTES, write_bytes, write_stream
from smlp.errors import UserError
from smlp.files import NamedFile, name_below
from smlp.text.binarized import HEADER, MAGIC, TOKEN_TYPES

_CODES = {np.dtype(name): code for code, name in TOKEN_TYPES.items()}


def token_type(vocab_size: int) -> np.dtype:
    """Return the integer type that fairseq chooses for a dictionary of this size."""
    return np.dtype("<u2" if vocab_size < 65500 else "<u4" if vocab_size < 2**32 - 1 else "<i8")


def with_ends(ids_N: np.ndarray, lengths_L: np.ndarray, end: int, dtype: np.dtype) -> np.ndarray:
    """Return the ids of lines, each followed by ``end``: (N + L,)."""
    last_L = np.cumsum(lengths_L + 1) - 1
    stream = np.empty(len(ids_N) + len(lengths_L), dtype)
    is_token = np.ones(len(stream), bool)
    is_token[last_L] = False
    stream[is_token] = ids_N
    stream[last_L] = end
    return stream


def index_content(
    dtype: np.dtype, num_lines: int, lengths: Callable[[], Iterable[np.ndarray]]
) -> Iterator[bytes | memoryview]:
    """Yield the content of an ``.idx`` in blocks.

    ``lengths`` yields the lengths of all lines in tokens, with their ``</s>``, in blocks; it is called twice.
    """
    yield MAGIC + HEADER.pack(1, _CODES[dtype], num_lines)
    for lengths_L in lengths():
        yield lengths_L.astype("<i4").tobytes()
    position = 0
    for lengths_L in lengths():
        ends_L = position + np.cumsum(lengths_L, dtype=np.int64) * dtype.itemsize
        yield np.concatenate([[position], ends_L[:-1]]).astype("<i8").tobytes()
        position = int(ends_L[-1])


def write_tokens(
    out: Path, name: str, tokens_N: np.ndarray, lengths_L: np.ndarray, dtype: np.dtype
) -> list[dict[str, Any]]:
    """Write lines that are in memory as ``out/NAME.bin`` and then ``.idx``; return the rows of both for a manifest."""
    with write_stream(out / f"{name}.bin") as (stream, written_bin):
        stream.write(tokens_N.astype(dtype).tobytes())
    with write_stream(out / f"{name}.idx") as (stream, written_idx):
        for block in index_content(dtype, len(lengths_L), lambda: [lengths_L]):
            stream.write(block)
    return [written_bin.row(out), written_idx.row(out)]


SEGMENT_TOKENS = 1 << 19
LENGTH = np.dtype("<i4")


class Segment(NamedTuple):
    """``tokens`` in ``lines`` of one shard; ``ends`` counts the empty lines, which end documents."""

    shard: int
    tokens: int
    lines: int
    ends: int

    def num_bytes(self, token: np.dtype) -> int:
        """Return its size on disk."""
        return self.tokens * token.itemsize + self.lines * LENGTH.itemsize


class SegmentWriter:
    """Collect tokens for each shard and write them in segments."""

    def __init__(self, stream: BinaryIO, num_shards: int) -> None:
        self._stream = stream
        self._waiting: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(num_shards)]
        self._num_tokens = [0] * num_shards
        self.segments: list[Segment] = []

    def add(self, shard: int, tokens_N: np.ndarray, lengths_L: np.ndarray) -> None:
        """Add the tokens of whole lines, with the ``</s>`` of each, and the lines' lengths."""
        self._waiting[shard].append((tokens_N, lengths_L))
        self._num_tokens[shard] += len(tokens_N)
        if self._num_tokens[shard] >= SEGMENT_TOKENS:
            self._write(shard)

    def finish(self) -> None:
        """Write what is left, shard by shard."""
        for shard, num_tokens in enumerate(self._num_tokens):
            if num_tokens:
                self._write(shard)

    def _write(self, shard: int) -> None:
        for tokens_N, _ in self._waiting[shard]:
            self._stream.write(tokens_N.tobytes())
        lengths_L = np.concatenate([lengths_L for _, lengths_L in self._waiting[shard]])
        self._stream.write(lengths_L.astype(LENGTH).tobytes())
        ends = int(np.count_nonzero(lengths_L == 1))
        self.segments.append(Segment(shard, self._num_tokens[shard], len(lengths_L), ends))
        self._waiting[shard], self._num_tokens[shard] = [], 0


PLANS = f"{STATE}/plans"
SUMS = ("tokens", "lines", "ends")


def shard_folders(num_shards: int) -> list[str]:
    """Return the shards' folders relative to the step's folder, which itself is the only shard's."""
    width = max(2, len(str(num_shards - 1)))
    return [""] if num_shards == 1 else [f"shard{shard:0{width}d}/" for shard in range(num_shards)]


def write_plans(
    out: Path, split: str, results: Sequence[PartResult], folders: Sequence[str], by_part: bool, dtype: np.dtype
) -> list[FilePart]:
    """Write for each shard of a split a small file that lists its segments; return these files as parts to work on.

    ``results`` are those of all parts of the split, in order; ``folders`` are the shards that it has. ``by_part`` deals
    whole parts to the shards in turn; otherwise each segment names its shard.
    """
    shards: list[list[list[Any]]] = [[] for _ in folders]
    for number, result in enumerate(results):
        position = 0
        for row in result.facts["segments"]:
            segment = Segment(*row)
            shard = number % len(folders) if by_part else segment.shard
            shards[shard].append([result.outputs[0]["name"], position, *segment[1:]])
            position += segment.num_bytes(dtype)
    parts = []
    digests = [result.outputs[0]["sha256"] for result in results]
    for folder, segments in zip(folders, shards, strict=True):
        name = folder + split
        path = out / PLANS / f"{name.replace('/', '-')}.json"
        plan = {"name": name, "dtype": dtype.str, "segments": segments, "parts": digests}
        content = json.dumps(plan).encode()
        if not path.is_file() or path.read_bytes() != content:  # an existing shard is not made again
            write_bytes(path, content)
        parts.append(FilePart.whole(path))
    return parts


def tokens_of_plan(plan: FilePart) -> int:
    """Return the number of tokens in the shard that a file of :func:`write_plans` describes."""
    return sum(row[2] for row in json.loads(plan.path.read_bytes())["segments"])


def merge_part(part: FilePart, out: Path) -> PartResult:
    """Write ``.bin`` and then ``.idx`` of one shard of a split from its plan."""
    plan = json.loads(part.path.read_bytes())
    dtype, segments = np.dtype(plan["dtype"]), plan["segments"]
    for name in (plan["name"], *(row[0] for row in segments)):
        name_below(name, str(part.path))
    outputs = []
    for suffix, blocks in (("bin", _tokens(out, dtype, segments)), ("idx", _index(out, dtype, segments))):
        with write_stream(out / f"{plan['name']}.{suffix}") as (stream, written):
            for block in blocks:
                stream.write(block)
        outputs.append(written.row(out))
    outputs[0] |= {name: sum(row[place] for row in segments) for place, name in enumerate(SUMS, start=2)}
    return PartResult(outputs, Counts())


def _tokens(out: Path, dtype: np.dtype, segments: list[list[Any]]) -> Iterator[bytes]:
    for name, position, tokens, _, _ in segments:
        with io.BufferedReader(NamedFile(out / name)) as file:
            file.seek(position)
            left = tokens * dtype.itemsize
            while left:
                content = file.read(min(left, READ_BYTES))
                if not content:
                    raise _breaks_off(out / name)
                yield content
                left -= len(content)


def _breaks_off(path: Path) -> UserError:
    return UserError(f"{path} breaks off: run the same command again")


def _index(out: Path, dtype: np.dtype, segments: list[list[Any]]) -> Iterator[bytes | memoryview]:
    def lengths() -> Iterator[np.ndarray]:
        for name, position, tokens, lines, _ in segments:
            with io.BufferedReader(NamedFile(out / name)) as file:
                file.seek(position + tokens * dtype.itemsize)
                content = file.read(lines * LENGTH.itemsize)
                if len(content) < lines * LENGTH.itemsize:
                    raise _breaks_off(out / name)
                yield np.frombuffer(content, LENGTH)

    return index_content(dtype, sum(row[3] for row in segments), lengths)
