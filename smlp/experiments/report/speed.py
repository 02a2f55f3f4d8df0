"""The table of time and quality (Table 4's columns): speeds, and when a run first reached a perplexity.

Between the last validation above the perplexity and the first one at or below it, the loss (not the perplexity) is
interpolated linearly in updates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smlp.evaluation.curves import LossPoint
from smlp.experiments.report.quality import AFTER_PREFIX, ALL, perplexity_cell
from smlp.experiments.report.results import Model, Results, RunResult
from smlp.experiments.report.table import (
    EMPTY,
    MODEL_COLUMN,
    Cell,
    Column,
    Estimate,
    Table,
    amount,
    estimate,
    label,
    mean_cell,
    origin,
)

_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
#: a time unit is used if the longest time is at least this multiple of it
_LEAST = 3
#: file and field of times of training
TIMES_FILE, TIMES_FIELD = "update_times.jsonl", "seconds (without it train.log: train_wall)"
TIMES = f"{TIMES_FILE}: {TIMES_FIELD}"
#: perplexities that agree to this precision are equal: rounding may change the last digits
_SAME = 1 + 1e-9
#: sparse baselines over which the paper claims twice the training efficiency for sMLP, as over dense models
SPARSE_TRANSFORMERS = ("gshard_lm", "switch_lm", "base_lm", "hash_lm")


@dataclass(frozen=True)
class Target:
    """A perplexity per token, and where it comes from."""

    perplexity: float
    origin: str


@dataclass(frozen=True)
class TimeToTarget:
    """The time at which a model reached a target."""

    #: seconds in training steps, by seed, of the runs that reached it
    seconds: Estimate | None
    #: seconds on the mean curve, if the mean reached the target but some run did not
    mean_curve_seconds: float | None
    num_runs: int

    @property
    def all_runs(self) -> bool:
        return self.seconds is not None and self.seconds.count == self.num_runs


def first_crossing(points: Sequence[LossPoint], perplexity: float) -> float | None:
    """Return the update at which validations first reached a perplexity; None if they never did.

    If the first validation is already there, its update is returned: what came before is not known.
    """
    target = math.log2(perplexity * _SAME)
    place = next((place for place, point in enumerate(points) if point.bits <= target), None)
    if place is None:
        return None
    before, point = points[max(place - 1, 0)], points[place]
    share = (before.bits - target) / (before.bits - point.bits) if place else 1.0
    return before.num_updates + min(share, 1.0) * (point.num_updates - before.num_updates)


def averaged_runs(results: Results, model: Model) -> list[RunResult]:
    """Return the drawn runs, without finished ones whose log lacks a finite last validation."""
    runs = [run for run in results.drawn(model) if run.curve.valid]
    return [run for run in runs if not run.is_done or run.curve.valid[-1].num_updates >= results.updates]


def mean_curve(results: Results, model: Model) -> tuple[LossPoint, ...]:
    """Return the mean perplexity over the averaged runs at each validation that all of them have."""
    curves = [
        {point.num_updates: point.perplexity for point in run.curve.valid} for run in averaged_runs(results, model)
    ]
    if not curves:
        return ()
    common = sorted(set.intersection(*map(set, curves)))
    return tuple(
        LossPoint(update, math.log2(sum(curve[update] for curve in curves) / len(curves))) for update in common
    )


def targets(results: Results) -> list[Target]:
    """Return the experiment's targets, or the final perplexity of each dense model and the best sparse Transformer."""
    chosen = results.settings.get("targets") or []
    if chosen:
        return [Target(float(perplexity), "experiment.json: targets") for perplexity in dict.fromkeys(chosen)]
    curves = {model.name: mean_curve(results, model) for model in results.models if results.done(model)}
    families = {model.name: model.family for model in results.models}
    whole = {name: curve for name, curve in curves.items() if curve and curve[-1].num_updates >= results.updates}
    ends = {name: curve[-1].perplexity for name, curve in whole.items()}
    rivals = [name for name in ends if families[name] in SPARSE_TRANSFORMERS]
    best = min(rivals, key=lambda name: ends[name], default=None)
    found = []
    for name, perplexity in ends.items():
        if families[name] in ("dense_lm", "gmlp_lm"):
            found.append(Target(perplexity, f"the last validation of {name}, mean over seeds"))
        elif name == best:
            what = ", the best of the sparse Transformers" if len(rivals) > 1 else ""
            found.append(Target(perplexity, f"the last validation of {name}{what}, mean over seeds"))
    return found


