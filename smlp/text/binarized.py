"""Read the token files that ``fairseq-preprocess`` writes (``--dataset-impl mmap``), with numpy alone.

``PREFIX.idx``, little-endian: 9 bytes ``MMIDIDX\\0\\0``; uint64 version (1); uint8 code of the token type; uint64
number S of sentences; int32 length of each sentence, in tokens (S); int64 byte offset of each in the data file (S).
``PREFIX.bin``: the tokens of all sentences, one after the other, with no header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from smlp.errors import UserError
from smlp.files import regular_file

_PIECE = 2**24  # tokens read at a time
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQ")  # version, type code, number of sentences
FIRST_LENGTH = len(MAGIC) + HEADER.size
OLDER_MAGIC = b"TNTIDX\x00\x00"
OLDER_HEADER = struct.Struct("<8sQQQQQ")  # and version, type code, its bytes, number of sentences, and of dimensions
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}


@dataclass(frozen=True)
class BinarizedTokens:
    """``tokens``: (N,) int64, all sentences in order, each with its ``</s>``; ``lengths``: (S,) int32, of each."""

    tokens: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class TokenFiles:
    """The two files of a split, which fit each other; tokens are read on demand.

    ``lengths``: (S,) int32, number of tokens of each sentence; sentences are contiguous in the data file.
    """

    data_path: Path
    dtype: np.dtype
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sentences."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        """Return the size of the data file in bytes."""
        return self.num_tokens * self.dtype.itemsize

    def pieces(self, vocab_size: int) -> Iterator[np.ndarray]:
        """Yield the tokens in order, 17 million at a time.

        Raises:
            UserError: an id is negative or not below ``vocab_size``.
        """
        tokens = np.memmap(self.data_path, self.dtype, mode="r")
        for start in range(0, tokens.size, _PIECE):
            piece = tokens[start : start + _PIECE]
            for outermost in (int(piece.min()), int(piece.max())):
                if not 0 <= outermost < vocab_size:
                    raise UserError(
                        f"{self.data_path} holds the id {outermost}, but the dictionary has {vocab_size} symbols"
                    )
            yield piece


def open_tokens(path_prefix: str | Path) -> TokenFiles:
    """Open ``path_prefix.idx`` and ``path_prefix.bin`` and compare the first with the size of the second.

    Raises:
        UserError: a file is missing, unreadable, empty, not in this format, truncated, or does not fit the other.
    """
    index_path, data_path = Path(f"{path_prefix}.idx"), Path(f"{path_prefix}.bin")
    dtype, lengths, offsets = _read_index(index_path)
    with open_data_file(data_path) as file:
        size = os.fstat(file.fileno()).st_size
    files = TokenFiles(data_path, dtype, lengths)
    if size != files.num_bytes:
        raise UserError(
            f"{data_path} holds {size} bytes, but {index_path.name} lists {files.num_tokens} tokens of "
            f"{dtype.itemsize} bytes"
        )
    # The format allows any order of sentences. fairseq writes them in sequence, which a stream needs.
    position = 0
    for start in range(0, lengths.size, _PIECE):
        sizes = lengths[start : start + _PIECE].astype(np.int64) * dtype.itemsize
        ends = position + np.cumsum(sizes)
        if not np.array_equal(offsets[start : start + _PIECE], ends - sizes):
            raise UserError(f"{index_path} is damaged: its sentences do not follow each other in {data_path.name}")
        position = int(ends[-1])
    return files


def check_older(path_prefix: str | Path) -> None:
    """Compare the two files of fairseq's older formats (``--dataset-impl lazy`` and ``cached``) with each other.

    ``PREFIX.idx``, all numbers int64: 8 bytes ``TNTIDX\\0\\0``; version (1); code and bytes of the token type; number S
    of sentences; number D of their dimensions (S, each being a row); S + 1 places in the list of dimensions; S + 1
    places in the data file, in tokens; the dimensions (D).

    Raises:
        UserError: the message names the file and the numbers.
    """
    index_path, data_path = Path(f"{path_prefix}.idx"), Path(f"{path_prefix}.bin")
    with open_data_file(index_path) as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with open_data_file(data_path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
    if len(content) < OLDER_HEADER.size or content[: len(OLDER_MAGIC)] != OLDER_MAGIC:
        raise UserError(f"{index_path} is not a fairseq index of an older kind: it starts with {content[:9]!r}")
    version, code, width, num_sentences, num_sizes = OLDER_HEADER.unpack_from(content)[1:]
    if version != 1 or code not in TOKEN_TYPES or np.dtype(TOKEN_TYPES[code]).itemsize != width:
        raise UserError(
            f"{index_path} is damaged: version {version}, token type {code} of {width} bytes; only version 1 and "
            "integer types can be read"
        )
    needed = OLDER_HEADER.size + 8 * (2 * (num_sentences + 1) + num_sizes)
    if len(content) != needed or num_sizes != num_sentences or num_sentences == 0:
        raise UserError(
            f"{index_path} holds {len(content)} bytes, but {num_sentences} sentences of {num_sizes} sizes need {needed}"
        )
    numbers = np.frombuffer(content, "<i8", offset=OLDER_HEADER.size)
    dims, places, lengths = np.split(numbers, [num_sentences + 1, 2 * (num_sentences + 1)])
    if lengths.min() < 0 or dims[0] or places[0] or np.any(np.diff(dims) != 1) or np.any(np.diff(places) != lengths):
        raise UserError(f"{index_path} is damaged: its sentences do not follow each other in {data_path.name}")
    if num_bytes != width * places[-1]:
        raise UserError(
            f"{data_path} holds {num_bytes} bytes, but {index_path.name} lists {places[-1]} tokens of {width} bytes"
        )


def check_recorded(
    path_prefix: str | Path, largest: float = math.inf, suffixes: Sequence[str] = ("idx", "bin")
) -> None:
    """Compare both files with the sizes and SHA-256 that ``smlp data`` wrote into ``manifest.json``.

    If neither their folder nor (for a shard) the one above has such a manifest, nothing is compared.

    Args:
        path_prefix: of the files.
        largest: in bytes; of a larger file only the size is compared, not the SHA-256.
        suffixes: of the files.

    Raises:
        UserError: a file has changed.
    """
    for suffix in suffixes:
        check_recorded_file(Path(f"{path_prefix}.{suffix}"), largest)


def check_recorded_file(path: Path, largest: float = math.inf) -> None:
    """Compare one file with its manifest, as :func:`check_recorded` does.

    Raises:
        UserError: the file has changed.
    """
    path = path.absolute()
    record = _record_of(path)
    if record is None:
        return
    manifest, row = record
    said = (
        f"{manifest} says, which 'smlp data {row['step']}' wrote with it: make the data again, or delete "
        f"{manifest.name} and .state"
    )
    with open_data_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != row["bytes"]:
            raise UserError(f"{path} has changed: {size:,} bytes, not the {row['bytes']:,} that {said}")
        if size <= largest and (digest := hashlib.file_digest(file, "sha256").hexdigest()) != row["sha256"]:
            raise UserError(f"{path} has changed: its SHA-256 is {digest[:16]}..., not what {said}")


def read_fairseq_tokens(path_prefix: str | Path) -> BinarizedTokens:
    """Read ``path_prefix.idx`` and ``path_prefix.bin`` into memory.

    Raises:
        UserError: as :func:`open_tokens` and :func:`check_recorded`.
    """
    files = open_tokens(path_prefix)
    check_recorded(path_prefix)
    tokens = np.fromfile(files.data_path, files.dtype)
    if (highest := int(tokens.max(initial=0))) > np.iinfo(np.int64).max:
        raise UserError(f"{files.data_path} is damaged: it holds the id {highest}")
    return BinarizedTokens(tokens.astype(np.int64), files.lengths.copy())


def count_tokens(path_prefix: str | Path, vocab_size: int) -> np.ndarray:
    """Count how often each id occurs in ``path_prefix.bin``, (V,) int64, reading it piece by piece.

    Raises:
        UserError: a file is missing or damaged, or holds an id that is not below ``vocab_size``.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for piece in open_tokens(path_prefix).pieces(vocab_size):
        counts += np.bincount(piece.astype(np.int64, copy=False), minlength=vocab_size)
    return counts


