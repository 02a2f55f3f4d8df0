"""Small problems for Triton's kernels, their answers in float64, and kernels that fail; for triton_cases.py."""

import torch
from comparing import spatial_reference

from smlp.ops import first_use
from smlp.ops.tolerances import SHARE, largest_share


def small_tiles():
    """Tiles of the least size that a GPU's matrix products have, so that little data takes many."""
    from smlp.ops import triton_spatial

    triton_spatial.PROJECTION = [{"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16}]
    triton_spatial.WEIGHT_GRADIENT = [{"BLOCK": 16}]
    triton_spatial.NUM_CHOICES = 1
    first_use._SIZES, first_use._NUM_SEQS = (21, 32, 1, 8), (2,)


def drawn(dtype=torch.float32, num_seqs=2, num_tokens=35, context=38, heads=1, width=9, gate=True, poison=True):
    """x, weight, bias and gate; not contiguous, and where weights must not matter, with what would be seen."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    both = draw(num_seqs, num_tokens, 2, heads, width)
    weight = draw(heads, context, context)
    if poison:
        above = torch.ones(context, context, dtype=torch.bool).triu(1)
        weight.masked_fill_(above, torch.nan).masked_fill_(above.triu(5), torch.inf)
        weight[:, num_tokens:] = torch.nan  # rows of positions that are not there
    inputs = [both[:, :, 1], weight, draw(heads, context)]
    return [tensor.requires_grad_() for tensor in [*inputs, *([both[:, :, 0]] if gate else [])]]


def apply(inputs):
    from smlp.ops.triton_spatial import FusedProjection

    return FusedProjection.apply(*inputs, *([None] if len(inputs) == 3 else []))


def allowed(dtype):
    """The interpreter cuts off what bfloat16 cannot hold, where a GPU rounds: twice the error."""
    return SHARE[dtype] * (2 if dtype == torch.bfloat16 else 1)


def given_gradient(inputs):
    """A gradient of the output."""
    return torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)


def compare(inputs, dtype=torch.float32, grad=None):
    """Output and every gradient of the kernels, against float64."""
    out = apply(inputs)
    grad = given_gradient(inputs) if grad is None else grad
    ours = torch.autograd.grad(out, inputs, grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        exact[1].tril_()
    want = spatial_reference(*exact)
    theirs = torch.autograd.grad(want, exact, grad.double())
    names = ("output", "x", "weight", "bias", "gate")
    for name, our, their in zip(names, (out, *ours), (want, *theirs), strict=False):
        assert our.dtype == dtype and our.shape == their.shape
        share = largest_share(our.detach(), their.detach())
        assert share <= allowed(dtype), f"{name}: {share}"
    above = ours[1].triu(1)
    assert torch.equal(above, torch.zeros_like(above)), "weights above the diagonal must get no gradient"
    return out, ours


class Broken:
    """A kernel that leaves something undone, or raises."""

    def __init__(self, kernel, spoil=None, error=None):
        self.kernel, self.spoil, self.error = kernel, spoil, error

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            if self.error:
                raise self.error
            self.kernel[grid](*arguments, **constants)
            self.spoil(arguments, constants)

        return run
