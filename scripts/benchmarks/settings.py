"""What a run of the benchmark was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """Device and effort; ``scale`` divides all sizes, which only the tests want."""

    device: str = "cpu"
    quick: bool = False
    scale: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU, fp32 on a CPU."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def repeats(self) -> int:
        """Times that each alternative is run."""
        if self.scale > 1:
            return 1
        return 5 if self.quick else 11

    def tensor(self, *shape: int, learnt: bool = True) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=learnt)

    def sized(self, *sizes: int) -> tuple[int, ...]:
        """The sizes of a test where one is asked for."""
        return tuple(max(size // self.scale, 1) for size in sizes)
