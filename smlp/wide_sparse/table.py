"""Presets as wide, sparse MLPs, and what the paper prints next to the formulas (``smlp wide-sparse table``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from smlp.vision.table import aligned
from smlp.wide_sparse.counts import Row, mixer_connections


@dataclass(frozen=True)
class Printed:
    """A number of the paper, and what its own settings and equations give."""

    model: str
    settings: str
    quantity: str
    paper: float
    ours: float
    note: str = ""


def _total(blocks: int, tokens: int, channels: int, expansion: float, patch_values: int) -> float:
    """Return the connections of all layers and of the stem; each block has four matrices."""
    return 4 * blocks * mixer_connections(tokens, channels, expansion) + tokens * channels * patch_values


def paper_rows() -> list[Printed]:
    """Return the widths and connections of Table 1, and Table S.3 where its settings can be inferred."""
    image_net = mixer_connections(196, 768, 4)
    small = 24 * 64**4  # entries of the masked MLP's matrices: 12 blocks of an S-Mixer with S = C = 64
    return [
        Printed("Mixer-SS/8", "S=16 C=986 g=4", "largest width", 6.3e4, 4 * 16 * 986),
        Printed("Mixer-SS/8", "S=16 C=986 g=4 L=2", "connections", 256e6, _total(2, 16, 986, 4, 192)),
        Printed("Mixer-SS-W", "S=64 C=487 g=4", "largest width", 1.2e5, 4 * 64 * 487),
        Printed(
            *("Mixer-SS-W", "S=64 C=487 g=4 L=2", "connections", 255e6, _total(2, 64, 487, 4, 48)),
            "C=467 gives what is printed",
        ),
        Printed("Mixer-SS-W", "S=64 C=467 g=4 L=2", "connections", 255e6, _total(2, 64, 467, 4, 48)),
        Printed("Mixer-B/16", "S=196 C=768 g=4", "largest width", 6.0e5, 4 * 196 * 768, "the table prints C=786"),
        Printed("Mixer-B/16", "S=196 C=768 g=4", "Omega", 2.6e8, image_net, "section C.5 prints 290217984"),
        Printed(
            *("Mixer-B/16", "S=196 C=768, hidden 384 and 3072", "Omega", 2.6e8, 196 * 768 * (384 + 3072) / 2),
            "the hidden widths of Mixer-B/16",
        ),
        Printed(
            *("Mixer-B-W", "S=256 C=588 g=4.57", "largest width", 6.2e5, 4.57 * 256 * 588),
            "g=4.095 gives what is printed",
        ),
        Printed("Mixer-B-W", "S=256 C=588 g=4.57", "Omega", 2.6e8, mixer_connections(256, 588, 4.57)),
        Printed("Mixer-B-W", "S=256 C=588 g=4.095", "Omega", 2.6e8, mixer_connections(256, 588, 4.095)),
        Printed("SW-MLP, CIFAR", "S=C=64 L=12", "FLOPs", 805e6, 2 * small),
        Printed("SW-MLP, CIFAR", "S=C=64 L=12", "bytes", 3.22e9, 8 * small, "weights and masks in float32"),
        Printed("MLP-Mixer, CIFAR", "S=C=64 L=12", "FLOPs", 12.5e6, 2 * 24 * 64**3),
        Printed("MLP-Mixer, CIFAR", "S=C=64 L=12", "bytes", 3.93e6, 4 * 24 * 64**2, "a tenth of what is printed"),
        Printed("SW-MLP, ImageNet", "S=196 C=768 g=4 L=8", "FLOPs", 5.80e12, 2 * 32 * 4 * (196 * 768) ** 2),
        Printed("SW-MLP, ImageNet", "S=196 C=768 g=4 L=8", "bytes", 23.2e12, 8 * 32 * 4 * (196 * 768) ** 2),
        Printed(
            *("MLP-Mixer, ImageNet", "S=196 C=768 g=4 L=8", "FLOPs", 4.06e9, 2 * 32 * image_net),
            "not with the gamma of the SW-MLP next to it",
        ),
    ]


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows as plain values, with how often each weight is used."""
    return [{**asdict(row), "uses": row.uses} for row in rows]


def table_text(rows: Iterable[Row], with_paper: bool) -> str:
    """Return rows of presets as text, and those of the paper if they are asked for."""
    table = [["model", "layer", "work", "layers", "width", "density", "connections", "weights", "uses", "executed"]]
    for row in rows:
        density = "-" if row.density is None else f"{row.density:.3g}"
        counts = [f"{row.connections:,.0f}", f"{row.weights:,}", f"{row.uses:,.4g}", f"{row.executed:,.0f}"]
        table.append([row.model, row.kind, row.work, str(row.layers), f"{row.width:,}", density, *counts])
    notes = (
        "Numbers are those of one layer and one input: an image, or a sequence of T tokens. Connections are the\n"
        "products of a weight and a feature; uses are connections for each weight; executed are multiply-adds.\n"
        "Attention scores, routers, embeddings and heads are left out."
    )
    parts = [aligned(table, 3), notes]
    if with_paper:
        printed = [["model", "settings", "quantity", "formula", "paper", "difference", "  note"]]
        for one in paper_rows():
            numbers = [f"{one.ours:.4g}", f"{one.paper:.4g}", f"{one.ours / one.paper - 1:+.1%}"]
            printed.append([one.model, one.settings, one.quantity, *numbers, one.note])
        parts.append(aligned(printed, 3))
    return "\n\n".join(parts) + "\n"
