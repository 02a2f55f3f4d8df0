"""The layout of experts over ranks, the groups to talk through, and state dicts, whole or of one rank.

Expert tensors are stacked along their first axis, in order of global id; that is how a model in one process names and
stores them. :func:`whole_state` and :func:`cut_state` serve optimizer state with the shapes of the parameters (Adam's
moments) as well: one call for each kind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from smlp.errors import UserError
from smlp.parallel.group import DistributedGroup, Group, LocalGroup


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
    group_size: int = None  # type: ignore[assignment]  # None becomes the largest possible size

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
        """p, the position of this rank in its expert group."""
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


@dataclass(frozen=True)
class Ranks:
    """A layout with the groups to talk through."""

    layout: ExpertLayout
    #: P ranks that share one set of experts; position p holds experts p*E/P and on
    experts: Group
    #: W/P ranks that hold the same experts as this one
    replicas: Group
    #: all W ranks
    world: Group


def one_process(num_experts: int, group_size: int | None = None) -> Ranks:
    """Return the layout of one process, which holds all experts: P is 1, and another ``group_size`` is refused."""
    layout = ExpertLayout(num_experts, group_size=group_size)  # type: ignore[arg-type]
    return Ranks(layout, LocalGroup(), LocalGroup(), LocalGroup())


def connect(
    num_experts: int, group_size: int | None = None, timeout: timedelta | None = None, backend: str | None = None
) -> Ranks:
    """Return the ranks of torch.distributed's default group, or one process if it is not initialised.

    A collective: every rank calls it with the same arguments. Expert and replica groups are process groups of their
    own, so that their traffic keeps its order whatever else (such as DDP's reductions) uses the default group.

    Args:
        num_experts: E.
        group_size: P; the largest that fits by default.
        timeout: of the expert and replica groups; torch's default if None.
        backend: of the expert and replica groups; that of the default group if None.

    Raises:
        UserError: P does not divide W and E.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return one_process(num_experts, group_size)
    layout = ExpertLayout(num_experts, dist.get_world_size(), dist.get_rank(), group_size)  # type: ignore[arg-type]
    world = DistributedGroup(dist.group.WORLD) if layout.world_size > 1 else LocalGroup()
    experts = _own_group(layout.expert_groups, layout.rank, timeout, backend)
    replicas = _own_group(layout.replica_groups, layout.rank, timeout, backend)
    return Ranks(layout, experts, replicas, world)


def _own_group(groups: list[list[int]], rank: int, timeout: timedelta | None, backend: str | None) -> Group:
    """Make all groups, as every rank must in the same order; return the one with this rank."""
    if len(groups[0]) == 1:
        return LocalGroup()
    made = [dist.new_group(members, timeout=timeout, backend=backend) for members in groups]
    (own,) = (group for group, members in zip(made, groups, strict=True) if rank in members)
    return DistributedGroup(own)


def whole_state(state: Mapping[str, Tensor], expert_names: Collection[str], ranks: Ranks) -> dict[str, Tensor]:
    """Gather all experts from the ranks that have them, bit for bit; a collective over each expert group.

    Args:
        state: tensors of this rank by name. Expert tensors are (e, ...); scalars and the others are taken as they are.
        expert_names: names of expert tensors; those that ``state`` lacks are left out, on all ranks alike.
        ranks: layout and groups.

    Returns:
        The names in the order of ``state``; expert tensors (E, ...) on their own device.
    """
    whole = {}
    for name, tensor in state.items():
        if name not in expert_names or tensor.dim() == 0:
            whole[name] = tensor
            continue
        # sent as bytes, which works for every dtype
        as_bytes = tensor.detach().contiguous().view(torch.uint8)
        whole[name] = torch.cat(ranks.experts.gather(as_bytes, name)).view(tensor.dtype)
    return whole


def cut_state(whole: Mapping[str, Tensor], expert_names: Collection[str], layout: ExpertLayout) -> dict[str, Tensor]:
    """Return this rank's experts, and everything else as it is: the inverse of :func:`whole_state`, for any layout.

    Raises:
        UserError: a tensor does not hold E experts.
    """
    first, last = layout.expert_ids[0], layout.expert_ids[-1] + 1
    cut = {}
    for name, tensor in whole.items():
        if name not in expert_names or tensor.dim() == 0:
            cut[name] = tensor
            continue
        if tensor.size(0) != layout.num_experts:
            raise UserError(f"{name} holds {tensor.size(0)} experts, but the model has {layout.num_experts}")
        cut[name] = tensor[first:last].clone()
    return cut
