"""``smlp compare run``: data, models, the grid, the runs and their scores, on this machine or on a cluster."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import yaml

from smlp.errors import UserError
from smlp.experiments import slurm
from smlp.experiments.data import check_subsets, data_of, describe, dictionary_size
from smlp.experiments.folder import DONE, FAILED, WAITING, Folder
from smlp.experiments.json_files import write_json
from smlp.experiments.local import Machine, await_scores, is_trained, run_here, time_here
from smlp.experiments.plan import (
    PlannedModel,
    PlannedRun,
    as_json,
    main_runs,
    not_done,
    planned_models,
    print_models,
    tuning_runs,
)
from smlp.experiments.processes import stopped_by
from smlp.experiments.progress import DIVERGED, Progress, has_diverged, is_given_up, reached
from smlp.experiments.reading import settings_of
from smlp.experiments.spec import Experiment, path_word
from smlp.experiments.tuning import at_edge, check_runs, choose
from smlp.files import copy_whole, write_whole
from smlp.launch.environment import environment, keep_difference

_TWO_JOBS = "two jobs failed to train it"
#: in the message of a run of the grid that has no value for good, as a rate that is too high may have none
_GIVEN_UP = (DIVERGED, _TWO_JOBS)


def run_experiment(experiment: Experiment, folder: Folder, only_scores: bool = False) -> int:
    """Do what is not done yet in an experiment; return the exit status.

    Raises:
        UserError: data or an option are wrong, the folder belongs to another experiment, or runs are to be scored while
            the grid is not over.
    """
    on_cluster = experiment.resources.where == "slurm" and not only_scores
    with folder.locked():
        if on_cluster and (queued := slurm.jobs_in_queue(folder)):
            print(f"jobs {', '.join(queued)} are in the queue: nothing is submitted (see smlp compare status)")
            return 0
        data, models = _prepare(experiment, folder)
        if on_cluster:
            return _submit(experiment, folder, data, models)
        is_alone = experiment.resources.ranks == 1  # the speed of one rank says nothing about several
        if only_scores:  # scoring uses one process, however many the training used
            experiment = replace(experiment, resources=replace(experiment.resources, where="local", ranks=1, jobs=1))
        machine = Machine.of(experiment, torch.cuda.device_count())
        tuning = tuning_runs(experiment, models)
        if only_scores:
            own = [(folder.run(run.folder), run.updates) for run in tuning]
            left = [one for one, updates in own if one.state()["state"] != FAILED and not is_trained(one, updates)]
            if left:
                raise UserError(f"{len(left)} of {len(own)} runs of the grid are not over, which choose what is scored")
            _finish_trained(folder, tuning)
            tuning = []
        stopped, chosen = None, {}
        if tuning:
            left = [run for run in tuning if not has_diverged(folder.run(run.folder), run.made_with(experiment))]
            _note_environment(experiment, folder, left, machine)
            stopped = _train(experiment, folder, data, models, left, machine)
            states = {run.folder: folder.run(run.folder).state()["state"] for run in tuning}
            missing = [name for name, state in states.items() if state not in (DONE, FAILED)]
            if stopped is None and missing:  # a signal has stopped them alone
                print(f"not trained yet: {', '.join(missing)}, which choose what is trained", flush=True)
                return 1
        if stopped is None:
            chosen = _chosen(experiment, folder, models)
            runs = main_runs(experiment, models, chosen)
            if only_scores:
                runs = [run for run in runs if is_trained(folder.run(run.folder), run.updates)]
            else:
                _note_environment(experiment, folder, runs, machine)
            stopped = _train(experiment, folder, data, models, runs, machine)
        if stopped is None and is_alone:
            stopped = time_here(experiment, folder, runs, machine)
        if stopped is not None:
            return stopped_by(stopped)
        return _summary(experiment, folder, models, chosen)


def _prepare(experiment: Experiment, folder: Folder) -> tuple[str, list[PlannedModel]]:
    """Prepare data and models, and record the planned experiment before the first run."""
    is_own = folder.yaml.exists() and folder.yaml.samefile(experiment.path)
    if folder.yaml.exists() and (experiment.is_quick if is_own else not folder.experiment.is_file()):
        raise UserError(f"{folder.yaml} is yours and would be replaced: give another --out")
    tasks = experiment.evaluation.zeroshot_data
    if tasks is not None and not tasks.is_dir():
        raise UserError(f"{experiment.path}: evaluate.zeroshot.data: there is no folder {tasks}")
    data = data_of(experiment, folder)
    check_subsets(experiment, data)
    models = planned_models(experiment, data, dictionary_size(experiment, data))
    described = describe(data, experiment.evaluation.subsets)
    folder.check_data(described)
    check_runs(experiment, models, folder)  # before anything about the experiment is written
    folder.settle({**as_json(experiment, models), "data_sha256": described["splits"]["train"]["sha256"]})
    write_json(folder.data, described)
    if experiment.is_quick:
        settings = yaml.safe_dump(settings_of(experiment.path, is_quick=True), sort_keys=False, allow_unicode=True)
        write_whole(folder.yaml, lambda file: file.write(settings.encode()))
    elif not is_own:
        copy_whole(experiment.path, folder.yaml)
    print_models(experiment, models)
    return data, models


def _train(
    experiment: Experiment,
    folder: Folder,
    data: str,
    models: Sequence[PlannedModel],
    runs: Sequence[PlannedRun],
    machine: Machine,
) -> signal.Signals | None:
    for run in runs:
        folder.run(run.folder).claim(run.made_with(experiment))
    left = not_done(folder, runs)
    if left:
        what, jobs = "runs of the grid" if left[0].tuning else "runs", experiment.resources.at_a_time(len(left))
        print(f"{len(left)} of {len(runs)} {what} to do, {jobs} at a time, {machine.threads} threads each", flush=True)
        if machine.runs_on_a_gpu > 1:
            print(f"up to {machine.runs_on_a_gpu} of them share a GPU and slow each other down", flush=True)
    progress = Progress(folder, runs)
    return run_here(experiment, folder, data, runs, machine, progress, _prefix(models)) if runs else None


def _prefix(models: Sequence[PlannedModel]) -> int:
    """Return how many leading positions some model does not predict."""
    return max(model.config.prefix_tokens for model in models)


def _note_environment(
    experiment: Experiment, folder: Folder, runs: Sequence[PlannedRun], machine: Machine | None
) -> None:
    """If runs are left, write ``environment.json`` about the machine that starts them; each run has its own as well."""
    if not not_done(folder, runs):
        return
    resources = experiment.resources
    num_gpus = 0 if resources.device == "cpu" else torch.cuda.device_count()
    gpus = [torch.cuda.get_device_name(number) for number in range(num_gpus)]
    threads = machine.threads if machine else resources.threads
    record = {**environment(), "gpus": gpus, "world_size": resources.ranks, **asdict(resources), "threads": threads}
    write_json(folder.environment, record)
    keep_difference(record["git"], folder.path)


def _chosen(experiment: Experiment, folder: Folder, models: Sequence[PlannedModel]) -> dict[str, Any]:
    """Return the tuned option's value for each model, and print them with those at the edge of the grid."""
    if experiment.tuning is None:
        return {}
    chosen = choose(experiment, models, tuning_runs(experiment, models), folder)
    name = experiment.tuning.option
    print(f"tuned {name}: " + ", ".join(f"{model} {value}" for model, value in chosen.items()), flush=True)
    edge = at_edge(experiment.tuning.values, chosen)
    if edge:
        print(f"at the edge of the grid, so a wider one could be better: {', '.join(edge)}", flush=True)
    return chosen


