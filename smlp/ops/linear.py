"""Linear maps of few rows: one token of a sequence that is being written, or a few of them.

Such a product reads each weight once and is bound by memory. Products of a matrix and a vector (and of two, which are
no better) leave one of two cores idle on a CPU and half of the other's bandwidth unused; a batched product of bands of
the matrix uses both.

Letters: ``N`` rows, ``I`` and ``O`` features in and out, ``k`` bands.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.ops.fast_paths import BANDS, takes_bands


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``W x + b`` over the last axis of x, (..., I) to (..., O), as :func:`torch.nn.functional.linear`."""
    if not takes_bands(x, weight_OI, bias_O):
        return F.linear(x, weight_OI, bias_O)
    bands = math.gcd(weight_OI.size(0), BANDS)
    weight_kOI = weight_OI.unflatten(0, (bands, -1))
    # rows as columns that lie one after the other: otherwise the product is no faster than F.linear's
    x_kIN = x.reshape(1, -1, x.size(-1)).expand(bands, -1, -1).transpose(1, 2)
    if bias_O is None:
        out_kON = torch.bmm(weight_kOI, x_kIN)
    else:
        out_kON = torch.baddbmm(bias_O.view(bands, -1, 1), weight_kOI, x_kIN)
    return out_kON.flatten(0, 1).t().reshape(*x.shape[:-1], -1)
