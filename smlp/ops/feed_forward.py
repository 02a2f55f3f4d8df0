"""Feed-forward networks of many experts, each over its own run of tokens.

Letters: ``A`` routed tokens sorted by expert, ``e`` experts on this rank, ``H``, ``F``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}


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
    act = ACTIVATION_FUNCTIONS[activation]
    num_experts = len(counts)
    if counts and all(count == counts[0] for count in counts):
        x_enH = x_AH.reshape(num_experts, counts[0], x_AH.size(1))
        if norm is not None:
            gain_eH, offset_eH = norm
            x_enH = torch.addcmul(offset_eH.unsqueeze(1), F.layer_norm(x_enH, x_AH.shape[1:]), gain_eH.unsqueeze(1))
        hidden = act(torch.baddbmm(b1_eF.unsqueeze(1), x_enH, w1_eFH.transpose(1, 2)))
        return torch.baddbmm(b2_eH.unsqueeze(1), hidden, w2_eHF.transpose(1, 2)).reshape(x_AH.shape)
    # Unbound weights give one stacked gradient in the backward pass instead of one full-size gradient per expert.
    weights = zip(*(weight.unbind() for weight in (w1_eFH, b1_eF, w2_eHF, b2_eH)), strict=True)
    norms = zip(*(weight.unbind() for weight in norm), strict=True) if norm is not None else [None] * num_experts
    outputs = []
    for x, own_norm, (w1, b1, w2, b2) in zip(x_AH.split(list(counts)), norms, weights, strict=True):
        if own_norm is not None:
            x = F.layer_norm(x, x.shape[1:], *own_norm)
        outputs.append(F.linear(act(F.linear(x, w1, b1)), w2, b2))
    return torch.cat(outputs)
