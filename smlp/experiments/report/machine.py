"""The machine that runs were trained on, how their environments differ, and the table of where their time went."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from smlp.experiments.report.results import Results, RunResult
from smlp.experiments.report.speed import TIMES, TIMES_FIELD, TIMES_FILE, mean_over, training_seconds
from smlp.experiments.report.table import MODEL_COLUMN, Cell, Column, Table, estimate, label, mean_cell, origin

#: facts that may affect a run's results or speed
_NAMES = ("smlp", "torch", "fairseq", "numpy", "python", "processor", "gpu", "threads", "world_size", "git", "plugins")
#: name of training attempts in run.json; other attempts score
_TRAIN = "train"
_ATTEMPTS = ("run.json", "attempts.seconds")
_PEAK = "peak_memory_mib"
_WALL = ("train.log", "wall, the last")
_LOST = "an attempt is missing from run.json, perhaps because smlp compare run was killed with it"
_NO_WALL = "run.json has no attempts, as on Slurm, and wall in train.log is missing or starts again"


def hardware(results: Results) -> dict[str, Any]:
    """Return what environment.json says, overridden by the first run's own record; ``gpus`` is a list."""
    own = next((run.environments[-1] for run in results.runs if run.environments), None)
    if own is None:
        return dict(results.environment)
    return {**results.environment, **own, "gpus": [own["gpu"]] * (own.get("world_size") or 1) if own.get("gpu") else []}


def describe_gpus(results: Results) -> str:
    """Describe the GPUs, such as ``2 GPUs (NVIDIA H200)``, or ``no GPU``."""
    found = hardware(results).get("gpus") or []
    return f"{_counted(len(found), 'GPU')} ({', '.join(dict.fromkeys(found))})" if found else "no GPU"


def describe_machine(results: Results) -> str:
    """Describe the machine in a sentence; empty if no file says what it was."""
    found = hardware(results)
    if not found:
        return ""
    parts = [describe_gpus(results), f"{found.get('cores')} cores"]
    if found.get("processor"):
        parts.append(found["processor"])
    at_a_time = "each run" if found.get("where") == "slurm" else f"{_counted(found.get('jobs'), 'run')} at a time, each"
    return (
        f"Machine: {', '.join(parts)}; {at_a_time} with "
        f"{_counted(found.get('world_size'), 'rank')} of {_counted(found.get('threads'), 'thread')}."
    )


def differences(results: Results) -> list[str]:
    """Return a sentence for each thing that was not the same at all starts of the finished runs."""
    sentences = []
    for name in _NAMES:
        starts = ((run, record) for run in results.runs if run.is_done for record in run.environments)
        if parts := differing((run.name, record.get(name)) for run, record in starts):
            sentences.append(f"Runs were not made with the same {name}: {parts}")
    return sentences


def differing(found: Iterable[tuple[str, Any]]) -> str:
    """Return each value with the runs that have it, given pairs of a run and a value; "" if there is one value."""
    runs: dict[str, dict[str, None]] = {}
    for name, value in found:
        runs.setdefault(_shown(value), {})[name] = None
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in runs.items()) if len(runs) > 1 else ""


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "revision" in value:
        changed = value.get("changed")
        return f"{value['revision']}{', changed: ' + (value.get('difference_sha256') or '')[:12] if changed else ''}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _counted(count: int | None, noun: str) -> str:
    return f"{'an unknown number of' if count is None else count} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True)
class WholeTime:
    """The time that a run's training commands took in all, or why it is not known."""

    seconds: float | None
    #: file and field of the number
    source: tuple[str, str]
    #: why the number is unknown
    reason: str = ""


def whole_time(run: RunResult) -> WholeTime | None:
    """Return how long the training commands of a run took; None if its log has no training steps.

    Args:
        run: a run whose training time is known.
    """
    training = training_seconds(run)
    if training is None:
        return None
    attempts = [one for one in run.record.get("attempts") or [] if one.get("step", _TRAIN) == _TRAIN]
    logged = run.logged_seconds or 0.0
    if attempts:
        seconds = sum(attempt.get("seconds") or 0.0 for attempt in attempts)
        known = seconds >= max(training, logged) and len(run.environments) <= len(attempts)
        return WholeTime(seconds, _ATTEMPTS) if known else WholeTime(None, _ATTEMPTS, _LOST)
    return WholeTime(logged, _WALL) if logged >= training else WholeTime(None, _WALL, _NO_WALL)


def split_table(results: Results) -> Table:
    """Make the table of where each model's time went, of its memory, and of how well it used the machine."""
    columns = [
        MODEL_COLUMN,
        Column("training_s", "training steps (s)", TIMES),
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
    for model in results.models:
        runs = results.done(model)
        if not runs:
            continue
        rows.append(
            {
                "model": label(model.name),
                "training_s": mean_over(runs, ",.1f", TIMES_FILE, TIMES_FIELD, training_seconds),
                "other_s": _other_cell(runs),
                "memory_mib": mean_over(runs, ",.0f", "run.json", _PEAK, lambda run: run.record.get(_PEAK)),
                "device_memory_gib": _logged(runs, ",.2f", "mem_gb", max),
                "mfu_percent": _logged(runs, ",.1f", "mfu", statistics.median),
                "data_wait_percent": _logged(runs, ",.1f", "data_wait", statistics.fmean),
            }
        )
    title = "Where the time went, memory, use of the machine"
    return Table("time-split", title, columns, rows, _notes(results))


def _logged(runs: list[RunResult], pattern: str, name: str, combine: Callable) -> Cell:
    def read(run: RunResult) -> float | None:
        values = [float(line[name]) for line in run.lines.values() if name in line]
        return combine(values) if values else None

    return mean_over(runs, pattern, "train.log", name, read)


def _other_cell(runs: list[RunResult]) -> Cell:
    """Return the cell of the time that was not spent in training steps, over the runs whose whole time is known."""
    known = [(run, whole) for run in runs if (whole := whole_time(run)) and whole.seconds is not None]
    other = estimate({run.seed: whole.seconds - training_seconds(run) for run, whole in known})
    sources = dict.fromkeys(whole.source for _, whole in known)
    source = "; ".join(origin([run for run, whole in known if whole.source == one], *one) for one in sources)
    return mean_cell(other, ",.1f", source)


def _notes(results: Results) -> list[str]:
    notes = [
        '"All else" is what the training command did besides: starting, validation, saving, and updates that a '
        "resumed run repeated."
    ]
    done = [run for model in results.models for run in results.done(model)]
    unknown: dict[str, list[str]] = {}
    for run in done:
        whole = whole_time(run)
        if whole is not None and whole.seconds is None:
            unknown.setdefault(whole.reason, []).append(run.name)
    notes += [f"Not known for {', '.join(names)}: {reason}." for reason, names in unknown.items()]
    if not hardware(results).get("gpus"):
        notes.append(
            "MFU is relative to the rate of a matrix product that is measured when a run starts; on a CPU that other "
            "programs use at the time, this rate varies by a third."
        )
    return notes
