"""Named ranges around the parts of a model, for as long as a profile is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from smlp.costs.component import NORMS, PROJECTIONS, SCORES, SPATIAL
from smlp.moe.feature_layer import FeatureMoE
from smlp.nn.blocks import CausalSelfAttention, SpatialGatingUnit
from smlp.nn.decoder import Decoder
from smlp.parallel.spans import SEPARATOR, span

#: endings of the names of ranges around whole blocks
DENSE_BLOCK, SPARSE_BLOCK = ", dense block", ", sparse block"
#: what modules inside blocks are; of nested ones the inner one counts
MODULE_PARTS = {
    nn.LayerNorm: NORMS,
    nn.Linear: PROJECTIONS,
    SpatialGatingUnit: SPATIAL,
    FeatureMoE: SPATIAL,
    CausalSelfAttention: SCORES,
}


@contextmanager
def named_parts(model: Decoder) -> Iterator[None]:
    """Opens a range around each block and the modules of :data:`MODULE_PARTS`, also where they are computed again,
    while this context is open."""
    open_spans: list[AbstractContextManager] = []
    handles = []

    def name_it(module: nn.Module, name: str) -> None:
        def enter(module: nn.Module, inputs: Any) -> None:
            open_spans.append(span(name))
            open_spans[-1].__enter__()

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            open_spans.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter))
        # also where recomputation stops half-way, which it does by an exception
        handles.append(module.register_forward_hook(leave, always_call=True))

    for index, block in enumerate(model.blocks):
        name = f"layer {index}" + (SPARSE_BLOCK if hasattr(block, "token_moe") else DENSE_BLOCK)
        name_it(block, name)
        for module in block.modules():
            if (part := _part_of(module)) is not None:
                name_it(module, name + SEPARATOR + part)
    name_it(model.norm, f"decoder{SEPARATOR}{NORMS}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part_of(module: nn.Module) -> str | None:
    return next((part for kind, part in MODULE_PARTS.items() if isinstance(module, kind)), None)
