"""What a router decides: which tokens go to which experts, as indices.

Letters: ``N`` tokens, ``E`` experts, ``A`` assignments (N for top-1 routing without drops).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingPlan:
    """Assignments of tokens to experts, sorted by expert and, within an expert, by token."""

    #: row of each assignment's token, (A,), int64
    token_A: Tensor
    #: global id of each assignment's expert, (A,), int64, ascending
    expert_A: Tensor
    #: assignments of each expert, (E,), int64
    counts_E: Tensor
    #: N
    num_tokens: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts_E.numel()

    @classmethod
    def from_experts(cls, expert_N: Tensor, num_experts: int) -> RoutingPlan:
        """The plan in which token i goes to expert ``expert_N[i]`` (N,)."""
        token_A = expert_N.argsort(stable=True)
        counts_E = torch.bincount(expert_N, minlength=num_experts)
        return cls(token_A, expert_N[token_A], counts_E, expert_N.numel())
