"""Which rank holds which experts: arithmetic, no communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smlp.errors import UserError


@dataclass(frozen=True)
class ExpertLayout:
    """E experts over W ranks, in expert groups of P consecutive ranks.

    The ranks of an expert group share one set of experts: the rank at position p holds experts p*E/P .. (p+1)*E/P - 1.
    The ranks at the same position of all groups hold the same experts; they are a replica group.

    Args:
        num_experts: E.
        world_size: W.
        rank: of this process, 0 .. W-1.
        group_size: P, divides W and E; the largest such number by default.

    Raises:
        UserError: the numbers do not fit; the message names them.
    """

    num_experts: int
    world_size: int = 1
    rank: int = 0
    group_size: int | None = None

    def __post_init__(self) -> None:
        num_experts, world_size, group_size = self.num_experts, self.world_size, self.group_size
        if num_experts < 1 or world_size < 1 or not 0 <= self.rank < world_size:
            raise UserError(
                f"rank {self.rank} of {world_size} ranks with {num_experts} experts: there must be at least one "
                "expert, and ranks count from 0"
            )
        largest = math.gcd(num_experts, world_size)
        if group_size is None:
            object.__setattr__(self, "group_size", largest)
        elif group_size < 1 or largest % group_size:
            raise UserError(
                f"an expert-parallel size of {group_size} must divide both the {world_size} ranks and the "
                f"{num_experts} experts; the largest that does is {largest}"
            )

    @property
    def position(self) -> int:
        """p, of this rank in its expert group."""
        return self.rank % self.group_size

    @property
    def num_local(self) -> int:
        """e = E/P, experts on each rank."""
        return self.num_experts // self.group_size

    @property
    def num_replicas(self) -> int:
        """W/P, ranks that hold the same experts."""
        return self.world_size // self.group_size

    @property
    def expert_ids(self) -> range:
        """Global ids of this rank's experts."""
        return range(self.position * self.num_local, (self.position + 1) * self.num_local)

    @property
    def expert_groups(self) -> list[list[int]]:
        """The ranks of every expert group, each in order of position."""
        return [list(range(first, first + self.group_size)) for first in range(0, self.world_size, self.group_size)]

    @property
    def replica_groups(self) -> list[list[int]]:
        """The ranks of every replica group, by position."""
        return [list(range(position, self.world_size, self.group_size)) for position in range(self.group_size)]
