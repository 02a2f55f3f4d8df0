"""The rate of matrix products that a device reaches, as it is just now: what speeds are compared with."""

from __future__ import annotations

import time

import torch

from smlp.ops import linear

#: sides of the square products: doubled from the first to at most the largest, as long as the time allows
_FIRST_SIZE, _LARGEST_SIZE = 256, {"cpu": 2048, "cuda": 8192}


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """Floating-point operations a second of a square product as our linear layers take it (multiply and add are two).

    Draws its numbers from a generator of its own, and takes about as long as is asked for: the product grows until a
    larger one would take more than the time that is left, and the fastest of the last size counts.

    Args:
        device: where.
        dtype: of both factors and of the product.
        seconds: to measure for, a first call that makes the device ready not included.
    """
    size, times = _FIRST_SIZE, []
    product = _Product(device, dtype, size)
    product.seconds()
    end = time.perf_counter() + seconds
    while True:
        times.append(product.seconds())
        left = end - time.perf_counter()
        if left <= times[-1]:
            return 2 * size**3 / min(times)
        # twice the size is eight times the work; a first call and at least three more should fit
        if 2 * size <= _LARGEST_SIZE[device.type] and 4 * 8 * times[-1] < left:
            size, times = 2 * size, []
            product = _Product(device, dtype, size)
            product.seconds()


class _Product:
    def __init__(self, device: torch.device, dtype: torch.dtype, size: int) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.left, self.right = (
            torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
        )
        self.device = device

    def seconds(self) -> float:
        """Of one product, on the device as well."""
        self._wait()
        start = time.perf_counter()
        with torch.no_grad():
            linear(self.left, self.right)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
