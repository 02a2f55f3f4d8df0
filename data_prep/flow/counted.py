"""Documents of a part with everything else on record: what most steps begin with."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.flow.documents import Defect, Loss, Reading, Record, read
from data_prep.flow.manifest import Counts
from data_prep.flow.parts import Part


def counted_records(
    part: Part, reading: Reading, counts: Counts, defects: list[dict[str, str]] | None = None
) -> Iterator[Record]:
    """The documents of a part, in order.

    Args:
        part: what to read.
        reading: how.
        counts: losses are dropped there, by their reasons; the documents themselves are the caller's to count.
        defects: takes those of the file; None where another phase of the step reads it too, and reports them.
    """
    for piece in read(part, reading):
        if isinstance(piece, Record):
            yield piece
        elif isinstance(piece, Loss):
            counts.drop(piece.reason, piece.number)
        elif isinstance(piece, Defect) and defects is not None:
            defects.append({"problem": piece.problem, "where": piece.where})
