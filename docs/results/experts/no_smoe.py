"""A control: sMLP's sparse block without its sMoE, so that nothing mixes the tokens there."""

from collections.abc import Iterable

from torch import Tensor, nn

from smlp.extend import (
    Component,
    ForwardContext,
    ModelConfig,
    Ranks,
    SparseBlockKind,
    register_architecture,
    register_sparse_block,
)


class Nothing(nn.Module):
    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        return x_BnH


@register_sparse_block("tokens_only")
class TokensOnly(SparseBlockKind):
    def mixing(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> nn.Module:
        return Nothing()

    def mixing_components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        return ()


register_architecture("smlp_without_smoe_tiny", like="smlp_tiny", sparse_block="tokens_only")
