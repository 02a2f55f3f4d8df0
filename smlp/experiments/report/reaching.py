"""When a run first reached a perplexity: between which validations, after how many updates and seconds.

Between the last validation above it and the first one at or below it, the loss (not the perplexity) is taken to fall
in proportion to the updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smlp.evaluation.curves import LossPoint
from smlp.experiments.report.runs import Experiment, Model
from smlp.experiments.report.statistics import Estimate, estimate

#: perplexities that agree so far are the same: sums of the same numbers may differ in their last digits
_SAME = 1 + 1e-9
#: what the paper's claim of twice the training efficiency holds sMLP against, beside dense models
_SPARSE_TRANSFORMERS = ("gshard_lm", "switch_lm", "base_lm", "hash_lm")


@dataclass(frozen=True)
class Target:
    """A perplexity per token, and whose it is where no one chose it."""

    perplexity: float
    origin: str


@dataclass(frozen=True)
class Reached:
    """When a model reached a target."""

    #: seconds in training steps, by seed of the runs that reached it
    seconds: Estimate | None
    #: the same for updates
    updates: Estimate | None
    #: of the mean over seeds, where some run did not reach the target and the mean did
    mean_curve_seconds: float | None
    num_runs: int

    @property
    def all_runs(self) -> bool:
        return self.seconds is not None and self.seconds.count == self.num_runs


def first_crossing(points: Sequence[LossPoint], perplexity: float) -> float | None:
    """The update at which validations first reached a perplexity; None if they never did.

    The first validation counts as it is: what was before is not known.
    """
    target = math.log2(perplexity * _SAME)
    place = next((place for place, point in enumerate(points) if point.bits <= target), None)
    if place is None:
        return None
    before, point = points[max(place - 1, 0)], points[place]
    share = (before.bits - target) / (before.bits - point.bits) if place else 1.0
    return before.num_updates + min(share, 1.0) * (point.num_updates - before.num_updates)


def mean_curve(experiment: Experiment, model: Model) -> tuple[LossPoint, ...]:
    """Mean perplexity over the drawn runs at each validation that all of them have."""
    curves = [{point.num_updates: point.perplexity for point in run.curve.valid} for run in experiment.drawn(model)]
    if not curves:
        return ()
    common = sorted(set.intersection(*map(set, curves)))
    return tuple(
        LossPoint(update, math.log2(sum(curve[update] for curve in curves) / len(curves))) for update in common
    )


def targets(experiment: Experiment) -> list[Target]:
    """Those of the experiment, or what each dense model and the best of the sparse Transformers reach at the end."""
    chosen = experiment.settings.get("targets") or []
    if chosen:
        return [Target(float(perplexity), "experiment.json: targets") for perplexity in chosen]
    curves = {model.name: mean_curve(experiment, model) for model in experiment.models if experiment.done(model)}
    families = {model.name: model.family for model in experiment.models}
    ends = {name: curve[-1].perplexity for name, curve in curves.items() if curve}
    rivals = [name for name in ends if families[name] in _SPARSE_TRANSFORMERS]
    best = min(rivals, key=lambda name: ends[name], default=None)
    found = []
    for name, perplexity in ends.items():
        if families[name] in ("dense_lm", "gmlp_lm"):
            found.append(Target(perplexity, f"the last validation of {name}, mean over seeds"))
        elif name == best:
            what = ", the best of the sparse Transformers" if len(rivals) > 1 else ""
            found.append(Target(perplexity, f"the last validation of {name}{what}, mean over seeds"))
    return found


def reached(experiment: Experiment, model: Model, target: Target) -> Reached:
    """When a model's finished runs reached a target."""
    runs = [run for run in experiment.done(model) if run.timeline is not None]
    updates = {run.seed: first_crossing(run.curve.valid, target.perplexity) for run in runs}
    seconds = {run.seed: None if updates[run.seed] is None else run.timeline.at(updates[run.seed]) for run in runs}
    mean = first_crossing(mean_curve(experiment, model), target.perplexity)
    missed = any(value is None for value in updates.values())
    mean_seconds = sum(run.timeline.at(mean) for run in runs) / len(runs) if missed and mean is not None else None
    return Reached(estimate(seconds), estimate(updates), mean_seconds, len(runs))
