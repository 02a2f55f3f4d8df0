"""Gradients of spread experts in fairseq's trainer, and the norm of all gradients.

fairseq averages dense gradients over W ranks and multiplies all gradients by W / (tokens of the update) later. The sum
over ranks that the backward pass and the replica group leave in an expert's gradient is divided by W here, so that both
come out as the gradient of the mean loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from smlp.parallel import Ranks, global_grad_norm, reduce_expert_gradients
from smlp.trainer.spread import experts_of


def apply() -> None:
    from fairseq.optim import FairseqOptimizer
    from fairseq.trainer import Trainer

    all_reduce = FairseqOptimizer.all_reduce_grads
    clip = Trainer.clip_grad_norm

    @functools.wraps(all_reduce)
    def all_reduce_grads(self: FairseqOptimizer, module: nn.Module) -> None:
        all_reduce(self, module)
        experts = experts_of(module)
        if experts is not None:
            average_expert_gradients(experts.parameters(module), experts.ranks)

    @functools.wraps(clip)
    def clip_grad_norm(self: Trainer, clip_norm: float) -> Tensor:
        experts = experts_of(self.model)
        if experts is None:
            return clip(self, clip_norm)
        # of half-precision training the 32-bit copies, which bear the same mark
        groups = self.optimizer.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"] if hasattr(parameter, "expert")]
        return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=norm_with(parameters, experts.ranks))

    FairseqOptimizer.all_reduce_grads = all_reduce_grads
    Trainer.clip_grad_norm = clip_grad_norm


def average_expert_gradients(parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Sums expert gradients over their replicas and divides them by W; a collective."""
    reduce_expert_gradients(parameters, ranks.replicas)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, 1 / ranks.layout.world_size)


def norm_with(experts: list[nn.Parameter], ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """Completes the norm of the dense gradients, which fairseq has computed, with those of all experts.

    The result is the same number on every rank, and not finite anywhere if a gradient is not finite somewhere.
    """

    def aggregate(dense_norm: Tensor) -> Tensor:
        dense: Any = nn.Parameter(torch.empty_like(dense_norm), requires_grad=False)
        dense.grad = dense_norm
        return global_grad_norm([dense], experts, ranks).to(dense_norm)

    return aggregate
