"""Dropout whose masks cost little on a CPU.

torch draws one number of 53 random bits for each element, one after the other on CPUs that are not Intel's. Here each
element gets 16 bits of a generator's 64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.ops.fast_paths import draws_own_masks

_LEVELS = 2**16


def dropout(x: Tensor, probability: float) -> Tensor:
    """Elements set to zero with a probability, the others scaled so that the mean stays (Srivastava et al., 2014).

    Args:
        x: any shape.
        probability: in [0, 1). On a CPU the nearest multiple of 1/65536, which the scale then follows.

    Returns:
        A tensor like ``x``. Numbers come from torch's global generator of the device.
    """
    if probability == 0 or x.numel() == 0:
        return x
    if not draws_own_masks(x):
        return F.dropout(x, probability)
    kept_of = max(round((1 - probability) * _LEVELS), 1)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.long, device=x.device).random_(-(2**63), None)
    bits = words.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (bits <= kept_of - 1 - _LEVELS // 2).to(x.dtype).mul_(_LEVELS / kept_of)
