"""Products of float32 matrices by oneDNN, which torch brings along, where torch's own choice (MKL) is slow.

MKL uses 256-bit instructions on CPUs that Intel did not make, which is half the speed of those that compute 512 bits at
a time; oneDNN uses the full width. torch calls oneDNN for convolutions and 16-bit dtypes, and has one operator that
calls it for a linear map in float32. This module expresses the map's gradients and other products by that operator.

Letters: ``N`` rows (tokens), ``I`` and ``O`` features in and out.
"""

from __future__ import annotations

import platform
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from smlp.ops.tolerances import SHARE, largest_share


def mapped(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``, (N, O), a new tensor.

    oneDNN is a thousand times slower where neither ``W`` nor its transpose is stored row by row, and assumes that ``b``
    is contiguous: other tensors are copied first.
    """
    if not (weight_OI.is_contiguous() or weight_OI.t().is_contiguous()):
        weight_OI = weight_OI.contiguous()
    if x_NI.stride(0) == 1:
        x_NI = x_NI.t().contiguous().t()  # to be transposed: faster if it is contiguous
    if bias_O is not None:
        bias_O = bias_O.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


def product(left_NI: Tensor, right_IO: Tensor) -> Tensor:
    """Return ``A B``, (N, O), a new tensor; what :func:`mapped` says of ``W`` holds for ``B``."""
    return mapped(left_NI, right_IO.t())


def outer(y_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Return ``y^T x``, the sum of the outer products of rows, (O, I), a new tensor or its transpose.

    oneDNN wants the left factor row by row, so one of the two is copied transposed: the smaller one, counting copies
    that the caller has to make.
    """
    (num_rows, num_outputs), num_inputs = y_NO.shape, x_NI.size(1)
    if num_rows * num_outputs <= (num_rows + num_outputs) * num_inputs:
        return product(y_NO.t(), x_NI)
    return product(x_NI.t(), y_NO).t()


@cache
def faster_than_mkl() -> bool:
    """Return whether to compute float32 products here: an AMD CPU with AVX-512, a torch that would call MKL, and
    right values."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _made_by_amd()
        and right()
    )


def _made_by_amd() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        vendor = next(line for line in lines if line.startswith("vendor_id"))
    except (OSError, StopIteration):
        vendor = platform.processor()  # on Windows the last word of it is the vendor
    return "AuthenticAMD" in vendor


def right() -> bool:
    """Return whether the operator is there and its values are right; warn where they are wrong."""
    generator = torch.Generator("cpu").manual_seed(0)
    x_NI, weight_OI, y_NO = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((96, 80), (112, 80), (96, 112))
    )
    try:
        with torch.no_grad():
            got = mapped(x_NI, weight_OI, weight_OI[:, 0]), product(y_NO, weight_OI), outer(y_NO, x_NI)
    except (AttributeError, RuntimeError, NotImplementedError):  # another version of torch
        return False
    x, weight, y = x_NI.double(), weight_OI.double(), y_NO.double()
    want = x @ weight.t() + weight[:, 0], y @ weight, y.t() @ x
    share = max(largest_share(*pair) for pair in zip(got, want, strict=True))
    if share <= SHARE[torch.float32]:
        return True
    warnings.warn(
        f"products by oneDNN are off by {share:.2g} of their largest value on this CPU; MKL is used instead",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