def num_tokens(path_prefix: str | Path) -> int:
    """Return how many tokens ``path_prefix.idx`` lists.

    Raises:
        UserError: the file is missing, unreadable, empty or damaged.
    """
    return int(_read_index(Path(f"{path_prefix}.idx"))[1].sum(dtype=np.int64))


def open_data_file(path: Path, what: str = "data file") -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises:
        UserError: it is missing, unreadable, no regular file, or empty.
    """
    file = regular_file(path, what).open("rb")
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise UserError(f"{what} {path} is empty (0 bytes)")
    return file


#: steps of ``smlp data`` that write data for training
_STEPS = ("binarize", "glue", "squad")


def _record_of(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the manifest of ``smlp data`` that lists a file, and its row there; None without a manifest."""
    for folder in path.parents[:2]:
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            continue
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
            raise UserError(
                f"{path} cannot be compared with {manifest}: {reason}; make the data again, or delete "
                f"{manifest.name} and .state"
            ) from None
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # a manifest of something else
            for row in content["outputs"] if content.get("step") in _STEPS else ():
                if folder / row["name"] == path:
                    return manifest, {"bytes": row["bytes"], "sha256": row["sha256"], "step": content["step"]}
    return None


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Return the type of tokens, and lengths and offsets of the sentences."""
    with open_data_file(path) as file:
        # Mapped, because the index of a large corpus has gigabytes and every rank reads it.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    dtype, num_sentences = read_header(content[:FIRST_LENGTH], len(content), path)
    lengths = np.frombuffer(content, "<i4", num_sentences, FIRST_LENGTH)
    offsets = np.frombuffer(content, "<i8", num_sentences, FIRST_LENGTH + 4 * num_sentences)
    if lengths.min() < 0:
        raise UserError(f"{path} is damaged: a sentence of {lengths.min()} tokens")
    return dtype, lengths, offsets


def read_header(start: bytes, num_bytes: int, path: Path) -> tuple[np.dtype, int]:
    """Return the type of tokens and the number of sentences of an index.

    Args:
        start: its first ``FIRST_LENGTH`` bytes; fewer if it has no more.
        num_bytes: its size.
        path: of the index, for messages.

    Raises:
        UserError: it is not in this format, empty, or of another size than its sentences need.
    """
    if not start.startswith(MAGIC) or len(start) < FIRST_LENGTH:
        raise UserError(f"{path} is not a fairseq index of the mmap kind: it starts with {start[:9]!r}")
    version, code, num_sentences = HEADER.unpack_from(start, len(MAGIC))
    if version != 1 or code not in TOKEN_TYPES:
        raise UserError(
            f"{path} has version {version} and token type {code}; only version 1 and integer types can be read"
        )
    if num_sentences == 0:
        raise UserError(f"{path} lists no sentence")
    if num_bytes != (needed := FIRST_LENGTH + 12 * num_sentences):
        raise UserError(f"{path} holds {num_bytes} bytes, but {num_sentences} sentences need {needed}")
    return np.dtype(TOKEN_TYPES[code]), num_sentences
