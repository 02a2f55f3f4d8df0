"""Count every sample once.

That concerns samples that fairseq leaves out silently, batches that a resumed run would make differently, and batches
that only keep the ranks together.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from smlp.errors import UserError
from smlp.fairseq_compat.replacing import replacing

logger = logging.getLogger(__name__)


def apply() -> None:
    """Replace what fairseq does with batches; each function says what was wrong."""
    _keep_last_batches()
    _refuse_long_samples()
    _keep_batches_of_first_epoch()
    _tell_loaders_of_epochs()
    _count_repeated_batches_as_nothing()
    _save_what_positions_depend_on()


def _keep_last_batches() -> None:
    """Keep a last batch of any size.

    ``--required-batch-size-multiple`` (8 unless given) is documented as "smaller than N or a multiple of N", and
    batches are cut that way; but then a last batch of any other size is thrown away. Validation during training thus
    skips up to a whole batch of the split, its perplexity disagrees with eval-lm (which asks for no multiple), and a
    split of fewer than 8 samples is called empty. Batches follow the order of the indices, so what is missing is their
    tail.
    """
    from fairseq.data import data_utils

    @replacing(data_utils, "batch_by_size")
    def batch_by_size(cut: Any, indices: Any, *rest: Any, fixed_shapes: Any = None, **kw: Any) -> Any:
        if fixed_shapes is not None:
            return cut(indices, *rest, fixed_shapes=fixed_shapes, **kw)
        if not isinstance(indices, numpy.ndarray):
            indices = numpy.fromiter(indices, dtype=numpy.int64, count=-1)
        if len(indices) == 0:
            return []
        try:
            batches = list(cut(indices, *rest, **kw))
        except AssertionError as error:
            tokens, most = kw.get("num_tokens_vec"), kw.get("max_tokens")
            if tokens is None:
                tokens = [(kw.get("num_tokens_fn") or rest[0])(index) for index in indices]
            longest = numpy.max(tokens)
            if most is None or longest <= most:
                raise
            raise UserError(
                f"a batch of {most} tokens has no room for the longest sample, which has {longest}: raise --max-tokens "
                "(for validation, --max-tokens-valid), or lower --tokens-per-sample (of sentences and questions, "
                "--max-positions)"
            ) from error
        kept = sum(len(batch) for batch in batches)
        return [*batches, indices[kept:]] if kept < len(indices) else batches


def _refuse_long_samples() -> None:
    """Refuse samples that are longer than the model's context.

    fairseq-eval-lm leaves them out: with too large a ``--tokens-per-sample`` it reports the perplexity of the last,
    short block alone. Validation ends in a traceback.
    """
    from fairseq.tasks.fairseq_task import FairseqTask
    from fairseq.tasks.language_modeling import LanguageModelingTask

    @replacing(LanguageModelingTask, "eval_lm_dataloader")
    def eval_lm_dataloader(load: Any, self: Any, dataset: Any, *rest: Any, max_positions: Any = None, **kw: Any) -> Any:
        tokens = self.args.tokens_per_sample + kw.get("context_window", 0)  # which fairseq has subtracted
        if isinstance(max_positions, int) and tokens > longest_sample(self, dataset, max_positions):
            start = ", one of which is the start symbol" if tokens == max_positions else ""
            raise UserError(
                f"--tokens-per-sample {tokens} is longer than the context of {max_positions} tokens that the model was "
                f"trained with{start}"
            )
        return load(self, dataset, *rest, max_positions=max_positions, **kw)

    @replacing(FairseqTask, "filter_indices_by_size")
    def filter_indices_by_size(
        leave_out: Any,
        self: FairseqTask,
        indices: Any,
        dataset: Any,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> Any:
        has_start, limit = False, None
        if isinstance(max_positions, int):
            limit = longest_sample(self, dataset, max_positions)
            has_start, max_positions = limit < max_positions, limit
        sizes = getattr(dataset, "sizes", None)
        if isinstance(sizes, list) and len(sizes) == 1:  # of sentence_prediction
            (sizes,) = sizes
        if limit is not None and isinstance(sizes, numpy.ndarray) and sizes.ndim == 1:
            options = getattr(self, "args", None) or self.cfg
            check_lengths(sizes[indices], limit, options, ignore_invalid_inputs, has_start)
        return leave_out(self, indices, dataset, max_positions, ignore_invalid_inputs)


def _keep_batches_of_first_epoch() -> None:
    """Make the batches of the first epoch in a run that is resumed in a later one.

    A run keeps them and draws only their order anew for each epoch, but a resumed run made others, drawn with that
    epoch's number.
    """
    from fairseq.tasks.fairseq_task import FairseqTask

    @replacing(FairseqTask, "get_batch_iterator")
    def get_batch_iterator(iterate: Any, self: FairseqTask, dataset: Any, *rest: Any, epoch: int = 1, **kw: Any) -> Any:
        kept = not (kw.get("disable_iterator_cache") or kw.get("update_epoch_batch_itr"))
        if epoch <= 1 or not kept or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
            return iterate(self, dataset, *rest, epoch=epoch, **kw)
        if getattr(self, "adds_epoch_to_seed", False):
            kw["seed"] -= epoch - 1
        iterator = iterate(self, dataset, *rest, epoch=1, **kw)
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator


def _tell_loaders_of_epochs() -> None:
    """Shuffle the epochs after those of ``--curriculum N``, and draw masks anew in each epoch.

    One data loader serves all epochs. fairseq told it only once whether to shuffle, and its workers kept the data set
    as it was in the first epoch, so that masks were those of that epoch, unless a run was resumed.
    """
    from fairseq.data.iterators import EpochBatchIterator

    @replacing(EpochBatchIterator, "_get_iterator_for_epoch")
    def get_iterator_for_epoch(
        begin_epoch: Any, self: EpochBatchIterator, epoch: int, shuffle: bool, *rest: Any, **kw: Any
    ) -> Any:
        drawn_for = _epoch_of(self.dataset) if self.num_workers else None
        if self.dataloader is not None:
            self.epoch_batch_sampler.shuffle = shuffle
            if self.workers_draw_for != drawn_for:
                self.dataloader = None  # new workers
        self.workers_draw_for = drawn_for
        return begin_epoch(self, epoch, shuffle, *rest, **kw)


def _epoch_of(dataset: Any) -> int | None:
    """Return the epoch for which a data set, or one that it wraps, draws what it hands out; None if none draws."""
    if isinstance(own := getattr(dataset, "epoch", None), int):
        return own
    inner = (getattr(dataset, "dataset", None), *getattr(dataset, "defn", {}).values())
    return next((epoch for part in inner if part is not None and (epoch := _epoch_of(part)) is not None), None)


def _count_repeated_batches_as_nothing() -> None:
    """Count real batches only.

    A rank that has fewer batches than others repeats an old one, to keep the ranks together. fairseq decides by the
    last batch of an update whether the whole update counts; here only the repeated batches do not count.
    """
    from fairseq.tasks.fairseq_task import FairseqTask

    @replacing(FairseqTask, "train_step")
    def train_step(micro_batch: Any, self: FairseqTask, *args: Any, ignore_grad: bool = False, **kw: Any) -> Any:
        loss, sample_size, logging_output = micro_batch(self, *args, ignore_grad=ignore_grad, **kw)
        return as_nothing(loss, sample_size, logging_output) if ignore_grad else (loss, sample_size, logging_output)

    @replacing(FairseqTask, "valid_step")
    def valid_step(validate: Any, self: FairseqTask, sample: Any, model: Any, criterion: Any) -> Any:
        # unlike validation during training, fairseq-validate has no such batches
        if sample:
            self.last_valid_sample = sample
            return validate(self, sample, model, criterion)
        nothing = as_nothing(*validate(self, real_sample(self), model, criterion))
        if not criterion.logging_outputs_can_be_summed():  # the rows of all ranks are joined, not added up
            nothing[2].update({key: value[:0] for key, value in nothing[2].items() if getattr(value, "ndim", 0)})
        return nothing


def _save_what_positions_depend_on() -> None:
    """Save what the position in an epoch depends on: it counts batches of one rank, in an order of the seed.

    A resumed run that has another seed or number of batches has others at that position.
    """
    from fairseq.data.iterators import EpochBatchIterator

    @replacing(EpochBatchIterator, "state_dict")
    def state_dict(iterator_state: Any, self: EpochBatchIterator) -> dict[str, Any]:
        numbers = {"num_shards": self.num_shards, "num_batches": len(self.frozen_batches), "seed": self.seed}
        return {**iterator_state(self), **numbers}

    @replacing(EpochBatchIterator, "load_state_dict")
    def load_state_dict(load_iterator_state: Any, self: EpochBatchIterator, state: dict[str, Any]) -> None:
        own = for_other_ranks(state, self.num_shards)
        try:
            load_iterator_state(self, own)
        except RuntimeError as error:
            if "dataloader mismatch" not in str(error):
                raise
            raise UserError(
                f"the checkpoint was written after {own['iterations_in_epoch']:,} batches of an epoch, and an epoch of "
                f"this run has {len(self):,}: train on the same data with the same "
                "--batch-size, --max-tokens and --tokens-per-sample, or give --reset-dataloader"
            ) from error
        then, now = state.get("num_batches"), len(self.frozen_batches)
        if own["iterations_in_epoch"] and then not in (None, now) and self.shard_id == 0:
            logger.warning(
                f"the checkpoint was written in an epoch of {then:,} batches, and one of this run has {now:,}: some "
                "texts are seen twice in this epoch, or not at all, unless you train on the same data with the same "
                "--batch-size, --max-tokens and --tokens-per-sample; --reset-dataloader begins with the first epoch"
            )
        seed = state.get("seed", self.seed)
        if own["iterations_in_epoch"] and seed != self.seed and self.shard_id == 0:
            logger.warning(
                f"the checkpoint was written in an epoch in the order of seed {seed}, and this run has {self.seed}: "
                "some texts are seen twice in this epoch, or not at all; --reset-dataloader begins with the first epoch"
            )


def longest_sample(task: Any, dataset: Any, max_positions: int) -> int:
    """Return fairseq's limit for the tokens of a sample, lowered where a start symbol is still to come before them."""
    context = getattr(task, "model_context", None)  # of a model of this package
    parts = (dataset, getattr(dataset, "dataset", None))  # there may be earlier tokens as context around it
    has_start = any(getattr(part, "add_bos_token", False) for part in parts)
    return min(max_positions, context - 1) if context is not None and has_start else max_positions


