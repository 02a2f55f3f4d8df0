"""Offsets: a number for each expert that is added to scores for the choice alone, from loads and without a gradient.

Loads are summed over the micro-batches and ranks of an update, and offsets move once, after it: they are the same on
any layout of ranks, and constant in evaluation, so that no token's expert depends on another token.

Letters: ``N`` tokens, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from smlp.ops.fast_paths import needs_fixed_shapes
from smlp.ops.rows import occurrences

_M = TypeVar("_M", bound="ExpertOffsets")


class ExpertOffsets(nn.Module):
    """Offsets that even out loads: an expert with more than its share of the tokens loses, one with less gains.

    By sign (Wang et al., 2024, algorithm 1; DeepSeek-V3): each moves by exactly ``rate``. In proportion: by ``rate``
    times the mean spread of a token's scores (best minus worst) times ``1 - load / mean load``, which is cut at -1.

    Args:
        num_experts: E.
        rate: step of an update.
        by_sign: whether to use the first rule instead of the second.
    """

    value: Tensor

    def __init__(self, num_experts: int, rate: float, by_sign: bool) -> None:
        super().__init__()
        self.rate, self.by_sign = rate, by_sign
        self.register_buffer("value", torch.zeros(num_experts, dtype=torch.float32))
        #: loads of the experts and the sum of the spreads since the last update, (E + 1,) float64
        self._pending: Tensor | None = None

    def forward(self, scores_NE: Tensor) -> Tensor:
        """Return the scores to choose by, (N, E)."""
        return scores_NE + self.value.to(scores_NE.dtype)

    @torch.no_grad()
    def count(self, expert_N: Tensor, scores_NE: Tensor) -> None:
        """Count the experts (N,) that the tokens of a micro-batch chose by these scores (N, E), before drops.

        Sequences under ``vmap``, as for gradients of each, belong to no update.
        """
        if needs_fixed_shapes():
            return
        loads_E = occurrences(expert_N, self.value.numel()).double()
        spread = (scores_NE.amax(dim=1) - scores_NE.amin(dim=1)).double().sum()
        sums = torch.cat([loads_E, spread.view(1)])
        self._pending = sums if self._pending is None else self._pending + sums

    def take(self) -> Tensor:
        """Return what was counted since the last call, (E + 1,) float64, and forget it."""
        pending, self._pending = self._pending, None
        return self.value.new_zeros(self.value.numel() + 1, dtype=torch.double) if pending is None else pending

    @torch.no_grad()
    def adjust(self, sums: Tensor) -> None:
        """Move the offsets by the sums of all micro-batches and ranks of an update, (E + 1,)."""
        loads_E, spread = sums[:-1], sums[-1]
        total = loads_E.sum()
        if total == 0:
            return
        lack_E = 1 - loads_E * loads_E.numel() / total  # exactly 0 where an expert has its share
        step_E = lack_E.sign() if self.by_sign else lack_E.clamp(min=-1) * (spread / total)
        self.value += (self.rate * step_E).to(self.value)

    def _apply(self: _M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _M:
        """Keep the offsets in float32: steps would be lost in half precision."""
        before = self.value
        super()._apply(fn, recurse)
        if not before.is_meta and self.value.dtype != before.dtype:
            self.value = before.to(self.value.device)
        return self

    def extra_repr(self) -> str:
        return f"rate={self.rate}, by_sign={self.by_sign}"
