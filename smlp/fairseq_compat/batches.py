"""Samples that fairseq leaves out without saying so, or with a warning that nobody reads."""

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
    """
    from fairseq.data import data_utils
    from fairseq.tasks.language_modeling import LanguageModelingTask

    cut = data_utils.batch_by_size
    load = LanguageModelingTask.eval_lm_dataloader

    @functools.wraps(cut)
    def batch_by_size(indices: Any, *rest: Any, fixed_shapes: Any = None, **kw: Any) -> Any:
        if fixed_shapes is not None:
            return cut(indices, *rest, fixed_shapes=fixed_shapes, **kw)
        if not isinstance(indices, numpy.ndarray):
            indices = numpy.fromiter(indices, dtype=numpy.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = list(cut(indices, *rest, **kw))
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

    data_utils.batch_by_size = batch_by_size
    LanguageModelingTask.eval_lm_dataloader = eval_lm_dataloader
