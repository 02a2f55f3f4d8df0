"""First and last phase, a part at a time: sign the documents; write those that are kept, and a line for each other."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.contamination import Index, TaskNgrams
from data_prep.dedup.files import Lookup, Signed, output_of, spilling
from data_prep.dedup.signatures import (
    Scheme,
    band_keys,
    shingles,
    signatures,
    similarity,
    text_hash,
    word_hashes,
    words_of,
)
from data_prep.flow.documents import ReadSettings, Record, counted_records
from data_prep.flow.manifest import WORK, Counts, PartResult
from data_prep.flow.parts import FilePart
from data_prep.flow.streams import json_line, write_stream

BLOCK = 4096  # documents whose rows are held in memory and written together


@dataclass(frozen=True)
class SignSettings:
    """The settings of the first phase."""

    reading: ReadSettings  # of the files
    scheme: Scheme | None  # of near duplicates; None looks for exact ones only
    num_partitions: int  # of the rows on disk
    tasks: TaskNgrams | None  # zero-shot tasks, if documents are compared with them
    leave_out: bool  # exclude documents that overlap with a task from the later phases
    held_out: frozenset[str]  # names of parts that are not compared with tasks


class _Block:
    """Rows of documents that are not written yet."""

    def __init__(self) -> None:
        self.exact: list[tuple[int, int, int]] = []
        self.shingles: list[np.ndarray] = []
        self.numbers: list[int] = []  # numbers of the documents of ``shingles``; -1 if excluded
        self.num_shingles = self.num_documents = 0


def sign_part(part: FilePart, out: Path, settings: SignSettings) -> PartResult:
    """Write ``.work/NAME.exact``, ``.bands``, ``.signatures``, ``.names``, ``.offsets``, ``.tainted`` and ``.hits``."""
    stem = out / WORK / part.name
    counts, defects = Counts(), []
    index = Index(settings.tasks) if settings.tasks and part.name not in settings.held_out else None
    number, offset = 0, 0
    with ExitStack() as files:

        def opened(kind: str) -> Any:
            return files.enter_context(write_stream(stem.with_name(f"{part.name}.{kind}")))[0]

        names, offsets, tainted, hits = opened("names"), opened("offsets"), opened("tainted"), opened("hits")
        values = opened("signatures")
        add_exact = files.enter_context(spilling(stem.with_name(f"{part.name}.exact"), settings.num_partitions))
        add_bands = files.enter_context(spilling(stem.with_name(f"{part.name}.bands"), settings.num_partitions))
        block = _Block()

        def flush() -> None:
            nonlocal block
            if block.exact:
                add_exact(np.array(block.exact, dtype=np.uint64))
            if settings.scheme and block.shingles:
                signed = signatures(block.shingles, settings.scheme)
                values.write(signed.tobytes())
                numbers = np.array(block.numbers)
                keys = band_keys(signed[numbers >= 0], settings.scheme)
                rows = np.repeat(numbers[numbers >= 0].astype(np.uint64), keys.shape[1])
                add_bands(np.stack([keys.reshape(-1), rows], axis=1))
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
            line = json_line([piece.id, piece.source])
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
    """Return a line about a document that overlaps with tasks: how many n-grams of each, and the first of them."""
    tasks = {
        task: {"ngrams": number, "text": b" ".join(words[start : start + n]).decode()}
        for task, (number, start, n) in found.items()
    }
    return json_line({"id": record.id, "source": record.source, "tasks": tasks})


@dataclass(frozen=True)
class Decisions:
    """Two files with a number for each document, in the order of the documents."""

    exact: Path  # the first document with the same words
    kept: Path  # the document that is kept instead; itself if kept
    kind: str  # of these numbers

    def of(self, path: Path, start: int, stop: int) -> np.ndarray:
        """Read the numbers of documents ``start`` to ``stop``."""
        size = np.dtype(self.kind).itemsize
        return np.fromfile(path, dtype=self.kind, offset=start * size, count=stop - start)


def outputs_of_part(name: str, suffix: str) -> tuple[str, str]:
    """Return what :func:`write_part` writes, relative to the step's folder: documents, and those removed."""
    return f"{name}.jsonl{suffix}", f"{WORK}/{name}.removed"


def write_part(
    part: FilePart, out: Path, reading: ReadSettings, signed: Signed, decisions: Decisions, num_perm: int, suffix: str
) -> PartResult:
    """Write the kept documents of an input to ``NAME.jsonl``, and the others to ``.work/NAME.removed``.

    ``num_perm`` is the number of entries of a signature, if there are any; ``suffix`` that of a compression.
    """
    number = signed.names.index(part.name)
    base, stop = int(signed.bases[number]), int(signed.bases[number + 1])
    exact, kept = (decisions.of(path, base, stop) for path in (decisions.exact, decisions.kept))
    tainted = np.fromfile(signed.path(number, "tainted"), dtype=bool)
    lookup = Lookup(signed, num_perm)
    counts, defects, pairs = Counts(), [], Counter()
    documents_path, removed_path = (out / name for name in outputs_of_part(part.name, suffix))
    index = 0
    with write_stream(documents_path) as (stream, written), write_stream(removed_path) as (removed, removed_file):
        for piece in counted_records(part, reading, counts, defects):
            document, index = base + index, index + 1
            if tainted[document - base]:
                counts.drop("contaminated")
                row: dict[str, Any] = {"kind": "contaminated"}
            elif kept[document - base] == document:
                counts.keep()
                stream.write(piece.line())
                continue
            else:
                winner = int(kept[document - base])
                row = _removed(document, winner, bool(exact[document - base] == winner), lookup)
                row["held_out"] = winner < signed.first_input
                counts.drop(f"{row['kind']} duplicate{' of a held-out document' if row['held_out'] else ''}")
                pairs[piece.source, row["kept_source"], row["kind"]] += 1
            removed.write(json_line({"id": piece.id, "source": piece.source, **row}))
    assert index == stop - base, f"{part.path}: {index} documents, but there were {stop - base}"
    lookup.close()
    facts = {"pairs": [[*key, number] for key, number in sorted(pairs.items())]}
    outputs = [written.row(out, documents=counts.kept), removed_file.row(out)]
    return PartResult(outputs, counts, defects, facts)


def _removed(document: int, winner: int, is_exact: bool, lookup: Lookup) -> dict[str, Any]:
    """Say why a document is removed.

    The kept document may be a duplicate's duplicate, and kind and similarity are those of the document and it.
    """
    identity, source = lookup.name(winner)
    alike = 1.0
    if not is_exact:
        alike = float(similarity(lookup.signature(document), lookup.signature(winner)[None])[0])
    kind = "exact" if is_exact else "near"
    return {"kind": kind, "similarity": round(alike, 4), "kept_id": identity, "kept_source": source}
