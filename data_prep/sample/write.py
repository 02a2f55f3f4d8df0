"""Second reading: each document to its split, as often as the plan says."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from data_prep.corpus import SPLITS
from data_prep.flow.counted import counted_records
from data_prep.flow.documents import Reading, Record
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import Part
from data_prep.flow.streams import WrittenFile, write_stream
from data_prep.sample.plan import Plan
from data_prep.sample.sizes import Measure
from data_prep.sample.survey import hashes, place_of


def write_part(
    part: Part,
    out: Path,
    *,
    reading: Reading,
    measure: Measure,
    seed: int,
    plan: Plan,
    order: dict[str, int],
    suffix: str,
) -> PartResult:
    """Writes ``OUT/SPLIT/PART.jsonl`` for the splits that it has documents of.

    ``order`` gives the position of each part by its name.
    """
    counts, defects, number = Counts(), [], 0
    paths = {split: out / split / f"{part.name}.jsonl{suffix}" for split in SPLITS}
    opened: dict[str, tuple[BinaryIO, WrittenFile]] = {}
    with ExitStack() as files:
        for piece in counted_records(part, reading, counts, defects):
            if reason := measure.reason_against(piece.text):
                counts.drop(reason)
                continue
            draw, split_hash = hashes(piece.text, seed)
            split, times, beginning = plan.place(draw, split_hash, place_of(order[part.name], number), piece.source)
            number += 1
            copies = _copies(piece, times, beginning, measure)
            if not copies:
                counts.drop("beyond the budget" if split else "not in the fraction")
                continue
            counts.keep()
            if len(copies) > 1:
                counts.other[f"{split}: documents written again"] += len(copies) - 1
            if split not in opened:
                opened[split] = files.enter_context(write_stream(paths[split]))
            for copy in copies:
                opened[split][0].write(copy.line())
                counts.other[f"{split}: documents"] += 1
                if measure.unit != "documents":
                    size = measure(copy.text)
                    counts.other[f"{split}: {measure.unit}"] += size
                    counts.other[f"{split}: {measure.unit} of source {copy.source}"] += size
    for split in set(SPLITS) - set(opened):
        paths[split].unlink(missing_ok=True)  # of an earlier run with other files, where this part had documents
    outputs = [
        {"name": f"{split}/{written.path.name}", "bytes": written.num_bytes, "sha256": written.sha256}
        for split, (_, written) in sorted(opened.items())
    ]
    return PartResult(outputs, counts, defects)


def _copies(record: Record, times: int, beginning: int, measure: Measure) -> list[Record]:
    """The document ``times`` times, later copies with ids of their own, and its beginning once more."""
    copies = [record if copy == 0 else replace(record, id=f"{record.id}#{copy + 1}") for copy in range(times)]
    text = measure.beginning(record.text, beginning) if beginning else ""
    if text:
        copies.append(replace(record, text=text, id=f"{record.id}#{times + 1}" if times else record.id))
    return copies
