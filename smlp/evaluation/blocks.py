"""Log-probabilities of a stream of tokens, block by block, as fairseq-eval-lm cuts it by default.

Letters: ``N`` tokens of the stream, ``T`` the model's context.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smlp.context import ForwardContext
from smlp.nn.decoder import Decoder


@torch.no_grad()
def block_log_probs(
    decoder: Decoder,
    tokens_N: Tensor,
    start_token: int,
    batch_size: int = 16,
    seen: Callable[[ForwardContext], None] | None = None,
) -> Tensor:
    """Natural log-probability of every token given those before it in its block, (N,) float32.

    Token i stands at position ``i % T`` of its block and is predicted from the tokens before it in the block and the
    last one of the block before (or ``start_token``), as fairseq feeds them. The decoder's mode is the caller's.

    Args:
        decoder: any.
        tokens_N: ids (N,).
        start_token: what the first token is predicted from.
        batch_size: blocks at a time.
        seen: called with each forward pass's context.
    """
    device = decoder.embedding.weight.device
    width = decoder.config.max_tokens
    inputs_N = torch.cat([tokens_N.new_tensor([start_token]), tokens_N[:-1]])
    num_whole = tokens_N.numel() // width * width
    inputs = list(inputs_N[:num_whole].view(-1, width).split(batch_size))
    targets = list(tokens_N[:num_whole].view(-1, width).split(batch_size))
    if num_whole < tokens_N.numel():
        inputs.append(inputs_N[num_whole:].unsqueeze(0))
        targets.append(tokens_N[num_whole:].unsqueeze(0))
    log_probs = []
    for source_Bn, target_Bn in zip(inputs, targets, strict=True):
        context = ForwardContext()
        logits = decoder(source_Bn.to(device), context=context).logits.float()
        chosen = logits.log_softmax(dim=2).gather(2, target_Bn.to(device).unsqueeze(2))
        log_probs.append(chosen.flatten().cpu())
        if seen is not None:
            seen(context)
    return torch.cat(log_probs) if log_probs else torch.zeros(0)


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
