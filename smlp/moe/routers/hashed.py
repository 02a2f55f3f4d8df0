"""Hash routing: a fixed table from token id to expert.

Source: Roller et al., 2021, section 3.1. The table is part of the checkpoint, so that a model always routes as it was
trained, whatever data are at hand.

Letters: ``N`` tokens, ``V`` vocabulary, ``E`` experts.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.errors import UserError
from smlp.moe.plan import RoutingPlan, random_table
from smlp.moe.routers.routing import RouterKind, Routing, register_router
from smlp.parallel.spans import ASSIGNMENT, stage


def balanced_table(frequencies_V: Tensor, num_experts: int) -> Tensor:
    """Return an expert for each id, (V,), such that training tokens load experts as equally as a greedy deal can.

    Ids are dealt by falling frequency, ties by id, each to the expert with the lowest load so far (Roller et al., 2021,
    "balanced assignment") and, among those, with the fewest ids. The most frequent id may outweigh an equal share:
    nothing can divide it.
    """
    vocab_size = frequencies_V.numel()
    table_V = torch.empty(vocab_size, dtype=torch.long)
    lightest = [(0, expert) for expert in range(num_experts)]
    for token in frequencies_V.argsort(descending=True, stable=True).tolist():
        load, expert = lightest[0]
        table_V[token] = expert
        # All ids together weigh less than one occurrence, so that they only break ties between loads.
        heapq.heapreplace(lightest, (load + int(frequencies_V[token]) * (vocab_size + 1) + 1, expert))
    return table_V


class HashRouter(nn.Module):
    """The expert that a table names for the token's id, with weight one; nothing is learnt.

    Args:
        vocab_size: V.
        num_experts: E.
        seed: of the random table; None for a table that is still to come, by :meth:`balance` or from a checkpoint.
    """

    table: Tensor

    def __init__(self, vocab_size: int, num_experts: int, seed: int | None) -> None:
        super().__init__()
        self.num_experts = num_experts
        table_V = torch.full((vocab_size,), -1) if seed is None else random_table(vocab_size, num_experts, seed)
        self.register_buffer("table", table_V.to(torch.get_default_device()))
        self._is_complete = seed is not None

    def balance(self, frequencies_V: Tensor) -> None:
        """Replace the table by one that is balanced for these counts of training tokens, (V,).

        Raises:
            UserError: there are not V counts.
        """
        if frequencies_V.numel() != self.table.numel():
            raise UserError(f"{frequencies_V.numel()} token frequencies for a vocabulary of {self.table.numel()}")
        self.table.copy_(balanced_table(frequencies_V, self.num_experts))

    def forward(self, x_NH: Tensor, token_ids_N: Tensor, plan: RoutingPlan | None = None) -> Routing:
        """Route tokens with ids (N,); see :class:`smlp.moe.routers.Router`.

        Raises:
            UserError: the table is still to come.
        """
        if not self._is_complete and not torch.compiler.is_compiling():
            if not self.table.is_meta and bool((self.table < 0).any()):
                raise UserError(
                    "hash_kind=balanced has no table: it is made from the training split (mmap format) when training "
                    "starts, or comes with a checkpoint"
                )
            self._is_complete = True
        if plan is None:
            with stage(ASSIGNMENT):
                plan = RoutingPlan.from_experts(self.table[token_ids_N], self.num_experts)
        return Routing(plan, None)

    def looks_ahead(self) -> bool:
        """Return False: a token's own id decides."""
        return False


@register_router("hash")
class Hash(RouterKind):
    """A table from the token's id (Roller et al., 2021)."""

    takes = ("hash_kind", "hash_seed", "hash_tables")
    title = "Hash"

    def check(self, config: ModelConfig) -> None:
        require(
            config.hash_tables == "shared" or not self.needs_token_counts(config),
            "hash_tables=own is for random tables: hash_kind=balanced makes the same table for every layer",
        )

    def build(self, config: ModelConfig) -> HashRouter:
        seed = None if self.needs_token_counts(config) else config.hash_seed
        return HashRouter(config.vocab_size, config.num_experts, seed)

    def num_parameters(self, config: ModelConfig) -> int:
        return 0

    def flops_per_token(self, config: ModelConfig) -> float:
        return 0

    def activations_per_position(self, config: ModelConfig) -> float:
        return 0

    def needs_token_counts(self, config: ModelConfig) -> bool:
        return config.hash_kind == "balanced"
