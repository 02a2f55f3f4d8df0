"""Means with intervals, and tables whose numbers know where they come from, as Markdown, CSV and JSON.

Samples are seeds, or the rounds of a timer. They are paired: models of one seed saw the same tokens in the same order,
and those of one round were timed one after the other, so their difference varies less than each of them. All intervals
are Student's t, 95 %, two-sided; one sample has none.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smlp.errors import UserError

if TYPE_CHECKING:
    from smlp.experiments.report.results import RunResult

CONFIDENCE = 0.95
NOTHING = "–"


@dataclass(frozen=True)
class Estimate:
    """A number for each seed or round, with their mean and its interval."""

    samples: Mapping[int, float]

    @property
    def count(self) -> int:
        """The number of seeds or rounds."""
        return len(self.samples)

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return statistics.fmean(self.samples.values())

    @property
    def half(self) -> float | None:
        """Half the width of the interval, t * s / sqrt(n); None with one sample."""
        if self.count < 2:
            return None
        return t_quantile(self.count - 1) * statistics.stdev(self.samples.values()) / math.sqrt(self.count)

    @property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """The upper end of the interval."""
        return None if self.half is None else self.mean + self.half


def t_quantile(degrees: int) -> float:
    """Return the value that Student's t with this many degrees of freedom exceeds in 2.5 % of all cases.

    Raises:
        UserError: scipy is not installed.
    """
    try:
        from scipy.special import stdtrit
    except ImportError as error:
        raise UserError('intervals need scipy: pip install -e ".[plots]"') from error

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def estimate(samples: Mapping[int, float | None]) -> Estimate | None:
    """Collect the samples that are finite numbers; None if there is none."""
    found = {name: value for name, value in samples.items() if value is not None and math.isfinite(value)}
    return Estimate(found) if found else None


def log_ratios(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> Estimate | None:
    """Return the differences of the logarithms of two sets of numbers, by the seeds or rounds that both have.

    Args:
        first, second: positive numbers by seed or round; those that are not finite are left out.

    Returns:
        None if they have no seed or round in common.
    """
    logs = {
        name: math.log(first[name]) - math.log(second[name])
        for name in first
        if 0 < (first[name] or 0) < math.inf and 0 < (second.get(name) or 0) < math.inf
    }
    return Estimate(logs) if logs else None


@dataclass(frozen=True)
class Cell:
    """A value, how it is shown, and the file and field that it comes from."""

    value: Any
    text: str
    source: str = ""
    low: float | None = None
    high: float | None = None
    #: what mean and interval are computed over
    samples: Mapping[int, float] | None = None
    #: what a sample is: ``seed`` or ``round`` (of a timer)
    kind: str = "seed"

    def as_json(self) -> dict[str, Any]:
        record = {"low": self.low, "high": self.high, f"by_{self.kind}": self.samples}
        known = {name: value for name, value in record.items() if value is not None}
        return {"value": self.value, **known, "source": self.source}


EMPTY = Cell(None, NOTHING, "no file has this number")


@dataclass(frozen=True)
class Column:
    """A column: ``key`` names it in CSV and JSON, ``head`` in Markdown; ``how`` says what it is and its source."""

    key: str
    head: str
    how: str


MODEL_COLUMN = Column("model", "model", "experiment.json: models.name")


@dataclass(frozen=True)
class Table:
    """Rows of cells by column key. A missing key is an empty cell, and a column without any cell is not shown."""

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
        """Return the table without title and notes. The first column and those of text are left-aligned."""
        columns = self.columns
        marks = ["---" if n == 0 or self._is_text(column.key) else "---:" for n, column in enumerate(columns)]
        lines = [markdown_line(column.head for column in columns), "|" + "|".join(marks) + "|"]
        lines += [markdown_line(row.get(column.key, EMPTY).text for column in columns) for row in self.rows]
        return "\n".join(lines)

    def csv(self) -> str:
        """Return unrounded values; after a column with intervals, their ends and the number of seeds or rounds."""
        found: list[list[Any]] = []  # columns, each with its head
        for column in self.columns:
            key, cells = column.key, [row.get(column.key, EMPTY) for row in self.rows]
            found.append([key, *(cell.value for cell in cells)])
            over = [kind for kind in ("seed", "round") if any(cell.samples and cell.kind == kind for cell in cells)]
            if over:
                found.append([f"{key}_low", *(cell.low for cell in cells)])
                found.append([f"{key}_high", *(cell.high for cell in cells)])
            for kind in over:
                found.append([f"{key}_{kind}s", *(len(cell.samples or ()) * (cell.kind == kind) for cell in cells)])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*found, strict=True))
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


def markdown_line(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def label(value: str | None, source: str = "experiment.json: models") -> Cell:
    """Make a cell of words."""
    return EMPTY if value is None else Cell(value, value, source)


def amount(value: float | None, pattern: str, source: str) -> Cell:
    """Make a cell of one number, shown by a format such as ``,.1f``."""
    return EMPTY if value is None else Cell(value, format(value, pattern), source)


def mean_cell(found: Estimate | None, pattern: str, source: str) -> Cell:
    """Make a cell of a mean over seeds, with its interval if there is one."""
    if found is None:
        return EMPTY
    shown = format(found.mean, pattern)
    if found.half is not None:
        shown += f" ± {format(found.half, pattern)}"
    return Cell(found.mean, shown, source, found.low, found.high, dict(found.samples))


#: the second column of :func:`difference_cells`
VERDICT_COLUMN = Column("verdict", "difference is", "seen if the interval excludes 0")


def difference_cells(first: Mapping[int, float], second: Mapping[int, float], source: str) -> dict[str, Cell]:
    """Return the cells of ``first - second``, paired by seed, and of what can be said of it; none without a pair."""
    paired = {seed: value - second[seed] for seed, value in first.items() if seed in second}
    if not paired:
        return {}
    found = Estimate(paired)
    shown = f"{found.mean:+.2f}" + ("" if found.half is None else f" ± {found.half:.2f}")
    seen = found.low is not None and found.high is not None and not found.low <= 0 <= found.high
    return {
        "difference": Cell(found.mean, shown, source, found.low, found.high, paired),
        "verdict": label("one seed" if found.count < 2 else "seen" if seen else "not seen", source),
    }


def origin(runs: Iterable[RunResult], file: str, field_name: str) -> str:
    """Name the source of a number that several runs have: ``runs/{a,b}/FILE: FIELD``."""
    names = [run.name for run in runs]
    folder = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
    return f"runs/{folder}/{file}: {field_name}"
