"""Leave the first tokens of a sample out of its score if they only choose experts (``prefix_tokens``)."""

from __future__ import annotations

import logging
from typing import Any

from smlp.fairseq_compat.core import prefix_of
from smlp.fairseq_compat.replacing import replacing

logger = logging.getLogger(__name__)


def apply() -> None:
    """Let fairseq-eval-lm and every other user of ``SequenceScorer`` score positions after the prefix only, and say so.

    The scorer can start later in a sample (``start_indices``, made for ``--context-window``), so nothing but that and
    the number of tokens reported is changed.
    """
    from fairseq.sequence_scorer import SequenceScorer

    told: set[int] = set()

    @replacing(SequenceScorer, "generate")
    def generate_after_prefix(generate: Any, self: Any, models: Any, sample: dict, **kw: Any) -> Any:
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
