"""Fast paths against their slow references."""

import torch
import torch.nn.functional as F

from smlp.ops import ACTIVATION_FUNCTIONS

#: plain float64 operations in another order, as ``rtol`` and ``atol``; layers of several such operations
EXACT = 1e-10
EXACT_LAYER = 1e-9


def assert_same(got, want, inputs, tolerance):
    """Outputs, and the gradients of all ``inputs`` under one random weighting of the outputs; returns our gradients."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    coefficients = torch.randn(got.shape, generator=torch.Generator().manual_seed(0), dtype=got.dtype)
    ours = torch.autograd.grad((got * coefficients).sum(), inputs)
    theirs = torch.autograd.grad((want * coefficients).sum(), inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)
    return ours


def spatial_reference(x, weight, bias, gate=None):
    """sum over s <= t of W[h, t, s] x[b, s, h] + b[h, t], times the gate, one number at a time over t and s."""
    num_tokens = x.size(1)
    rows = []
    for t in range(num_tokens):
        total = bias[:, t].view(1, -1, 1).expand(x.size(0), -1, x.size(3))
        for s in range(t + 1):
            total = total + weight[:, t, s].view(1, -1, 1) * x[:, s]
        rows.append(total)
    out = torch.stack(rows, dim=1)
    return out if gate is None else out * gate


def feed_forward_reference(x, counts, norm, w1, b1, w2, b2, activation):
    """One token at a time."""
    act = ACTIVATION_FUNCTIONS[activation]
    rows, row = [], 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            normed = x[row] if norm is None else F.layer_norm(x[row], x[row].shape, norm[0][expert], norm[1][expert])
            rows.append(w2[expert] @ act(w1[expert] @ normed + b1[expert]) + b2[expert])
            row += 1
    return torch.stack(rows) if rows else x.new_zeros(0, w2.size(1))


def assert_balanced(owner: torch.Tensor, num_tokens: int, num_experts: int) -> None:
    assert owner.shape == (num_tokens,) and owner.dtype == torch.long
    loads = torch.bincount(owner, minlength=num_experts)
    assert loads.numel() == num_experts, "an expert out of range"
    assert loads.sum() == num_tokens and loads.max() - loads.min() <= 1, loads.tolist()
