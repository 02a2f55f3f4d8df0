"""Write and read the ``manifest.json`` of a step, which is in its folder only when the step is finished.

The same inputs and settings give the same manifest, byte for byte, whatever the number of workers: times and rates go
to the terminal, not here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.flow.streams import as_json, read_json, write_bytes
from smlp import __version__
from smlp.errors import UserError, one_line
from smlp.files import name_below, read_text

MANIFEST = "manifest.json"
#: in a step's folder: finished parts, files that are used up, and files about documents that are not there any more
STATE, WORK, REPORTS = ".state", ".work", ".reports"
SETTINGS = "settings.json"  # in that folder: the step and its settings


def read_settings(path: Path) -> dict[str, Any]:
    """Return the name and the settings of a step, which it recorded when it began.

    Raises:
        UserError: the file is damaged.
    """
    found = read_json(path) or {}
    if not isinstance(found.get("step"), str) or not isinstance(found.get("settings"), dict):
        raise UserError(f"{path} is damaged: remove the folder that it belongs to, and run its step again")
    return found


@dataclass
class Counts:
    """Documents in, kept and dropped by reason; ``other`` counts things that are not documents (lines, bytes).

    ``documents_in == kept + sum(dropped.values())`` always: :meth:`check`.
    """

    documents_in: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)

    def keep(self) -> None:
        self.documents_in += 1
        self.kept += 1

    def drop(self, reason: str, number: int = 1) -> None:
        self.documents_in += number
        self.dropped[reason] += number

    def add(self, counts: Counts) -> None:
        self.documents_in += counts.documents_in
        self.kept += counts.kept
        self.dropped.update(counts.dropped)
        self.other.update(counts.other)

    def reasons(self) -> str:
        """Return how many documents are dropped and why, to end a message with."""
        return "".join(f"; dropped: {number:,} {reason}" for reason, number in self.dropped.most_common())

    def check(self) -> None:
        """Raise AssertionError if a document is neither kept nor dropped."""
        dropped = sum(self.dropped.values())
        assert self.documents_in == self.kept + dropped, f"{self.documents_in} in, {self.kept} kept, {dropped} dropped"

    def to_json(self) -> dict[str, Any]:
        self.check()
        return {
            "documents_in": self.documents_in,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "other": dict(sorted(self.other.items())),
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Counts:
        return cls(row["documents_in"], row["kept"], Counter(row["dropped"]), Counter(row["other"]))

    def table(self) -> str:
        """Return a few lines for the terminal."""
        rows = [("in", self.documents_in), ("kept", self.kept)] if self.documents_in else []
        rows += [(f"dropped: {reason}", number) for reason, number in self.dropped.most_common()]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [
            f"documents {name:<{width}} {number:>13,} {_share(number, self.documents_in)}" for name, number in rows
        ]
        other = {one_line(name): number for name, number in self.other.items()}  # a source's name is any text
        width = max(map(len, other), default=0)
        lines += [f"{name:<{width}} {number:>13,}" for name, number in sorted(other.items())]
        return "\n".join(lines)


def _share(number: int, total: int) -> str:
    return f"{number / total:>7.2%}" if total else ""


@dataclass(frozen=True)
class PartResult:
    """The result of a step for one part."""

    # files written, ``{"name", "bytes", "sha256", ...}``, names relative to the step's folder
    outputs: list[dict[str, Any]]
    counts: Counts  # its documents
    # ``{"problem", "where"}`` of defective files
    defects: list[dict[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # anything else that the step gathers
    smlp: str = __version__  # that did it


def counts_of(results: Sequence[PartResult]) -> Counts:
    """Return the sum over parts."""
    counts = Counts()
    for result in results:
        counts.add(result.counts)
    return counts


def write_manifest(
    out: Path,
    step: str,
    settings: dict[str, Any],
    inputs: list[dict[str, Any]],
    results: list[PartResult],
    facts: dict[str, Any] | None = None,
    counts: Counts | None = None,
    versions: Iterable[str] = (),
) -> dict[str, Any]:
    """Write ``out/manifest.json`` and return it.

    Args:
        out: the step's folder.
        step: its name.
        settings: everything that its output depends on, the seed included.
        inputs: ``{"path", "bytes", "sha256"}`` of what was read.
        results: of all parts, in their order.
        facts: further entries.
        counts: of the step, if they are not the sum of those of its parts.
        versions: of smlp that did earlier phases of the step.
    """
    counts = counts_of(results) if counts is None else counts
    manifest = {
        "step": step,
        "smlp": ", ".join(sorted({*versions, *(result.smlp for result in results)})) or __version__,
        "settings": settings,
        "inputs": inputs,
        "outputs": [output for result in results for output in result.outputs],
        "counts": counts.to_json(),
        "defects": [defect for result in results for defect in result.defects],
        **(facts or {}),
    }
    write_bytes(out / MANIFEST, as_json(manifest, indent=1) + b"\n")
    return manifest


#: what the entries of every manifest are
_KINDS: dict[str, type] = {"settings": dict, "counts": dict, "inputs": list, "outputs": list, "defects": list}
_KIND_NAMES = {dict: "names with values", list: "a list of names with values"}
#: names with values that those of some steps have besides
_FACTS = {
    **dict.fromkeys(("binarize", "glue", "squad"), ("splits",)),
    "tokenizer": ("vocabulary", "sample", "round_trip"),
}
#: values of each row of these entries
_ROWS: dict[str, dict[str, type]] = {
    "inputs": {"bytes": int},
    "outputs": {"name": str, "bytes": int},
    "defects": {"problem": str, "where": str},
}


def read_manifest(folder: Path, made_by: str = "") -> dict[str, Any]:
    """Read the manifest of a finished step.

    Raises:
        UserError: the step is not finished, or another one made the folder, or the file is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_text(path))
        step = manifest["step"]
    except FileNotFoundError:
        raise UserError(f"{folder} has no {MANIFEST}: the step that writes it is not finished") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not a manifest of smlp data") from None
    if made_by and step != made_by:
        raise UserError(f"{folder} was made by 'smlp data {step}', not by 'smlp data {made_by}'")
    for name, kind in {**_KINDS, **dict.fromkeys(_FACTS.get(str(step), ()), dict)}.items():
        value = manifest.get(name)
        if not isinstance(value, kind) or not all(isinstance(row, dict) for row in value if kind is list):
            raise UserError(f"{path} is damaged: {name} must be {_KIND_NAMES[kind]}")
    for name, fields in _ROWS.items():
        for field_name, kind in fields.items():
            if not all(isinstance(row.get(field_name), kind) for row in manifest[name]):
                raise UserError(f"{path} is damaged: {name} must each have {field_name!r}")
    try:
        Counts.from_json(manifest["counts"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged: counts must have documents_in, kept, dropped and other") from None
    return manifest


def output_paths(folder: Path, rows: Sequence[dict[str, Any]], named_by: Path) -> list[Path]:
    """Return the paths of the outputs that ``named_by``, a manifest or a record of a part, lists in ``rows``.

    Raises:
        UserError: a name leads out of the folder, by itself or through a link.
    """
    paths = [folder / name_below(row["name"], str(named_by)) for row in rows]
    root = folder.resolve()
    for parent in {path.parent for path in paths}:
        if not parent.resolve().is_relative_to(root):
            raise UserError(f"{named_by} names a file in {parent}, which would lie outside its folder through a link")
    return paths


def is_whole(folder: Path, inputs: list[dict[str, Any]] | None = None, settings: dict[str, Any] | None = None) -> bool:
    """Return whether a step is finished and all its files exist, each with the size in the manifest.

    ``inputs`` and ``settings`` are those that it must have been made from; None allows any.
    """
    if not (folder / MANIFEST).is_file():
        return False
    manifest = read_manifest(folder)
    if inputs is not None and manifest["inputs"] != inputs:
        return False
    if settings is not None and manifest["settings"] != json.loads(json.dumps(settings)):
        return False
    rows = manifest["outputs"]
    paths = output_paths(folder, rows, folder / MANIFEST)
    return all(path.is_file() and path.stat().st_size == row["bytes"] for path, row in zip(paths, rows, strict=True))
