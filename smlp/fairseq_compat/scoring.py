"""Leave the first tokens of a sample out of its score if they only choose experts (``prefix_tokens``)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from smlp.fairseq_compat.core import prefix_of
from smlp.fairseq_compat.replacing import replacing
from smlp.text.tokenizer import Vocabulary

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
        given = [int(start) for start in sample.get("start_indices") or [0] * target.size(0)]
        sample["start_indices"] = [max(start, prefix) for start in given]
        sample["ntokens"] = sum(
            int(row[start:].ne(self.pad).sum()) for row, start in zip(target, sample["start_indices"], strict=True)
        )
        found = generate(self, models, sample, **kw)
        if all(row[start] == Vocabulary.bos for row, start in zip(target, given, strict=True)):
            for hypos, start in zip(found, given, strict=True):
                if start < prefix:
                    _put_start_back(hypos[0])
        return found


def _put_start_back(hypo: dict[str, Any]) -> None:
    """Begin with the symbol of ``--add-bos-token``, which fairseq-eval-lm takes off before it counts."""
    tokens, scores = hypo["tokens"], hypo["positional_scores"]
    hypo["tokens"] = torch.cat([tokens.new_tensor([Vocabulary.bos]), tokens])
    hypo["positional_scores"] = torch.cat([scores.new_zeros(1), scores])
