"""Tensors named as in a model's state dict: whole, with all experts, or cut down to one rank's.

Expert tensors are stacked along their first axis, in order of global id; that is how a model in one process names and
stores them. The same functions serve optimizer state with the shapes of the parameters (Adam's moments): one call for
each kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from smlp.errors import UserError
from smlp.parallel.layout import ExpertLayout
from smlp.parallel.ranks import Ranks


def whole_state(
    state: Mapping[str, Tensor], expert_names: Collection[str], ranks: Ranks, only_on_first: bool = False
) -> dict[str, Tensor] | None:
    """All experts, from the ranks that have them, bit for bit; a collective over each expert group.

    Args:
        state: tensors of this rank by name. Expert tensors are (e, ...); scalars and the others are taken as they are.
        expert_names: names of expert tensors; those that ``state`` lacks are left out, on all ranks alike.
        ranks: layout and groups.
        only_on_first: only rank 0 gets the result, and only its expert group communicates; the others get None.

    Returns:
        The names in the order of ``state``; expert tensors (E, ...) on their own device.
    """
    if only_on_first and ranks.layout.rank >= ranks.layout.group_size:
        return None
    whole = {}
    for name, tensor in state.items():
        if name not in expert_names or tensor.dim() == 0:
            whole[name] = tensor
            continue
        # as bytes: every dtype can be sent
        as_bytes = tensor.detach().contiguous().view(torch.uint8)
        parts = ranks.experts.gather(as_bytes, name, destination=0 if only_on_first else None)
        if parts is not None:
            whole[name] = torch.cat(parts).view(tensor.dtype)
    return None if only_on_first and ranks.layout.rank > 0 else whole


def cut_state(whole: Mapping[str, Tensor], expert_names: Collection[str], layout: ExpertLayout) -> dict[str, Tensor]:
    """This rank's experts, and everything else as it is: the inverse of :func:`whole_state`, for any layout.

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
