"""Log-probabilities of a stream of tokens, block by block, as fairseq-eval-lm cuts it by default.

Letters: ``N`` tokens of the stream, ``T`` the model's context.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from smlp.evaluation.samples import Cutting, cut
from smlp.evaluation.scoring import score_samples
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext


def block_log_probs(
    decoder: Decoder,
    tokens_N: Tensor,
    batch_size: int = 16,
    seen: Callable[[ForwardContext], None] | None = None,
) -> Tensor:
    """Natural log-probability of every token given those before it in its block, (N,) float32.

    Token i stands at position ``i % T`` of its block and is predicted from the tokens before it in the block and the
    last one of the block before (or ``</s>``), as fairseq feeds them. The decoder's mode is the caller's.

    Args:
        decoder: any.
        tokens_N: ids (N,).
        batch_size: blocks at a time.
        seen: called with each forward pass's context.
    """
    width = decoder.config.max_tokens
    samples = cut(tokens_N.numpy(), np.array([tokens_N.numel()]), Cutting(width, width))
    scores = score_samples(decoder, samples, samples.batches(batch_size), tokens_N.numel(), seen=seen)
    return torch.from_numpy(scores.log_probs_N)


@torch.no_grad()
def stepwise_log_probs(decoder: Decoder, source_Bn: Tensor, target_Bn: Tensor, first: int = 0) -> Tensor:
    """Log-probability of each target from ``first`` on, with no later token in sight, (B, n - first) float32.

    Every position takes a forward pass of its own, on the input cut off behind it. For a model that does not leak this
    is what one pass over the whole input gives; for one that does, it is what the model can really do.

    Args:
        decoder: in evaluation mode.
        source_Bn, target_Bn: ids of inputs and of what follows each, (B, n).
        first: first position that is scored.
    """
    columns = []
    for position in range(first, source_Bn.size(1)):
        logits_BV = decoder(source_Bn[:, : position + 1]).logits[:, -1].float()
        columns.append(logits_BV.log_softmax(dim=1).gather(1, target_Bn[:, position, None]))
    return torch.cat(columns, dim=1)
