"""Pictures of what goes where: pieces of the vocabulary, and features, to experts.

Letters: ``P`` pieces, ``E`` experts, ``H`` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smlp.drawing import LINES, SEQUENTIAL, label_ticks, new_figure, readable
from smlp.plots.ordering import like_beside_like
from smlp.plots.routing import FeatureCounts, TokenCounts
from smlp.tokenizer_kinds import WORD_START

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: of a column of the map, in inches
_PIECE_WIDTH = 0.2


def draw_tokens(counts: TokenCounts, symbols: Sequence[str], model_name: str, text: str) -> Figure:
    """Experts by pieces: the share of each piece's tokens that goes to each expert; beside it the experts' loads.

    Like experts stand near each other, and each piece near the expert to which most of its tokens go.

    Args:
        counts: of one layer.
        symbols: of the pieces, (P,).
        model_name, text: for the title.
    """
    expert_order, piece_order = orders(counts)
    num_pieces, num_experts = counts.counts_PE.shape
    width = float(np.clip(_PIECE_WIDTH * num_pieces, 5.0, 20.0))
    what = "tokens" if counts.choices_per_token == 1 else f"choices ({counts.choices_per_token:g} of each token)"
    figure = new_figure(
        width + 4.8,
        2.3 + float(np.clip(0.24 * num_experts, 1.6, 9.0)),
        f"{model_name}, {counts.name}, {counts.router} router: where the {num_pieces} most frequent pieces go\n"
        f"{text}; {counts.loyalty:.0%} of these pieces' {what} are for their piece's first expert\n"
        f"the fullest expert has {counts.load_share_E.max():.0%} of all {what.split()[0]}",
    )
    map_axes, load_axes = figure.subplots(1, 2, width_ratios=[width, 1.9], sharey=True)
    shares_EP = counts.shares_PE.T[expert_order][:, piece_order]
    top = 1 / counts.choices_per_token
    image = map_axes.imshow(shares_EP, cmap=SEQUENTIAL, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    names = readable([symbols[piece] for piece in piece_order])
    label_ticks(map_axes, "x", names, most=int(width / _PIECE_WIDTH), rotation=90, fontsize=8)
    label_ticks(map_axes, "y", [str(expert) for expert in expert_order], most=40, fontsize=8)
    begins = f" ({WORD_START} begins a word)" if any(WORD_START in symbol for symbol in symbols) else ""
    map_axes.set_xlabel(f"piece of the vocabulary{begins}")
    map_axes.set_ylabel("expert")
    bar = figure.colorbar(image, ax=map_axes, pad=0.01, aspect=25)
    bar.set_label(f"share of the piece's {what.split()[0]}", fontsize=9)
    bar.ax.tick_params(labelsize=8)

    places = np.arange(num_experts)
    load_axes.barh(places, 100 * counts.load_share_E[expert_order], color="0.65", label="load")
    load_axes.axvline(100 / num_experts, color="black", linewidth=1, linestyle=(0, (4, 2)), label="equal load")
    if counts.mean_own_affinity_E is not None:
        own, everyone = counts.mean_own_affinity_E[expert_order], counts.mean_affinity_E[expert_order]
        style = {"linestyle": "none", "markersize": 5}
        load_axes.plot(100 * own, places, "D", color=LINES[0], label="affinity, own tokens", **style)
        load_axes.plot(100 * everyone, places, "o", color=LINES[1], label="affinity, all tokens", **style)
    load_axes.set_xlim(left=0)
    load_axes.set_xlabel("load (%)" if counts.affinity_E is None else "load, mean affinity (%)")
    load_axes.tick_params(labelsize=8)
    figure.legend(*load_axes.get_legend_handles_labels(), loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    return figure


def orders(counts: TokenCounts) -> tuple[list[int], list[int]]:
    """Orders of the experts and of the pieces in :func:`draw_tokens`."""
    experts = like_beside_like(counts.counts_PE.T)
    shares_PE = counts.shares_PE[:, experts]
    favourite_P = shares_PE.argmax(axis=1)
    return experts, np.lexsort((-shares_PE.max(axis=1), favourite_P)).tolist()


def draw_features(counts: FeatureCounts, model_name: str, text: str) -> Figure:
    """Experts by features: the share of the sequences in which a feature goes to each expert; and how stable that is.

    Args:
        counts: of one layer; of two sequences at least.
        model_name, text: for the title.
    """
    num_features, num_experts = counts.counts_HE.shape
    experts = like_beside_like(counts.counts_HE.T)
    shares_HE = counts.shares_HE[:, experts]
    features = np.lexsort((-shares_HE.max(axis=1), shares_HE.argmax(axis=1)))
    agreement_H = counts.agreement_H
    figure = new_figure(
        11.5,
        2.1 + float(np.clip(0.24 * num_experts, 1.8, 9.0)),
        f"{model_name}, {counts.name}, {counts.routing} routing: where the {num_features} features go\n"
        f"{text}; two sequences send a feature to the same expert: {agreement_H.mean():.0%} of the time (at random "
        f"{1 / num_experts:.0%})",
    )
    map_axes, side = figure.subplots(1, 2, width_ratios=[3.2, 1])
    image = map_axes.imshow(
        shares_HE[features].T, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )
    label_ticks(map_axes, "y", [str(expert) for expert in experts], most=40, fontsize=8)
    map_axes.set_xlabel("feature, by the expert to which it goes most often")
    map_axes.set_ylabel("expert")
    bar = figure.colorbar(image, ax=map_axes, pad=0.01, aspect=25)
    bar.set_label("share of the sequences", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    side.hist(agreement_H, bins=np.linspace(0, 1, 21), color="0.65")
    side.axvline(1 / num_experts, color="black", linestyle=(0, (4, 2)), linewidth=1, label="at random")
    side.set_xlim(0, 1)
    side.set_xlabel("agreement of two sequences")
    side.set_ylabel("features")
    side.legend(fontsize=8, frameon=False)
    return figure
