"""Pictures of routing: which experts receive which pieces of the vocabulary, and which features.

Letters: ``P`` pieces, ``E`` experts, ``H`` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from smlp.plots.drawing import LINES, SEQUENTIAL, label_ticks, new_figure, readable
from smlp.plots.routing import FeatureCounts, TokenCounts
from smlp.text.tokenizer_kinds import WORD_START

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: width of a column of the map, in inches
_PIECE_WIDTH = 0.2
#: what the toolkit's routers use as affinity
_AFFINITIES = {"BASE": "sigmoid of the score", "Switch": "softmax gate", "GShard": "softmax gate"}


def draw_tokens(counts: TokenCounts, symbols: Sequence[str], model_name: str, text: str) -> Figure:
    """Draw experts by pieces: the share of each piece's tokens that goes to each expert; next to it the experts' loads.

    Below, where the router has scores: the mean affinity of the same pieces' tokens to the same experts, and next
    to it the mean over all tokens and over each expert's own. Similar experts are adjacent, and each piece is near the
    expert that most of its tokens go to.

    Args:
        counts: of one layer.
        symbols: of the pieces, (P,).
        model_name, text: for the title.
    """
    expert_order, piece_order = orders(counts)
    num_pieces, num_experts = counts.counts_PE.shape
    affinity_PE = counts.mean_affinity_PE
    num_maps, least_height = (1, 1.6) if affinity_PE is None else (2, 2.1)
    width = float(np.clip(_PIECE_WIDTH * num_pieces, 5.0, 20.0))
    what = "tokens" if counts.choices_per_token == 1 else f"choices ({counts.choices_per_token:g} of each token)"
    figure = new_figure(
        width + 4.8,
        2.3 + num_maps * float(np.clip(0.24 * num_experts, least_height, 9.0)),
        f"{model_name}, {counts.name}, {counts.router} router: where the {num_pieces} most frequent pieces go\n"
        f"{text}; {counts.loyalty:.0%} of these pieces' {what} are for their piece's first expert\n"
        f"the fullest expert has {counts.load_share_E.max():.0%} of all {what.split()[0]}",
    )
    panels = figure.subplots(num_maps, 2, width_ratios=[width, 1.9], sharey=True, squeeze=False)
    shares_EP = counts.shares_PE.T[expert_order][:, piece_order]
    _draw_map(panels[0, 0], shares_EP, 1 / counts.choices_per_token, f"share of the piece's {what.split()[0]}")
    _draw_loads(panels[0, 1], counts.load_share_E[expert_order])
    if affinity_PE is not None:
        panels[1, 0].sharex(panels[0, 0])
        panels[0, 0].tick_params(labelbottom=False)
        unit = f"\n({_AFFINITIES[counts.router]})" if counts.router in _AFFINITIES else ""
        affinity_EP = affinity_PE.T[expert_order][:, piece_order]
        _draw_map(panels[1, 0], affinity_EP, float(np.nanmax(affinity_EP)) or 1.0, f"mean affinity{unit}")
        _draw_affinities(panels[1, 1], counts.mean_own_affinity_E[expert_order], counts.mean_affinity_E[expert_order])
    names = readable([symbols[piece] for piece in piece_order])
    label_ticks(panels[-1, 0], "x", names, most=int(width / _PIECE_WIDTH), rotation=90, fontsize=8)
    label_ticks(panels[0, 0], "y", [str(expert) for expert in expert_order], most=40, fontsize=8)
    begins = f" ({WORD_START} begins a word)" if any(WORD_START in symbol for symbol in symbols) else ""
    panels[-1, 0].set_xlabel(f"piece of the vocabulary{begins}")
    for panel in panels[:, 0]:
        panel.set_ylabel("expert")
        panel.tick_params(axis="y", labelsize=8)
    for panel in panels[:, 1]:
        panel.set_xlim(left=0)
        panel.tick_params(labelsize=8)
    found = [panel.get_legend_handles_labels() for panel in panels[:, 1]]
    handles, labels = ([each for part in parts for each in part] for parts in zip(*found, strict=True))
    figure.legend(handles, labels, loc="outside lower right", ncols=4, fontsize=8, frameon=False)
    return figure


def _draw_map(axes: Axes, values_EP: np.ndarray, top: float, label: str) -> None:
    """Draw a map in colours from 0 to ``top``, and a colour bar with a label."""
    image = axes.imshow(values_EP, cmap=SEQUENTIAL, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=25)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_loads(axes: Axes, load_share_E: np.ndarray) -> None:
    axes.barh(np.arange(len(load_share_E)), 100 * load_share_E, color="0.65", label="load")
    axes.axvline(100 / len(load_share_E), color="black", linewidth=1, linestyle=(0, (4, 2)), label="equal load")
    axes.set_xlabel("load (%)")


def _draw_affinities(axes: Axes, own_E: np.ndarray, everyone_E: np.ndarray) -> None:
    places, style = np.arange(len(own_E)), {"linestyle": "none", "markersize": 5}
    axes.plot(own_E, places, "D", color=LINES[0], label="affinity, own tokens", **style)
    axes.plot(everyone_E, places, "o", color=LINES[1], label="affinity, all tokens", **style)
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    axes.set_xlabel("mean affinity")


def orders(counts: TokenCounts) -> tuple[list[int], list[int]]:
    """Return the orders of the experts and of the pieces in :func:`draw_tokens`."""
    experts = like_beside_like(counts.counts_PE.T)
    shares_PE = counts.shares_PE[:, experts]
    favourite_P = shares_PE.argmax(axis=1)
    return experts, np.lexsort((-shares_PE.max(axis=1), favourite_P)).tolist()


def draw_features(counts: FeatureCounts, model_name: str, text: str) -> Figure:
    """Draw experts by features: the share of the sequences in which a feature goes to each expert; and how stable that
    is.

    Args:
        counts: of one layer; of two sequences at least.
        model_name, text: for the title.
    """
    num_features, num_experts = counts.counts_HE.shape
    experts = like_beside_like(counts.counts_HE.T)
    shares_HE = counts.shares_HE[:, experts]
    features = np.lexsort((-shares_HE.max(axis=1), shares_HE.argmax(axis=1)))
    agreement_H = counts.agreement_H
    agreement = (
        f"two sequences send a feature to the same expert: {agreement_H.mean():.0%} of the time (at random "
        f"{1 / num_experts:.0%})"
    )
    figure = new_figure(
        11.5,
        2.1 + float(np.clip(0.24 * num_experts, 1.8, 9.0)),
        f"{model_name}, {counts.name}, {counts.routing} routing: where the {num_features} features go\n"
        f"{text}; {agreement if counts.num_seqs > 1 else 'one sequence'}",
    )
    map_axes, side = figure.subplots(1, 2, width_ratios=[3.2, 1])
    _draw_map(map_axes, shares_HE[features].T, 1.0, "share of the sequences")
    label_ticks(map_axes, "y", [str(expert) for expert in experts], most=40, fontsize=8)
    map_axes.set(xlabel="feature, by the expert to which it goes most often", ylabel="expert")
    side.hist(agreement_H, bins=np.linspace(0, 1, 21), color="0.65")
    side.axvline(1 / num_experts, color="black", linestyle=(0, (4, 2)), linewidth=1, label="at random")
    side.set(xlim=(0, 1), xlabel="agreement of two sequences", ylabel="features")
    side.legend(fontsize=8, frameon=False)
    return figure


def evenly(count: int, most: int) -> list[int]:
    """Return at most ``most`` of the numbers 0 .. count-1, spread evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(float(value)) for value in np.linspace(0, count - 1, most)})


