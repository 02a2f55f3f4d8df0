"""A layout with the groups to talk through."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from smlp.parallel.group import DistributedGroup, Group, LocalGroup
from smlp.parallel.layout import ExpertLayout


@dataclass(frozen=True)
class Ranks:
    """What a model and its trainer need to know about other ranks."""

    layout: ExpertLayout
    #: P ranks that share one set of experts; position p holds experts p*E/P and on
    experts: Group
    #: W/P ranks that hold the same experts as this one
    replicas: Group
    #: all W ranks
    world: Group


def one_process(num_experts: int) -> Ranks:
    """All experts here, nobody to talk to."""
    return Ranks(ExpertLayout(num_experts), LocalGroup(), LocalGroup(), LocalGroup())


def connect(num_experts: int, group_size: int | None = None, timeout: timedelta | None = None) -> Ranks:
    """The ranks of torch.distributed's default group, which must be up, or one process where it is not.

    A collective: every rank calls it with the same arguments. Expert and replica groups are process groups of their
    own, so that their traffic keeps its order whatever else (such as DDP's reductions) uses the default group.

    Args:
        num_experts: E.
        group_size: P; the largest that fits by default.
        timeout: of the expert and replica groups; torch's default if None.

    Raises:
        UserError: P does not divide W and E.
    """
    if not (dist.is_available() and dist.is_initialized()):
        layout = ExpertLayout(num_experts, group_size=group_size)
        return Ranks(layout, LocalGroup(), LocalGroup(), LocalGroup())
    layout = ExpertLayout(num_experts, dist.get_world_size(), dist.get_rank(), group_size)
    world = DistributedGroup(dist.group.WORLD) if layout.world_size > 1 else LocalGroup()
    experts = _own_group(layout.expert_groups, layout.rank, timeout)
    replicas = _own_group(layout.replica_groups, layout.rank, timeout)
    return Ranks(layout, experts, replicas, world)


def _own_group(groups: list[list[int]], rank: int, timeout: timedelta | None) -> Group:
    """Makes all groups, as every rank must in the same order; returns the one with this rank."""
    if len(groups[0]) == 1:
        return LocalGroup()
    made = [dist.new_group(members, timeout=timeout) for members in groups]
    (own,) = (group for group, members in zip(made, groups, strict=True) if rank in members)
    return DistributedGroup(own)