def time_to_target(results: Results, model: Model, target: Target) -> TimeToTarget:
    """Return when a model's finished runs reached a target; those that diverged do not count."""
    runs = [run for run in averaged_runs(results, model) if run.is_done and run.timeline is not None]
    updates = {run.seed: first_crossing(run.curve.valid, target.perplexity) for run in runs}
    seconds = {run.seed: None if updates[run.seed] is None else run.timeline.at(updates[run.seed]) for run in runs}
    mean = first_crossing(mean_curve(results, model), target.perplexity)
    missed = any(value is None for value in updates.values())
    mean_seconds = sum(run.timeline.at(mean) for run in runs) / len(runs) if missed and mean is not None else None
    return TimeToTarget(estimate(seconds), mean_seconds, len(runs))


def training_seconds(run: RunResult) -> float | None:
    """Return the seconds that a run spent in training steps; None if its log does not tell."""
    return run.timeline.at(run.last_update) if run.timeline and run.last_update else None


def over_runs(results: Results, model: Model, read: Callable[[RunResult], float | None]) -> Estimate | None:
    """Collect a number of each finished run."""
    return estimate({run.seed: read(run) for run in results.done(model)})


def mean_over(
    runs: Sequence[RunResult], pattern: str, file: str, field: str, read: Callable[[RunResult], float | None]
) -> Cell:
    """Return the cell of the mean of a number over runs of a model, which have it in a field of a file."""
    return mean_cell(estimate({run.seed: read(run) for run in runs}), pattern, origin(runs, file, field))


def logged_tokens_per_second(results: Results, model: Model) -> Estimate | None:
    """Return the tokens per second of the whole training without evaluation; all positions of a batch count."""

    def read(run: RunResult) -> float | None:
        seconds = training_seconds(run)
        return results.mean_tokens_of(run.seed) * run.last_update / seconds if seconds else None

    return over_runs(results, model, read)


def seconds_by_round(results: Results, model: Model) -> dict[int, float]:
    """Return the seconds of an update by round of speed.json, in which the models took turns; empty if it has none."""
    timed = ((results.speed or {}).get("models") or {}).get(model.name) or {}
    return dict(enumerate(timed.get("seconds_per_update", [])))


def timed_tokens_per_second(results: Results, model: Model) -> float | None:
    """Return the median tokens per second over the rounds of speed.json; None if it has none."""
    seconds = seconds_by_round(results, model)
    if not seconds:
        return None
    return results.speed["models"][model.name]["tokens_per_update"] / statistics.median(seconds.values())


def time_unit(seconds: list[float]) -> tuple[str, float]:
    """Choose a unit that suits the longest of some times; return its name and its seconds."""
    longest = max(seconds, default=0.0)
    return next((unit for unit in _UNITS if longest >= _LEAST * unit[1]), _UNITS[-1])


def _in_unit(found: Estimate | None, unit: float) -> Estimate | None:
    return None if found is None else Estimate({seed: value / unit for seed, value in found.samples.items()})


def speed_table(results: Results) -> Table:
    """Make Table 4: parameters, perplexity, time to a perplexity, words per second."""
    subset, aims = results.subsets[0], targets(results)
    words = results.of_text(subset, "words_per_token")
    whole = {model.name: over_runs(results, model, training_seconds) for model in results.models}
    unit, size = time_unit([found.mean for found in whole.values() if found])
    named = {
        f"time_to_{name.replace(',', '')}_{unit}": (name, aim) for name, aim in zip(_names(aims), aims, strict=True)
    }
    columns = [
        MODEL_COLUMN,
        Column("parameters_millions", "parameters (M)", "experiment.json: models.parameters.total"),
        Column(
            "perplexity",
            f"perplexity after {results.updates:,} updates",
            f"scores.json: exp(subsets.{subset}.nll_all)",
        ),
        Column(
            "perplexity_after_prefix",
            "after the prefix",
            f"scores.json: exp(subsets.{subset}.nll_after_prefix)",
        ),
        Column(
            f"training_time_{unit}",
            f"training time ({unit})",
            f"{TIMES}; training steps alone, summed to the last update",
        ),
        *(
            Column(
                key,
                f"time to {name} ({unit})",
                f"train.log: {subset}_loss, loss interpolated between validations; "
                f"{TIMES}; the perplexity is from {aim.origin}",
            )
            for key, (name, aim) in named.items()
        ),
        Column(
            "logged_tokens_per_second",
            "tokens/s, training",
            f"tokens of an update ({TIMES_FILE}: tokens, without it train.log: wpb) * updates / training time; {TIMES}",
        ),
        Column("logged_words_per_second", "words/s, training", "the same times words_per_token of data.json"),
        Column(
            "timed_tokens_per_second", "tokens/s, alone", "speed.json: tokens_per_update / median of seconds_per_update"
        ),
        Column("timed_words_per_second", "words/s, alone", "the same times words_per_token of data.json"),
    ]
    rows = []
    for model in results.models:
        runs = results.done(model)
        logged, timed = logged_tokens_per_second(results, model), timed_tokens_per_second(results, model)
        source = origin(runs, TIMES_FILE, TIMES_FIELD) if runs else ""
        alone = f"speed.json: models.{model.name}"
        row = {
            "model": label(model.name),
            "parameters_millions": amount(
                model.num_parameters / 1e6, ",.1f", "experiment.json: models.parameters.total"
            ),
            "perplexity": perplexity_cell(results, model, subset, ALL),
            f"training_time_{unit}": mean_cell(_in_unit(whole[model.name], size), ",.2f", source),
            "logged_tokens_per_second": mean_cell(logged, ",.0f", f"{source}; tokens"),
            "timed_tokens_per_second": amount(timed, ",.0f", alone),
        }
        if results.has_prefix:
            row["perplexity_after_prefix"] = perplexity_cell(results, model, subset, AFTER_PREFIX)
        if words:
            times_words = None if logged is None else Estimate({s: v * words for s, v in logged.samples.items()})
            row["logged_words_per_second"] = mean_cell(times_words, ",.0f", f"{source}; data.json: splits.{subset}")
            row["timed_words_per_second"] = amount(
                timed and timed * words, ",.0f", f"{alone}; data.json: splits.{subset}"
            )
        for key, (_, aim) in named.items():
            row[key] = _reached_cell(time_to_target(results, model, aim), size, f"{source}; train.log: {subset}_loss")
        rows.append(row)
    return Table("speed", "Time and quality", columns, rows, _notes(results, aims, words))


