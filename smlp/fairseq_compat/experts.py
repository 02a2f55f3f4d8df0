"""Experts that are spread over ranks: their parameters, gradients, gradient norm and optimizer state.

fairseq averages dense gradients over W ranks and multiplies all gradients by W / (tokens of the update) later. The
gradient of an expert is a sum over ranks after the backward pass and the reduction over its replicas. Here it is
divided by W, so that both kinds end up as the gradient of the mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smlp.checkpoint.parts import ExpertRows
from smlp.moe.experts import expert_parameters
from smlp.parallel import Ranks, global_grad_norm, reduce_expert_gradients


@dataclass(frozen=True)
class SpreadExperts:
    """The experts of a model, all of them on this rank or only a part."""

    ranks: Ranks
    #: names of the expert parameters in the model's state dict
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, ranks: Ranks) -> SpreadExperts:
        """Find the experts and, if they are spread, keep fairseq and torch from averaging their gradients.

        fairseq leaves alone parameters with an attribute ``expert`` (``legacy_ddp``, and the 32-bit copies of
        half-precision training); torch's DistributedDataParallel has a list of names.
        """
        found = list(expert_parameters(model))
        experts = cls(ranks, tuple(name for name, _, _ in found))
        if experts.are_spread:
            for _, parameter, _ in found:
                parameter.expert = True
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts.names)
        return experts

    @property
    def are_spread(self) -> bool:
        """Return whether other ranks hold experts that this rank does not (P > 1)."""
        return bool(self.names) and self.ranks.layout.group_size > 1

    def positions(self, model: nn.Module) -> dict[str, int]:
        """Return the positions of expert parameters in the optimizer's state, by name."""
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        numbers = {name: number for number, name in enumerate(trained)}
        return {name: numbers[name] for name in self.names if name in numbers}

    def whole_shapes(self, own: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Return the shapes of a state dict with all experts, given the one of this rank."""
        experts, num_experts = set(self.names), self.ranks.layout.num_experts
        return {
            name: torch.Size((num_experts, *tensor.shape[1:])) if name in experts else tensor.shape
            for name, tensor in own.items()
        }

    def cut(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with this rank's experts, given one with all of them (some may still be in files)."""
        experts = set(self.names)
        return {name: self.cut_tensor(value) if name in experts else value for name, value in whole.items()}

    def cut_tensor(self, whole: Any) -> Any:
        """Return this rank's experts (e, ...) of a tensor (E, ...) in memory or in files; anything else unchanged."""
        ids = self.ranks.layout.expert_ids
        if isinstance(whole, ExpertRows):
            return whole.rows(ids)
        if self.are_spread and isinstance(whole, Tensor) and whole.dim() > 0:
            return whole[ids[0] : ids[-1] + 1].clone()
        return whole


def experts_of(model: Any) -> SpreadExperts | None:
    """Return the experts of one of this package's models if they are spread over ranks; else None."""
    experts = getattr(model, "experts", None)
    return experts if isinstance(experts, SpreadExperts) and experts.are_spread else None


def adapt_optimizer(optimizer: Any, model: nn.Module, experts: SpreadExperts) -> None:
    """Let one of fairseq's optimizers load the state of all experts, and average the gradients of spread ones.

    Args:
        optimizer: of a trainer.
        model: one of this package's, not wrapped.
        experts: of the model, spread or not.
    """
    load_own, reduce_dense, positions = optimizer.load_state_dict, optimizer.all_reduce_grads, experts.positions(model)

    def load_state_dict(state: dict[str, Any], *rest: Any, **kw: Any) -> None:
        load_own(own_optimizer_state(state, experts, positions), *rest, **kw)

    def all_reduce_grads(module: nn.Module) -> None:
        reduce_dense(module)
        if experts_of(module) is not None:  # otherwise a criterion with parameters
            average_expert_gradients([parameter for _, parameter, _ in expert_parameters(module)], experts.ranks)

    if experts.names:
        optimizer.load_state_dict = load_state_dict
    if experts.are_spread:
        optimizer.all_reduce_grads = all_reduce_grads


def own_optimizer_state(state: dict[str, Any], experts: SpreadExperts, positions: dict[str, int]) -> dict[str, Any]:
    """Return the optimizer state for this rank's parameters, given one for all experts.

    Args:
        state: ``"state"`` by position of the parameter, and ``"param_groups"``.
        experts: of the model.
        positions: of the expert parameters, by name.
    """
    moments = dict(state["state"])
    for position in positions.values():
        if position in moments:
            moments[position] = {key: experts.cut_tensor(value) for key, value in moments[position].items()}
    return {**state, "state": moments}


def average_expert_gradients(parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Sum expert gradients over their replicas and divide them by W. A collective."""
    reduce_expert_gradients(parameters, ranks.replicas)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(grads, 1 / ranks.layout.world_size)


def norm_with_experts(optimizer: Any, ranks: Ranks) -> Callable[[Tensor], Tensor]:
    """Return a function that adds the gradients of all experts to the norm of the dense ones, which fairseq computes.

    Its result is the same number on every rank, and is not finite if a gradient on any rank is not.

    Args:
        optimizer: fairseq's; in half precision it holds 32-bit copies of the parameters, which have ``expert`` too.
        ranks: of the experts.
    """
    groups = optimizer.optimizer.param_groups
    experts = [parameter for group in groups for parameter in group["params"] if hasattr(parameter, "expert")]

    def aggregate(dense_norm: Tensor) -> Tensor:
        dense: Any = nn.Parameter(torch.empty_like(dense_norm), requires_grad=False)
        dense.grad = dense_norm
        return global_grad_norm([dense], experts, ranks).to(dense_norm)

    return aggregate
