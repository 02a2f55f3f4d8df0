"""First phase: reads every document once, and leaves what the others need of it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.contamination import Index, Tasks
from data_prep.dedup.files import WORK, output_of
from data_prep.dedup.signatures import Scheme, band_keys, shingles, signatures
from data_prep.dedup.spill import spilling
from data_prep.dedup.words import text_hash, word_hashes, words_of
from data_prep.flow.counted import counted_records
from data_prep.flow.documents import Reading, Record
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import Part
from data_prep.flow.streams import write_stream

BLOCK = 4096  # documents whose rows are held and written at once


@dataclass(frozen=True)
class SignSettings:
    """What the first phase does.

    Attributes:
        reading: of the files.
        scheme: of near duplicates; None looks for exact ones only.
        num_partitions: of the rows on disk.
        tasks: zero-shot tasks, if documents are compared with them.
        leave_out: documents that overlap with a task take no part in what follows.
        held_out: names of parts that are not compared with tasks.
    """

    reading: Reading
    scheme: Scheme | None
    num_partitions: int
    tasks: Tasks | None
    leave_out: bool
    held_out: frozenset[str]


class _Block:
    """Rows of documents that are not written yet."""

    def __init__(self) -> None:
        self.exact: list[tuple[int, int, int]] = []
        self.shingles: list[np.ndarray] = []
        self.numbers: list[int] = []  # of the documents of ``shingles``; -1 where it takes no part
        self.num_shingles = self.num_documents = 0


def sign_part(part: Part, out: Path, settings: SignSettings) -> PartResult:
    """Writes ``.work/NAME.exact``, ``.bands``, ``.signatures``, ``.names``, ``.offsets``, ``.tainted`` of a part."""
    stem = out / WORK / part.name
    counts, defects = Counts(), []
    index = Index(settings.tasks) if settings.tasks and part.name not in settings.held_out else None
    number, offset = 0, 0
    with ExitStack() as files:

        def opened(kind: str) -> Any:
            return files.enter_context(write_stream(stem.with_name(f"{part.name}.{kind}")))[0]

        names, offsets, tainted, hits = opened("names"), opened("offsets"), opened("tainted"), opened("hits")
        values = opened("signatures")
        exact = files.enter_context(spilling(stem.with_name(f"{part.name}.exact"), 3, settings.num_partitions))
        bands = files.enter_context(spilling(stem.with_name(f"{part.name}.bands"), 2, settings.num_partitions))
        block = _Block()

        def flush() -> None:
            nonlocal block
            if block.exact:
                exact.add(np.array(block.exact, dtype=np.uint64))
            if settings.scheme and block.shingles:
                signed = signatures(block.shingles, settings.scheme)
                values.write(signed.tobytes())
                numbers = np.array(block.numbers)
                keys = band_keys(signed[numbers >= 0], settings.scheme)
                rows = np.repeat(numbers[numbers >= 0].astype(np.uint64), keys.shape[1])
                bands.add(np.stack([keys.reshape(-1), rows], axis=1))
            block = _Block()

        offsets.write(np.int64(0).tobytes())
        for piece in counted_records(part, settings.reading, counts, defects):
            counts.keep()
            words = words_of(piece.text)
            hashes = word_hashes(words) if index or settings.scheme else None
            found = index.hits(hashes) if index else {}
            if found:
                hits.write(_hit_row(piece, found, words))
            leave_out = bool(found) and settings.leave_out
            tainted.write(bytes([leave_out]))
            line = (json.dumps([piece.id, piece.source], ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
            offset += len(line)
            names.write(line)
            offsets.write(np.int64(offset).tobytes())
            if not leave_out:
                block.exact.append((*text_hash(piece.text, words), number))
            if settings.scheme:
                block.shingles.append(shingles(hashes, settings.scheme.ngram))
                block.numbers.append(-1 if leave_out or not words else number)
                block.num_shingles += len(words)
            number += 1
            block.num_documents += 1
            if block.num_documents >= BLOCK or block.num_shingles >= BLOCK * 256:
                flush()
        flush()
    kinds = ["names", "offsets", "tainted", "hits", "signatures", "exact", "exact.index", "bands", "bands.index"]
    outputs = [output_of(out, stem.with_name(f"{part.name}.{kind}")) for kind in kinds]
    facts = {"documents": number, "contamination": index.facts() if index else {}}
    return PartResult(outputs, counts, defects, facts)


def _hit_row(record: Record, found: dict[str, tuple[int, int, int]], words: list[bytes]) -> bytes:
    """A line about a document that overlaps with tasks: how many n-grams of each, and the first of them."""
    tasks = {
        task: {"ngrams": number, "text": b" ".join(words[start : start + n]).decode()}
        for task, (number, start, n) in found.items()
    }
    row = {"id": record.id, "source": record.source, "tasks": tasks}
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
