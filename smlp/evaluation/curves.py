"""Loss curves from the logs that ``fairseq-train --log-format json --log-file FILE`` writes.

Among other lines the file holds one JSON object for each report; all numbers are strings, and losses are in bits:
every ``--log-interval`` updates ``{"epoch", "update", "loss", "ppl", "num_updates", ...}``; at each validation the
same names with the prefix ``valid_``; at the end of an epoch its averages with ``train_``. From the second epoch on,
fairseq repeats lines, because it attaches the file anew each time it makes a progress bar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.evaluation.perplexity import of_bits
from smlp.files import read_bytes
from smlp.plots.drawing import OKABE_ITO, entry, legend, new_figure, plain_number, save

# Runs also differ in marker.
_COLOURS = tuple(OKABE_ITO[name] for name in ("blue", "vermillion", "green", "purple", "orange", "sky"))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_BASELINE_COLOUR = "#555555"


@dataclass(frozen=True)
class LossPoint:
    """Loss after a number of updates, in bits per token, without auxiliary losses that are reported separately."""

    num_updates: int
    bits: float

    @property
    def perplexity(self) -> float:
        return of_bits(self.bits)


@dataclass(frozen=True)
class TrainingCurve:
    """One run: training loss at each log interval and validation loss at each validation, by number of updates."""

    name: str
    train: tuple[LossPoint, ...]
    valid: tuple[LossPoint, ...]


def log_records(path: Path) -> list[dict[str, Any]]:
    """Return the report in each line of a log; an empty one where there is none (text, or a line cut short by a crash).

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return [log_record(line) for line in read_bytes(path).decode(errors="replace").split("\n")]
    except OSError as error:
        raise UserError(f"training log {path} cannot be read: {error.strerror}") from error


def read_training_log(path: Path, name: str) -> TrainingCurve:
    """Read a log, see :func:`curve_of`. Raises UserError if the file is missing or holds no finite loss."""
    records = log_records(path)
    curve = curve_of(records, name)
    if not curve.train and not curve.valid:
        raise UserError(
            f"training log {path} holds no finite loss in {len(records)} lines: did the run diverge, or was the log "
            "written without --log-format json?"
        )
    return curve


def curve_of(records: Iterable[Mapping[str, Any]], name: str, subset: str = "valid") -> TrainingCurve:
    """Return the losses of a log; a point logged twice (repeated lines, a resumed run) counts once, the last time.

    A run that never reached its log interval is drawn from its epoch averages. Where a run has
    diverged, so that its loss or its perplexity is not finite, it has no point.

    Args:
        records: of :func:`log_records`.
        name: of the run.
        subset: the validation set, as fairseq calls it.
    """
    points: dict[str, dict[int, float]] = {"": {}, "train_": {}, f"{subset}_": {}}
    for record in records:
        for prefix, found in points.items():
            bits = record.get(f"{prefix}nll_loss", record.get(f"{prefix}loss"))
            updates = record.get(f"{prefix}num_updates")
            if bits is not None and updates is not None and 0 < of_bits(float(bits)) < math.inf:
                found[int(updates)] = float(bits)
    return TrainingCurve(name, _ordered(points[""] or points["train_"]), _ordered(points[f"{subset}_"]))


#: suffixes of the names of numbers read from a log
_NUMBERS = ("loss", "ups", "wps", "wpb", "wall", "data_wait", "mem_gb", "mfu")


def log_record(line: str) -> dict[str, Any]:
    """Return the report in a line of a log; empty if it holds none."""
    if not line.startswith("{"):
        return {}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the configuration (a Python literal) or a truncated line
        return {}
    return record if _has_numbers(record) else {}


def _has_numbers(record: dict[str, Any]) -> bool:
    """Return whether every value that should be a number is one, as text too; other lines are damaged."""
    try:
        for name, value in record.items():
            if name.endswith("num_updates"):
                int(value)
            elif name.endswith(_NUMBERS):
                float(str(value))
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _ordered(points: dict[int, float]) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(updates, points[updates]) for updates in sorted(points))


def draw_curves(curves: Sequence[TrainingCurve], out: Path, baselines: Mapping[str, float] | None = None) -> None:
    """Draw all runs into a PNG: perplexity per token on a logarithmic axis against updates.

    Training is a thin line, validation a thick one with markers; ``baselines`` (name to perplexity per token, on the
    validation set) are dashed horizontal lines. The right-hand axis gives the loss in nats. Raises UserError if there
    is nothing to draw, more runs than colours, no matplotlib, or a file that cannot be written.
    """
    if not 1 <= len(curves) <= len(_COLOURS):
        raise UserError(f"between 1 and {len(_COLOURS)} training curves can be drawn, not {len(curves)}")
    if not any(curve.train or curve.valid for curve in curves):
        raise UserError(f"there is no loss to draw: {', '.join(curve.name for curve in curves)} without any point")
    figure = new_figure(9, 5.5, "Training and validation loss")
    from matplotlib.ticker import LogLocator

    axes = figure.add_subplot()
    axes.set_yscale("log")
    for number, (curve, colour, marker) in enumerate(zip(curves, _COLOURS, _MARKERS, strict=False)):
        axes.plot(*_xy(curve.train), color=colour, linewidth=1, alpha=0.6, label=entry(f"{curve.name}, training"))
        axes.plot(
            *_xy(curve.valid),
            color=colour,
            linewidth=2.2,
            marker=marker,
            markersize=max(11 - 3 * number, 5),  # smaller on larger ones, so that equal curves stay visible
            label=entry(f"{curve.name}, validation"),
        )
    right = max(point.num_updates for curve in curves for point in curve.train + curve.valid)
    for name, perplexity in (baselines or {}).items():
        axes.axhline(perplexity, color=_BASELINE_COLOUR, linewidth=1.3, linestyle=(0, (5, 3)))
        axes.annotate(
            f"{name}: {perplexity:,.0f}",
            (0.1 * right, perplexity),  # the curves are still above the baselines here
            xytext=(0, -3),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color=_BASELINE_COLOUR,
        )
    axes.set_xlim(0, right * 1.02)
    axes.margins(y=0.08)  # room for the lowest baseline's name
    axes.set_xlabel("updates")
    axes.set_ylabel("perplexity per token (log scale)")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plain_number)
    axes.minorticks_off()
    loss_axis = axes.secondary_yaxis("right", functions=(lambda x: np.log(np.maximum(x, 1e-9)), np.exp))
    loss_axis.set_yscale("linear")
    loss_axis.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    legend(axes, frameon=False, loc="upper right")
    save(figure, out)


def _xy(points: Sequence[LossPoint]) -> tuple[list[int], list[float]]:
    return [point.num_updates for point in points], [point.perplexity for point in points]
