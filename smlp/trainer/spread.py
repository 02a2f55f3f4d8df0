"""Which parameters of a fairseq model belong to experts, and on which ranks they live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smlp.checkpoint.parts import ExpertRows
from smlp.moe.experts import expert_parameters
from smlp.parallel import Ranks


@dataclass(frozen=True)
class SpreadExperts:
    """The experts of a model: some of them here, perhaps, and the others on other ranks."""

    ranks: Ranks
    #: of the expert parameters, in the model's state dict
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, ranks: Ranks) -> SpreadExperts:
        """Finds the experts and, if they are spread, keeps fairseq and torch from averaging their gradients.

        fairseq leaves parameters alone that have an attribute ``expert`` (``legacy_ddp``, and the 32-bit copies of
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
        """Whether other ranks hold experts that this one does not: P > 1."""
        return bool(self.names) and self.ranks.layout.group_size > 1

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Those of the experts of this rank."""
        return [parameter for _, parameter, _ in expert_parameters(model)]

    def positions(self, model: nn.Module) -> dict[str, int]:
        """Where expert parameters stand in the optimizer's state, by name."""
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        numbers = {name: number for number, name in enumerate(trained)}
        return {name: numbers[name] for name in self.names if name in numbers}

    def whole_shapes(self, own: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Shapes of a state dict with all experts, from this rank's."""
        experts, num_experts = set(self.names), self.ranks.layout.num_experts
        return {
            name: torch.Size((num_experts, *tensor.shape[1:])) if name in experts else tensor.shape
            for name, tensor in own.items()
        }

    def cut(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's experts of a state dict with all of them, some or all of which may still be in files."""
        experts = set(self.names)
        return {name: self.cut_tensor(value) if name in experts else value for name, value in whole.items()}

    def cut_tensor(self, whole: Any) -> Any:
        """This rank's experts (e, ...) of a tensor (E, ...) or of one in files; anything else as it is."""
        ids = self.ranks.layout.expert_ids
        if isinstance(whole, ExpertRows):
            return whole.rows(ids)
        if self.are_spread and isinstance(whole, Tensor) and whole.dim() > 0:
            return whole[ids[0] : ids[-1] + 1].clone()
        return whole


def experts_of(model: Any) -> SpreadExperts | None:
    """The experts of one of this package's models, wrapped for several ranks or not, if they are spread over ranks."""
    experts = getattr(model, "experts", None)
    return experts if isinstance(experts, SpreadExperts) and experts.are_spread else None
