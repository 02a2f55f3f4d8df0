"""FLOPs and parameters of the real module, counted: the check on :mod:`smlp.costs.formula`.

The whole decoder is built, with all its layers and experts, and traced by fvcore on torch's meta device: tensors have
shapes and no content, so that no weight takes memory and no product takes time. Only routing needs numbers; it is
given, with equal loads, on the CPU. Blocks that are alike are traced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fvcore.nn import FlopCountAnalysis
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from smlp.config import ModelConfig
from smlp.costs.formula import components
from smlp.costs.operators import TracedConvolutions, prepare, refuse_if_it_costs, unknown_operators
from smlp.moe.feature_layer import RoutedFeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import RoutingPlan
from smlp.nn.blocks import GatedMLPMoEBlock
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext
from smlp.ops.fast_paths import reference_ops

_ROOT = "decoder"


def build_without_weights(config: ModelConfig) -> Decoder:
    """Return the decoder on the meta device, in evaluation mode."""
    with torch.device("meta"):
        return Decoder(config).eval()


def counted_flops(decoder: Decoder, num_seqs: int = 1, num_tokens: int | None = None) -> dict[str, int]:
    """Return the multiply-adds that fvcore counts in the forward pass of B sequences of n (default T) tokens.

    Args:
        decoder: from :func:`build_without_weights`.
        num_seqs, num_tokens: B, n.

    Returns:
        By component, named as in :mod:`smlp.costs.formula`; together they are the total.

    Raises:
        UserError: the model runs an operator that nobody knows the cost of; the message names it.
    """
    num_tokens = decoder.config.max_tokens if num_tokens is None else num_tokens
    parts = components(decoder.config, num_tokens)
    blocks, (distinct, kind_of_layer) = decoder.blocks, distinct_blocks(decoder.blocks)
    traced = {
        part.name: part.name.replace(f"blocks.{part.layer}", f"blocks.{kind_of_layer[part.layer]}")
        if part.layer is not None
        else part.name
        for part in parts
    }

    def by_component(by_module: Mapping[str, float]) -> dict[str, float]:
        own = own_shares(by_module, list(dict.fromkeys(traced.values())))
        return {name: own[where] for name, where in traced.items()}

    tokens_Bn = torch.empty(num_seqs, num_tokens, dtype=torch.long, device="meta")
    decoder.blocks = distinct
    try:
        forward = _Forward(decoder, balanced_routing(decoder, num_seqs, num_tokens))
        with _MetaAndNumbers(), TracedConvolutions(), reference_ops():  # what the convention counts: the dense products
            analysis = prepare(FlopCountAnalysis(forward, (tokens_Bn,)))
            flops = by_component(analysis.by_module())
            unknown = unknown_operators(analysis)
    finally:
        decoder.blocks = blocks
    for name, by_module in unknown.items():
        refuse_if_it_costs(name, sum(by_component(by_module).values()), sum(flops.values()))
    return flops


def counted_parameters(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """Return the parameters of all experts together, and the others, by component."""
    sizes = [{}, {}]
    for path, module in decoder.named_modules():
        name = f"{_ROOT}.{path}" if path else _ROOT
        for of_experts in (True, False):
            sizes[not of_experts][name] = sum(
                parameter.numel()
                for own, parameter in module.named_parameters(prefix=path)
                if (".experts." in own) == of_experts
            )
    names = [part.name for part in components(decoder.config)]
    experts, others = (own_shares(size, names) for size in sizes)
    return {name: (experts[name], others[name]) for name in names}


def distinct_blocks(blocks: nn.ModuleList) -> tuple[nn.ModuleList, list[int]]:
    """Return the first block of each kind, and for every block which of these it is like: modules and sizes are the
    same."""
    firsts: dict[Any, int] = {}
    distinct, kinds = nn.ModuleList(), []
    for block in blocks:
        shapes = tuple((name, tensor.shape) for name, tensor in block.state_dict().items())
        kind = firsts.setdefault((repr(block), shapes), len(distinct))
        if kind == len(distinct):
            distinct.append(block)
        kinds.append(kind)
    return distinct, kinds


def own_shares(by_module: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """Return what each named module has beside the named modules inside it.

    Args:
        by_module: something that adds up over submodules, by path below the decoder's.
        names: components.
    """
    path = {name: name if name == _ROOT else f"{_ROOT}.{name}" for name in names}
    own: dict[str, float] = {}
    for name in sorted(names, key=lambda name: path[name].count("."), reverse=True):
        inner = sum(share for other, share in own.items() if path[other].startswith(path[name] + "."))
        own[name] = by_module[path[name]] - inner
    return own


def balanced_routing(decoder: Decoder, num_seqs: int, num_tokens: int) -> ForwardContext:
    """Return routing decisions for every sparse layer, dealt out in turn: token i goes to experts i*k, i*k + 1, ...
    (modulo E)."""
    config = decoder.config
    num_experts = config.moe.num_experts
    num_choices = min(config.experts_per_token, num_experts)
    choice_NK = torch.arange(num_seqs * num_tokens * num_choices).view(-1, num_choices) % num_experts
    plan = RoutingPlan.from_choices(choice_NK, num_experts)
    expert_BH = (torch.arange(config.embed_dim) % num_experts).expand(num_seqs, -1)
    context = ForwardContext()
    for layer in decoder.modules():
        if isinstance(layer, TokenMoE):
            context.plans[layer] = plan
        elif isinstance(layer, RoutedFeatureMoE):
            context.plans[layer] = expert_BH
    # A mask, although nothing is padded: from it gMLP-MoE learns the places of its tokens as numbers.
    if any(isinstance(block, GatedMLPMoEBlock) for block in decoder.blocks):
        context.valid_Bn = torch.ones(num_seqs, num_tokens, dtype=torch.bool)
    return context


class _Forward(nn.Module):
    """The decoder as a function of tokens alone, which is what fvcore can trace."""

    def __init__(self, decoder: Decoder, context: ForwardContext) -> None:
        super().__init__()
        self.decoder = decoder
        self.context = context

    def forward(self, tokens_Bn: Tensor) -> Tensor:
        return self.decoder(tokens_Bn, context=self.context).logits


class _MetaAndNumbers(TorchDispatchMode):
    """Lets tensors without content meet tensors with content: where they do, the result has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        on_meta = {tensor.is_meta for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        if len(on_meta) == 2:
            if func is torch.ops.aten.index.Tensor:  # how many rows a mask selects, only its numbers tell
                args = (args[0], [place for index in args[1] for place in _places(index)])
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or index.is_meta or index.dtype != torch.bool:
        return (index,)
    return index.nonzero().unbind(1)
