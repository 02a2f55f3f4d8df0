"""Causal spatial projection: ours, the masked dense product, and other people's spatial gating units."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import Settings
from benchmarks.timing import interleaved, training_step
from smlp.config.presets import preset
from smlp.nn.blocks import SpatialGatingUnit
from smlp.nn.state import ForwardContext
from smlp.ops import causal_spatial_projection, linear
from smlp.ops.fast_paths import takes_onednn

SECTION = "Causal spatial projection (forward + backward)"
#: label, B, T, heads, features of a head
SHAPES = [
    ("SGU, 1 head of 2048", 4, 1024, 1, 2048),
    ("SGU, 16 heads of 128", 4, 1024, 16, 128),
    ("sMoE, 32 chunks of 32", 8, 1024, 32, 32),
]


def rows(settings: Settings) -> Iterator[Row]:
    """Compare our product with the masked dense one, and whole units with other people's."""
    for label, num_seqs, length, heads, width in SHAPES:
        num_seqs, length, width = settings.sized(num_seqs, length, width)
        what = f"{label}, {num_seqs} x {length}"
        yield from projection(settings, what, num_seqs, length, heads, width)
        if settings.device == "cuda" and label.startswith("SGU"):  # one kernel for projection, bias and gate
            yield from projection(settings, f"{what}, and gate", num_seqs, length, heads, width, gated=True)
    if not settings.quick:
        for heads in (1, 16):
            yield from _units(settings, heads)


def projection(
    settings: Settings, what: str, num_seqs: int, length: int, heads: int, width: int, gated: bool = False
) -> Iterator[Row]:
    """Compare our product with the masked dense one, bias included, and with a gate where one is asked for.

    Where ours uses another library than torch does, the masked product by that library is compared as well.
    """
    x, bias = settings.tensor(num_seqs, length, heads, width), settings.tensor(heads, length)
    weight = (settings.tensor(heads, length, length, learnt=False) / length).requires_grad_()
    mask = torch.ones(length, length, device=settings.device, dtype=settings.dtype).tril()
    given = settings.tensor(num_seqs, length, heads, width, learnt=False)
    # half of the features, as in a gating unit
    gate = settings.tensor(num_seqs, length, 2, heads, width)[:, :, 0].detach().requires_grad_() if gated else None

    def masked() -> Tensor:
        out = torch.einsum("hmn,bnhc->bmhc", weight * mask, x) + bias.t()[None, :, :, None]
        return out if gate is None else gate * out

    def masked_alike() -> Tensor:
        x_hBcn = x.permute(2, 0, 3, 1)
        return torch.stack([linear(*one) for one in zip(x_hBcn, weight * mask, bias, strict=True)]).permute(1, 3, 0, 2)

    variants = {"ours": lambda: causal_spatial_projection(x, weight, bias, 0, gate), "masked dense product": masked}
    if gate is None and takes_onednn(length * length * num_seqs * width, x):
        variants["the same by oneDNN"] = masked_alike
    leaves = (x, weight, bias) if gate is None else (x, weight, bias, gate)
    steps = {name: training_step(variant, given, leaves) for name, variant in variants.items()}
    seconds = interleaved(steps, settings.repeats, settings.device)
    target = 1.5 if settings.device == "cuda" else 1.6
    for name in list(variants)[1:]:
        wanted = target if name == "masked dense product" else None
        yield compared(SECTION, what, seconds["ours"], name, seconds[name], wanted)


def _units(settings: Settings, heads: int) -> Iterator[Row]:
    """Compare whole units: norm, projection, bias, gate."""
    num_seqs, length, width = settings.sized(4, 1024, 4096)
    x = settings.tensor(num_seqs, length, width)
    given = settings.tensor(num_seqs, length, width // 2, learnt=False)
    config = preset("gmlp_lm", ffn_dim=width, max_tokens=length, num_heads=heads)
    ours = SpatialGatingUnit.of(config).to(settings.device, settings.dtype)
    units: dict[str, Callable[[], Tensor]] = {"ours": lambda: ours(*x.chunk(2, dim=2), ForwardContext())}
    modules = {"ours": ours}
    lucid = peers.module("g_mlp_pytorch.g_mlp_pytorch", "g-mlp-pytorch")
    if lucid is not None:
        modules["g-mlp-pytorch"] = lucid.SpatialGatingUnit(width, length, causal=True, heads=heads)
    gpt = peers.module("g_mlp_gpt.g_mlp_gpt", "g-mlp-gpt")
    if gpt is not None and heads == 1:
        modules["g-mlp-gpt"] = gpt.CausalSGU(width, length)
    for name, unit in modules.items():
        unit.to(settings.device, settings.dtype)
        if name != "ours":
            units[name] = lambda unit=unit: unit(x)
    seconds = interleaved(
        {name: training_step(unit, given, (x, *modules[name].parameters())) for name, unit in units.items()},
        settings.repeats,
        settings.device,
    )
    for name in units:
        if name != "ours":
            what = f"whole SGU, {heads} heads, F = {width}, {num_seqs} x {length}"
            yield compared(SECTION, what, seconds["ours"], name, seconds[name])