def _names(aims: list[Target]) -> list[str]:
    """Return the perplexities with two decimals, or as many more as tell them apart."""
    most = len({aim.perplexity for aim in aims})
    named = ([f"{aim.perplexity:,.{digits}f}" for aim in aims] for digits in range(2, 18))
    return next((names for names in named if len(set(names)) == most), [str(aim.perplexity) for aim in aims])


def _reached_cell(when: TimeToTarget, size: float, source: str) -> Cell:
    if not when.num_runs:
        return EMPTY
    if when.all_runs:
        return mean_cell(_in_unit(when.seconds, size), ",.2f", source)
    count = when.seconds.count if when.seconds else 0
    of_runs = f"{count} of {when.num_runs} seeds"
    if when.mean_curve_seconds is not None:
        value = when.mean_curve_seconds / size
        return Cell(value, f"{value:,.2f} (mean curve; {of_runs})", f"{source}; curve of the mean over seeds")
    return Cell(None, "not reached" if not count else of_runs, source)


def _notes(results: Results, aims: list[Target], words: float | None) -> list[str]:
    jobs, timed = results.environment.get("jobs"), results.speed
    notes = [
        '"Training" speeds and times cover only the training steps. Validation, saving and starting are left '
        "out, and are shown below."
    ]
    if results.environment.get("where") != "slurm" and (jobs is None or jobs > 1):
        shared = "environment.json does not say how many" if jobs is None else f"{jobs}"
        notes.append(f"Runs shared the machine ({shared} at a time), so these speeds are lower and noisier than alone.")
    if timed:
        notes.append(
            f'"Alone" is speed.json: {timed.get("how", "")} (device {timed.get("device")}, threads: '
            f"{timed.get('threads')}, median of {timed.get('rounds')} rounds). {_unrest(timed)}"
        )
    if words:
        notes.append(f"Words are tokens times {words:.4f}, the words per token of the {results.split} text.")
    else:
        notes.append("Speeds are in tokens, because data.json has no number of words.")
    notes += [f"{name} per token: from {aim.origin}." for name, aim in zip(_names(aims), aims, strict=True)]
    if aims:
        notes.append(
            "Times to a perplexity come from the validations during training; between two of them, the loss is "
            "interpolated linearly in updates. If a model is below the perplexity at its first validation, the time "
            "is that of this validation. " + _PREFIX * results.has_prefix
        )
    return notes


def _unrest(timed: Mapping[str, Any]) -> str:
    """Say how much the rounds of a model differ, which shows what else the machine did."""
    each = [sorted(model["seconds_per_update"]) for model in timed.get("models", {}).values()]
    spreads = [seconds[3 * len(seconds) // 4] / seconds[len(seconds) // 4] - 1 for seconds in each if seconds]
    if not spreads:
        return ""
    typical, share = statistics.median(spreads), timed.get("core_share")
    is_on_cpu = share is not None and timed.get("device") == "cpu"
    others = f" Its threads had {share:.0%} of a core each." if is_on_cpu else ""
    return (
        f"The middle half of a model's rounds typically spans {typical:.0%}; for the model with the widest spread, "
        f"{max(spreads):.0%}.{others}"
    )


_PREFIX = (
    "There, models with a prefix are measured on their own positions, which may be easier or harder than all positions."
)
