"""Updates over several ranks: random numbers, batches that only keep the ranks together, running out of memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of
from smlp.trainer.spread import experts_of


def apply() -> None:
    from fairseq.data.iterators import EpochBatchIterator
    from fairseq.tasks.fairseq_task import FairseqTask
    from fairseq.trainer import Trainer

    update = Trainer.train_step
    micro_batch = FairseqTask.train_step
    validate = FairseqTask.valid_step
    iterator_state = EpochBatchIterator.state_dict
    load_iterator_state = EpochBatchIterator.load_state_dict

    @functools.wraps(update)
    def train_step(self: Trainer, samples: list, raise_oom: bool = False) -> Any:
        # A rank that goes on alone after running out of memory would leave the others waiting for its tokens.
        raise_oom = raise_oom or experts_of(self.model) is not None
        self.task.seeds_of_batches = None
        if core_of(self.model) is not None:
            place = (self.data_parallel_rank, self.data_parallel_world_size)
            self.task.seeds_of_batches = batch_seeds(self.cfg.common.seed, self.get_num_updates(), *place)
        return update(self, real_batches_last(samples), raise_oom)

    @functools.wraps(micro_batch)
    def train_micro_batch(self: FairseqTask, *args: Any, ignore_grad: bool = False, **kw: Any) -> Any:
        seeds = getattr(self, "seeds_of_batches", None)
        if seeds is not None and not ignore_grad:
            _set_seed(next(seeds))
        loss, sample_size, logging_output = micro_batch(self, *args, ignore_grad=ignore_grad, **kw)
        return as_nothing(loss, sample_size, logging_output) if ignore_grad else (loss, sample_size, logging_output)

    @functools.wraps(validate)
    def valid_step(self: FairseqTask, sample: Any, model: Any, criterion: Any) -> Any:
        # fairseq-validate knows no such batches, unlike validation in training
        if sample:
            self.last_valid_sample = sample
            return validate(self, sample, model, criterion)
        return as_nothing(*validate(self, real_sample(self), model, criterion))

    @functools.wraps(iterator_state)
    def state_dict(self: EpochBatchIterator) -> dict[str, Any]:
        return {**iterator_state(self), "num_shards": self.num_shards}

    @functools.wraps(load_iterator_state)
    def load_state_dict(self: EpochBatchIterator, state: dict[str, Any]) -> None:
        own = for_other_ranks(state, self.num_shards)
        try:
            load_iterator_state(self, own)
        except RuntimeError as error:
            if "dataloader mismatch" not in str(error):
                raise
            raise UserError(
                f"the checkpoint was written after {own['iterations_in_epoch']:,} batches of an epoch, and an epoch of "
                f"this run has {len(self.frozen_batches) // self.num_shards:,}: train on the same data with the same "
                "--batch-size, --max-tokens and --tokens-per-sample, or give --reset-dataloader"
            ) from error

    Trainer.train_step = train_step
    FairseqTask.train_step = train_micro_batch
    FairseqTask.valid_step = valid_step
    EpochBatchIterator.state_dict = state_dict
    EpochBatchIterator.load_state_dict = load_state_dict


def batch_seeds(seed: int, num_updates: int, rank: int, num_ranks: int) -> Iterator[int]:
    """Return the seeds of one rank's batches in an update, without end.

    The batches of an update are dealt out to the ranks in turn, so the j-th of rank r is number ``j * W + r`` on any
    number W of ranks. The seed follows from this number: dropout, jitter and second experts do not depend on the
    layout. The first batch has fairseq's own seed, which fairseq would give to every rank.
    """
    for number in itertools.count(rank, num_ranks):
        yield batch_seed(seed, num_updates, number) if number else seed + num_updates


def batch_seed(seed: int, num_updates: int, number: int) -> int:
    """Return a seed of its own for a batch of an update."""
    return int(numpy.random.SeedSequence((seed, num_updates, number)).generate_state(1, numpy.uint64)[0] >> 1)


def _set_seed(seed: int) -> None:
    """Seed the generators that a forward pass draws from; ``torch.manual_seed`` takes 200 times as long on a CPU."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def as_nothing(loss: Any, sample_size: Any, logging_output: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """What a batch that only keeps ranks together adds to the sums over all of them."""
    return loss, sample_size * 0, {key: value * 0 for key, value in logging_output.items()}


def real_sample(task: Any) -> Any:
    """Something to compute on for a rank that has no more batches.

    Raises:
        UserError: it never had one.
    """
    sample = getattr(task, "last_valid_sample", None)
    if sample is None:
        raise UserError("there are fewer batches to validate on than ranks: give a smaller --batch-size or fewer ranks")
    return sample


def real_batches_last(samples: list) -> list:
    """The micro-batches of an update, those without data first.

    A rank that has fewer batches than others gets empty ones, on which it computes something that counts for nothing.
    fairseq decides by the last one of an update whether all of the update counts.
    """
    if not samples or samples[-1]:
        return samples
    return sorted(samples, key=bool)


def for_other_ranks(state: dict[str, Any], num_shards: int) -> dict[str, Any]:
    """The position in an epoch, in batches of one rank, for another number of ranks than the one it was saved by.

    Rounded down: at most W - 1 batches are seen twice.
    """
    written_by, position = state.get("num_shards", num_shards), state.get("iterations_in_epoch", 0)
    return {**state, "iterations_in_epoch": position * written_by // num_shards}
