"""How far two models are apart in what the paper speaks of: the differences of logarithms, and the cell of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from smlp.experiments.report.quality import difference, percent_cell
from smlp.experiments.report.runs import Experiment, Model, Run
from smlp.experiments.report.speed import logged_tokens_per_second, seconds_by_round, training_seconds
from smlp.experiments.report.statements import ACCURACY, PERPLEXITY, SAME_TIME, SPEED
from smlp.experiments.report.statistics import Estimate, relative_difference
from smlp.experiments.report.studies import mean_accuracies
from smlp.experiments.report.table import EMPTY, Cell, files

#: None and an empty cell where nothing is common to both
Measured = tuple[Estimate | None, Cell]


def measure(figure: str, experiment: Experiment, one: Model, other: Model) -> Measured:
    """By seed or by round, how much higher a figure of one model is than the other's.

    Args:
        figure: of :mod:`smlp.experiments.report.statements`.
        experiment: as read.
        one, other: of its models.
    """
    return _MEASURES[figure](experiment, one, other)


def _perplexity(experiment: Experiment, one: Model, other: Model) -> Measured:
    return difference(experiment, one, other, experiment.subsets[0])


def _accuracy(experiment: Experiment, one: Model, other: Model) -> Measured:
    pair = relative_difference(*(mean_accuracies(experiment, model) for model in (one, other)))
    return _by_seed(pair, experiment, (one, other), "zeroshot.json", "mean of tasks.*.accuracy")


def _speed(experiment: Experiment, one: Model, other: Model) -> Measured:
    """By speed.json where it has both, else by the logs."""
    rounds = [seconds_by_round(experiment, model) for model in (other, one)]
    timed = relative_difference(*rounds)
    if timed is not None:
        source = f"speed.json: seconds_per_update of {one.name} and {other.name}, each round's ratio; over rounds"
        return timed[0], percent_cell(timed[0], source, of_rounds=True)
    logged = [logged_tokens_per_second(experiment, model) for model in (one, other)]
    pair = relative_difference(*(found.samples for found in logged)) if all(logged) else None
    return _by_seed(pair, experiment, (one, other), "train.log", "train_wall, wps")


def _same_time(experiment: Experiment, one: Model, other: Model) -> Measured:
    """When the faster of two runs of a seed ends."""
    runs = [
        {run.seed: run for run in experiment.done(model) if run.curve.valid and training_seconds(run)}
        for model in (one, other)
    ]
    ends = {seed: min(training_seconds(each[seed]) for each in runs) for seed in runs[0] if seed in runs[1]}
    pair = relative_difference(*({seed: _perplexity_at(each[seed], ends[seed]) for seed in ends} for each in runs))
    field = "valid_loss, where the faster of two runs with the same seed ends by train_wall narrowed by wps"
    return _by_seed(pair, experiment, (one, other), "train.log", field)


def _perplexity_at(run: Run, seconds: float) -> float:
    """Between two validations the loss is taken to fall in proportion to the updates."""
    updates = [point.num_updates for point in run.curve.valid]
    return float(2 ** np.interp(run.timeline.update_at(seconds), updates, [point.bits for point in run.curve.valid]))


def _by_seed(
    pair: tuple[Estimate, Estimate] | None, experiment: Experiment, models: tuple[Model, Model], file: str, field: str
) -> Measured:
    if pair is None:
        return None, EMPTY
    runs = [run for model in models for run in experiment.done(model) if run.seed in pair[0].samples]
    return pair[0], percent_cell(pair[0], files(runs, file, field))


_MEASURES: Mapping[str, Callable[[Experiment, Model, Model], Measured]] = {
    PERPLEXITY: _perplexity,
    SAME_TIME: _same_time,
    SPEED: _speed,
    ACCURACY: _accuracy,
}
