"""How long a run trained: seconds in training steps by update, from fairseq's log, without evaluation.

``train_wall`` of a training line is the time in training steps since the line before, which fairseq rounds to whole
seconds: too coarse if updates are fast. ``wps`` of the same line has the exact time since the line before, but with
everything in it. So ``wps`` is used, less the share of ``data_wait``, within the rounding of ``train_wall``. If a
validation lies between two lines, the run's usual time per update is used instead.

``wall`` is the whole time since fairseq's trainer was made. A run that is resumed within an epoch continues its
checkpoint's; at the beginning of an epoch it counts from zero again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrainingTime:
    """Seconds in training steps up to an update; both begin at zero."""

    updates: tuple[int, ...]
    seconds: tuple[float, ...]
    #: mean predicted tokens of an update: the last one of an epoch is smaller; None if no line tells
    mean_tokens: float | None = None

    def at(self, update: float) -> float:
        """Return the seconds at an update, interpolated between two lines; after the last one at the mean speed."""
        if update > self.updates[-1]:
            return self.seconds[-1] * update / self.updates[-1]
        return float(np.interp(update, self.updates, self.seconds))

    def update_at(self, seconds: float) -> float:
        """Return the update at a number of seconds, the inverse of :meth:`at`."""
        if seconds > self.seconds[-1]:
            return self.updates[-1] * seconds / self.seconds[-1]
        return float(np.interp(seconds, self.seconds, self.updates))


def training_lines(records: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Mapping[str, Any], bool]]:
    """Return the last training line of each update, and whether a validation came before it.

    Args:
        records: of the log, in order (:func:`smlp.evaluation.curves.log_records`).
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
    """Return the training time of a log; None if no line tells.

    Updates that a resumed run repeated count once, the last time.
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
    """Return the last ``wall`` of a log; None if there is none, or if it ever falls: then time is missing from it."""
    walls = []
    for record in records:
        wall = record.get("wall") if "num_updates" in record else None
        if "train_num_updates" in record:  # at the end of an epoch all names begin with train_
            wall = record.get("train_wall")
        if wall is not None:
            walls.append(float(wall))
    return walls[-1] if walls and walls == sorted(walls) else None


def _elapsed(record: Mapping[str, Any], count: int) -> float | None:
    """Return the seconds since the line before, without waiting for data."""
    speed, size = float(record.get("wps", 0)), float(record.get("wpb", 0))
    if not (speed > 0 and size > 0):
        return None
    return float(count) * size / speed * (1 - float(record.get("data_wait", 0)) / 100)


def _rounded(text: str) -> tuple[float, float]:
    """Return a number and its largest rounding error."""
    decimals = len(text.partition(".")[2])
    return float(text), 0.5 * 10.0**-decimals


def _within(value: float, middle: float, half: float) -> float:
    return min(max(value, middle - half, 0.0), middle + half)
