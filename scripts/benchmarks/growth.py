"""Measure how the time of a layer grows with tokens, and with experts at equal tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.report import Row, compared
from benchmarks.settings import HIDDEN, LENGTH, WIDTH, Settings, through
from benchmarks.timing import interleaved, training_step
from smlp.config import ModelConfig
from smlp.config.presets import preset
from smlp.nn.blocks import build_blocks

SECTION = "Growth (forward + backward of a block)"
#: layers by preset: a dense block, or a sparse one with all that is in it
BLOCKS = {
    "gmlp_lm": "dense",
    "dense_lm": "dense",
    "smlp": "sparse",
    "smlp_partial": "sparse",
    "gmlp_moe": "sparse",
    "switch_lm": "sparse",
    "gshard_lm": "sparse",
    "base_lm": "sparse",
    "hash_lm": "sparse",
}
IN_SHORT = ("smlp",)


def rows(settings: Settings) -> Iterator[Row]:
    """Yield rows; targets are twice the time for twice the sequences, and equal time for four times the experts."""
    num_seqs = 1 if settings.scale > 1 else 8
    for arch in IN_SHORT if settings.quick else BLOCKS:
        steps = {count: _step(settings, arch, 8, count * num_seqs) for count in (1, 2)}
        if BLOCKS[arch] == "sparse":
            steps[4] = _step(settings, arch, 32, 2 * num_seqs)
        seconds = interleaved(
            {str(count): step for count, step in steps.items()}, 2 if settings.quick else 3, settings.device
        )
        what = f"{arch}, {BLOCKS[arch]} block, {2 * num_seqs} x {settings.sized(LENGTH)[0]} tokens"
        yield compared(SECTION, what, seconds["2"], "twice half of them", 2 * seconds["1"], 1 / 1.1)
        if 4 in steps:
            yield compared(SECTION, f"{what}, E = 32", seconds["4"], "E = 8", seconds["2"], 1 / 1.2)


def _config(settings: Settings, arch: str, num_experts: int) -> ModelConfig:
    width, hidden, length = settings.sized(WIDTH, HIDDEN, LENGTH)
    sparse = BLOCKS[arch] == "sparse"
    more = {"num_experts": num_experts} if sparse else {}
    if sparse and arch != "smlp_partial" and arch != "smlp":
        more["capacity_factor"] = 0.0
    return preset(
        arch,
        embed_dim=width,
        ffn_dim=hidden,
        max_tokens=length,
        vocab_size=1000,
        num_heads=1 if arch in ("gmlp_lm", "smlp", "smlp_partial", "gmlp_moe") else 8,
        num_dense_layers=1,
        num_sparse_layers=int(sparse),
        **more,
    )


def _step(settings: Settings, arch: str, num_experts: int, num_seqs: int) -> Callable[[], None]:
    config = _config(settings, arch, num_experts)
    torch.manual_seed(0)
    block = build_blocks(config)[config.sparse_layer_indices()[0] if BLOCKS[arch] == "sparse" else 0]
    block.to(settings.device, settings.dtype)
    x_BnH = settings.tensor(num_seqs, config.max_tokens, config.embed_dim)
    tokens_Bn = torch.randint(4, config.vocab_size, x_BnH.shape[:2], device=settings.device)
    return training_step(through(block, x_BnH, tokens_Bn), torch.ones_like(x_BnH), (x_BnH, *block.parameters()))
