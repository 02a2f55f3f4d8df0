"""Leave the first tokens of a sample out of its score if they only choose experts (``prefix_tokens``); gather the
predictions of all ranks for GLUE's metrics."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from smlp.fairseq_compat.core import prefix_of

logger = logging.getLogger(__name__)


def apply() -> None:
    """Let fairseq-eval-lm and every other user of ``SequenceScorer`` score positions after the prefix only, and say so.

    The scorer can start later in a sample (``start_indices``, made for ``--context-window``), so nothing but that and
    the number of tokens reported is changed.

    ``--report-mcc`` and its like end on several ranks, because fairseq then sums lists of predictions with numbers.
    They are gathered instead. ``--report-pearson-and-spearman`` ends at a batch of one row, whose correlation fairseq
    also computes; it is nan there.
    """
    from fairseq.criterions import sentence_prediction
    from fairseq.sequence_scorer import SequenceScorer

    generate, correlate = SequenceScorer.generate, sentence_prediction.pearson_and_spearman
    told: set[int] = set()

    @functools.wraps(generate)
    def generate_after_prefix(self: Any, models: Any, sample: dict, **kw: Any) -> Any:
        prefix = max(map(prefix_of, models), default=0)
        if prefix == 0:
            return generate(self, models, sample, **kw)
        target = sample["target"]
        if target.size(1) <= prefix:
            logger.warning(
                "%d samples of at most %d tokens are not scored: the first %d only choose experts",
                *(*target.shape, prefix),
            )
        if prefix not in told:
            told.add(prefix)
            logger.info("scoring positions from %d on: the first %d of each sample choose experts", prefix, prefix)
        given = sample.get("start_indices") or [0] * target.size(0)
        sample["start_indices"] = [max(int(start), prefix) for start in given]
        sample["ntokens"] = sum(
            int(row[start:].ne(self.pad).sum()) for row, start in zip(target, sample["start_indices"], strict=True)
        )
        return generate(self, models, sample, **kw)

    def logging_outputs_can_be_summed(self: Any) -> bool:
        return self.training or not self.keep_pred_and_targ

    @functools.wraps(correlate)
    def pearson_and_spearman(preds: Any, labels: Any) -> dict[str, float]:
        if len(preds) < 2:
            return dict.fromkeys(("pearson", "spearmanr", "corr"), math.nan)
        return correlate(preds, labels)

    SequenceScorer.generate = generate_after_prefix
    sentence_prediction.pearson_and_spearman = pearson_and_spearman
    sentence_prediction.SentencePredictionCriterion.logging_outputs_can_be_summed = logging_outputs_can_be_summed