def check_lengths(
    lengths: numpy.ndarray, limit: int, options: Any, may_leave_out: bool, has_start: bool = False
) -> None:
    """Refuse samples that are too long where fairseq ends in a traceback.

    Args:
        lengths: tokens of each sample.
        limit: the smallest of the model's context and fairseq's limits.
        options: of the task; the message names those that it has.
        may_leave_out: some may be left out, as in training, but not all.
        has_start: the limit leaves room for a start symbol.

    Raises:
        UserError: there are some that may not be left out, or nothing is left.
    """
    too_long = int((lengths > limit).sum())
    if too_long == 0 or (may_leave_out and too_long < len(lengths)):
        return
    is_cut = hasattr(options, "tokens_per_sample")
    room = "--max-target-positions" if hasattr(options, "max_target_positions") else "--max-positions"
    if too_long == len(lengths):
        remedy = f"{'lower --tokens-per-sample, or ' if is_cut else ''}raise --max-tokens and {room}"
    else:
        remedy = "--skip-invalid-size-inputs-valid-test leaves them out of validation, " + (
            "--sample-break-mode none with a --tokens-per-sample that is no larger cuts them"
            if is_cut
            else f"a larger {room} keeps them"
        )
    remedy += " (of sentences, --shorten-method truncate)" if hasattr(options, "shorten_method") else ""
    room = f"{limit} tokens{' without the start symbol' if has_start else ''}"
    raise UserError(
        f"{too_long:,} of {len(lengths):,} samples are longer than {room}, the longest has {lengths.max()}: {remedy}"
    )


