"""A table whose numbers know where they come from, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smlp.experiments.report.runs import Run
from smlp.experiments.report.statistics import Estimate

NOTHING = "–"
#: what an interval can be over: the field of a cell, and the ending of its column in CSV
_SAMPLES = {"by_seed": "seeds", "by_round": "rounds"}


@dataclass(frozen=True)
class Cell:
    """A value, how it is shown, and the file and field that it comes from."""

    value: Any
    text: str
    source: str = ""
    low: float | None = None
    high: float | None = None
    by_seed: Mapping[int, float] | None = None
    #: instead, of a timer
    by_round: Mapping[int, float] | None = None

    def as_json(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in ("value", "low", "high", *_SAMPLES)}
        return {name: value for name, value in record.items() if name == "value" or value is not None} | {
            "source": self.source
        }


EMPTY = Cell(None, NOTHING, "no file has it")


@dataclass(frozen=True)
class Column:
    """``key`` is its name in CSV and JSON, ``head`` in Markdown; ``how`` says what it is and where it comes from."""

    key: str
    head: str
    how: str


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key; a key that is absent is an empty cell. A column that is all empty is not shown."""

    name: str
    title: str
    all_columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def columns(self) -> list[Column]:
        return [
            column for column in self.all_columns if any(row.get(column.key, EMPTY) is not EMPTY for row in self.rows)
        ]

    def markdown(self) -> str:
        """The table alone; the first column is left-aligned, and others whose values are text."""
        columns = self.columns
        marks = ["---" if n == 0 or self._is_text(column.key) else "---:" for n, column in enumerate(columns)]
        lines = [_line(column.head for column in columns), "|" + "|".join(marks) + "|"]
        lines += [_line(row.get(column.key, EMPTY).text for column in columns) for row in self.rows]
        return "\n".join(lines)

    def csv(self) -> str:
        """Values unrounded; beside each one that has an interval, its ends and the number of seeds or rounds."""
        heads: list[str] = []
        readers: list[Callable[[Mapping[str, Cell]], Any]] = []
        for column in self.columns:
            heads.append(column.key)
            readers.append(lambda row, key=column.key: row.get(key, EMPTY).value)
            cells = [row.get(column.key, EMPTY) for row in self.rows]
            over = [name for name in _SAMPLES if any(getattr(cell, name) for cell in cells)]
            for end in ("low", "high") if over else ():
                heads.append(f"{column.key}_{end}")
                readers.append(lambda row, key=column.key, end=end: getattr(row.get(key, EMPTY), end))
            for name in over:
                heads.append(f"{column.key}_{_SAMPLES[name]}")
                readers.append(lambda row, key=column.key, name=name: len(getattr(row.get(key, EMPTY), name) or ()))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows([read(row) for read in readers] for row in self.rows)
        return text.getvalue()

    def as_json(self) -> dict[str, Any]:
        columns = self.columns
        return {
            "title": self.title,
            "columns": {column.key: {"head": column.head, "how": column.how} for column in columns},
            "rows": [{column.key: row.get(column.key, EMPTY).as_json() for column in columns} for row in self.rows],
            "notes": list(self.notes),
        }

    def _is_text(self, key: str) -> bool:
        return all(isinstance(row.get(key, EMPTY).value, str | None) for row in self.rows)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def text(value: str | None, source: str = "experiment.json: models") -> Cell:
    """A cell of words."""
    return EMPTY if value is None else Cell(value, value, source)


def number(value: float | None, pattern: str, source: str) -> Cell:
    """A cell of one number, shown by a format such as ``,.1f``."""
    return EMPTY if value is None else Cell(value, format(value, pattern), source)


def estimated(found: Estimate | None, pattern: str, source: str) -> Cell:
    """A cell of a mean over seeds, with its interval where there is one."""
    if found is None:
        return EMPTY
    shown = format(found.mean, pattern)
    if found.half is not None:
        shown += f" ± {format(found.half, pattern)}"
    return Cell(found.mean, shown, source, found.low, found.high, dict(found.samples))


def files(runs: Iterable[Run], file: str, field_name: str) -> str:
    """The source of a number that several runs have: ``runs/{a,b}/FILE: FIELD``."""
    names = [run.name for run in runs]
    folder = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
    return f"runs/{folder}/{file}: {field_name}"
