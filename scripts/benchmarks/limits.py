"""What the device can do at most, as it is just now: matrix products and copies."""

from __future__ import annotations

import torch

from benchmarks.timing import interleaved


def matmul_rate(device: str, dtype: torch.dtype, repeats: int) -> float:
    """Floating-point operations a second in a square product (multiply and add are two)."""
    size = 8192 if device == "cuda" else 2048
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / interleaved({"product": lambda: torch.mm(left, right, out=out)}, repeats, device)["product"]


def copy_rate(device: str, repeats: int) -> float:
    """Bytes a second in a copy, those read and those written."""
    source = torch.ones(2**28 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / interleaved({"copy": lambda: target.copy_(source)}, repeats, device)["copy"]
