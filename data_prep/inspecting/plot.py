"""A picture of how long documents are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.inspecting.statistics import Statistics
from smlp.errors import UserError


def plot_lengths(splits: dict[str, Statistics], path: Path) -> None:
    """Writes a PNG: the share of documents by their number of tokens, a line for each split.

    Raises:
        UserError: matplotlib is not installed, or there is no document.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'smlp[plots]'") from None
    splits = {name: statistics for name, statistics in splits.items() if statistics.documents}
    if not splits:
        raise UserError("--plot: there is no document whose length could be drawn")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    used = np.flatnonzero(sum(statistics.histogram for statistics in splits.values()))
    powers = np.arange(used[0], used[-1] + 1)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, statistics in splits.items():
        shares = statistics.histogram[powers] / statistics.documents
        axes.stairs(shares, 2.0 ** np.append(powers, powers[-1] + 1), label=f"{name} ({statistics.documents:,})")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("share of documents")
    axes.legend(title="documents of")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
