"""How long an experiment will take, and how much disk: said before anything is trained.

On this machine the time of an update is measured, with random weights and random tokens; for a cluster it follows from
the floating-point operations and the share of the device's peak that training is expected to reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smlp.costs.formula import parameters, training_flops
from smlp.experiments.experiment import Experiment, option_words
from smlp.experiments.plan import PlannedModel, Run
from smlp.experiments.updates import TimedUpdates, dtype_of
from smlp.nn.decoder import Decoder

#: of a GPU in bf16, without sparsity, where the file does not say otherwise: an A100's data sheet
GPU_TFLOPS = 312.0
#: share of the peak that is assumed where the file does not say otherwise
MFU = 0.3
#: weights and Adam's two moments, 4 bytes each
_BYTES_PER_PARAMETER = 12
#: what fairseq's own loop, validation and checkpoints add to a bare loop's updates, measured on CPUs
OVERHEAD = 1.15
#: of a process that starts, and of one that scores
SECONDS_AROUND = 14.0
#: files of a checkpoint that fairseq writes each time: with its number, the best and the last
CHECKPOINT_FILES = 3
#: at which a node is taken to write them
BYTES_PER_SECOND = 1e9
_MEASURED_UPDATES = 3
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Cost:
    """Of all runs."""

    seconds_per_update: dict[str, float]
    #: as the clock on the wall shows it
    seconds: float
    #: of all devices together
    device_hours: float
    #: multiply-adds count as two, both passes
    flops: float
    #: checkpoints that stay, one of each run of the comparison, and all there are at the fullest moment
    disk_bytes: int
    most_disk_bytes: int
    how: str


def estimate(
    experiment: Experiment,
    models: Sequence[PlannedModel],
    runs: Sequence[Run],
    threads: int | None,
    held_out: int = 0,
) -> Cost:
    """What some runs cost; zero-shot tasks are left out.

    Args:
        experiment: what the file says.
        models: of the runs.
        runs: that are left to do.
        threads: that each run has here; None where the runs are not meant for this machine.
        held_out: tokens of the splits that are scored, at each validation and at the end.
    """
    place = experiment.place
    flops = {model.name: training_flops(model.config) * experiment.tokens_per_update / place.ranks for model in models}
    if threads is not None:
        seconds = {model.name: measure_update(model, experiment, threads) for model in models}
        with_what = f"{threads} threads" if _device(experiment) == "cpu" else torch.cuda.get_device_name()
        how = f"updates measured here with {with_what} and random weights; {OVERHEAD - 1:.0%} more for the rest"
        overhead, around = OVERHEAD, SECONDS_AROUND
    else:
        tflops, mfu = place.tflops or GPU_TFLOPS, place.mfu or MFU
        seconds = {name: each / (tflops * 1e12 * mfu) for name, each in flops.items()}
        rate = f"{BYTES_PER_SECOND / 1e9:g} GB/s for each node"
        how = f"{mfu:.0%} of {tflops:.0f} TFLOP/s for each GPU (run.mfu, run.tflops), checkpoints at {rate}"
        overhead, around = 1.0, SECONDS_AROUND
    # one at the end of a run of the grid; of the others the scores as well
    validations = {True: 1, False: experiment.evaluation.validations + 1}
    passes = held_out / experiment.tokens_per_update / 3  # a forward pass is a third of an update
    sizes = {model.name: _BYTES_PER_PARAMETER * parameters(model.config, 1).total for model in models}
    writing = {name: CHECKPOINT_FILES * size / (BYTES_PER_SECOND * place.nodes) for name, size in sizes.items()}
    each = [
        (run.updates * overhead + validations[run.tuning] * passes) * seconds[run.model.name]
        + validations[run.tuning] * writing[run.model.name]
        + around
        for run in runs
    ]
    staying = sum(sizes[run.model.name] for run in runs if not run.tuning)
    largest = sorted((sizes[run.model.name] for run in runs), reverse=True)[: place.at_a_time(len(runs))]
    return Cost(
        seconds_per_update=seconds,
        seconds=_end_of_the_last(each, place.at_a_time(len(runs))),
        device_hours=sum(each) * (place.ranks if place.is_on_gpus or place.where == "slurm" else 1) / 3600,
        flops=sum(run.updates * flops[run.model.name] * place.ranks for run in runs),
        disk_bytes=staying,
        most_disk_bytes=staying + (CHECKPOINT_FILES - 1) * sum(largest),
        how=how,
    )


def _end_of_the_last(seconds: Sequence[float], jobs: int) -> float:
    """When the last of some runs ends, ``jobs`` at a time, each begun when one before it has ended."""
    ends = [0.0] * jobs
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def _device(experiment: Experiment) -> str:
    return "cuda" if experiment.place.device != "cpu" and torch.cuda.is_available() else "cpu"


def measure_update(model: PlannedModel, experiment: Experiment, threads: int) -> float:
    """Seconds of forward, backward and Adam, the fastest of a few; with accumulation, of all micro-batches."""
    device = _device(experiment)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        words = option_words({**experiment.recipe, **model.recipe})
        decoder = Decoder(model.config)
        decoder.balance_routers(torch.ones(model.config.vocab_size, dtype=torch.long))  # as ids are drawn below
        timed = TimedUpdates(decoder, device, dtype_of(words), _LEARNING_RATE)
        shape = (experiment.batch_size, experiment.tokens_per_sample + 1)
        tokens = torch.randint(4, model.config.vocab_size, shape, device=device)
        for _ in range(_MEASURED_UPDATES):
            timed.update([(tokens[:, :-1], tokens[:, 1:])] * experiment.update_freq)
        return min(timed.seconds)
    finally:
        torch.set_num_threads(before)
