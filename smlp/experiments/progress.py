"""How far the runs of an experiment are: read from their logs, with the time that is left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smlp.evaluation.curves import log_record
from smlp.evaluation.perplexity import of_bits
from smlp.experiments.folder import DONE, FAILED, RUNNING, Folder
from smlp.experiments.plan import Run

_TAIL_BYTES = 1 << 16
_SECONDS_BETWEEN = 1.0
#: on a terminal the line is redrawn; elsewhere a line is printed as often as this
_SHARE_BETWEEN_LINES = 0.05


@dataclass(frozen=True)
class Reached:
    """Where a run is, from the end of its log."""

    updates: int = 0
    #: per token, of the last lines that have one
    train: float | None = None
    valid: float | None = None
    #: as the last training line says
    updates_per_second: float | None = None


def reached(log: Path) -> Reached:
    """Reads the end of a log; a run without one has not begun."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return Reached()
    updates, train, valid, pace = 0, None, None, None
    for line in lines:
        record = log_record(line)
        if "valid_num_updates" in record and "valid_loss" in record:
            updates = int(record["valid_num_updates"])
            valid = of_bits(float(record.get("valid_nll_loss", record["valid_loss"])))
        elif {"num_updates", "update", "loss"} <= record.keys():
            updates, train = int(record["num_updates"]), of_bits(float(record.get("nll_loss", record["loss"])))
            pace = float(record.get("ups", 0)) or None
    return Reached(updates, train, valid, pace)


class Progress:
    """One line for all runs: how many updates of all are done, and how long the rest takes at this pace.

    Args:
        folder: of the experiment.
        runs: all that are to be done, those that are done already too.
    """

    def __init__(self, folder: Folder, runs: Sequence[Run]) -> None:
        self.folder, self.runs = folder, list(runs)
        self.total = sum(run.updates for run in runs)
        self.live = sys.stdout.isatty()
        self.start = time.monotonic()
        self.first = self._updates()
        self._last_look, self._last_share = 0.0, self.first / max(1, self.total)

    def watch(self) -> None:
        """Called often; looks once a second."""
        now = time.monotonic()
        if now - self._last_look < _SECONDS_BETWEEN:
            return
        self._last_look = now
        done = self._updates()
        share = done / max(1, self.total)
        if self.live:
            print(f"\r{self.line(done, now):<118}", end="", flush=True)
        elif share - self._last_share >= _SHARE_BETWEEN_LINES:
            self._last_share = share
            print(self.line(done, now), flush=True)

    def line(self, done: int, now: float) -> str:
        """The line, for a number of updates."""
        states = [self.folder.run(run.folder).state()["state"] for run in self.runs]
        text = f"{done:,} of {self.total:,} updates ({done / max(1, self.total):.0%})"
        text += f", {states.count(DONE)} of {len(states)} runs done"
        text += f", {states.count(FAILED)} failed" if FAILED in states else ""
        rate = (done - self.first) / max(1e-9, now - self.start)
        if rate > 0 and done < self.total:
            text += f", {rate:.1f} updates/s, {duration((self.total - done) / rate)} left"
        running = [run.name for run, state in zip(self.runs, states, strict=True) if state == RUNNING]
        return text + (f": {', '.join(running)}" if running else "")

    def say(self, text: str) -> None:
        """A line of its own."""
        print(f"\r{text:<118}".rstrip() if self.live else text, flush=True)

    def _updates(self) -> int:
        done = 0
        for run in self.runs:
            folder = self.folder.run(run.folder)
            done += run.updates if folder.state()["state"] == DONE else min(reached(folder.log).updates, run.updates)
        return done


def duration(seconds: float) -> str:
    """Such as 45 s, 12 min or 3 h 20 min."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"
