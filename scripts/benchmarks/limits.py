"""What the device can copy at most, as it is just now; its matrix products: :mod:`smlp.costs.matmul_rate`."""

from __future__ import annotations

import torch

from benchmarks.timing import interleaved


def copy_rate(device: str, repeats: int) -> float:
    """Bytes a second in a copy, those read and those written."""
    source = torch.ones(2**28 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / interleaved({"copy": lambda: target.copy_(source)}, repeats, device)["copy"]
