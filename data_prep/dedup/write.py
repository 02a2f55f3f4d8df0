"""Last phase: writes the documents that are kept, and a line about each that is not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.files import WORK, Lookup, Signed, output_of
from data_prep.dedup.signatures import similarity
from data_prep.flow.counted import counted_records
from data_prep.flow.documents import Reading
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import Part
from data_prep.flow.streams import write_stream

HELD_OUT = " of a held-out document"


@dataclass(frozen=True)
class Decisions:
    """What became of all documents: files of a number each, in the order of their numbers.

    Attributes:
        exact: the first document of the same words.
        kept: the one that is kept instead; itself for one that is kept.
        kind: of these numbers.
    """

    exact: Path
    kept: Path
    kind: str

    def of(self, path: Path, start: int, stop: int) -> np.ndarray:
        """Those of some documents."""
        size = np.dtype(self.kind).itemsize
        return np.fromfile(path, dtype=self.kind, offset=start * size, count=stop - start)


def outputs_of_part(name: str, suffix: str) -> tuple[str, str]:
    """What :func:`write_part` writes for a part, as names in the step's folder: documents, and those removed."""
    return f"{name}.jsonl{suffix}", f"{WORK}/{name}.removed"


def write_part(
    part: Part, out: Path, reading: Reading, signed: Signed, decisions: Decisions, num_perm: int, suffix: str
) -> PartResult:
    """Writes ``NAME.jsonl`` with the suffix of a compression, and ``.work/NAME.removed``.

    Args:
        part: of the inputs.
        out: the step's folder.
        reading: as in the first phase.
        signed: what that phase left.
        decisions: who is kept.
        num_perm: of signatures; 0 if there are none.
        suffix: of the files of documents.
    """
    number = signed.names.index(part.name)
    base, stop = int(signed.bases[number]), int(signed.bases[number + 1])
    exact, kept = (decisions.of(path, base, stop) for path in (decisions.exact, decisions.kept))
    tainted = np.fromfile(signed.path(number, "tainted"), dtype=bool)
    lookup = Lookup(signed, num_perm)
    counts, defects, pairs = Counts(), [], Counter()
    documents_path, removed_path = (out / name for name in outputs_of_part(part.name, suffix))
    index = 0
    with write_stream(documents_path) as (stream, written), write_stream(removed_path) as (removed, _):
        for piece in counted_records(part, reading, counts, defects):
            document, index = base + index, index + 1
            if tainted[document - base]:
                counts.drop("contaminated")
                row: dict[str, Any] = {"id": piece.id, "source": piece.source, "kind": "contaminated"}
            elif kept[document - base] == document:
                counts.keep()
                stream.write(piece.line())
                continue
            else:
                winner = int(kept[document - base])
                row = _removed(document, winner, bool(exact[document - base] != document), lookup)
                row = {"id": piece.id, "source": piece.source, **row}
                held_out = winner < signed.first_input
                row["held_out"] = held_out
                counts.drop(f"{row['kind']} duplicate{HELD_OUT if held_out else ''}")
                pairs[piece.source, row["kept_source"], row["kind"]] += 1
            removed.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass"))
    assert index == stop - base, f"{part.path}: {index} documents, there were {stop - base}"
    lookup.close()
    output = {"name": written.path.name, "bytes": written.num_bytes, "sha256": written.sha256}
    facts = {"pairs": [[*key, number] for key, number in sorted(pairs.items())]}
    outputs = [{**output, "documents": counts.kept}, output_of(out, removed_path)]
    return PartResult(outputs, counts, defects, facts)


def _removed(document: int, winner: int, is_exact: bool, lookup: Lookup) -> dict[str, Any]:
    """Why a document goes. The similarity is that to the one kept, which may be a duplicate's duplicate."""
    identity, source = lookup.name(winner)
    alike = 1.0
    if not is_exact:
        alike = float(similarity(lookup.signature(document), lookup.signature(winner)[None])[0])
    kind = "exact" if is_exact else "near"
    return {"kind": kind, "similarity": round(alike, 4), "kept_id": identity, "kept_source": source}
