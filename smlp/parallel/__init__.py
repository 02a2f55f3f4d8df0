"""Experts on several ranks: layout, groups, the one all-to-all, gradients, whole and partial state.

Letters: ``W`` ranks, ``P`` ranks that share one set of experts, ``E`` experts, ``e`` = E/P experts on a rank.
"""

from smlp.errors import ParallelError
from smlp.parallel.gradients import global_grad_norm, reduce_expert_gradients
from smlp.parallel.group import DistributedGroup, Group, LocalGroup
from smlp.parallel.ranks import ExpertLayout, Ranks, connect, cut_state, one_process, whole_state

__all__ = [
    "DistributedGroup",
    "ExpertLayout",
    "Group",
    "LocalGroup",
    "ParallelError",
    "Ranks",
    "connect",
    "cut_state",
    "global_grad_norm",
    "one_process",
    "reduce_expert_gradients",
    "whole_state",
]
