"""Products of float32 matrices by oneDNN, which torch brings along, where torch's own choice (MKL) is slow.

MKL takes instructions of 256 bits on CPUs that Intel did not make, and leaves half of the speed of those that compute
512 bits at a time; oneDNN does not. torch asks it for convolutions and for 16 bits, and has one operator that takes a
linear map in float32 to it. Here are the other products that a linear map and its gradients need, as calls of that one.

Letters: ``N`` rows (tokens), ``I`` and ``O`` features in and out.
"""

from __future__ import annotations

import platform
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from smlp.ops.tolerances import allowed_share, largest_share


def mapped(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T + b``, (N, O), a new tensor.

    oneDNN is a thousand times slower where neither ``W`` nor its transpose lies in memory row by row, and takes ``b``
    for numbers one after the other: where that is not so, copies are made.
    """
    if not (weight_OI.is_contiguous() or weight_OI.t().is_contiguous()):
        weight_OI = weight_OI.contiguous()
    if x_NI.stride(0) == 1:
        x_NI = x_NI.t().contiguous().t()  # to be transposed: faster where it lies without gaps
    if bias_O is not None:
        bias_O = bias_O.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


def product(left_NI: Tensor, right_IO: Tensor) -> Tensor:
    """``A B``, (N, O), a new tensor; what :func:`mapped` says of ``W`` holds for ``B``."""
    return mapped(left_NI, right_IO.t())


def outer(y_NO: Tensor, x_NI: Tensor) -> Tensor:
    """``y^T x``, the sum of the outer products of rows, (O, I), a new tensor or its transpose.

    oneDNN wants the left factor row by row, and so one of the two is copied transposed: that of less numbers, those
    counted that the caller has to put in order.
    """
    (num_rows, num_outputs), num_inputs = y_NO.shape, x_NI.size(1)
    if num_rows * num_outputs <= (num_rows + num_outputs) * num_inputs:
        return product(y_NO.t(), x_NI)
    return product(x_NI.t(), y_NO).t()


@cache
def faster_than_mkl() -> bool:
    """Return whether products in float32 are to be taken here: an AMD CPU with AVX-512, a torch that would ask MKL,
    and right values."""
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
        vendor = platform.processor()  # on Windows its last word is the vendor
    return "AuthenticAMD" in vendor


def right() -> bool:
    """Return whether the operator is there and its values are right; where they are wrong, warns."""
    generator = torch.Generator("cpu").manual_seed(0)
    x_NI, weight_OI, y_NO = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((96, 80), (112, 80), (96, 112))
    )
    try:
        with torch.no_grad():
            got = mapped(x_NI, weight_OI, weight_OI[:, 0]), product(y_NO, weight_OI), outer(y_NO, x_NI)
    except (AttributeError, RuntimeError, NotImplementedError):  # another torch
        return False
    x, weight, y = x_NI.double(), weight_OI.double(), y_NO.double()
    want = x @ weight.t() + weight[:, 0], y @ weight, y.t() @ x
    share = max(largest_share(*pair) for pair in zip(got, want, strict=True))
    if share <= allowed_share(torch.float32):
        return True
    warnings.warn(
        f"products by oneDNN are off by {share:.2g} of their largest value on this CPU; MKL is used instead",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
