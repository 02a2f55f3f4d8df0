"""Compare Triton's kernels with plain PyTorch before relying on them: at first use, for each device and dtype.

Where they do not compile, or their values are wrong, one warning says so, and this process uses PyTorch's products from
then on. Triton is imported here, when a kernel is wanted for the first time, and nowhere else.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``h`` heads, ``c`` features of one head.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable

import torch
from torch import Tensor

from smlp.ops.tolerances import SHARE, largest_share

#: whether the kernels passed the check, by device, dtype and whether there is a gate
_believed: dict[Hashable, bool] = {}

#: n, T, h and c of the check: several tiles in each direction, the last ones ragged
_SIZES = (300, 304, 2, 48)
#: with few sequences one program computes a sum, with many several do
_NUM_SEQS = (3, 16)


def fused_projection(x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, gate_Bnhc: Tensor | None) -> Tensor | None:
    """Compute :func:`smlp.ops.causal_spatial_projection` by Triton's kernels; return None if they fail the check."""
    kind = (x_Bnhc.device, x_Bnhc.dtype, gate_Bnhc is not None)
    believed = _believed.get(kind)
    if believed is None:
        believed = _believed[kind] = _check(x_Bnhc.device, x_Bnhc.dtype, gate_Bnhc is not None)
    if not believed:
        return None
    from smlp.ops.triton_spatial import FusedProjection

    return FusedProjection.apply(x_Bnhc, weight_hTT, bias_hT, gate_Bnhc)


def _check(device: torch.device, dtype: torch.dtype, with_gate: bool) -> bool:
    """Return whether outputs and gradients of the kernels are right; warn if not."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for num_seqs in _NUM_SEQS:
                _compare(device, dtype, with_gate, num_seqs)
    except Exception as error:  # whatever a compiler or a driver raises
        reason = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the Triton kernels of the causal spatial projection ({device}, {str(dtype).removeprefix('torch.')}, "
            f"{'with' if with_gate else 'without'} gate) failed at their first use, "
            f"{type(error).__name__}: {reason}; PyTorch's products are used instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _compare(device: torch.device, dtype: torch.dtype, with_gate: bool, num_seqs: int) -> None:
    """Compares all launch settings on one small problem.

    Raises:
        FloatingPointError: a value is too far off; the message says which.
    """
    from smlp.ops.triton_spatial import NUM_CHOICES, fused_backward, fused_forward, prescribed

    num_tokens, context, num_heads, width = _SIZES
    # all by name: the user may have set another default device and dtype
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    x_Bnhc, grad_Bnhc = (draw(num_seqs, num_tokens, num_heads, width) for _ in range(2))
    # half of the features, as in a gating unit
    gate_Bnhc = draw(num_seqs, num_tokens, 2, num_heads, width)[:, :, 0] if with_gate else None
    weight_hTT, bias_hT = draw(num_heads, context, context), draw(num_heads, context)
    above = torch.ones(context, context, dtype=torch.bool, device=device).triu(1)
    weight_hTT.masked_fill_(above, torch.nan)  # must not matter
    want = _reference(grad_Bnhc, x_Bnhc, weight_hTT, bias_hT, gate_Bnhc)
    names = ("output", "gradient of x", "gradient of the weights", "gradient of the bias", "gradient of the gate")
    for number in range(NUM_CHOICES):
        with prescribed(number):
            out_Bnhc = fused_forward(x_Bnhc, weight_hTT, bias_hT, gate_Bnhc)
            gradients = fused_backward(grad_Bnhc, x_Bnhc, weight_hTT, bias_hT, gate_Bnhc)
        for name, ours, theirs in zip(names, (out_Bnhc, *gradients), want, strict=True):
            if ours is None or theirs is None:
                continue
            share = largest_share(ours, theirs)
            if not share <= SHARE[dtype]:
                raise FloatingPointError(
                    f"the {name} is off by {share:.2g} of its largest value, allowed {SHARE[dtype]:g}"
                )
        if gradients[1].masked_select(above).any():
            raise FloatingPointError("weights above the diagonal have a gradient")


def _reference(
    grad_Bnhc: Tensor, x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, gate_Bnhc: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the output and the gradients of x, weight, bias and gate, in float64 by dense products.

    Written out, not by autograd: a graph inside a forward pass would meet the hooks of activation checkpointing.
    """
    num_tokens = x_Bnhc.size(1)
    grad, x = grad_Bnhc.double(), x_Bnhc.double()
    weight = weight_hTT[:, :num_tokens, :num_tokens].double().tril()
    out = torch.einsum("hmk,bkhc->bmhc", weight, x) + bias_hT[:, :num_tokens].double().t()[:, :, None]
    grad_gate = None
    if gate_Bnhc is not None:
        gate = gate_Bnhc.double()
        out, grad, grad_gate = out * gate, grad * gate, grad * out
    grad_x = torch.einsum("hmk,bmhc->bkhc", weight, grad)
    grad_weight, grad_bias = x.new_zeros(weight_hTT.shape), x.new_zeros(bias_hT.shape)
    grad_weight[:, :num_tokens, :num_tokens] = torch.einsum("bmhc,bkhc->hmk", grad, x).tril()
    grad_bias[:, :num_tokens] = grad.sum(dim=(0, 3)).t()
    return out, grad_x, grad_weight, grad_bias, grad_gate
