"""Parameters and work of every size compared with what the papers print (``smlp vision table``)."""

from __future__ import annotations

from typing import Any

from smlp.vision.costs import exaflops, multiply_adds, parameters
from smlp.vision.presets import PRESETS, preset

#: images of JFT-300M
JFT_IMAGES = 303e6
_PARAMETERS, _MULTIPLY_ADDS, _FLOPS = "parameters (M)", "multiply-adds (G)", "FLOPs (G)"
_EXAFLOPS = "exaFLOPs of training"

_CLS, _HEADLESS = {"pool": "cls"}, {"num_classes": 0}
_AT_384 = {"img_size": 384, "num_classes": 0}
_GMLP_L = {**_AT_384, "embed_dim": 1024, "ffn_dim": 6144}
#: what is printed: model, settings, quantity, value, source; the epochs on JFT-300M, where they matter
PAPER: list[tuple[str, dict[str, Any], str, float, str, int]] = [
    *(
        (f"smlp_mixer_{size}", {}, _EXAFLOPS, value, "MLP-Mixer, supplement, Table 2", epochs)
        for size, value, epochs in [
            *(("s32", 9, 5), ("b32", 41, 7), ("s16", 34, 5), ("b16", 161, 7)),
            *(("l32", 145, 7), ("l16", 1141, 14), ("h14", 3096, 14)),
        ]
    ),
    *(
        (f"smlp_gmlp_{size}16", _CLS, quantity, value, "gMLP, Table 1", 0)
        for size, *values in [("ti", 5.9, 2.7), ("s", 19.5, 8.9), ("b", 73.4, 31.6)]
        for quantity, value in zip((_PARAMETERS, _FLOPS), values, strict=True)
    ),
    *(
        (name, settings, quantity, value, "gMLP, Table 2", 0)
        for name, settings, *values in [
            ("smlp_mixer_b16", _HEADLESS, 59, 12.7),
            ("smlp_mixer_l16", _HEADLESS, 207, 44.8),
            *(("smlp_gmlp_ti16", _CLS, 6, 1.4), ("smlp_gmlp_s16", _CLS, 20, 4.5), ("smlp_gmlp_b16", _CLS, 73, 15.8)),
        ]
        for quantity, value in zip((_PARAMETERS, _MULTIPLY_ADDS), values, strict=True)
    ),
    ("smlp_gmlp_b16", _AT_384, _PARAMETERS, 81, "gMLP, Table 11", 0),
    ("smlp_gmlp_b16", _GMLP_L, _PARAMETERS, 294, "gMLP, Table 11", 0),
]


def table_rows() -> list[dict[str, Any]]:
    """Return a row for each number that a paper prints, then two for each model: its parameters and multiply-adds.

    Returns:
        Rows with ``model``, ``settings`` (that differ from the named model's), ``quantity``, ``ours`` (by formula),
        ``paper`` and ``source``, both None where nothing is printed, and ``difference``, a share of the paper's number.
    """
    rows = [_row(*printed) for printed in PAPER]
    return rows + [_row(name, {}, quantity) for name in PRESETS for quantity in (_PARAMETERS, _MULTIPLY_ADDS)]


def table_text() -> str:
    """Return the rows as text: what the papers print first, then all sizes."""
    rows = table_rows()
    printed = [["model", "source", "quantity", "formula", "paper", "difference"]]
    for row in rows:
        if row["paper"] is not None:
            settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
            model = row["model"] + (f" ({settings})" if settings else "")
            shares = [f"{row['ours']:.4g}", f"{row['paper']:g}", f"{row['difference']:+.1%}"]
            printed.append([model, row["source"], row["quantity"], *shares])
    sizes = [["model", "image", "tokens", "parameters", _MULTIPLY_ADDS]]
    for name in PRESETS:
        config = preset(name)
        work = f"{multiply_adds(config) / 1e9:.3f}"
        sizes.append([name, f"{config.img_size}", f"{config.num_tokens}", f"{parameters(config):,}", work])
    notes = (
        "One FLOP is an addition or a multiplication, two to a multiply-add; training counts three passes over the\n"
        "303 million images of JFT-300M for the paper's epochs. Norms, biases and activations are not counted."
    )
    return "\n\n".join([aligned(printed, 3), aligned(sizes, 1), notes]) + "\n"


def _row(
    model: str, settings: dict[str, Any], quantity: str, paper: float | None = None, source: str = "", epochs: int = 0
) -> dict[str, Any]:
    config = preset(model, **settings)
    ours = {
        _PARAMETERS: lambda: parameters(config) / 1e6,
        _MULTIPLY_ADDS: lambda: multiply_adds(config) / 1e9,
        _FLOPS: lambda: 2 * multiply_adds(config) / 1e9,
        _EXAFLOPS: lambda: exaflops(config, epochs * JFT_IMAGES),
    }[quantity]()
    return {
        "model": model,
        "settings": settings,
        "quantity": quantity,
        "ours": ours,
        "paper": paper,
        "difference": None if paper is None else ours / paper - 1,
        "source": source or None,
    }


def aligned(rows: list[list[str]], num_texts: int) -> str:
    """Return rows as columns, the first ones texts, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[num_texts:] = [cell.rjust(width) for cell, width in zip(row[num_texts:], widths[num_texts:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)
