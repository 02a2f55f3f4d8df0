"""The multiply-adds that a forward pass really does, compared with the nominal ones of its tokens.

Nominal work (:mod:`smlp.costs.formula`) knows no padding, no dropped tokens and no recomputation. Padded positions
cost work but have no nominal work; a dropped assignment costs nothing but has nominal work; activation checkpointing
does the forward pass of every block once more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from smlp.config import ModelConfig
from smlp.costs.component import ROUTER, Component
from smlp.costs.formula import components
from smlp.moe.plan import RoutingPlan
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext


@dataclass(frozen=True)
class Work:
    """Counts that can be added up over forward passes and ranks; flops are multiply-adds, as in fvcore."""

    #: positions of the batch that hold a token
    tokens: float = 0
    #: all positions of the batch, padding included
    positions: float = 0
    #: one forward pass over the tokens, with k experts per token and equal loads
    nominal_flops: float = 0
    #: work actually done, recomputation included
    realised_flops: float = 0
    #: the part of ``realised_flops`` that recomputed the blocks' forward pass
    recomputed_flops: float = 0
    #: the token experts' part of ``nominal_flops``
    nominal_expert_flops: float = 0
    #: the token experts' actual work, without recomputation
    realised_expert_flops: float = 0

    def to_tensor(self) -> Tensor:
        """Return the counts in the order above, (7,) float64; :meth:`from_tensor` restores sums of such tensors."""
        return torch.tensor([getattr(self, field.name) for field in fields(self)], dtype=torch.double)

    @classmethod
    def from_tensor(cls, work: Tensor) -> Work:
        """Restore what :meth:`to_tensor` wrote."""
        return cls(*work.tolist())

    @staticmethod
    def size() -> int:
        """Return 7, the number of counts."""
        return len(fields(Work))

    @property
    def ratio(self) -> float | None:
        """Return realised over nominal work; None without a token."""
        return self.realised_flops / self.nominal_flops if self.nominal_flops else None

    @property
    def padded_share(self) -> float | None:
        """Return the share of positions that hold padding; None without a position."""
        return 1 - self.tokens / self.positions if self.positions else None


def realised_work(decoder: Decoder, context: ForwardContext) -> Work:
    """Return the work of a finished forward pass.

    Args:
        decoder: its mode says whether blocks are to be recomputed in the backward pass.
        context: of that pass (all positions at once, not one by one with a decoding state).
    """
    config, valid_Bn = decoder.config, context.valid_Bn
    positions = context.tokens_Bn.numel()
    tokens = positions if valid_Bn is None else int(valid_Bn.sum())
    recomputes = config.checkpoint_activations and decoder.training
    nominal = realised = recomputed = nominal_experts = realised_experts = 0.0
    for part in _components(config, context.num_new_tokens):
        # padding is never routed
        local = part.flops_per_position * (tokens if part.kind == ROUTER else positions)
        routed = 0.0
        if part.assignments_per_token:
            routed = _expert_flops(part, context.plans[decoder.blocks[part.layer].token_moe], context)
            nominal_experts += tokens * (part.nominal_flops(context.num_new_tokens) - part.flops_per_position)
        nominal += tokens * part.nominal_flops(context.num_new_tokens)
        realised += local + routed
        realised_experts += routed
        if recomputes and part.layer is not None:
            recomputed += local + routed
    return Work(tokens, positions, nominal, realised + recomputed, recomputed, nominal_experts, realised_experts)


@functools.lru_cache(maxsize=64)
def _components(config: ModelConfig, num_tokens: int) -> list[Component]:
    return components(config, num_tokens)


def _expert_flops(part: Component, plan: RoutingPlan, context: ForwardContext) -> float:
    flops = part.flops_per_assignment * plan.token_A.numel()
    return flops + part.flops_per_pair * num_pairs(plan, context) if part.flops_per_pair else flops


def num_pairs(plan: RoutingPlan, context: ForwardContext) -> int:
    """Count ordered pairs of assignments of one sequence at one expert, each paired with itself too."""
    position_N = torch.arange(context.tokens_Bn.numel(), device=plan.token_A.device)
    if context.valid_Bn is not None:
        position_N = position_N[context.valid_Bn.flatten()]
    sequence_A = position_N[plan.token_A].div(context.num_new_tokens, rounding_mode="floor")
    return int(torch.bincount(plan.expert_A * context.num_seqs + sequence_A).square().sum())