def _submit(experiment: Experiment, folder: Folder, data: str, models: Sequence[PlannedModel]) -> int:
    """Submit the next array of jobs that can start: the grid, then the runs."""
    grid = tuning_runs(experiment, models)
    left = [run for run in grid if not _is_over(experiment, folder, run)]
    if not left:
        _finish_trained(folder, grid)
        chosen = _chosen(experiment, folder, models)
        runs = main_runs(experiment, models, chosen)
        left = [run for run in runs if not is_trained(folder.run(run.folder), run.updates)]
        if not left:
            await_scores(experiment, folder, runs, _prefix(models))
            if any(folder.run(run.folder).state()["state"] != DONE for run in runs):
                print(f"all runs are trained; job {slurm.submit_scores(experiment, folder)} scores them", flush=True)
                return 0
            if runs:
                print("all runs are trained and scored", flush=True)
            return _summary(experiment, folder, models, chosen)
    _note_environment(experiment, folder, left, None)
    for run in left:
        folder.run(run.folder).claim(run.made_with(experiment))
    print(slurm.submit(experiment, folder, data, left, then_score=not left[0].tuning), flush=True)
    for run in left:
        own = folder.run(run.folder)
        own.update_state(model=run.model.name, seed=run.seed, state=WAITING, message=None)
        own.update_state(submitted=[*own.state().get("submitted", []), reached(own.log).updates])
    if left[0].tuning:
        print("this is the grid: run the same command again when it is done", flush=True)
    return 0


def _finish_trained(folder: Folder, grid: Sequence[PlannedRun]) -> None:
    """Record that the trained runs of the grid are done, which a job of Slurm or a stopped command leaves open."""
    for run in grid:
        own = folder.run(run.folder)
        if is_trained(own, run.updates):
            own.update_state(model=run.model.name, seed=run.seed, state=DONE, trained=True, message=None)
            own.drop_checkpoints(keep_last=False)


def _is_over(experiment: Experiment, folder: Folder, run: PlannedRun) -> bool:
    """Return whether a run of the grid needs no job: it is trained, or two jobs in a row have brought it no further."""
    own = folder.run(run.folder)
    if is_trained(own, run.updates):
        return True
    made_with = run.made_with(experiment)
    if not is_given_up(own, made_with):
        return False
    if not has_diverged(own, made_with):
        own.update_state(state=FAILED, message=f"{_TWO_JOBS}: see {folder.path / 'slurm' / 'logs'}")
    return True


def _summary(experiment: Experiment, folder: Folder, models: Sequence[PlannedModel], chosen: dict[str, Any]) -> int:
    runs = main_runs(experiment, models, chosen)
    states = {run.name: folder.run(run.folder).state() for run in runs}
    grid = {run.folder: folder.run(run.folder).state()["message"] for run in tuning_runs(experiment, models)}
    # including runs that only lack zero-shot results
    failed = {name: state["message"] for name, state in states.items() if state["message"]}
    missing = [name for name, state in states.items() if state["state"] not in (DONE, FAILED)]
    left_out = [model.name for model in models if experiment.tuning is not None and model.name not in chosen]
    for name, message in (*grid.items(), *failed.items()):
        if message:
            print(f"failed: {name}: {message}", flush=True)
    if missing:
        print(f"not trained yet: {', '.join(missing)}", flush=True)
    for name in left_out:
        print(f"not trained: {name}: every run of its grid failed", flush=True)
    done = sum(state["state"] == DONE for state in states.values())
    print(f"{done} of {len(runs)} runs are done: smlp compare report {shlex.quote(path_word(folder.path))}", flush=True)
    to_repeat = any(message and not any(words in message for words in _GIVEN_UP) for message in grid.values())
    return 1 if failed or missing or left_out or to_repeat else 0
