"""The criterion ``span``: cross-entropy of the first and the last token of an answer, and the best answers of windows.

Letters: ``B`` windows of a batch, ``n`` tokens, ``A`` tokens of the longest answer, ``W`` windows of all batches.
"""

import math
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn import functional

#: in the logging output of validation: (B, 6) float32, the split and a row for ``smlp.text.squad.score_answers``
WINDOWS = "answers"


def best_answers(scores_Bn2: Tensor, prefix_B: Tensor, length_B: Tensor, longest: int) -> Tensor:
    """Find the best answer of each window, by the sum of the scores of its first and its last token.

    Args:
        scores_Bn2: of first tokens, and of last ones.
        prefix_B: tokens before the part of the context.
        length_B: tokens of that part, in which an answer lies.
        longest: A.

    Returns:
        (B, 4) float32: score of no answer (both at ``<s>``), score of the best answer, its first and its last token,
        counted from the beginning of the part.
    """
    place_n = torch.arange(scores_Bn2.shape[1], device=scores_Bn2.device)
    is_outside_Bn = (place_n < prefix_B[:, None]) | (place_n >= (prefix_B + length_B)[:, None])
    first_Bn, last_Bn = scores_Bn2.masked_fill(is_outside_Bn[:, :, None], -math.inf).unbind(-1)
    longest = min(longest, len(place_n))
    padded = functional.pad(last_Bn, (0, longest - 1), value=-math.inf)
    best_last_Bn, more_Bn = padded.unfold(1, longest, 1).max(dim=-1)  # over (B, n, A)
    best_B, place_B = (first_Bn + best_last_Bn).max(dim=1)
    begin_B = place_B - prefix_B
    end_B = begin_B + more_Bn.gather(1, place_B[:, None])[:, 0]
    return torch.stack([column.float() for column in (scores_Bn2[:, 0].sum(-1), best_B, begin_B, end_B)], dim=1)


@register_criterion("span")
class SpanCriterion(FairseqCriterion):
    """Mean of the cross-entropies of the first and the last token over the tokens of a window, padding left out.

    The target of a window without the answer is ``<s>``, twice (Devlin et al., 2019).
    """

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return loss (a sum over windows), their number, and logging output."""
        tokens_Bn = sample["net_input"]["src_tokens"]
        scores_Bn2, _ = model(**sample["net_input"], features_only=True, span=True)
        is_padding_Bn = tokens_Bn == self.padding_idx
        scores_Bn2 = scores_Bn2.float().masked_fill(is_padding_Bn[:, :, None], -math.inf)
        losses_B2 = functional.cross_entropy(scores_Bn2, sample["target"], reduction="none")  # (B, n, 2), (B, 2)
        loss = losses_B2.mean(dim=1).sum() if reduce else losses_B2.mean(dim=1)
        size = len(tokens_Bn)
        logging_output = {"loss": loss.data, "ntokens": sample["ntokens"], "nsentences": size, "sample_size": size}
        if not self.training:
            number_B, question_B, begin_B, length_B, prefix_B = sample["window"].unbind(1)
            found_B4 = best_answers(scores_Bn2.detach(), prefix_B, length_B, self.task.cfg.max_answer_length)
            found_B4[:, 2:] += begin_B[:, None]
            names_B2 = torch.stack([number_B, question_B], dim=1).float()
            logging_output[WINDOWS] = torch.cat([names_B2, found_B4], dim=1).cpu()
        return loss, size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss to base 2, and collect the best answers of all ranks; the task scores them."""
        size = sum(log.get("sample_size", 0) for log in logging_outputs)
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / (size or 1) / math.log(2), size, round=3)
        found = [log[WINDOWS] for log in logging_outputs if WINDOWS in log]
        if found:
            metrics.log_concat_tensor(f"_{WINDOWS}", torch.cat(found))

    def logging_outputs_can_be_summed(self) -> bool:
        """Return whether ranks may sum what they log: not in validation, where each has answers of its own."""
        return self.training
