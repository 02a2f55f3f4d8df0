"""``smlp compare status``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.experiments import kept, slurm
from smlp.experiments.experiment import Experiment
from smlp.experiments.folder import DONE, RUNNING, STOPPED, WAITING, Folder, read_json
from smlp.experiments.progress import duration, reached
from smlp.experiments.reading import read_experiment


def print_status(out: Path, json_file: str | None) -> int:
    """Prints the state of every run; 0 if all are done, 1 otherwise.

    Raises:
        UserError: nothing was begun there.
    """
    folder = Folder(out)
    if not folder.experiment.is_file():
        raise UserError(f"nothing was begun in {out}: smlp compare run starts an experiment")
    experiment = read_experiment(folder.yaml)
    is_over = _is_over(experiment, folder)
    rows = [_row(folder, name, updates, is_over) for name, updates in _runs(folder, experiment)]
    width = max(len(row["run"]) for row in rows)
    print(
        f"{'run':<{width}}  {'state':<8} {'updates':>15}  {'left':>10}  {'train':>9} {'valid':>9}  perplexity per token"
    )
    for row in rows:
        numbers = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("train", "valid")]
        of, message = f"{row['num_updates']:,}/{row['updates']:,}", row["message"] or ""
        left = "" if row["seconds_left"] is None else duration(row["seconds_left"])
        line = (
            f"{row['run']:<{width}}  {row['state']:<8} {of:>15}  {left:>10}  {numbers[0]:>9} {numbers[1]:>9}  {message}"
        )
        print(line.rstrip())
    states = [row["state"] for row in rows]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if json_file:
        from smlp.cli.json_file import write_json

        write_json(json_file, rows)
    return 0 if set(states) == {DONE} else 1


def _is_over(experiment: Experiment, folder: Folder) -> bool:
    """Whether it is known that no job of the experiment waits or runs any more."""
    if experiment.place.where != "slurm":
        return False
    try:
        return not slurm.jobs_in_queue(folder)
    except UserError:  # away from the cluster
        return False


def _runs(folder: Folder, experiment: Experiment) -> list[tuple[str, int]]:
    """Names of all runs, those of a grid first, with their updates."""
    tuning, settled = experiment.tuning, read_json(folder.experiment, kept.EXPERIMENT)
    models = settled["models"]
    values = tuning.values if tuning else ()
    grid = [(f"tune/{model['folder']}-{value}", tuning.updates) for value in values for model in models]
    runs = [(f"runs/{model['folder']}-s{seed}", settled["updates"]) for seed in settled["seeds"] for model in models]
    return [*grid, *runs]


def _row(folder: Folder, name: str, updates: int, is_over: bool) -> dict[str, Any]:
    """A line of the table; ``is_over`` as :func:`_is_over`."""
    run = folder.run(name)
    state, found = run.state(), reached(run.log)
    what, message, pace = state["state"], state["message"], found.updates_per_second
    if what == WAITING:  # on a cluster nobody else writes it down
        if found.updates >= updates:
            what = "trained"
        elif is_over and state.get("submitted"):
            what, message = STOPPED, f"its job has ended: {folder.path / 'slurm' / 'logs'}"
        elif found.updates:
            what = RUNNING
    elif what == RUNNING and not folder.is_locked():
        what = STOPPED
    return {
        "run": name,
        "state": what,
        "num_updates": found.updates,
        "updates": updates,
        "seconds_left": (updates - found.updates) / pace if what == RUNNING and pace else None,
        "train": found.train,
        "valid": found.valid,
        "message": message,
    }
