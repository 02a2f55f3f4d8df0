"""Plans: which tokens go to which experts, as indices.

Letters: ``N`` tokens, ``V`` ids, ``E`` experts, ``K`` choices of each token, ``A`` assignments (N where each token has
one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smlp.ops.fast_paths import is_traced, needs_fixed_shapes
from smlp.ops.rows import occurrences


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
    #: experts that each token chose before drops, best first, (N, K); None if nothing is dropped
    choice_NK: Tensor | None = None
    #: index of each assignment among its token's choices, (A,); None if every token has one
    rank_A: Tensor | None = None
    #: choices without an assignment, by cause
    dropped: dict[str, int] = field(default_factory=dict)
    #: index of each token's assignment in the order above, (N,); None unless every token has exactly one
    place_N: Tensor | None = None
    #: False at assignments that were dropped and stay for the sake of fixed shapes, (A,); None if there are none
    kept_A: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts_E.numel()

    @classmethod
    def from_experts(cls, expert_N: Tensor, num_experts: int) -> RoutingPlan:
        """Return the plan in which token i goes to expert ``expert_N[i]`` (N,)."""
        token_A = _sorted_by_expert(expert_N)
        counts_E = occurrences(expert_N, num_experts)
        return cls(token_A, expert_N[token_A], counts_E, expert_N.numel(), place_N=_inverse(token_A))

    @classmethod
    def from_choices(
        cls,
        choice_NK: Tensor,
        num_experts: int,
        capacity: int | None = None,
        priority_N: Tensor | None = None,
        wanted_NK: Tensor | None = None,
    ) -> RoutingPlan:
        """Return the plan in which tokens go to the experts that they chose, within the experts' capacity.

        All first choices are served before any second one. Among equals, earlier tokens come first, or those with
        the higher ``priority_N``. Tokens beyond an expert's capacity are dropped.

        Args:
            choice_NK: (N, K), best first, no expert twice for a token.
            num_experts: E.
            capacity: most tokens of an expert; None for any number.
            priority_N: (N,).
            wanted_NK: False at choices that are given up beforehand and use no capacity, (N, K); None for none.
        """
        num_tokens, num_choices = choice_NK.shape
        order_N = torch.arange(num_tokens, device=choice_NK.device)
        if priority_N is not None:
            order_N = priority_N.argsort(descending=True, stable=True)
        # a single queue: first choices of all tokens, then second choices
        token_Q = order_N.repeat(num_choices)
        rank_Q = torch.arange(num_choices, device=choice_NK.device).repeat_interleave(num_tokens)
        if needs_fixed_shapes() and not (capacity is None and wanted_NK is None):
            return cls._with_all_choices(choice_NK, num_experts, capacity, wanted_NK, token_Q, rank_Q)
        if wanted_NK is not None:
            kept_Q = wanted_NK[token_Q, rank_Q]
            token_Q, rank_Q = token_Q[kept_Q], rank_Q[kept_Q]
        num_wanted = token_Q.numel()
        if capacity is not None:
            kept_Q = slots(choice_NK[token_Q, rank_Q], num_experts) < capacity
            token_Q, rank_Q = token_Q[kept_Q], rank_Q[kept_Q]
        expert_Q = choice_NK[token_Q, rank_Q]
        order_A = (expert_Q * num_tokens + token_Q).argsort()
        token_A, expert_A = token_Q[order_A], expert_Q[order_A]
        dropped = {"capacity": num_wanted - token_A.numel()}
        if wanted_NK is not None:
            dropped["second_expert"] = num_tokens * num_choices - num_wanted
        counts_E = occurrences(expert_A, num_experts)
        # a graph does not know how many were dropped
        is_whole = capacity is None and wanted_NK is None if is_traced() else token_A.numel() == num_tokens
        place_N = _inverse(token_A) if num_choices == 1 and is_whole else None
        return cls(token_A, expert_A, counts_E, num_tokens, choice_NK, rank_Q[order_A], dropped, place_N)

    @classmethod
    def _with_all_choices(
        cls,
        choice_NK: Tensor,
        num_experts: int,
        capacity: int | None,
        wanted_NK: Tensor | None,
        token_Q: Tensor,
        rank_Q: Tensor,
    ) -> RoutingPlan:
        """Return the plan of :meth:`from_choices` with the dropped assignments marked instead of left out.

        ``token_Q`` and ``rank_Q`` are the tokens and the choices of the queue, (Q,).
        """
        num_tokens, expert_Q = len(choice_NK), choice_NK[token_Q, rank_Q]
        kept_Q = torch.ones_like(expert_Q, dtype=torch.bool) if wanted_NK is None else wanted_NK[token_Q, rank_Q]
        if capacity is not None:  # what is not wanted waits in a queue of its own
            kept_Q = kept_Q & (slots(torch.where(kept_Q, expert_Q, num_experts), num_experts + 1) < capacity)
        order_A = (expert_Q * num_tokens + token_Q).argsort()
        token_A, expert_A, rank_A, kept_A = (value[order_A] for value in (token_Q, expert_Q, rank_Q, kept_Q))
        counts_E = occurrences(torch.where(kept_A, expert_A, num_experts), num_experts)
        return cls(token_A, expert_A, counts_E, num_tokens, choice_NK, rank_A, kept_A=kept_A)


def _sorted_by_expert(expert_N: Tensor) -> Tensor:
    """Return the tokens by expert and, within an expert, in their order, (N,)."""
    if is_traced():  # ONNX has no stable sort
        num_tokens = expert_N.numel()
        return (expert_N * num_tokens + torch.arange(num_tokens, device=expert_N.device)).argsort()
    return expert_N.argsort(stable=True)


def slots(expert_Q: Tensor, num_experts: int) -> Tensor:
    """Return the place of each item in its expert's queue, (Q,): how many before it go to the same expert."""
    order_Q = expert_Q.argsort(stable=True)
    counts_E = occurrences(expert_Q, num_experts)
    first_E = counts_E.cumsum(0) - counts_E
    place_Q = torch.empty_like(order_Q)
    place_Q[order_Q] = torch.arange(expert_Q.numel(), device=expert_Q.device) - first_E[expert_Q[order_Q]]
    return place_Q


def _inverse(order_N: Tensor) -> Tensor:
    """Return where each number stands in a permutation of 0 .. N-1."""
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return place_N


def random_table(vocab_size: int, num_experts: int, seed: int) -> Tensor:
    """Return an expert for each id, (V,): a random permutation dealt out in turn, the same in every run and rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab_size, generator=generator, device="cpu") % num_experts


def expert_capacity(factor: float, num_choices: int, num_tokens: int, num_experts: int) -> int | None:
    """Return an expert's capacity: ``ceil(factor * K * N / E)``, at least 1; None (no limit) for a factor of 0."""
    if factor == 0:
        return None
    return max(1, math.ceil(round(factor * num_choices * num_tokens / num_experts, 6)))
