"""Read from the logs how far the runs of an experiment are, and how long the rest takes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smlp.errors import UserError
from smlp.evaluation.curves import log_record
from smlp.evaluation.perplexity import of_bits
from smlp.experiments import slurm
from smlp.experiments.folder import DONE, FAILED, RUNNING, STOPPED, WAITING, Folder, RunFolder
from smlp.experiments.json_files import EXPERIMENT, read_json
from smlp.experiments.reading import read_experiment
from smlp.experiments.spec import Experiment, grid_folder

DIVERGED = "has diverged"  # in the message of a run that a number that is not finite ended
_TAIL_BYTES = 1 << 16
_SECONDS_BETWEEN = 1.0
#: share of the updates between printed lines; on a terminal the line is redrawn instead
_SHARE_BETWEEN_LINES = 0.05


@dataclass(frozen=True)
class Reached:
    """The last update of a run's log."""

    updates: int = 0
    #: perplexity per token, from the last log lines that have one, if they are in the last 64 KiB of the log
    train: float | None = None
    valid: float | None = None
    #: from the last training line of the log
    updates_per_second: float | None = None


def reached(log: Path) -> Reached:
    """Read the end of a log; a run without one has not begun."""
    updates, train, pace = 0, None, None
    valid: dict[str, float] = {}  # by subset
    for line in _last_lines(log):
        record = log_record(line)
        for subset in [name.removesuffix("_num_updates") for name in record if name.endswith("_num_updates")]:
            updates = int(record[f"{subset}_num_updates"])
            if f"{subset}_loss" in record and subset != "train":  # of an epoch
                valid[subset] = of_bits(float(record.get(f"{subset}_nll_loss", record[f"{subset}_loss"])))
        if {"num_updates", "update", "loss"} <= record.keys():
            updates, train = int(record["num_updates"]), of_bits(float(record.get("nll_loss", record["loss"])))
            pace = float(record.get("ups", 0)) or None
    return Reached(updates, train, valid.get("valid", next(iter(valid.values()), None)), pace)


def has_diverged(run: RunFolder, made_with: dict[str, Any]) -> bool:
    """Return whether a run of the grid has no value with these settings, as a rate that is too high may have none."""
    state = run.state()
    is_over = state["state"] == FAILED and DIVERGED in (state["message"] or "")
    return is_over and run.is_made_with(made_with)


def is_given_up(run: RunFolder, made_with: dict[str, Any]) -> bool:
    """Return whether no job is to train a run of the grid: it has diverged, or two in a row brought it no further.

    None of its jobs is in the queue.
    """
    before = run.state().get("submitted", [])  # updates at each submission
    is_stuck = len(before) >= 2 and reached(run.log).updates <= before[-2] and run.is_made_with(made_with)
    return is_stuck or has_diverged(run, made_with)


def _last_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _in_order(path: Path) -> int:
    """Return the last update in a record of the data's order, which has those between two lines of the log, too.

    They are not all in a checkpoint, so this is for people only.
    """
    updates = (log_record(line).get("update") for line in reversed(_last_lines(path)))
    return next((update for update in updates if isinstance(update, int)), 0)


class TrainingPlan(Protocol):
    """A training of a folder, as far as its progress is concerned."""

    @property
    def name(self) -> str:
        """Return its name in messages."""

    @property
    def folder(self) -> str:
        """Return the folder of the run, relative to that of all runs."""

    @property
    def updates(self) -> int:
        """Return the number of updates until its end."""


class Progress:
    """A line about all runs: how many updates are done, and how long the rest takes at this pace.

    Args:
        folder: of the experiment.
        runs: all runs of the comparison, finished ones included.
    """

    def __init__(self, folder: Folder, runs: Sequence[TrainingPlan]) -> None:
        self.folder, self.runs = folder, list(runs)
        self.total = sum(run.updates for run in runs)
        self.live = sys.stdout.isatty()
        self.start = time.monotonic()
        self.first = self._updates()
        self._last_look, self._last_share = 0.0, self.first / max(1, self.total)
        self._is_open = False  # whether the cursor is at the end of a line

    def watch(self) -> None:
        """Show the line if a second has passed; called often."""
        now = time.monotonic()
        if now - self._last_look < _SECONDS_BETWEEN:
            return
        self._last_look = now
        done = self._updates()
        share = done / max(1, self.total)
        if self.live:
            print(f"\r\x1b[K{self.line(done, now)}", end="", flush=True)
            self._is_open = True
        elif share - self._last_share >= _SHARE_BETWEEN_LINES:
            self._last_share = share
            print(self.line(done, now), flush=True)

    def line(self, done: int, now: float) -> str:
        """Return the line for a number of updates."""
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
        """Print a text on a line of its own."""
        print(f"\r\x1b[K{text}" if self.live else text, flush=True)
        self._is_open = False

    def end(self) -> None:
        """End the line that is redrawn, so that what is printed next has its own."""
        if self._is_open:
            print(flush=True)
        self._is_open = False

    def _updates(self) -> int:
        done = 0
        for run in self.runs:
            folder = self.folder.run(run.folder)
            done += run.updates if folder.state()["state"] == DONE else min(reached(folder.log).updates, run.updates)
        return done


def duration(seconds: float) -> str:
    """Return a text such as 45 s, 12 min or 3 h 20 min."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


def status(folder: Folder) -> list[dict[str, Any]]:
    """Return a record for every run of an experiment, those of a grid first.

    Raises:
        UserError: nothing was begun there, or a file is damaged.
    """
    if not folder.experiment.is_file():
        raise UserError(f"nothing has been started in {folder.path}: smlp compare run starts an experiment")
    experiment = read_experiment(folder.yaml)
    is_over = _has_no_jobs(experiment, folder)
    return [_status_of(folder, name, updates, is_over) for name, updates in _runs(folder, experiment)]


def _has_no_jobs(experiment: Experiment, folder: Folder) -> bool:
    """Return whether it is known that no job of the experiment waits or runs any more."""
    if experiment.resources.where != "slurm":
        return False
    try:
        return not slurm.jobs_in_queue(folder)
    except UserError:  # not on the cluster
        return False


def _runs(folder: Folder, experiment: Experiment) -> list[tuple[str, int]]:
    """Return the names of all runs, those of a grid first, with their updates."""
    tuning, settled = experiment.tuning, read_json(folder.experiment, EXPERIMENT)
    models = settled["models"]
    values = tuning.values if tuning else ()
    grid = [(grid_folder(model["folder"], value), tuning.updates) for value in values for model in models]
    runs = [(f"runs/{model['folder']}-s{seed}", settled["updates"]) for seed in settled["seeds"] for model in models]
    return [*grid, *runs]


def _status_of(folder: Folder, name: str, updates: int, is_over: bool) -> dict[str, Any]:
    """Return the record of a run; ``is_over`` as :func:`_has_no_jobs`."""
    run = folder.run(name)
    state, found = run.state(), reached(run.log)
    what, message, pace = state["state"], state["message"], found.updates_per_second
    if what == WAITING:  # on a cluster nothing else records it
        if found.updates >= updates:
            what = "trained"
        elif is_over and state.get("submitted"):
            what, message = STOPPED, f"its job has ended: see {folder.path / 'slurm' / 'logs'}"
        elif found.updates:
            what = RUNNING
    elif what == RUNNING and not folder.is_locked():
        what = STOPPED
    return {
        "run": name,
        "state": what,
        "num_updates": max(found.updates, _in_order(run.order)),
        "updates": updates,
        "seconds_left": (updates - found.updates) / pace if what == RUNNING and pace else None,
        "train": found.train,
        "valid": found.valid,
        "message": message,
    }