def like_beside_like(profiles_EP: np.ndarray) -> list[int]:
    """Return an order of the rows in which similar rows are close to each other.

    Rows are counts. The similarity of two is ``sum_p sqrt(q_p r_p)`` for their shares q and r (Bhattacharyya). Rows are
    sorted by the second eigenvector of the similarities' Laplacian (the Fiedler vector), which makes the sum of
    squared distances between similar rows small; ties are broken by the next eigenvectors. Rows
    without a count come last. The half with the fullest row comes first, so that an eigenvector's sign does not matter.
    """
    totals_E = profiles_EP.sum(axis=1)
    full = np.flatnonzero(totals_E > 0)
    empty = np.flatnonzero(totals_E == 0).tolist()
    if len(full) < 3:
        return [*sorted(full.tolist(), key=lambda row: -totals_E[row]), *empty]
    roots = np.sqrt(profiles_EP[full] / totals_E[full, None])
    # The constant connects the graph and affects only the constant eigenvector.
    likeness = roots @ roots.T + 1.0
    laplacian = np.diag(likeness.sum(axis=1)) - likeness
    vectors = np.linalg.eigh(laplacian)[1][:, 1:].round(6)
    if vectors[totals_E[full].argmax(), 0] > 0:
        vectors = -vectors
    return [*full[np.lexsort(vectors.T[::-1])].tolist(), *empty]
