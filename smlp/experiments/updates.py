"""Timed updates of a model in a plain loop, without fairseq: forward, backward, Adam."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from smlp.nn.decoder import Decoder
from smlp.ops import token_losses


def dtype_of(words: Sequence[str]) -> torch.dtype:
    """In which options of ``fairseq-train`` have a model compute."""
    if "--bf16" in words or "--memory-efficient-bf16" in words:
        return torch.bfloat16
    if "--fp16" in words or "--memory-efficient-fp16" in words:
        return torch.float16
    return torch.float32


class TimedUpdates:
    """Updates of one model; with 16 bits, weights and moments in 32 bits are kept beside, as in fairseq's training.

    Args:
        decoder: the model; its weights change.
        device: on which it computes.
        dtype: in which it computes; losses are float32.
        learning_rate: of Adam.
    """

    def __init__(self, decoder: Decoder, device: str, dtype: torch.dtype, learning_rate: float) -> None:
        self.decoder, self.device = decoder.to(device, dtype).train(), device
        self.weights = list(self.decoder.parameters())
        #: what Adam changes; in float16 its squares of gradients would be 0
        self.masters = (
            [weight.detach().float().requires_grad_() for weight in self.weights] if dtype.itemsize == 2 else []
        )
        self.optimizer = torch.optim.Adam(self.masters or self.weights, lr=learning_rate)
        #: of each update so far
        self.seconds: list[float] = []

    def update(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One, of batches of tokens (B, T) and those that follow them."""
        start = time.perf_counter()
        prefix = self.decoder.config.prefix_tokens
        for source_BT, target_BT in batches:
            output = self.decoder(source_BT)
            losses_BT = token_losses(output.logits, target_BT)
            (losses_BT[:, prefix:].mean() + sum(output.aux_losses.values())).backward()
        for master, weight in zip(self.masters, self.weights, strict=False):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
