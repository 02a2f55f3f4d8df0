"""The rate of matrix products that a device reaches at the moment, with which speeds are compared."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from smlp.ops import linear

#: sides of the square matrices: doubled from the first up to the largest, as time allows
_FIRST_SIZE, _LARGEST_SIZE = 256, {"cpu": 2048, "cuda": 8192}


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """Return the rate of a square matrix product, taken as our linear layers take it, in floating-point operations per
    second (a multiply and an add are two).

    Draws random numbers from its own generator, and takes about the requested time: the product grows until a
    larger one would take more than the time that is left, and the fastest of the last size counts.

    Args:
        device: where.
        dtype: of both factors and of the product.
        seconds: how long to measure, not counting the first call, which makes the device ready.
    """
    size, times = _FIRST_SIZE, []
    factors = _factors(device, dtype, size)
    end = time.perf_counter() + seconds
    while True:
        times.append(_seconds(factors))
        left = end - time.perf_counter()
        if left <= times[-1]:
            return 2 * size**3 / min(times)
        # twice the size is eight times the work; a warm-up call and at least three more should fit
        if 2 * size <= _LARGEST_SIZE[device.type] and 4 * 8 * times[-1] < left:
            size, times = 2 * size, []
            factors = _factors(device, dtype, size)


def _factors(device: torch.device, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Return two random matrices whose product has been computed once, which makes the device ready for it."""
    generator = torch.Generator(device).manual_seed(1)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    _seconds((left, right))
    return left, right


def _seconds(factors: tuple[Tensor, Tensor]) -> float:
    """Return how long one product takes, until the device is done."""
    on_gpu = factors[0].is_cuda
    if on_gpu:
        torch.cuda.synchronize(factors[0].device)
    start = time.perf_counter()
    with torch.no_grad():
        linear(*factors)
    if on_gpu:
        torch.cuda.synchronize(factors[0].device)
    return time.perf_counter() - start
