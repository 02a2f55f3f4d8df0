"""Read how long a run trained: seconds in training steps by number of updates, without evaluation.

A run writes the seconds of each update to ``update_times.jsonl``. Runs of older versions have fairseq's log alone:
``train_wall`` of a training line is the time in training steps since the line before, rounded to whole seconds.

``wall`` is the whole time since fairseq's trainer was made. A run that is resumed within an epoch continues the
``wall`` of its checkpoint; one that is resumed at the beginning of an epoch counts from zero again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrainingTime:
    """Seconds in training steps up to an update; both begin at zero."""

    updates: tuple[int, ...]
    seconds: tuple[float, ...]
    #: mean predicted tokens per update (the last one of an epoch is smaller); None if the log does not tell
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


def training_lines(records: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the training lines of a log by update, the last of each.

    Args:
        records: of the log, in order (:func:`smlp.evaluation.curves.log_records`).
    """
    lines = {int(record["num_updates"]): record for record in records if "num_updates" in record}
    return dict(sorted(lines.items()))


def missing_update(times: Iterable[Mapping[str, Any]], last: int = 0) -> int | None:
    """Return the first update that has no line in ``update_times.jsonl`` though a later one has, or up to ``last``.

    None if there is none, or no line at all.
    """
    updates = {line["update"] for line in times}
    return next((update for update in range(1, max(len(updates), last) + 1) if updates and update not in updates), None)


def read_timeline(
    times: Sequence[Mapping[str, Any]], lines: Mapping[int, Mapping[str, Any]], last: int = 0
) -> TrainingTime | None:
    """Return how long a run trained; None if no file says.

    Updates that a resumed run did a second time count once, the last time.

    Args:
        times: lines of ``update_times.jsonl``; used if there are any and :func:`missing_update` finds none missing.
        lines: of the log, by update.
        last: the run's last update, if it is finished.
    """
    by_update = {line["update"]: line for line in times}
    if by_update and missing_update(times, last) is None:
        steps = [(update, by_update[update]["seconds"], by_update[update]["tokens"]) for update in sorted(by_update)]
    else:
        steps = [
            (update, float(line["train_wall"]), float(line["wpb"]) if "wpb" in line else None)
            for update, line in lines.items()
            if "train_wall" in line and update > 0
        ]
    if not steps:
        return None
    updates, seconds, tokens = zip(*steps, strict=True)
    sizes = [pair for pair in zip(tokens, np.diff([0, *updates]).tolist(), strict=True) if pair[0] is not None]
    mean_tokens = sum(size * count for size, count in sizes) / sum(count for _, count in sizes) if sizes else None
    return TrainingTime((0, *updates), (0.0, *itertools.accumulate(seconds)), mean_tokens)


def logged_seconds(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the last ``wall`` of a log; None if there is none, or if it ever falls: then time is missing from it."""
    walls = []
    for record in records:
        wall = record.get("wall") if "num_updates" in record else None
        if "train_num_updates" in record:  # in lines at the end of an epoch, all names begin with train_
            wall = record.get("train_wall")
        if wall is not None:
            walls.append(float(wall))
    return walls[-1] if walls and walls == sorted(walls) else None
