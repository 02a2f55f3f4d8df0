"""Which parameters of a model belong to experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from smlp.moe.feature_layer import FeatureMoE
from smlp.moe.layer import TokenMoE


def expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, tuple[int, ...]]]:
    """Name, as in the state dict, parameter, and the global ids of the experts along its first axis.

    Routers, norms of whole layers, and the heads of a spatial gating unit are not experts: every rank has them.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, (TokenMoE, FeatureMoE)):
            prefix = f"{path}.experts" if path else "experts"
            for name, parameter in layer.experts.named_parameters(prefix=prefix):
                yield name, parameter, layer.experts.expert_ids
