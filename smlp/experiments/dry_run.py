"""``smlp compare run --dry-run``: what would be done, how long it would take, and how much disk it would need.

For this machine the time of an update is measured, with random weights and random tokens. For a cluster it follows from
the floating-point operations and the share of the device's peak that training is expected to reach.
"""

from __future__ import annotations

import heapq
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smlp.costs.formula import parameters, training_flops
from smlp.experiments.data import (
    argument,
    check_same_text,
    check_subsets,
    check_text,
    dictionary_size,
    find_data,
    held_out_tokens,
)
from smlp.experiments.folder import FAILED, Folder
from smlp.experiments.local import Machine
from smlp.experiments.plan import (
    PlannedModel,
    PlannedRun,
    as_json,
    launch_words,
    main_runs,
    not_done,
    planned_models,
    print_models,
    training_words,
    tuning_runs,
    validations_of,
)
from smlp.experiments.progress import duration, has_diverged, is_given_up
from smlp.experiments.spec import Experiment, option_words
from smlp.experiments.speed import TimedUpdates, dtype_of
from smlp.experiments.tuning import check_runs, chosen_so_far
from smlp.nn.build import model_of
from smlp.nn.decoder import Decoder

#: default peak of a GPU in bf16 without sparsity, from an A100's data sheet
GPU_TFLOPS = 312.0
#: the same of a CPU's core in float32: two AVX2 units, 3 GHz
CORE_TFLOPS = 0.1
#: default share of the peak
MFU = 0.3
#: bytes per parameter: the weight and Adam's two moments, 4 bytes each
_BYTES_PER_PARAMETER = 12
#: time of fairseq's loop with validation and checkpoints relative to a bare training loop, measured on CPUs
OVERHEAD = 1.15
#: seconds to start a process, and to score
SECONDS_AROUND = 14.0
#: files that fairseq writes per checkpoint: the numbered, the best and the last one
CHECKPOINT_FILES = 3
#: assumed write speed of a node
BYTES_PER_SECOND = 1e9
_MEASURED_UPDATES = 3
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Cost:
    """The cost of all runs."""

    seconds_per_update: dict[str, float]
    #: wall-clock time
    seconds: float
    #: total hours over all devices
    device_hours: float
    #: of forward and backward pass; a multiply-add counts as two
    flops: float
    #: size of the remaining checkpoints, one per run of the comparison, and the largest size at any time
    disk_bytes: int
    most_disk_bytes: int
    how: str


def dry_run(experiment: Experiment, folder: Folder) -> None:
    """Print what would be done and what it would cost; make nothing.

    Raises:
        UserError: an option is wrong, the folder has runs of other settings, or the data do not exist and the file does
            not name the vocabulary's size.
    """
    if experiment.text is not None:
        check_same_text(experiment.text, folder)
    found = find_data(experiment, folder)
    vocab_size = dictionary_size(experiment, found)
    if found is not None:
        check_subsets(experiment, found)
    else:
        if experiment.text is not None:
            check_text(experiment.text)
        print(f"no data yet: {vocab_size:,} pieces are assumed, and the time does not include validations")
    data = argument(experiment, folder)
    tasks = experiment.evaluation.zeroshot_data
    if tasks is not None and not tasks.is_dir():
        print(f"no tasks yet: there is no folder {tasks} (evaluate.zeroshot.data), and the run will need it")
    models = planned_models(experiment, data, vocab_size)
    check_runs(experiment, models, folder)
    folder.check(as_json(experiment, models))
    resources, gpus = experiment.resources, torch.cuda.device_count()
    is_here = resources.where == "local" and (resources.device != "gpu" or gpus > 0)
    machine = Machine.of(experiment, gpus) if is_here else None
    runs = _all_runs(experiment, models, folder)
    print_models(experiment, models)
    todo = not_done(folder, runs)
    if len(todo) < len(runs):
        print(f"{len(runs) - len(todo)} of {len(runs)} runs are done already")
    if given_up := _given_up(experiment, folder, todo):
        print(f"not trained again: {', '.join(run.folder for run in given_up)}")
        todo = [run for run in todo if run not in given_up]
    held_out = held_out_tokens(found, experiment.evaluation.subsets) if found else 0
    _print_cost(experiment, todo, estimate(experiment, models, todo, machine.threads if machine else None, held_out))
    if machine and machine.runs_on_a_gpu > 1:
        print(f"  (up to {machine.runs_on_a_gpu} runs share a GPU here, and take longer than that)")
    first = next(run for run in runs if not run.tuning)
    words = [*launch_words(experiment), *training_words(experiment, first, data, folder.run(first.folder).path)]
    print(f"the first run of the comparison:\n  smlp train {shlex.join(words)}")


def _all_runs(experiment: Experiment, models: Sequence[PlannedModel], folder: Folder) -> list[PlannedRun]:
    """Return all runs: with the values that the grid has chosen or, until it is done, with its first."""
    tuning = experiment.tuning
    expected = chosen_so_far(experiment, models, folder) if tuning else {}
    expected = expected or {model.name: tuning.values[0] for model in models if tuning}
    return [*tuning_runs(experiment, models), *main_runs(experiment, models, expected)]


