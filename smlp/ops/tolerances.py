"""Tolerances by dtype: how far a fast path may be from its reference in float64, outputs and every gradient.

Used by the check of kernels at their first use (:mod:`smlp.ops.first_use`) and by the tests of operations and layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: largest difference as a share of the largest value: some units in the last place of a number that was rounded twice:
#: first the gradient behind a gate, then the result
SHARE = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def largest_share(got: Tensor, want: Tensor) -> float:
    """Return the largest difference as a share of the largest wanted value: 0 if empty, non-finite if a value is."""
    if want.numel() == 0:
        return 0.0
    want = want.double()
    return float((got.double() - want).abs().max() / want.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
