"""Encode the documents or lines of a part; lines are read just as ``fairseq-preprocess`` reads them."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.binarize.shards import SegmentWriter, token_type, with_ends
from data_prep.flow.documents import NOT_TEXT, ReadSettings, counted_records
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.options import cached_tokenizer
from data_prep.flow.parts import FilePart
from data_prep.flow.running import STATE
from data_prep.flow.streams import DamagedFile, open_stream, write_stream
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer, Vocabulary, load_tokenizer
from smlp.text.tokenizer_files import DICTIONARY
from smlp.text.tokenizer_kinds import Words

BLOCK_BYTES = 1 << 20


def line_blocks(part: FilePart, max_bytes: int) -> Iterator[list[str]]:
    """Yield the lines of a part, without their ends, in lists of about ``BLOCK_BYTES`` of text.

    A line belongs to the part that it begins in. A carriage return, alone or before a line feed, ends a line, as in
    Python's text files; there is no line after the last line end. A line may have at most ``max_bytes``.

    Raises:
        UserError: the file is damaged or is not UTF-8, or a line is longer.
    """
    with open_stream(part.path) as stream:
        try:
            start = _next_line(stream, part.start)
            stop = None if part.stop is None else _next_line(stream, part.stop)
            if start or stop is not None:
                stream.seek(start)
            rest = b""
            while stop is None or start < stop:
                left = BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - start - len(rest))
                content = rest + stream.read(left)
                if content and not content.endswith(b"\n"):
                    content += stream.readline(max_bytes + 1)
                end = len(content)
                if not content.endswith(b"\n"):  # a carriage return at the end may be half of a line end
                    end = max(content.rfind(b"\n"), content.rfind(b"\r", 0, -1)) + 1 or end
                content, rest = content[:end], content[end:]
                if not content:
                    return
                if len(content) > max_bytes:
                    _check_lengths(content, part, start, max_bytes)
                yield _lines_of(content, part, start)
                start += len(content)
        except DamagedFile as error:
            raise UserError(f"{error}: it is damaged, and only whole files are read as lines") from None


def _check_lengths(content: bytes, part: FilePart, start: int, max_bytes: int) -> None:
    for line in re.split(b"[\r\n]", content):
        if len(line) > max_bytes:
            raise UserError(
                f"{part.path}: the line at byte {start:,} is longer than {max_bytes:,} bytes: give a larger "
                "--max-document-bytes, or leave the file out"
            )
        start += len(line) + 1


def _next_line(stream: BinaryIO, offset: int) -> int:
    """Return where the first line begins that does not begin before ``offset``."""
    if not offset:
        return 0
    stream.seek(offset - 1)
    place = offset - 1
    while True:
        rest = stream.readline(BLOCK_BYTES)
        place += len(rest)
        if not rest or rest.endswith(b"\n"):
            return place


def _lines_of(content: bytes, part: FilePart, start: int) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{part.path} is not UTF-8: byte 0x{content[error.start]:02x} at position {start + error.start:,}"
        ) from None
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n")


DOCUMENTS, LINES, PIECES = FORMATS = ("documents", "lines", "pieces")
BLOCK_CHARACTERS = 1 << 20  # of the documents that are encoded at a time
SEGMENTS = f"{STATE}/segments"  # holds tokens of parts until they are moved to shards
NO_TOKEN = "no token in it"


@dataclass(frozen=True)
class Job:
    """The settings of :func:`encode_part`."""

    tokenizer: Path  # folder of the tokenizer
    # one of ``FORMATS``: documents whose paragraphs are lines, plain lines, or lines of dictionary symbols
    format: str
    reading: ReadSettings  # how documents are read
    num_shards: int  # documents go to a shard by the hash of their text; lines all go to the first shard


@functools.lru_cache(maxsize=1)
def _encoder(job: Job) -> tuple[Vocabulary, Tokenizer | Words]:
    if job.format == PIECES:
        vocabulary = Vocabulary.load(job.tokenizer / DICTIONARY)
        return vocabulary, Words(vocabulary)
    tokenizer = cached_tokenizer(job.tokenizer)
    return tokenizer.vocabulary, tokenizer


def encode_part(part: FilePart, out: Path, job: Job) -> PartResult:
    """Write the tokens of a part in segments.

    Raises:
        UserError: lines are not UTF-8, or the file is damaged; documents of that kind are counted instead.
    """
    vocabulary, encoder = _encoder(job)
    counts, defects = Counts(), []
    with write_stream(out / SEGMENTS / f"{part.name}.bin") as (stream, written):
        segments = SegmentWriter(stream, job.num_shards)
        if job.format == DOCUMENTS:
            blocks = _document_blocks(part, job, encoder, counts, defects)
        else:
            blocks = ((*encoder.encode_batch(lines), None) for lines in line_blocks(part, job.reading.max_bytes))
        unknown = 0
        for ids_N, lengths_L, documents in blocks:
            unknown += int(np.count_nonzero(ids_N == vocabulary.unk))
            tokens = with_ends(ids_N, lengths_L, vocabulary.eos, token_type(len(vocabulary)))
            _deal(segments, tokens, lengths_L + 1, documents)
        segments.finish()
    return PartResult([written.row(out)], counts, defects, {"unknown": unknown, "segments": segments.segments})


# of each document of a block: its shard, and its number of lines (D,), including the empty one at its end
_Documents = tuple[list[int], np.ndarray]


def _document_blocks(
    part: FilePart, job: Job, encoder: Tokenizer, counts: Counts, defects: list[dict[str, str]]
) -> Iterator[tuple[np.ndarray, np.ndarray, _Documents]]:
    """Yield blocks of documents: ids, lengths of lines without their end, and the documents that they make.

    A document is its paragraphs that have a token, and an empty line.
    """
    lines: list[str] = []
    sizes: list[int] = []  # lines of each document
    shards: list[int] = []
    characters = 0
    for piece in counted_records(part, job.reading, counts, defects):
        try:
            content = piece.text.encode()
        except UnicodeEncodeError:
            counts.drop(NOT_TEXT)
            continue
        paragraphs = piece.text.split("\n")
        lines += paragraphs
        lines.append("")
        sizes.append(len(paragraphs) + 1)
        shards.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) % job.num_shards)
        characters += len(piece.text)
        if characters >= BLOCK_CHARACTERS:
            yield _encoded(lines, sizes, shards, encoder, counts)
            lines, sizes, shards, characters = [], [], [], 0
    if lines:
        yield _encoded(lines, sizes, shards, encoder, counts)


def _encoded(
    lines: list[str], sizes: list[int], shards: list[int], encoder: Tokenizer, counts: Counts
) -> tuple[np.ndarray, np.ndarray, _Documents]:
    """Encode a block of documents, each with an empty line at its end, and drop other lines without a token."""
    ids_N, lengths_L = encoder.encode_batch(lines)
    size_D = np.array(sizes)
    last_D = np.cumsum(size_D) - 1
    has_token_D = np.add.reduceat(lengths_L, last_D - size_D + 1) > 0
    is_kept_L = lengths_L > 0
    is_kept_L[last_D[has_token_D]] = True
    num_lines_D = np.add.reduceat(is_kept_L, last_D - size_D + 1, dtype=np.int64)[has_token_D]
    kept = int(np.count_nonzero(has_token_D))
    counts.documents_in += len(sizes)
    counts.kept += kept
    if kept < len(sizes):
        counts.dropped[NO_TOKEN] += len(sizes) - kept
    if left_out := int(size_D[has_token_D].sum() - num_lines_D.sum()):
        counts.other["paragraphs without a token left out"] += left_out
    kept_shards = [shard for shard, has_token in zip(shards, has_token_D, strict=True) if has_token]
    return ids_N, lengths_L[is_kept_L], (kept_shards, num_lines_D)


def _deal(segments: SegmentWriter, tokens_N: np.ndarray, lengths_L: np.ndarray, documents: _Documents | None) -> None:
    """Assign each document to its shard; lines that are no documents go to the first."""
    if documents is None or not any(documents[0]):
        segments.add(0, tokens_N, lengths_L)
        return
    shards, num_lines_D = documents
    line_D = np.cumsum(num_lines_D)
    token_D = np.cumsum(lengths_L)[line_D - 1]
    line, token = 0, 0
    for shard, next_line, next_token in zip(shards, line_D.tolist(), token_D.tolist(), strict=True):
        segments.add(shard, tokens_N[token:next_token], lengths_L[line:next_line])
        line, token = next_line, next_token


def check_tokenizer(folder: Path, format: str) -> Vocabulary:
    """Return the dictionary of a tokenizer that fits a format.

    Raises:
        UserError: there is no such folder, or something is missing or damaged in it.
    """
    if not folder.is_dir():
        raise UserError(f"--tokenizer {folder} is not a folder")
    return Vocabulary.load(folder / DICTIONARY) if format == PIECES else load_tokenizer(folder).vocabulary
