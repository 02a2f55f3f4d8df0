"""The outcome of a grid over one option of training."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from smlp.errors import UserError
from smlp.evaluation.curves import curve_of, log_records
from smlp.experiments.folder import DONE, FAILED, Folder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.plan import PlannedModel, PlannedRun, main_runs, tuning_runs
from smlp.experiments.spec import Experiment


def is_ordered(values: Sequence[Any]) -> bool:
    """Return whether a grid's values are numbers; true and false are not, although Python counts them as such."""
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def at_edge(values: Sequence[Any], chosen: Mapping[str, Any]) -> list[str]:
    """Return the models for which a value outside the grid might do better than the chosen one."""
    if len(values) < 2 or not is_ordered(values):
        return []
    return [model for model, value in chosen.items() if value in (min(values), max(values))]


def choose(experiment: Experiment, models: Sequence[PlannedModel], runs: Sequence[PlannedRun], folder: Folder) -> dict:
    """Choose the value with the lowest loss on the first subset for each model, and write ``tuned.json``.

    Raises:
        UserError: a run was made with another value, which a smaller grid had chosen.
    """
    chosen, results = best(experiment, models, runs, folder)
    _check(experiment, main_runs(experiment, models, chosen), folder)
    tuning = experiment.tuning
    write_json(
        folder.tuned,
        {
            "option": "--" + tuning.option.replace("_", "-"),
            "values": list(tuning.values),
            "updates": tuning.updates,
            "seed": tuning.seed,
            "subset": experiment.evaluation.subsets[0],
            "results": results,
            "chosen": chosen,
        },
    )
    return chosen


def check_runs(experiment: Experiment, models: Sequence[PlannedModel], folder: Folder) -> None:
    """Refuse to go on with runs of the folder that were made with other settings.

    Raises:
        UserError: the message names the run and the first setting that differs.
    """
    chosen = chosen_so_far(experiment, models, folder)
    _check(experiment, [*tuning_runs(experiment, models), *main_runs(experiment, models, chosen)], folder)


def _check(experiment: Experiment, runs: Sequence[PlannedRun], folder: Folder) -> None:
    for run in runs:
        folder.run(run.folder).check(run.made_with(experiment))


def chosen_so_far(experiment: Experiment, models: Sequence[PlannedModel], folder: Folder) -> dict[str, Any]:
    """Return the value that the grid chooses for each model; none while some of it is neither done nor failed."""
    grid = tuning_runs(experiment, models)
    states = {folder.run(run.folder).state()["state"] for run in grid}
    return best(experiment, models, grid, folder)[0] if grid and states <= {DONE, FAILED} else {}


def best(
    experiment: Experiment, models: Sequence[PlannedModel], runs: Sequence[PlannedRun], folder: Folder
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the value with the lowest validation loss for each model, and the losses of all values.

    A model whose runs have begun keeps its value of ``tuned.json``, chosen on this subset, unless one that the grid did
    not have is better.

    Raises:
        UserError: a run was not validated on the first subset.
    """
    tuning, subset = experiment.tuning, experiment.evaluation.subsets[0]
    results: dict[str, dict[str, float | None]] = {model.name: {} for model in models}
    for run in runs:
        own = folder.run(run.folder)
        value = str(run.recipe[tuning.option])
        results[run.model.name][value] = None
        if own.state()["state"] == DONE:
            records = log_records(own.log)
            if not any(f"{subset}_num_updates" in record for record in records):
                raise UserError(
                    f"{own.log} has no validation on {subset}, the first of evaluate.subsets, which chooses "
                    f"{tuning.option}: put the subset first that the grid was trained with"
                )
            valid = curve_of(records, run.name, subset).valid  # without losses that are not finite
            is_last = valid and valid[-1].num_updates == run.updates  # a diverged run has no validation at the end
            results[run.model.name][value] = valid[-1].perplexity if is_last else None
    by_text = {str(value): value for value in tuning.values}
    before = {"values": [], "chosen": {}}
    with contextlib.suppress(UserError):  # a damaged one is written anew
        found = read_json(folder.tuned, {"values": list, "chosen": dict}) if folder.tuned.is_file() else before
        before = found if found.get("subset", subset) == subset else before
    older = set(map(str, before["values"]))
    begun = [run for run in main_runs(experiment, models, before["chosen"]) if folder.run(run.folder).is_begun]
    has_begun = {run.model.name for run in begun}
    chosen = {}
    for name, found in results.items():
        measured = {value: perplexity for value, perplexity in found.items() if perplexity is not None}
        kept = str(before["chosen"].get(name))
        if name in has_begun and kept in measured:  # whatever a retried run of the grid has reached since
            measured = {value: measured[value] for value in measured if value == kept or value not in older}
        if measured:
            chosen[name] = by_text[min(measured, key=measured.get)]
    return chosen, results
