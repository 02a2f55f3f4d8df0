"""Whole updates (forward, backward, Adam) of all architectures at equal FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import VOCABULARY, Settings, drawn, matched
from benchmarks.timing import interleaved
from smlp.config import ModelConfig
from smlp.config.presets import preset
from smlp.costs.formula import flops_per_token
from smlp.costs.match import match
from smlp.costs.matmul_rate import matmul_rate
from smlp.nn.decoder import Decoder
from smlp.ops import token_losses

SECTION = "Whole updates at equal FLOPs (words a second)"
#: how much faster sMLP is to be; the paper's Table 4 has 1.04, 1.09, 1.08 and 1.41
TARGETS = {"switch_lm": 1.05, "base_lm": 1.10, "hash_lm": 1.10, "gshard_lm": 1.40}
IN_SHORT = ("switch_lm", "base_lm")
#: the two models of docs/results/sparse_pays.md whose margin grows; sequences of 128 tokens in an update
BEST, RIVAL = "smlp_hash", "gmlp_lm"
FEW_AND_MANY = (8, 64)
#: measured with ``smlp train --compile`` too, which translates every block
COMPILED = ("gmlp_lm", "dense_lm", "smlp")


def rows(settings: Settings) -> Iterator[Row]:
    """Compare sMLP with sparse Transformers, BASE with the dense one, that with fairseq's, and compiled models."""
    targets = {arch: target for arch, target in TARGETS.items() if arch in IN_SHORT or not settings.quick}
    matches = matched(settings, list(dict.fromkeys(["smlp", *targets, "dense_lm", *COMPILED])))
    num_seqs, length = settings.num_seqs, matches["smlp"].config.max_tokens
    tokens_Bn = torch.randint(4, settings.sized(VOCABULARY)[0], (num_seqs, length), device=settings.device)
    steps = {arch: update(build(matches[arch].config, settings), tokens_Bn) for arch in ("smlp", *targets, "dense_lm")}
    theirs = None if settings.quick else peers.transformer_lm(matches["dense_lm"].config)
    if theirs is not None:
        steps["fairseq"] = update(theirs.to(settings.device, settings.dtype), tokens_Bn)
    seconds = interleaved(steps, 4 if settings.quick else min(settings.repeats, 7), settings.device)
    what = f"{num_seqs} x {length} tokens, {matches['smlp'].target / 1e6:.1f} MFLOPs"
    for arch, target in targets.items():
        yield compared(SECTION, f"sMLP, {what}", seconds["smlp"], arch, seconds[arch], target)
    rate = matmul_rate(torch.device(settings.device), settings.dtype) / 1e12
    reached = 6 * flops_per_token(matches["smlp"].config) * tokens_Bn.numel() / seconds["smlp"] / 1e12
    wanted = 0.45 if settings.device == "cuda" else None
    yield Row(SECTION, f"sMLP, {what}: work", reached, "matrix product", rate, "TF/s", reached / rate, wanted)
    yield compared(SECTION, f"BASE, {what}", seconds["base_lm"], "dense_lm", seconds["dense_lm"], 0.91)
    if theirs is not None:
        dense = f"dense_lm, {what}"
        yield compared(SECTION, dense, seconds["dense_lm"], "fairseq's transformer_lm", seconds["fairseq"])
    if not settings.quick:
        del steps  # and the models
        yield from _best(settings)
        for arch in COMPILED:
            modes, config = ("eager", "compiled"), matches[arch].config
            steps = {mode: update(build(config, settings, mode), tokens_Bn) for mode in modes}
            seconds = interleaved(steps, min(settings.repeats, 7), settings.device)
            yield compared(SECTION, f"{arch}, compiled, {what}", seconds["compiled"], arch, seconds["eager"])
            del steps


def _best(settings: Settings) -> Iterator[Row]:
    """Compare the best sMLP with the best gMLP of equal FLOPs, in the small size of their results; on a GPU, also in
    the paper's."""
    small = {"vocab_size": 4000, "max_tokens": 128, "embed_dim": 64, "dropout": 0.0, "spatial_weights": "toeplitz"}
    ours = preset(f"{BEST}_tiny", ffn_dim=256, num_experts=32, **small)
    theirs = preset(f"{RIVAL}_tiny", ffn_dim=228, **small)
    pairs = [(ours, theirs, num_seqs) for num_seqs in FEW_AND_MANY]
    if settings.device == "cuda":
        shared = {"embed_dim": 1024, "max_tokens": 1024, "vocab_size": 51200, "spatial_weights": "toeplitz"}
        ours = preset(BEST, num_experts=32, **shared)
        pairs.append((ours, match(RIVAL, flops_per_token(ours), overrides=shared).config, settings.num_seqs))
    for ours, theirs, num_seqs in pairs:
        tokens_Bn = torch.randint(4, ours.vocab_size, (num_seqs, ours.max_tokens), device=settings.device)
        models = {"ours": ours, "theirs": theirs}
        steps = {name: update(build(config, settings), tokens_Bn) for name, config in models.items()}
        seconds = interleaved(steps, settings.repeats, settings.device)
        what = f"{BEST}, Toeplitz, E = 32, {num_seqs} x {ours.max_tokens} tokens"
        yield compared(SECTION, what, seconds["ours"], f"{RIVAL}, Toeplitz", seconds["theirs"])


def build(config: ModelConfig, settings: Settings, mode: str = "eager") -> Decoder:
    """Return a model in training whose routers drop nothing, so that the work done is the nominal one."""
    torch.manual_seed(0)
    model = drawn(replace(config, capacity_factor=0.0, second_expert="all"), settings).train()
    if mode == "compiled":
        for block in model.blocks:
            block.compile(backend="inductor" if settings.scale == 1 else "eager")
    return model


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
