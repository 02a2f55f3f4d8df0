"""The table of where the time of runs went, of their memory, and of how well they used the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from smlp.experiments.report.environments import hardware
from smlp.experiments.report.runs import Experiment, Model, Run
from smlp.experiments.report.speed import LOG, over_runs, training_seconds
from smlp.experiments.report.statistics import Estimate, estimate
from smlp.experiments.report.table import Cell, Column, Table, estimated, files, text

#: what run.json calls an attempt to train; others score
_TRAIN = "train"
_ATTEMPTS = ("run.json", "attempts.seconds")
_WALL = ("train.log", "wall, the last")
_LOST = "an attempt is missing from run.json, as where it was killed together with smlp compare run"
_NO_WALL = "no attempt is in run.json, as on Slurm, and train.log has no wall that never falls"


@dataclass(frozen=True)
class WholeTime:
    """How long a run's training commands took in all, or why that is not known."""

    seconds: float | None
    #: file and field that it comes from
    source: tuple[str, str]
    #: where it is not known
    reason: str = ""


def whole_time(run: Run) -> WholeTime | None:
    """By the attempts of run.json, or, where no attempt is recorded, by the log; None without training steps.

    Args:
        run: whose log says how long it trained.
    """
    training = training_seconds(run)
    if training is None:
        return None
    attempts = [one for one in run.record.get("attempts") or [] if one.get("step", _TRAIN) == _TRAIN]
    logged = run.logged_seconds or 0.0
    if attempts:
        seconds = sum(attempt.get("seconds") or 0.0 for attempt in attempts)
        known = seconds >= max(training, logged)
        return WholeTime(seconds, _ATTEMPTS) if known else WholeTime(None, _ATTEMPTS, _LOST)
    return WholeTime(logged, _WALL) if logged >= training else WholeTime(None, _WALL, _NO_WALL)


def split_table(experiment: Experiment) -> Table:
    """Where a run's time went, its memory and how well it used the machine."""
    columns = [
        Column("model", "model", "experiment.json: models.name"),
        Column("training_s", "training steps (s)", LOG),
        Column(
            "other_s",
            "all else (s)",
            "run.json: sum of attempts.seconds of training, less the training steps; on Slurm, where run.json has no "
            "attempts, train.log: the last wall, which begins when fairseq's trainer is made, in their place",
        ),
        Column("memory_mib", "peak memory (MiB)", "run.json: peak_memory_mib, of the process"),
        Column("device_memory_gib", "peak memory, log (GiB)", "train.log: largest mem_gb"),
        Column(
            "mfu_percent", "MFU (%)", "train.log: median of mfu, from line to line, evaluation and all else included"
        ),
        Column("data_wait_percent", "waiting for data (%)", "train.log: mean of data_wait"),
    ]
    rows = []
    for model in experiment.models:
        runs = experiment.done(model)
        if not runs:
            continue
        log = files(runs, "train.log", "")

        def logged(name: str, combine: Callable, model: Model = model) -> Estimate | None:
            return over_runs(experiment, model, lambda run: _combined(run, name, combine))

        rows.append(
            {
                "model": text(model.name),
                "training_s": estimated(
                    over_runs(experiment, model, training_seconds), ",.1f", log + "train_wall, wps"
                ),
                "other_s": _other_cell(runs),
                "memory_mib": estimated(
                    over_runs(experiment, model, lambda run: run.record.get("peak_memory_mib")),
                    ",.0f",
                    files(runs, "run.json", "peak_memory_mib"),
                ),
                "device_memory_gib": estimated(logged("mem_gb", max), ",.2f", log + "mem_gb"),
                "mfu_percent": estimated(logged("mfu", statistics.median), ",.1f", log + "mfu"),
                "data_wait_percent": estimated(logged("data_wait", statistics.fmean), ",.1f", log + "data_wait"),
            }
        )
    title = "Where the time went, memory, use of the machine"
    return Table("time-split", title, columns, rows, _notes(experiment))


def _combined(run: Run, name: str, combine: Callable) -> float | None:
    values = [float(line[name]) for line in run.lines.values() if name in line]
    return combine(values) if values else None


def _other_cell(runs: list[Run]) -> Cell:
    """Of the runs whose whole time is known."""
    known = [(run, whole) for run in runs if (whole := whole_time(run)) and whole.seconds is not None]
    other = estimate({run.seed: whole.seconds - training_seconds(run) for run, whole in known})
    sources = dict.fromkeys(whole.source for _, whole in known)
    source = "; ".join(files([run for run, whole in known if whole.source == one], *one) for one in sources)
    return estimated(other, ",.1f", source)


def _notes(experiment: Experiment) -> list[str]:
    notes = ["All else of the training command: starting, validation, saving, updates that a stopped run did twice."]
    done = [run for model in experiment.models for run in experiment.done(model)]
    unknown: dict[str, list[str]] = {}
    for run in done:
        whole = whole_time(run)
        if whole is not None and whole.seconds is None:
            unknown.setdefault(whole.reason, []).append(run.name)
    notes += [f"Not known for {', '.join(names)}: {reason}." for reason, names in unknown.items()]
    if not hardware(experiment).get("gpus"):
        notes.append(
            "MFU is of the rate of a product of matrices that is measured when a run starts; on a CPU that others "
            "use at the time it varies by a third."
        )
    return notes
