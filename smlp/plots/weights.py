"""All pictures and numbers of one model, as made by ``smlp plot weights``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smlp.errors import UserError
from smlp.evaluation.samples import Samples
from smlp.nn.blocks import TokenMixing
from smlp.nn.decoder import Decoder
from smlp.nn.stack import Stack
from smlp.nn.state import ForwardContext
from smlp.plots.attention import AttentionMap, SeenText, attention_map, draw_attention, tiny_attention
from smlp.plots.draw_filters import MOST_MATRICES, draw_filters, draw_layers, draw_toeplitz
from smlp.plots.draw_routing import draw_features, draw_tokens, evenly, orders
from smlp.plots.drawing import check_matplotlib, save
from smlp.plots.filters import FilterNumbers, SpatialLayer, filter_numbers, fixed_chunks, layer_facts, spatial_layers
from smlp.plots.routing import FeatureCounts, RoutingCounts, TokenCounts, count_routing, layer_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: layers of a kind that are drawn by default
MOST_LAYERS = 4


@dataclass(frozen=True)
class Choice:
    """The layers, heads and experts to draw; numbers always cover all of them."""

    #: numbers of layers, "all", or None for :data:`MOST_LAYERS` of each kind, spread evenly
    layers: Sequence[int] | str | None = None
    #: heads or experts whose matrices are drawn, "all", or None for up to :data:`MOST_MATRICES`, spread evenly
    experts: Sequence[int] | str | None = None

    def check(self, model: Stack) -> None:
        """Raise UserError if a named layer, head or expert does not exist in the model."""
        most = {"layers": model.config.num_layers, "experts": 1}
        most["experts"] = max([each.num_matrices for each in spatial_layers(model)], default=1)
        for name, count in most.items():
            value = getattr(self, name)
            wrong = [] if value is None or value == "all" else [each for each in value if not 0 <= each < count]
            if wrong:
                what = "layers" if name == "layers" else "heads or experts with a spatial filter in a layer"
                raise UserError(f"--{name} names {wrong[0]}, but the model has {count} {what}: 0 to {count - 1}")

    def of_layers(self, numbers: Sequence[int]) -> list[int]:
        """Return the layers of one kind that are drawn."""
        if self.layers is None:
            return [numbers[place] for place in evenly(len(numbers), MOST_LAYERS)]
        return [number for number in numbers if self.has_layer(number)]

    def has_layer(self, number: int) -> bool:
        """Return whether a layer may be drawn."""
        return self.layers is None or self.layers == "all" or number in self.layers

    def of_matrices(self, count: int) -> list[list[int]]:
        """Return the heads or experts of a layer that are drawn, figure by figure."""
        if self.experts is None:
            chosen = evenly(count, MOST_MATRICES)
        else:
            chosen = [index for index in range(count) if self.experts == "all" or index in self.experts]
        return [chosen[start : start + MOST_MATRICES] for start in range(0, len(chosen), MOST_MATRICES)]


@dataclass
class WeightPlots:
    """The numbers and pictures of a model."""

    layers: list[SpatialLayer]
    #: numbers of every head or expert, by layer number
    filters: dict[int, list[FilterNumbers]]
    #: None if there is no text, and for models without experts
    routing: RoutingCounts | None = None
    #: symbols of ``routing.pieces_P``
    symbols: list[str] = field(default_factory=list)
    #: of each text; none for models without a tiny attention
    attention: list[AttentionMap] = field(default_factory=list)
    #: numbers of the head or expert of a layer whose matrix is drawn next to those of other layers, by layer number
    shown: dict[int, FilterNumbers] = field(default_factory=dict)
    figures: list[Path] = field(default_factory=list)
    #: sentences that explain what is not drawn, and why
    left_out: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        found: dict[str, Any] = {
            "spatial": [
                layer_facts(layer, self.filters[layer.layer], self.shown.get(layer.layer)) for layer in self.layers
            ],
            "figures": [str(path) for path in self.figures],
            "left_out": self.left_out,
        }
        if self.routing is not None:
            found["tokens_fed"], found["sequences_fed"] = self.routing.num_tokens, self.routing.num_seqs
            pieces = zip(self.routing.pieces_P.tolist(), self.symbols, self.routing.frequency_P.tolist(), strict=True)
            found["pieces"] = [{"id": piece, "symbol": symbol, "count": count} for piece, symbol, count in pieces]
            found["token_routing"] = [_token_facts(counts) for counts in self.routing.tokens]
            found["feature_routing"] = [_feature_facts(counts) for counts in self.routing.features]
        if self.attention:
            found["attention"] = [each.as_json() for each in self.attention]
        return found


def plot_weights(
    model: Stack,
    out: Path,
    model_name: str,
    *,
    choice: Choice | None = None,
    file_format: str = "png",
    samples: Samples | None = None,
    texts: Sequence[SeenText] = (),
    symbols: Sequence[str] = (),
    text: str = "",
    num_pieces: int = 40,
    seen: Callable[[ForwardContext], None] | None = None,
) -> WeightPlots:
    """Draw what a model has learnt.

    Args:
        model: a decoder that holds all experts, or an encoder.
        out: folder for the pictures, made if it is not there.
        model_name: for titles.
        choice: which layers, heads and experts.
        file_format: "png" or "svg".
        samples: of the text whose routing is counted; none by default.
        texts: through which the tiny attention of an aMLP is followed.
        symbols: of the vocabulary, (V,); with samples or texts.
        text: names the text of the samples in titles.
        num_pieces: pieces of the vocabulary in a map.
        seen: called with each forward pass's context.

    Raises:
        UserError: matplotlib is missing, ``choice`` names something that does not exist, nothing can be drawn, or a
            file cannot be written.
    """
    check_matplotlib()
    choice = choice or Choice()
    check_drawable(model, choice, samples is not None, bool(texts))
    layers, config = spatial_layers(model), model.config
    plots = WeightPlots(layers, {layer.layer: filter_numbers(layer) for layer in layers})
    _draw_filters(plots, choice, out, model_name, file_format)
    for number, each in enumerate(texts):
        plots.attention.append(attention_map(model, each, symbols))
        figure = draw_attention(plots.attention[-1], model_name)
        plots.figures.append(save(figure, out / f"attention_{number}.{file_format}"))
    if samples is not None and isinstance(model, Decoder) and config.num_sparse_layers:
        plots.routing = count_routing(model, samples, num_pieces, seen=seen)
        plots.symbols = [symbols[piece] for piece in plots.routing.pieces_P]
        _draw_routing(plots, choice, out, model_name, file_format, text)
    plots.left_out += _absent(model, bool(text) or samples is not None, bool(texts))
    if not plots.figures:
        raise UserError(f"no picture: no layer that --layers names has anything to draw; {'; '.join(plots.left_out)}")
    return plots


def check_drawable(model: Stack, choice: Choice, has_data: bool, has_texts: bool) -> None:
    """Raise UserError if ``choice`` names something that does not exist, or something that is asked for has no picture.

    Args:
        model, choice: as for :func:`plot_weights`.
        has_data, has_texts: whether there are samples, and texts.
    """
    choice.check(model)
    has_filters, has_experts = bool(spatial_layers(model)), model.config.num_sparse_layers > 0
    if not has_filters and not (has_data and has_experts):
        means = "without spatial weights, by self-attention for one"
        if any(isinstance(module, TokenMixing) for module in model.modules()):
            means = "by two matrices with an activation function between them (MLP-Mixer)"
        reason = f"the model mixes tokens {means}, so that it has no spatial filters"
        if has_experts:
            raise UserError(f"{reason}: give --data to draw which tokens go to which of its experts")
        raise UserError(f"{reason}, and it has no experts either: there is nothing to draw")
    if has_texts and not tiny_attention(model):
        raise UserError(
            "--text: the first half of the model's layers has no tiny attention (gmlp_attention_dim) to draw"
        )
    if not has_filters and not any(map(choice.has_layer, model.config.sparse_layer_indices())):
        raise UserError("no picture: no layer that --layers names has experts, and the model has no spatial filters")


def _absent(model: Stack, has_data: bool, has_texts: bool) -> list[str]:
    config, sentences = model.config, []
    if not spatial_layers(model):
        sentences.append("spatial filters: there are none, for tokens are mixed without spatial weights")
    if config.num_sparse_layers and not has_data:
        sentences.append("which tokens and features go to which expert: give binarised text with --data to count that")
    if tiny_attention(model) and not has_texts:
        sentences.append(
            "which tokens the tiny attention connects: give a text with --text, or lines of several words with --data"
        )
    elif has_data and not config.num_sparse_layers and not has_texts:
        sentences.append("--data: the model has no experts among which tokens could choose")
    chunks = fixed_chunks(config)
    return sentences if chunks is None else [*sentences, chunks]


def _draw_filters(plots: WeightPlots, choice: Choice, out: Path, model_name: str, file_format: str) -> None:
    if not plots.layers:
        return
    figure = draw_toeplitz(plots.layers, plots.filters, model_name)
    plots.figures.append(save(figure, out / f"toeplitz.{file_format}"))
    for layer in plots.layers:
        if choice.has_layer(layer.layer) and (parts := choice.of_matrices(layer.num_matrices)):
            plots.shown[layer.layer] = plots.filters[layer.layer][parts[0][0]]
    shown = [(layer, plots.shown[layer.layer]) for layer in plots.layers if layer.layer in plots.shown]
    if shown:
        plots.figures.append(save(draw_layers(shown, model_name), out / f"layers.{file_format}"))
    for kind in dict.fromkeys(layer.kind for layer in plots.layers):
        layers = {layer.layer: layer for layer in plots.layers if layer.kind == kind}
        chosen = choice.of_layers(list(layers))
        _note_layers(plots, choice, f"spatial filters of {kind}", chosen, len(layers))
        for number in chosen:
            layer = layers[number]
            parts = choice.of_matrices(layer.num_matrices)
            drawn = sum(map(len, parts))
            if choice.experts is None and drawn < layer.num_matrices and number == chosen[0]:
                plots.left_out.append(
                    f"spatial filters of {kind}: {drawn} of {layer.num_matrices} {layer.unit}s of a layer are drawn "
                    "(--experts all draws every one)"
                )
            for place, indices in enumerate(parts):
                name = f"filters_layer{number}" + (f"_{place}" if len(parts) > 1 else "")
                figure = draw_filters(layer, plots.filters[number], indices, model_name)
                plots.figures.append(save(figure, out / f"{name}.{file_format}"))


def _draw_routing(plots: WeightPlots, choice: Choice, out: Path, model_name: str, file_format: str, text: str) -> None:
    def draw(what: str, counted: Sequence[Any], figure_of: Callable[[Any], Figure]) -> None:
        layers = {layer_number(counts.name): counts for counts in counted}
        chosen = choice.of_layers(list(layers))
        _note_layers(plots, choice, f"{what} to experts", chosen, len(layers))
        for number in chosen:
            plots.figures.append(save(figure_of(layers[number]), out / f"{what}_layer{number}.{file_format}"))

    routing = plots.routing
    fed, num_seqs = f"{routing.num_tokens:,} tokens of {text}", f"{routing.num_seqs:,} sequences of {text}"
    draw("tokens", routing.tokens, lambda counts: draw_tokens(counts, plots.symbols, model_name, fed))
    if routing.features and routing.num_seqs < 2:
        plots.left_out.append("features to experts: a single sequence shows nothing; give more text")
    else:
        draw("features", routing.features, lambda counts: draw_features(counts, model_name, num_seqs))


def _note_layers(plots: WeightPlots, choice: Choice, what: str, chosen: Sequence[int], count: int) -> None:
    if choice.layers is None and len(chosen) < count:
        named = ", ".join(map(str, chosen))
        plots.left_out.append(f"{what}: {len(chosen)} of {count} layers are drawn ({named}); --layers chooses others")


def _token_facts(counts: TokenCounts) -> dict[str, Any]:
    experts, pieces = orders(counts)
    own, everyone, of_pieces = counts.mean_own_affinity_E, counts.mean_affinity_E, counts.mean_affinity_PE
    return {
        "layer": layer_number(counts.name),
        "name": counts.name,
        "router": counts.router,
        "load": counts.load_share_E.tolist(),
        "mean_affinity": None if everyone is None else everyone.tolist(),
        "mean_affinity_of_own_tokens": None if own is None else _or_null(own.tolist()),
        "loyalty": counts.loyalty,
        # a row for each piece, a column for each expert, both in the order of "pieces" and of expert ids
        "counts": counts.counts_PE.tolist(),
        "mean_affinity_of_pieces": None if of_pieces is None else [_or_null(row) for row in of_pieces.tolist()],
        "order_of_experts": experts,
        "order_of_pieces": pieces,
    }


def _feature_facts(counts: FeatureCounts) -> dict[str, Any]:
    return {
        "layer": layer_number(counts.name),
        "name": counts.name,
        "routing": counts.routing,
        "sequences": counts.num_seqs,
        # a row for each feature, a column for each expert
        "counts": counts.counts_HE.tolist(),
        "agreement": _or_null(counts.agreement_H.tolist()),
        "random_agreement": 1 / counts.counts_HE.shape[1],
    }


def _or_null(numbers: Sequence[float]) -> list[float | None]:
    """Replace NaN by None: JSON has no NaN."""
    return [None if number != number else number for number in numbers]
