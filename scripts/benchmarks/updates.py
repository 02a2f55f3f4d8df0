"""Whole updates (forward, backward, Adam) of all architectures at equal FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import VOCABULARY, Settings, matched
from benchmarks.timing import interleaved
from smlp.config import ModelConfig
from smlp.nn.decoder import Decoder
from smlp.ops import token_losses

SECTION = "Whole updates at equal FLOPs (words a second)"
#: how much faster sMLP is to be; the paper's Table 4 has 1.04, 1.09, 1.08 and 1.41
TARGETS = {"switch_lm": 1.05, "base_lm": 1.10, "hash_lm": 1.10, "gshard_lm": 1.40}
IN_SHORT = ("switch_lm", "base_lm")
#: measured with ``smlp train --compile`` too, which translates every block
COMPILED = ("gmlp_lm", "dense_lm", "smlp")


def rows(settings: Settings) -> Iterator[Row]:
    """Compare sMLP with sparse Transformers, BASE with the dense one, that with fairseq's, and compiled models."""
    targets = {arch: target for arch, target in TARGETS.items() if arch in IN_SHORT or not settings.quick}
    translated = () if settings.quick else COMPILED
    matches = matched(settings, list(dict.fromkeys(["smlp", *targets, "dense_lm", *translated])))
    num_seqs = 1 if settings.scale > 1 else 2 if settings.quick else 4
    length = matches["smlp"].config.max_tokens
    tokens_Bn = torch.randint(4, settings.sized(VOCABULARY)[0], (num_seqs, length), device=settings.device)
    steps = {arch: update(build(found.config, settings), tokens_Bn) for arch, found in matches.items()}
    for arch in translated:
        model = build(matches[arch].config, settings)
        for block in model.blocks:
            block.compile(backend="inductor" if settings.scale == 1 else "eager")
        steps[f"{arch}, compiled"] = update(model, tokens_Bn)
    theirs = None if settings.quick else peers.transformer_lm(matches["dense_lm"].config)
    if theirs is not None:
        steps["fairseq"] = update(theirs.to(settings.device, settings.dtype), tokens_Bn)
    seconds = interleaved(steps, 4 if settings.quick else min(settings.repeats, 7), settings.device)
    what = f"{num_seqs} x {length} tokens, {matches['smlp'].target / 1e6:.1f} MFLOPs"
    for arch, target in targets.items():
        yield compared(SECTION, f"sMLP, {what}", seconds["smlp"], arch, seconds[arch], target)
    yield compared(SECTION, f"BASE, {what}", seconds["base_lm"], "dense_lm", seconds["dense_lm"], 0.91)
    for arch in translated:
        name = f"{arch}, compiled"
        yield compared(SECTION, f"{name}, {what}", seconds[name], arch, seconds[arch])
    if theirs is not None:
        dense = f"dense_lm, {what}"
        yield compared(SECTION, dense, seconds["dense_lm"], "fairseq's transformer_lm", seconds["fairseq"])


def build(config: ModelConfig, settings: Settings) -> Decoder:
    """Return a model in training whose routers drop nothing, so that the work done is the nominal one."""
    torch.manual_seed(0)
    return (
        Decoder(replace(config, capacity_factor=0.0, second_expert="all")).to(settings.device, settings.dtype).train()
    )


def update(model: nn.Module, tokens_Bn: Tensor) -> Callable[[], None]:
    """Return a function that does an update, always on the same tokens."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        output = model(tokens_Bn)
        if isinstance(model, Decoder):
            loss = token_losses(output.logits, tokens_Bn).mean() + sum(output.aux_losses.values())
        else:  # as fairseq's criterion does
            log_probs_NV = F.log_softmax(output[0].flatten(0, 1), dim=1, dtype=torch.float32)
            loss = F.nll_loss(log_probs_NV, tokens_Bn.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
