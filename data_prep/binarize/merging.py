"""Segments of all parts put together into the files of a shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.binarize.mmap_files import index_content
from data_prep.binarize.segments import LENGTH, Segment
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import Part
from data_prep.flow.running import STATE
from data_prep.flow.streams import READ_BYTES, write_bytes, write_stream
from smlp.files import name_below

PLANS = f"{STATE}/plans"
SUMS = ("tokens", "lines", "ends")


def shard_folders(num_shards: int) -> list[str]:
    """The shards' folders below the step's: the step's own where there is one shard."""
    width = max(2, len(str(num_shards - 1)))
    return [""] if num_shards == 1 else [f"shard{shard:0{width}d}/" for shard in range(num_shards)]


def write_plans(
    out: Path, split: str, results: Sequence[PartResult], folders: Sequence[str], by_part: bool, dtype: np.dtype
) -> list[Part]:
    """Says for each shard of a split which segments it consists of, in a small file each.

    Args:
        out: the step's folder.
        split: train, valid or test.
        results: of all parts of the split, in order, with their segments.
        folders: of the shards that the split has.
        by_part: whether whole parts go to the shards in turn; otherwise a segment names its own.
        dtype: of the tokens.

    Returns:
        These files, as parts to work on, with what they hold.
    """
    shards: list[list[list[Any]]] = [[] for _ in folders]
    for number, result in enumerate(results):
        position = 0
        for row in result.facts["segments"]:
            segment = Segment(*row)
            shard = number % len(folders) if by_part else segment.shard
            shards[shard].append([result.outputs[0]["name"], position, *list(asdict(segment).values())[1:]])
            position += segment.num_bytes(dtype)
    parts = []
    digests = [result.outputs[0]["sha256"] for result in results]
    for folder, segments in zip(folders, shards, strict=True):
        name = folder + split
        path = out / PLANS / f"{name.replace('/', '-')}.json"
        plan = {"name": name, "dtype": dtype.str, "segments": segments, "parts": digests}
        content = json.dumps(plan).encode()
        if not path.is_file() or path.read_bytes() != content:  # else a shard that is there is not made again
            write_bytes(path, content)
        parts.append(Part.whole(path))
    return parts


def tokens_of_plan(plan: Part) -> int:
    """Tokens of the shard that a file of :func:`write_plans` describes."""
    return sum(row[2] for row in json.loads(plan.path.read_bytes())["segments"])


def merge_part(part: Part, out: Path) -> PartResult:
    """Writes ``.bin`` and then ``.idx`` of one shard of a split, from its plan."""
    plan = json.loads(part.path.read_bytes())
    dtype, segments = np.dtype(plan["dtype"]), plan["segments"]
    for name in (plan["name"], *(row[0] for row in segments)):
        name_below(name, str(part.path))
    outputs = []
    for suffix, blocks in (("bin", _tokens(out, dtype, segments)), ("idx", _index(out, dtype, segments))):
        with write_stream(out / f"{plan['name']}.{suffix}") as (stream, written):
            for block in blocks:
                stream.write(block)
        output = {"name": f"{plan['name']}.{suffix}", "bytes": written.num_bytes, "sha256": written.sha256}
        outputs.append(output)
    outputs[0] |= {name: sum(row[place] for row in segments) for place, name in enumerate(SUMS, start=2)}
    return PartResult(outputs, Counts())


def _tokens(out: Path, dtype: np.dtype, segments: list[list[Any]]) -> Iterator[bytes]:
    for name, position, tokens, _, _ in segments:
        with open(out / name, "rb") as file:
            file.seek(position)
            left = tokens * dtype.itemsize
            while left:
                content = file.read(min(left, READ_BYTES))
                yield content
                left -= len(content)


def _index(out: Path, dtype: np.dtype, segments: list[list[Any]]) -> Iterator[bytes | memoryview]:
    def lengths() -> Iterator[np.ndarray]:
        for name, position, tokens, lines, _ in segments:
            with open(out / name, "rb") as file:
                file.seek(position + tokens * dtype.itemsize)
                yield np.frombuffer(file.read(lines * LENGTH.itemsize), LENGTH)

    return index_content(dtype, sum(row[3] for row in segments), lengths)
