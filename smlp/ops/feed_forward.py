"""Feed-forward networks of many experts, each over its own run of tokens.

Letters: ``A`` routed tokens sorted by expert, ``e`` experts on this rank, ``H``, ``F``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.ops.activations import ACTIVATION_FUNCTIONS
from smlp.ops.fast_paths import allowed
from smlp.ops.fused_experts import FusedExperts


def expert_feed_forward(
    x_AH: Tensor,
    counts: Sequence[int],
    norm: tuple[Tensor, Tensor] | None,
    w1_eFH: Tensor,
    b1_eF: Tensor,
    w2_eHF: Tensor,
    b2_eH: Tensor,
    activation: str = "gelu",
) -> Tensor:
    """``w2 @ act(w1 @ LN(x) + b1) + b2`` with each token's own expert, the norm included.

    Args:
        x_AH: tokens sorted by expert, (A, H).
        counts: tokens of each expert, in order; their sum is A and zeros are allowed.
        norm: weight and bias of each expert's layer norm, each (e, H); None leaves out the norm.
        w1_eFH, b1_eF, w2_eHF, b2_eH: stacked weights, (e, F, H), (e, F), (e, H, F), (e, H).
        activation: a key of ``ACTIVATION_FUNCTIONS``.

    Returns:
        (A, H), in the order of ``x_AH``. Experts without tokens get zero gradients, never none.
    """
    weights = (w1_eFH, b1_eF, w2_eHF, b2_eH)
    if allowed(x_AH, *(norm or ()), *weights):
        return FusedExperts.apply(x_AH, *(norm or (None, None)), *weights, counts, activation)
    act, outputs = ACTIVATION_FUNCTIONS[activation], []
    for expert, x_nH in enumerate(x_AH.split(list(counts))):
        if norm is not None:
            gain_eH, offset_eH = norm
            x_nH = F.layer_norm(x_nH, x_nH.shape[1:], gain_eH[expert], offset_eH[expert])
        w1, b1, w2, b2 = (value[expert] for value in weights)
        outputs.append(F.linear(act(F.linear(x_nH, w1, b1)), w2, b2))
    return torch.cat(outputs)
