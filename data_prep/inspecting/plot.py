"""A picture of how long documents are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from data_prep.inspecting.statistics import Statistics
from smlp.errors import UserError
from smlp.plots.drawing import check_matplotlib

_PNG = b"\x89PNG"


def check_plot(path: Path) -> None:
    """To be called before the work.

    Raises:
        UserError: matplotlib is not installed, or no picture can be written there.
    """
    check_matplotlib()
    if path.is_dir():
        raise UserError(f"--plot {path} is a folder: name a file to write")
    if not path.parent.is_dir():
        raise UserError(f"cannot write --plot {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write --plot {path}: it may not be written to")
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(len(_PNG)) != _PNG:
                raise UserError(f"--plot {path}: there is a file of another kind already: name another one")


def plot_lengths(splits: dict[str, Statistics], path: Path) -> None:
    """Writes a PNG: the share of documents by their number of tokens, a line for each split.

    Raises:
        UserError: there is no document.
    """
    import matplotlib

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
