"""Balanced assignment against BASE's auction: time and total score."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import Settings
from benchmarks.timing import interleaved
from smlp.ops import balanced_assignment

SECTION = "Balanced assignment"
SIZES = [(4096, 8), (4096, 32), (4096, 128), (8192, 32), (16384, 64), (32768, 8), (32768, 32), (32768, 128)]
QUICK = [(4096, 32), (16384, 64)]


def scores_of(kind: str, num_tokens: int, num_experts: int) -> Tensor:
    """Return normal numbers (``random``), or products of 20 clusters of tokens with centroids, as in a model."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    if kind == "random":
        return torch.randn(num_tokens, num_experts, generator=generator)
    centres = torch.randn(20, 64, generator=generator)
    token_N = torch.randint(20, (num_tokens,), generator=generator)
    tokens = torch.randn(num_tokens, 64, generator=generator) + 2 * centres[token_N]
    return tokens @ torch.randn(64, num_experts, generator=generator) / 10


def rows(settings: Settings) -> Iterator[Row]:
    """Yield the time, then the total scores of the same problem."""
    name, solve = peers.base_auction()
    for num_tokens, num_experts in QUICK if settings.quick else SIZES:
        (num_tokens,) = settings.sized(num_tokens)
        for kind in ("random", "tokens"):
            scores = scores_of(kind, num_tokens, num_experts).to(settings.device)
            seconds = interleaved(
                {"ours": lambda s=scores: balanced_assignment(s), "auction": lambda s=scores: solve(s)},
                settings.repeats,
                settings.device,
            )
            what = f"N = {num_tokens}, E = {num_experts}, {kind}"
            yield compared(SECTION, what, seconds["ours"], name, seconds["auction"], 5.0)
            ours = _total(scores, balanced_assignment(scores))
            expert_N = torch.arange(num_experts, device=scores.device).repeat_interleave(num_tokens // num_experts)
            theirs = _total(scores[solve(scores)], expert_N)
            yield Row(SECTION, f"{what}: total score", ours, name, theirs, "", ours / theirs, 1.0)


def _total(scores_NE: Tensor, expert_N: Tensor) -> float:
    return scores_NE.gather(1, expert_N.unsqueeze(1)).double().sum().item()
