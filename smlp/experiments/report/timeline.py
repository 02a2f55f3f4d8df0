"""How long a run trained: seconds in training steps by number of updates, from fairseq's log, evaluation left out.

``train_wall`` of a training line is the time in training steps since the line before, in whole seconds as fairseq
rounds it. Where updates are fast, that is coarse. ``wps`` of the same line has the whole time since the line before
exactly, but with everything in it: so it is taken, less the share of ``data_wait``, as far as it agrees with
``train_wall`` within its rounding. Where a validation lies in between, the run's usual time takes its place.

``wall`` is the time since fairseq's trainer was made, everything in it. A run that is resumed within an epoch goes on
from its checkpoint's; at the beginning of one it counts from zero again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrainingTime:
    """Seconds in training steps until an update; both begin at zero."""

    updates: tuple[int, ...]
    seconds: tuple[float, ...]
    #: predicted tokens of an update, on average: the last one of an epoch is smaller; None where no line says
    mean_tokens: float | None = None

    def at(self, update: float) -> float:
        """Between two lines in proportion; after the last one at the mean speed until there."""
        if update > self.updates[-1]:
            return self.seconds[-1] * update / self.updates[-1]
        return float(np.interp(update, self.updates, self.seconds))

    def update_at(self, seconds: float) -> float:
        """The inverse of :meth:`at`."""
        if seconds > self.seconds[-1]:
            return self.updates[-1] * seconds / self.seconds[-1]
        return float(np.interp(seconds, self.seconds, self.updates))


def training_lines(records: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Mapping[str, Any], bool]]:
    """Training lines of a log by update, the last of each, and whether a validation came before it.

    Args:
        records: of the log, in its order (:func:`smlp.evaluation.curves.log_records`).
    """
    found: dict[int, tuple[Mapping[str, Any], bool]] = {}
    validated = False
    for record in records:
        if "num_updates" in record:
            update = int(record["num_updates"])
            if found.get(update, ({}, False))[0] != record:  # fairseq repeats lines
                found[update] = (record, validated)
            validated = False
        elif any(name.endswith("_num_updates") and name != "train_num_updates" for name in record):
            validated = True
    return dict(sorted(found.items()))


def read_timeline(records: Iterable[Mapping[str, Any]]) -> TrainingTime | None:
    """None where no line says how long training took.

    Updates that a resumed run did a second time count once, the last time.
    """
    lines = {update: line for update, line in training_lines(records).items() if "train_wall" in line[0] and update > 0}
    if not lines:
        return None
    counts = np.diff([0, *lines])
    guesses = [
        None if validated else _elapsed(record, count)
        for (record, validated), count in zip(lines.values(), counts, strict=True)
    ]
    walls = [_rounded(str(record["train_wall"])) for record, _ in lines.values()]
    rates = [_within(guess, *wall) / count for guess, wall, count in zip(guesses, walls, counts, strict=True) if guess]
    usual = statistics.median(rates) if rates else None
    total, seconds = 0.0, [0.0]
    for guess, wall, count in zip(guesses, walls, counts, strict=True):
        if guess is None:
            guess = wall[0] if usual is None else usual * count
        total += _within(guess, *wall)
        seconds.append(total)
    sizes = [
        (float(record["wpb"]), count)
        for (record, _), count in zip(lines.values(), counts, strict=True)
        if "wpb" in record
    ]
    mean_tokens = sum(size * count for size, count in sizes) / sum(count for _, count in sizes) if sizes else None
    return TrainingTime((0, *lines), tuple(seconds), mean_tokens)


def logged_seconds(records: Iterable[Mapping[str, Any]]) -> float | None:
    """The last ``wall`` of a log; None where there is none, or it falls on the way: then time is missing from it."""
    walls = []
    for record in records:
        wall = record.get("wall") if "num_updates" in record else None
        if "train_num_updates" in record:  # the end of an epoch, all names with train_ before them
            wall = record.get("train_wall")
        if wall is not None:
            walls.append(float(wall))
    return walls[-1] if walls and walls == sorted(walls) else None


def _elapsed(record: Mapping[str, Any], count: int) -> float | None:
    """Seconds since the line before, waiting for data left out."""
    speed, size = float(record.get("wps", 0)), float(record.get("wpb", 0))
    if not (speed > 0 and size > 0):
        return None
    return float(count) * size / speed * (1 - float(record.get("data_wait", 0)) / 100)


def _rounded(text: str) -> tuple[float, float]:
    """A number and how far it may be from what it was before it was rounded."""
    decimals = len(text.partition(".")[2])
    return float(text), 0.5 * 10.0**-decimals


def _within(value: float, middle: float, half: float) -> float:
    return min(max(value, middle - half, 0.0), middle + half)
