"""Draw which tokens of a text the tiny attention of an aMLP connects, as in figure 10 of Liu et al., 2021.

Letters: ``n`` tokens of a text, ``l`` layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from smlp.errors import UserError
from smlp.inference.scoring.candidates import drop_nothing
from smlp.nn.attention import SelfAttention
from smlp.nn.blocks import GatedMLPBlock
from smlp.nn.decoder import Decoder
from smlp.nn.stack import Stack
from smlp.plots.drawing import SEQUENTIAL, label_ticks, new_figure, readable
from smlp.text.tokenizer import Vocabulary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: pairs of tokens that are named
STRONGEST = 10
#: width of a cell of the map and of a letter beside it, in inches
_CELL, _LETTER = 0.19, 0.075


@dataclass(frozen=True)
class SeenText:
    """A text whose tokens are followed."""

    name: str
    ids: list[int]


@dataclass(frozen=True)
class Pair:
    """A token that attends to another one."""

    #: positions in the text
    query: int
    key: int
    weight: float
    #: layer with this weight
    layer: int


@dataclass(frozen=True)
class AttentionMap:
    """The largest weight that each token of a text gives to each one, over the first half of the layers."""

    text: SeenText
    #: of the text's tokens, (n,)
    symbols: list[str]
    #: layers of the first half that have a tiny attention
    layers: list[int]
    #: query by key, (n, n) float32
    weight_nn: np.ndarray
    #: the layer of each weight
    layer_nn: np.ndarray

    def strongest(self, count: int = STRONGEST) -> list[Pair]:
        """Return the pairs of different positions with the largest weights, without ``<s>`` and ``</s>``.

        Many tokens give those two, and themselves, large weights that say nothing about the text.
        """
        is_word_n = ~np.isin(self.text.ids, (Vocabulary.bos, Vocabulary.eos))
        is_pair_nn = is_word_n[:, None] & is_word_n & ~np.eye(len(is_word_n), dtype=bool) & (self.weight_nn > 0)
        queries, keys = np.nonzero(is_pair_nn)
        order = np.argsort(-self.weight_nn[queries, keys], kind="stable")[:count]
        return [
            Pair(query, key, float(self.weight_nn[query, key]), int(self.layer_nn[query, key]))
            for query, key in zip(queries[order].tolist(), keys[order].tolist(), strict=True)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        return {
            "text": self.text.name,
            "tokens": [{"id": token, "symbol": name} for token, name in zip(self.text.ids, self.symbols, strict=True)],
            "layers": self.layers,
            # a row for each token that attends, a column for each that it sees
            "weights": self.weight_nn.tolist(),
            "layer_of_weight": self.layer_nn.tolist(),
            "strongest": [
                {"from": pair.query, "to": pair.key, "weight": pair.weight, "layer": pair.layer}
                for pair in self.strongest()
            ],
        }


def tiny_attention(model: Stack) -> dict[int, SelfAttention]:
    """Return the tiny attention of each layer of the first half, by layer number; empty for models without it.

    Of an odd number of layers, the one in the middle is in the first half.
    """
    first_half = list(model.blocks)[: (len(model.blocks) + 1) // 2]
    found = ((number, block.attention) for number, block in enumerate(first_half) if isinstance(block, GatedMLPBlock))
    return {number: attention for number, attention in found if attention is not None}


def attention_map(model: Stack, text: SeenText, symbols: Sequence[str]) -> AttentionMap:
    """Feed a text to the model in evaluation mode; return the largest weights.

    Args:
        model: with a tiny attention in its first half; its mode is as before when this returns. No expert drops a
            token from now on.
        text: of at least one token.
        symbols: of the vocabulary, (V,).

    Raises:
        UserError: the text is longer than the model's context, or a weight is NaN.
    """
    layers, weights_lnn = tiny_attention(model), {}

    def record(number: int, attention: nn.Module, inputs: Any) -> None:
        assert isinstance(attention, SelfAttention)
        weights_lnn[number] = attention.weights(*inputs)[0].amax(dim=0).float().cpu()

    hooks = [
        attention.register_forward_pre_hook(functools.partial(record, number)) for number, attention in layers.items()
    ]
    was_training = model.training
    model.eval()
    if isinstance(model, Decoder):
        drop_nothing(model)
    try:
        with torch.no_grad():
            model(torch.tensor([text.ids], device=model.embedding.weight.device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    for number, weight_nn in weights_lnn.items():
        if not weight_nn.isfinite().all():
            raise UserError(f"layer {number}: the tiny attention has weights that are not finite")
    best = torch.stack([weights_lnn[number] for number in layers]).max(dim=0)
    layer_nn = np.array(list(layers))[best.indices.numpy()]
    return AttentionMap(text, [symbols[token] for token in text.ids], list(layers), best.values.numpy(), layer_nn)


def draw_attention(found: AttentionMap, model_name: str) -> Figure:
    """Draw the largest weights of a text, from the tokens at the left to those at the bottom."""
    names = readable(found.symbols)
    side = float(np.clip(_CELL * len(names), 3.6, 14.0))
    label = _LETTER * max(map(len, names))
    figure = new_figure(
        side + label + 1.6,
        side + label + 1.2,
        f"{model_name}: {readable([found.text.name])[0]}\n"
        f"largest weight of the tiny attention in layers {found.layers[0]} to {found.layers[-1]}",
    )
    axes = figure.add_subplot()
    image = axes.imshow(found.weight_nn, cmap=SEQUENTIAL, vmin=0, aspect="auto", interpolation="nearest")
    most = int(side / _CELL)
    label_ticks(axes, "x", names, most=most, rotation=90, fontsize=8)
    label_ticks(axes, "y", names, most=most, fontsize=8)
    for end in np.flatnonzero(np.array(found.text.ids[:-1]) == Vocabulary.eos) + 0.5:
        axes.axhline(end, color="white", linewidth=0.5)
        axes.axvline(end, color="white", linewidth=0.5)
    axes.set(xlabel="token that is seen", ylabel="token that attends")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=30, pad=0.01)
    bar.set_label("largest weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return figure
