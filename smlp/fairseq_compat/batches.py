"""Samples that fairseq leaves out without saying so, and batches that another start would make of other samples."""

from __future__ import annotations

import functools
from typing import Any

import numpy

from smlp.errors import UserError


def apply() -> None:
    """Keep every sample.

    ``--required-batch-size-multiple`` (8 unless given) is documented as "smaller than N or a multiple of N", and
    batches are cut that way; but then a last batch of any other size is thrown away. Validation during training thus
    skips up to a whole batch of the split, its perplexity disagrees with eval-lm (which asks for no multiple), and a
    split of fewer than 8 samples is called empty. Batches follow the order of the indices, so what is missing is their
    tail.

    fairseq-eval-lm leaves out every sample that is longer than the model's context: with too large a
    ``--tokens-per-sample`` it reports the perplexity of the last, short block alone. That is refused.

    A run keeps the batches that it has made for its first epoch, and draws only their order anew for each epoch; but a
    run that is resumed in a later epoch made others, drawn with that epoch's number. It now makes those of the first.
    """
    from fairseq.data import data_utils
    from fairseq.tasks.fairseq_task import FairseqTask
    from fairseq.tasks.language_modeling import LanguageModelingTask

    cut = data_utils.batch_by_size
    load = LanguageModelingTask.eval_lm_dataloader
    iterate = FairseqTask.get_batch_iterator
    leave_out = FairseqTask.filter_indices_by_size

    @functools.wraps(cut)
    def batch_by_size(indices: Any, *rest: Any, fixed_shapes: Any = None, **kw: Any) -> Any:
        if fixed_shapes is not None:
            return cut(indices, *rest, fixed_shapes=fixed_shapes, **kw)
        if not isinstance(indices, numpy.ndarray):
            indices = numpy.fromiter(indices, dtype=numpy.int64, count=-1)
        if len(indices) == 0:
            return []
        try:
            batches = list(cut(indices, *rest, **kw))
        except AssertionError as error:
            longest, most = numpy.max(kw.get("num_tokens_vec")), kw.get("max_tokens")
            if most is None or longest <= most:
                raise
            raise UserError(
                f"a batch of {most} tokens has no room for the longest sample, which has {longest}: raise --max-tokens "
                "(for validation, --max-tokens-valid), or lower --tokens-per-sample"
            ) from error
        kept = sum(len(batch) for batch in batches)
        return [*batches, indices[kept:]] if kept < len(indices) else batches

    @functools.wraps(load)
    def eval_lm_dataloader(self: Any, *rest: Any, max_positions: Any = None, **kw: Any) -> Any:
        tokens = self.args.tokens_per_sample
        if isinstance(max_positions, int) and tokens > max_positions:
            raise UserError(
                f"--tokens-per-sample {tokens} is longer than the context of {max_positions} tokens that the model was "
                "trained with"
            )
        return load(self, *rest, max_positions=max_positions, **kw)

    @functools.wraps(leave_out)
    def filter_indices_by_size(
        self: FairseqTask, indices: Any, dataset: Any, max_positions: Any = None, ignore_invalid_inputs: bool = False
    ) -> Any:
        limit = max_positions if isinstance(max_positions, int) else None
        sizes = getattr(dataset, "sizes", None)
        if limit is not None and isinstance(sizes, numpy.ndarray) and sizes.ndim == 1:
            check_lengths(sizes[indices], limit, may_leave_out=ignore_invalid_inputs)
        return leave_out(self, indices, dataset, max_positions, ignore_invalid_inputs)

    @functools.wraps(iterate)
    def get_batch_iterator(self: FairseqTask, dataset: Any, *rest: Any, epoch: int = 1, **kw: Any) -> Any:
        kept = not (kw.get("disable_iterator_cache") or kw.get("update_epoch_batch_itr"))
        if epoch <= 1 or not kept or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
            return iterate(self, dataset, *rest, epoch=epoch, **kw)
        iterator = iterate(self, dataset, *rest, epoch=1, **kw)
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator

    data_utils.batch_by_size = batch_by_size
    FairseqTask.get_batch_iterator = get_batch_iterator
    FairseqTask.filter_indices_by_size = filter_indices_by_size
    LanguageModelingTask.eval_lm_dataloader = eval_lm_dataloader


def check_lengths(lengths: numpy.ndarray, limit: int, may_leave_out: bool) -> None:
    """Refuse samples that are too long where fairseq ends in a traceback.

    Args:
        lengths: tokens of each sample.
        limit: the smallest of the model's context and fairseq's limits.
        may_leave_out: some may be left out, as in training, but not all.

    Raises:
        UserError: there are some that may not be left out, or nothing is left.
    """
    too_long = int((lengths > limit).sum())
    if too_long == 0 or (may_leave_out and too_long < len(lengths)):
        return
    remedy = (
        "lower --tokens-per-sample, or raise --max-tokens and --max-target-positions"
        if too_long == len(lengths)
        else "--skip-invalid-size-inputs-valid-test leaves them out of validation, --sample-break-mode none cuts them"
    )
    raise UserError(
        f"{too_long:,} of {len(lengths):,} samples are longer than {limit} tokens, the longest has {lengths.max()}: "
        f"{remedy}"
    )
