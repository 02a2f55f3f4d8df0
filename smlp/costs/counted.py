"""FLOPs and parameters of the real module, counted: the check on :mod:`smlp.costs.formula`.

The whole model is built, with all its layers and experts, and traced by fvcore on torch's meta device: tensors have
shapes and no content, so that no weight takes memory and no product takes time. Only routing needs numbers; it is
given, with equal loads, on the CPU. Blocks that are alike are traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fvcore.nn import FlopCountAnalysis
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from smlp.config import ModelConfig
from smlp.costs.formula import components, num_masked, root_of
from smlp.costs.operators import TracedConvolutions, prepare, refuse_if_it_costs, unknown_operators
from smlp.errors import UserError
from smlp.moe.feature_layer import RoutedFeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import RoutingPlan
from smlp.nn.blocks import GatedMLPMoEBlock
from smlp.nn.build import model_of, without_weights
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder
from smlp.nn.state import ForwardContext
from smlp.ops.fast_paths import reference_ops


def build_without_weights(config: ModelConfig) -> Decoder | Encoder:
    """Return the model on the meta device, in evaluation mode."""
    with without_weights():
        return model_of(config).eval()


def counted_flops(model: Decoder | Encoder, num_seqs: int = 1, num_tokens: int | None = None) -> dict[str, int]:
    """Return the multiply-adds that fvcore counts in the forward pass of B sequences of n (default T) tokens.

    Args:
        model: from :func:`build_without_weights`.
        num_seqs, num_tokens: B, n.

    Returns:
        By component, named as in :mod:`smlp.costs.formula`; together they are the total.

    Raises:
        UserError: the model runs an operator whose cost is unknown; the message names it.
    """
    num_tokens = model.config.max_tokens if num_tokens is None else num_tokens
    root, parts = root_of(model.config), components(model.config, num_tokens)
    blocks, (distinct, kind_of_layer) = model.blocks, distinct_blocks(model.blocks)
    traced = {
        part.name: part.name.replace(f"blocks.{part.layer}", f"blocks.{kind_of_layer[part.layer]}")
        if part.layer is not None
        else part.name
        for part in parts
    }

    def by_component(by_module: Mapping[str, float]) -> dict[str, float]:
        own = own_shares(by_module, list(dict.fromkeys(traced.values())), root)
        return {name: own[where] for name, where in traced.items()}

    tokens_Bn = torch.empty(num_seqs, num_tokens, dtype=torch.long, device="meta")
    model.blocks = distinct
    try:
        forward = _Forward(model, num_seqs, num_tokens)
        with _MetaAndNumbers(), TracedConvolutions(), reference_ops():  # by convention, dense products are counted
            analysis = prepare(FlopCountAnalysis(forward, (tokens_Bn,)))
            flops = by_component(analysis.by_module())
            unknown = unknown_operators(analysis)
    finally:
        model.blocks = blocks
    for name, by_module in unknown.items():
        refuse_if_it_costs(name, sum(by_component(by_module).values()), sum(flops.values()))
    return flops


def counted_parameters(model: Decoder | Encoder) -> dict[str, tuple[int, int]]:
    """Return the parameters of all experts together, and the others, by component."""
    root, sizes = root_of(model.config), [{}, {}]
    for path, module in model.named_modules():
        name = f"{root}.{path}" if path else root
        for of_experts in (True, False):
            sizes[not of_experts][name] = sum(
                parameter.numel()
                for own, parameter in module.named_parameters(prefix=path)
                if (".experts." in own) == of_experts
            )
    names = [part.name for part in components(model.config)]
    experts, others = (own_shares(size, names, root) for size in sizes)
    return {name: (experts[name], others[name]) for name in names}


def distinct_blocks(blocks: nn.ModuleList) -> tuple[nn.ModuleList, list[int]]:
    """Return the first block of each kind and, for every block, the number of its kind: blocks of a kind have equal
    modules, sizes and numbers as attributes."""
    firsts: dict[Any, int] = {}
    distinct, kinds = nn.ModuleList(), []
    for block in blocks:
        shapes = tuple((name, tensor.shape) for name, tensor in block.state_dict().items())
        numbers = [
            (path, name, value)
            for path, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, int | float)
        ]
        kind = firsts.setdefault((repr(block), shapes, tuple(numbers)), len(distinct))
        if kind == len(distinct):
            distinct.append(block)
        kinds.append(kind)
    return distinct, kinds


def own_shares(by_module: Mapping[str, float], names: list[str], root: str) -> dict[str, float]:
    """Return what each named module has without the named modules inside it.

    Args:
        by_module: something that adds up over submodules, by path below the model's.
        names: components.
        root: name of the whole model, itself a component.
    """
    path = {name: name if name == root else f"{root}.{name}" for name in names}
    own: dict[str, float] = {}
    for name in sorted(names, key=lambda name: path[name].count("."), reverse=True):
        inner = sum(share for other, share in own.items() if path[other].startswith(path[name] + "."))
        try:
            own[name] = by_module[path[name]] - inner
        except KeyError:
            raise UserError(f"costs are stated for {name}, but the model has no such module") from None
    return own


def balanced_routing(decoder: Decoder, num_seqs: int, num_tokens: int) -> ForwardContext:
    """Return routing decisions for every sparse layer, dealt out in turn: token i of each sequence goes to experts i*k,
    i*k + 1, ... (modulo E), so that gMLP-MoE, whose experts pad sequences to the longest, pads nothing."""
    config = decoder.config
    num_experts = config.num_experts
    num_choices = min(config.experts_per_token, num_experts)
    choice_nK = torch.arange(num_tokens * num_choices).view(-1, num_choices) % num_experts
    choice_NK = choice_nK.repeat(num_seqs, 1)
    plan = RoutingPlan.from_choices(choice_NK, num_experts)
    expert_BH = (torch.arange(config.embed_dim) % num_experts).expand(num_seqs, -1)
    context = ForwardContext()
    for layer in decoder.modules():
        if isinstance(layer, TokenMoE):
            context.plans[layer] = plan
        elif isinstance(layer, RoutedFeatureMoE):
            context.plans[layer] = expert_BH
    # A mask, although nothing is padded: gMLP-MoE reads its tokens' positions from it as numbers.
    if any(isinstance(block, GatedMLPMoEBlock) for block in decoder.blocks):
        context.valid_Bn = torch.ones(num_seqs, num_tokens, dtype=torch.bool)
    return context


class _Forward(nn.Module):
    """The model as a function of tokens alone, which is what fvcore can trace."""

    def __init__(self, model: Decoder | Encoder, num_seqs: int, num_tokens: int) -> None:
        super().__init__()
        self.add_module(root_of(model.config), model)
        self.run: Callable[[Tensor], Tensor]
        if isinstance(model, Encoder):
            masked_M = torch.arange(num_seqs * num_masked(num_tokens), device="meta")
            self.run = lambda tokens_Bn: model(tokens_Bn, masked_M)
        else:
            context = balanced_routing(model, num_seqs, num_tokens)
            self.run = lambda tokens_Bn: model(tokens_Bn, context=context).logits

    def forward(self, tokens_Bn: Tensor) -> Tensor:
        return self.run(tokens_Bn)


class _MetaAndNumbers(TorchDispatchMode):
    """Lets operators take tensors with and without content together; the result then has no content."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        on_meta = {tensor.is_meta for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        if len(on_meta) == 2:
            if func is torch.ops.aten.index.Tensor:  # the number of selected rows depends on the mask's values
                args = (args[0], [place for index in args[1] for place in _places(index)])
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or index.is_meta or index.dtype != torch.bool:
        return (index,)
    return index.nonzero().unbind(1)
