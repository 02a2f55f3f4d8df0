"""Separate learning rates and weight decays for kinds of parameters: spatial weights, norms, frozen routers.

The optimizer keeps fairseq's one group of parameters, which is divided for the duration of each step only. So the
schedule sets one rate, checkpoints are the same with and without these options, and any optimizer of torch's interface
follows them, fairseq's and the one of :mod:`smlp.fairseq_compat.adam` alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from smlp.errors import UserError
from smlp.moe.routers import TrainedRouter
from smlp.nn.attention import RelativeBias
from smlp.nn.layers import SpatialWeights
from smlp.nn.stack import Stack

logger = logging.getLogger(__name__)

SPATIAL, VECTOR, MATRIX = "spatial", "vector", "matrix"
#: entries of a group that belong to a part of it; an optimizer may keep others, such as the number of steps
_OWN = ("params", "lr", "weight_decay")


def roles_of(core: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield each parameter with its role.

    Spatial weights are the matrices over positions. Vectors are gains and biases: what has one axis at most, not
    counting that of the experts or heads, and biases by distance. The rest are matrices.
    """
    stacks = {id(part) for module in core.modules() if hasattr(module, "expert_ids") for part in module.modules()}
    for module in core.modules():
        num_stacked = isinstance(module, SpatialWeights) or id(module) in stacks
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, SpatialWeights) and name == "weight":
                yield parameter, SPATIAL
            else:
                is_vector = parameter.dim() - num_stacked <= 1 or isinstance(module, RelativeBias)
                yield parameter, VECTOR if is_vector else MATRIX


def divide_steps(optimizer: Any, core: Stack, parameters: Sequence[nn.Parameter], options: Any) -> None:
    """Let the steps of an optimizer follow ``--no-decay-norms``, ``--spatial-*`` and frozen routers.

    Args:
        optimizer: of fairseq, with one group of ``parameters`` or of their 32-bit copies.
        core: the model.
        parameters: in the optimizer's order, those of a criterion included.
        options: of the model.

    Raises:
        UserError: the optimizer keeps all parameters in one tensor, or only this rank's.
    """
    factor, spatial_decay = options.spatial_lr_factor, options.spatial_weight_decay
    freezes = bool(core.config.shares_of_training)
    is_spatial_wanted = factor != 1 or spatial_decay is not None
    if not (freezes or is_spatial_wanted or options.no_decay_norms):
        return
    roles = {id(parameter): role for parameter, role in roles_of(core)}
    if is_spatial_wanted and SPATIAL not in roles.values():
        logger.warning("--spatial-lr-factor and --spatial-weight-decay have no effect: there are no spatial weights")
    torch_optimizer = optimizer.optimizer
    if hasattr(torch_optimizer, "optim"):  # fairscale's copies rates and weight decays group by group
        raise UserError(
            "--zero-sharding os keeps one rate and one weight decay for all parameters: leave it out, or leave out "
            "--no-decay-norms, --spatial-lr-factor, --spatial-weight-decay and --router-freeze"
        )
    own = [parameter for group in torch_optimizer.param_groups for parameter in group["params"]]
    if [parameter.shape for parameter in own] != [parameter.shape for parameter in parameters]:
        raise UserError(
            "the optimizer keeps all parameters in one tensor, which cannot have several rates and weight decays: give "
            "--fp16-no-flatten-grads, or neither of --no-decay-norms, --spatial-lr-factor, --spatial-weight-decay, "
            "--router-freeze"
        )
    role_of = {id(copy): roles.get(id(parameter), MATRIX) for copy, parameter in zip(own, parameters, strict=True)}
    copy_of = {id(parameter): id(copy) for copy, parameter in zip(own, parameters, strict=True)}
    routers = [module for module in core.modules() if isinstance(module, TrainedRouter)]
    step_whole = torch_optimizer.step

    def parts_of(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        frozen = {copy_of[id(p)] for router in routers if router.is_frozen for p in router.parameters()}
        for role in (MATRIX, VECTOR, SPATIAL):
            part = {**group, "params": [p for p in group["params"] if role_of[id(p)] == role and id(p) not in frozen]}
            if role == SPATIAL:
                part["lr"] = group["lr"] * factor
                if "lr_old" in group:  # of fairseq's NAG, whose momentum follows changes of the rate
                    part["lr_old"] = group["lr_old"] * factor
                if spatial_decay is not None:
                    part["weight_decay"] = spatial_decay
            if role == VECTOR and options.no_decay_norms:
                part["weight_decay"] = 0.0
            yield part

    def step(*args: Any, **kw: Any) -> Any:
        groups = torch_optimizer.param_groups
        divided = [list(parts_of(group)) for group in groups]
        torch_optimizer.param_groups = [part for parts in divided for part in parts]
        try:
            return step_whole(*args, **kw)
        finally:
            for group, (first, *_) in zip(groups, divided, strict=True):
                group.update({name: value for name, value in first.items() if name not in _OWN})
            torch_optimizer.param_groups = groups

    torch_optimizer.step = step
