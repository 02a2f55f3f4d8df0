"""Sparse layers: against a dense network of equal FLOPs, against themselves with more experts, against fairscale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import Settings, through
from benchmarks.timing import interleaved, peak_extra_bytes, training_step
from smlp.config import ModelConfig
from smlp.config.presets import preset
from smlp.nn.blocks.sparse import feed_forward_moe
from smlp.nn.layers import FeedForward

SECTION = "Sparse layers (forward + backward)"


def rows(settings: Settings) -> Iterator[Row]:
    """Yield rows of the tMoE, then of gates with capacity."""
    yield from _balanced(settings)
    yield from _with_capacity(settings)


def _config(settings: Settings, arch: str, num_experts: int, **more: object) -> ModelConfig:
    width, hidden, length = settings.layer_sizes
    return preset(
        arch, embed_dim=width, ffn_dim=hidden, max_tokens=length, num_experts=num_experts, vocab_size=1000, **more
    )


def _balanced(settings: Settings) -> Iterator[Row]:
    """Compare the tMoE with 32 experts with a dense network, and few and many experts with each other.

    Each expert's weights are read twice and its gradients written once for its share of the tokens alone: with n tokens
    at an expert, 12 bytes of memory traffic a weight for 6n operations. At 10 GB/s and 100 GFLOP/s that is a share of
    20/n of the time, so that experts cost what they should only from some 128 tokens each.
    """
    num_seqs = 16 if settings.scale == 1 else 1
    steps = _tmoe_steps(settings, num_seqs, (2, 32) if settings.quick else (32,))
    seconds = interleaved(steps, min(settings.repeats, 3 if settings.quick else 7), settings.device)
    what = f"tMoE, {_sizes(settings, num_seqs)}"
    yield compared(SECTION, f"{what}, E = 32", seconds["32"], "dense FFN", seconds["dense"], 1 / 1.15)
    if not settings.quick:
        num_seqs = 64 if settings.scale == 1 else 1
        what = f"tMoE, {_sizes(settings, num_seqs)}"
        steps = _tmoe_steps(settings, num_seqs, (2, 8, 32, 128))
        del steps["dense"]
        seconds = interleaved(steps, min(settings.repeats, 3), settings.device)
    seconds.pop("dense", None)
    slowest, fastest = (choose(seconds, key=seconds.get) for choose in (max, min))
    what += f", slowest E = {slowest}"
    yield compared(SECTION, what, seconds[slowest], f"fastest E = {fastest}", seconds[fastest], 1 / 1.15)


def _tmoe_steps(settings: Settings, num_seqs: int, numbers: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """Return the steps of a dense network and of tMoE layers, by their numbers of experts."""
    width, hidden, length = settings.layer_sizes
    x = settings.tensor(num_seqs, length, width)
    dense = nn.Sequential(nn.LayerNorm(width), FeedForward(width, hidden, "gelu")).to(settings.device, settings.dtype)
    steps = {"dense": training_step(lambda: dense(x), torch.ones_like(x), (x, *dense.parameters()))}
    for number in numbers:
        layer = feed_forward_moe(_config(settings, "base_lm", number), 0).to(settings.device, settings.dtype)
        nn.init.normal_(layer.experts.w2, std=0.02)
        steps[str(number)] = training_step(through(layer, x), torch.ones_like(x), (x, *layer.parameters()))
    return steps


def _sizes(settings: Settings, num_seqs: int) -> str:
    width, hidden, length = settings.layer_sizes
    return f"{num_seqs} x {length} tokens, H = {width}, F = {hidden}"


def _with_capacity(settings: Settings) -> Iterator[Row]:
    """Compare Switch and GShard with fairscale's layer, E = 16, the same capacity."""
    width, hidden, length = settings.layer_sizes
    num_seqs = 8 if settings.scale == 1 else 1
    for arch, choices in (("switch_lm", 1), ("gshard_lm", 2))[: 1 if settings.quick else 2]:
        theirs = peers.fairscale_layer(width, hidden, 16, choices)
        if theirs is None:
            return
        # fairscale wants the batch to be a multiple of the experts on this rank
        x = settings.tensor(16, num_seqs * length // 16, width, learnt=False)
        x = x.float().requires_grad_()  # fairscale's dtype
        second = {"second_expert": "all"} if choices == 2 else {}
        layer = feed_forward_moe(_config(settings, arch, 16, capacity_factor=1.0, **second), 0)
        layer.to(settings.device)
        theirs.to(settings.device)
        steps = {
            "ours": training_step(through(layer, x), torch.ones_like(x), (x, *layer.parameters())),
            "fairscale": training_step(functools.partial(theirs, x), torch.ones_like(x), (x, *theirs.parameters())),
        }
        seconds = interleaved(steps, min(settings.repeats, 3), settings.device)
        what = f"{'Switch' if choices == 1 else 'GShard'}, float32, {num_seqs * length} tokens, H = {width}, E = 16"
        yield compared(SECTION, what, seconds["ours"], "fairscale MOELayer", seconds["fairscale"], 3.0)
        ours, other = (peak_extra_bytes(step, settings.device) / 2**20 for step in steps.values())
        yield Row(SECTION, f"{what}: peak memory", ours, "fairscale MOELayer", other, "MiB", other / ours, 4.0)