def _given_up(experiment: Experiment, folder: Folder, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs of the grid that have failed and that the next call does not train again."""
    is_over = is_given_up if experiment.resources.where == "slurm" else has_diverged
    failed = [run for run in runs if run.tuning and folder.run(run.folder).state()["state"] == FAILED]
    return [run for run in failed if is_over(folder.run(run.folder), run.made_with(experiment))]


def _print_cost(experiment: Experiment, runs: Sequence[PlannedRun], cost: Cost) -> None:
    for name, seconds in cost.seconds_per_update.items():
        print(f"  {name}: {seconds:.3g} s for an update")
    digits = 1 if cost.device_hours >= 1 else 2
    devices = "GPU hours" if experiment.resources.is_on_gpus else "hours of all runs one after the other"
    exponent = math.floor(math.log10(max(1.0, cost.flops)))
    jobs = experiment.resources.at_a_time(max(map(len, _stages(runs))))
    print(
        f"{len(runs)} runs: about {duration(cost.seconds)} with {jobs} at a time, "
        f"{cost.device_hours:.{digits}f} {devices}, {cost.flops / 10**exponent:.2f}e{exponent} floating-point "
        f"operations (a multiply-add is two), {cost.disk_bytes / 1e9:.1f} GB of checkpoints, "
        f"{cost.most_disk_bytes / 1e9:.1f} GB at most while it runs\n  ({cost.how})"
    )


def estimate(
    experiment: Experiment,
    models: Sequence[PlannedModel],
    runs: Sequence[PlannedRun],
    threads: int | None,
    held_out: int = 0,
) -> Cost:
    """Estimate what some runs cost; zero-shot tasks are left out.

    Args:
        experiment: what the file says.
        models: of the runs.
        runs: the runs that are left to do.
        threads: of each run on this machine; None if the runs are not meant for it.
        held_out: tokens of the splits that are scored, at each validation and at the end.
    """
    resources = experiment.resources
    flops = {
        model.name: training_flops(model.config) * experiment.tokens_per_update / resources.ranks for model in models
    }
    if threads is not None:
        seconds = {model.name: measure_update(model, experiment, threads) for model in models}
        with_what = f"{threads} threads" if _device(experiment) == "cpu" else torch.cuda.get_device_name()
        how = f"updates measured here with {with_what} and random weights; {OVERHEAD - 1:.0%} more for the rest"
        overhead, around = OVERHEAD, SECONDS_AROUND
    else:
        peak = GPU_TFLOPS if resources.is_on_gpus else CORE_TFLOPS * (resources.threads or 1)
        tflops, mfu = resources.tflops or peak, resources.mfu or MFU
        seconds = {name: each / (tflops * 1e12 * mfu) for name, each in flops.items()}
        rate = f"{BYTES_PER_SECOND / 1e9:g} GB/s for each node"
        device = "GPU" if resources.is_on_gpus else "process"
        how = f"{mfu:.0%} of {tflops:g} TFLOP/s for each {device} (run.mfu, run.tflops), checkpoints at {rate}"
        overhead, around = 1.0, SECONDS_AROUND
    passes = held_out / experiment.tokens_per_update / 3  # a forward pass costs a third of an update
    sizes = {model.name: _BYTES_PER_PARAMETER * parameters(model.config, 1).total for model in models}
    writing = {name: CHECKPOINT_FILES * size / (BYTES_PER_SECOND * resources.nodes) for name, size in sizes.items()}
    each = [
        # all but runs of the grid are scored as well, which writes no checkpoint
        (run.updates * overhead + (validations + (not run.tuning)) * passes) * seconds[run.model.name]
        + validations * writing[run.model.name]
        + around
        for run in runs
        for validations in [validations_of(experiment, run)]
    ]
    stages = _stages(runs)
    jobs = resources.at_a_time(max(map(len, stages)))
    most = []
    for stage, kept in zip(stages, (0, 1), strict=True):  # files that a run keeps
        own = sorted((sizes[runs[number].model.name] for number in stage), reverse=True)
        # on a cluster, runs that have ended keep the others, too, until the next call or the job that scores
        whole = own if resources.where == "slurm" else own[:jobs]
        most.append(kept * sum(own) + (CHECKPOINT_FILES - kept) * sum(whole))
    return Cost(
        seconds_per_update=seconds,
        seconds=sum(_end_of_the_last([each[number] for number in stage], jobs) for stage in stages),
        device_hours=sum(each) * (resources.ranks if resources.is_on_gpus else 1) / 3600,
        flops=sum(run.updates * flops[run.model.name] * resources.ranks for run in runs),
        disk_bytes=sum(sizes[run.model.name] for run in runs if not run.tuning),
        most_disk_bytes=max(most),
        how=how,
    )


def _stages(runs: Sequence[PlannedRun]) -> list[list[int]]:
    """Return the numbers of the runs of the grid, and of those that start when all of these have ended."""
    return [[number for number, run in enumerate(runs) if run.tuning == tuning] for tuning in (True, False)]


def _end_of_the_last(seconds: Sequence[float], jobs: int) -> float:
    """Return when the last run ends if ``jobs`` of them run at a time, each starting when an earlier one ends."""
    ends = [0.0] * max(1, min(jobs, len(seconds)))
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def _device(experiment: Experiment) -> str:
    return "cuda" if experiment.resources.device != "cpu" and torch.cuda.is_available() else "cpu"


def measure_update(model: PlannedModel, experiment: Experiment, threads: int) -> float:
    """Return the seconds of an update (forward and backward of all micro-batches, Adam), the fastest of a few."""
    device = _device(experiment)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        words = option_words({**experiment.recipe, **model.overrides, **model.recipe})
        built = model_of(model.config)
        if isinstance(built, Decoder):
            built.balance_routers(torch.ones(model.config.vocab_size, dtype=torch.long))  # uniform ids below
        timed = TimedUpdates(built, device, dtype_of(words), _LEARNING_RATE)
        shape = (experiment.batch_size, experiment.tokens_per_sample + 1)
        tokens = torch.randint(4, model.config.vocab_size, shape, device=device)
        for _ in range(_MEASURED_UPDATES):
            timed.update([(tokens[:, :-1], tokens[:, 1:])] * experiment.update_freq)
        return min(timed.seconds)
    finally:
        torch.set_num_threads(before)
