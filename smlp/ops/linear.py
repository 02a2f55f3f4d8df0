"""Linear maps, fast for few rows: one token of a sequence that is being written, or a few of them.

Letters: ``I`` and ``O`` features in and out.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from smlp.ops.bands import rows_by_bands
from smlp.ops.fast_paths import BANDS, takes_bands


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``W x + b`` over the last axis of x, (..., I) to (..., O), as :func:`torch.nn.functional.linear`."""
    if not takes_bands(x, weight_OI, bias_O):
        return F.linear(x, weight_OI, bias_O)
    return few_rows(x, weight_OI, bias_O)


def few_rows(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """:func:`linear` where :func:`smlp.ops.fast_paths.takes_bands` says so."""
    bands = math.gcd(weight_OI.size(0), BANDS)
    out_ON = rows_by_bands(weight_OI, x.reshape(-1, x.size(-1)), bands, bias_O)
    return out_ON.t().reshape(*x.shape[:-1], -1)
