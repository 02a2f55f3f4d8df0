"""A sample of documents that depends on nothing but the files, their texts and a seed, whatever the workers.

Each part gives a share by its size on disk: its documents with the smallest hashes.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.flow.documents import Loss, Reading, Record, read
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import Part
from data_prep.flow.running import STATE
from data_prep.flow.streams import open_stream, write_stream
from data_prep.tokenize.shared import NOT_TEXT

NOT_DRAWN = "not drawn"


def rank_of(text: str, seed: int) -> int:
    """The hash of a text that documents are drawn by, 64 bits."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest)


def sample_part(part: Part, out: Path, reading: Reading, num_bytes: int, total: int, seed: int) -> PartResult:
    """Writes the documents of a part with the smallest hashes, smallest first.

    Args:
        part: a part of the training text.
        out: the step's folder.
        reading: how it is read.
        num_bytes: of the whole sample.
        total: bytes on disk of all parts.
        seed: of the hashes.

    Returns:
        The file and what was drawn: the last document drawn makes the part's share full or more than full. It is what
        is held in memory.
    """
    share = num_bytes * part.num_bytes / total
    counts, defects = Counts(), []
    drawn: list[tuple[int, int, str]] = []  # a heap, the largest hash first; hash, bytes, text
    size = 0
    for piece in read(part, reading):
        if isinstance(piece, Record):
            try:
                length = len(piece.text.encode())
            except UnicodeEncodeError:
                counts.drop(NOT_TEXT)
                continue
            counts.keep()
            heapq.heappush(drawn, (-rank_of(piece.text, seed), length, piece.text))
            size += length
            while size - drawn[0][1] >= share and len(drawn) > 1:
                size -= heapq.heappop(drawn)[1]
        elif isinstance(piece, Loss):
            counts.drop(piece.reason)
        else:
            defects.append({"problem": piece.problem, "where": piece.where})
    if len(drawn) < counts.kept:
        counts.dropped[NOT_DRAWN] += counts.kept - len(drawn)
    counts.kept = len(drawn)
    name = f"{STATE}/texts/{part.name}.jsonl.gz"
    with write_stream(out / name) as (stream, written):
        for _, _, text in sorted(drawn, reverse=True):
            stream.write((json.dumps(text) + "\n").encode())
    return PartResult([{"name": name, "bytes": written.num_bytes, "sha256": written.sha256}], counts, defects)


def drawn_texts(files: Sequence[Path]) -> Iterator[str]:
    """The texts of the sample, part by part."""
    for path in files:
        with open_stream(path) as stream:
            yield from map(json.loads, stream)


def drawn_lines(files: Sequence[Path]) -> Iterator[str]:
    """Paragraphs of the sample that are not blank."""
    return (line for text in drawn_texts(files) for line in text.split("\n") if line.strip())
