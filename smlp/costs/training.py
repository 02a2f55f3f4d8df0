"""Floating-point operations of training, as they are compared with what a device can do.

Six for each multiply-add of :mod:`smlp.costs.formula`: two in the forward and four in the backward pass, which
computes the gradients of both factors. Of spatial projections and attention only the causal half counts, the diagonal
included, whatever is computed. What recomputation (activation checkpointing) does a second time does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from smlp.config import ModelConfig
from smlp.costs.formula import work_per_token

_PER_MULTIPLY_ADD = 2 * 3


@functools.lru_cache(maxsize=64)
def training_work(config: ModelConfig, num_tokens: int | None = None) -> Mapping[str, float]:
    """Operations of both passes for each token in sequences of n (default T) tokens, by what they are spent on.

    Raises:
        UserError: ``num_tokens`` is not in 1 .. T.
    """
    work = work_per_token(config, num_tokens, causal=True)
    return MappingProxyType({kind: _PER_MULTIPLY_ADD * flops for kind, flops in work.items()})


def training_flops(config: ModelConfig, num_tokens: int | None = None) -> float:
    """All of :func:`training_work`."""
    return sum(training_work(config, num_tokens).values())