def batch_seeds(seed: int, num_updates: int, rank: int, num_ranks: int) -> Iterator[int]:
    """Yield the seeds of one rank's batches in an update, without end.

    The batches of an update are dealt out to the ranks in turn, so the j-th of rank r is number ``j * W + r`` on any
    number W of ranks. The seed follows from this number: dropout, jitter and second experts do not depend on the
    layout. The first batch has fairseq's own seed, which fairseq would give to every rank.
    """
    for number in itertools.count(rank, num_ranks):
        yield batch_seed(seed, num_updates, number) if number else seed + num_updates


def batch_seed(seed: int, num_updates: int, number: int) -> int:
    """Return a seed of its own for a batch of an update."""
    return int(numpy.random.SeedSequence((seed, num_updates, number)).generate_state(1, numpy.uint64)[0] >> 1)


def seed_generators(seed: int) -> None:
    """Seed the generators that a forward pass draws from; ``torch.manual_seed`` takes 200 times as long on a CPU."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def as_nothing(loss: Any, sample_size: Any, logging_output: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return zeros for a batch that only keeps ranks together, to be added to the sums over ranks."""
    return loss, sample_size * 0, {key: value * 0 for key, value in logging_output.items()}


def real_sample(task: Any) -> Any:
    """Return a batch for a rank that has no more batches.

    Raises:
        UserError: it never had one.
    """
    sample = getattr(task, "last_valid_sample", None)
    if sample is None:
        raise UserError("validation has fewer batches than ranks: give a smaller --batch-size or fewer ranks")
    return sample


def real_batches_last(samples: list) -> list:
    """Return the micro-batches of an update, those without data first.

    fairseq decides by the last one whether the whole update counts.
    """
    if not samples or samples[-1]:
        return samples
    return sorted(samples, key=bool)


def for_other_ranks(state: dict[str, Any], num_shards: int) -> dict[str, Any]:
    """Return a saved position in an epoch, in batches of one rank, for another number of ranks.

    It is rounded down: at most W - 1 batches are seen twice.
    """
    written_by, position = state.get("num_shards", num_shards), state.get("iterations_in_epoch", 0)
    return {**state, "iterations_in_epoch": position * written_by // num_shards}
