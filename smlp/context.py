"""What travels beside the activations through one forward pass.

Letters: ``B`` sequences, ``n`` new tokens, ``m`` all tokens up to now, ``T`` the model's context, ``C`` features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


class DecodingState:
    """What token-mixing modules keep of earlier positions, so that no earlier token is computed again.

    Pass one object to successive calls of the decoder, each with the next tokens only.
    """

    def __init__(self) -> None:
        #: positions seen so far, the same for all sequences of the batch
        self.length = 0
        self._buffers: dict[nn.Module, Tensor] = {}

    def append(self, module: nn.Module, x_BnC: Tensor, max_tokens: int) -> Tensor:
        """Keeps (B, n, C) as the module's next positions; returns all of them so far, (B, m, C)."""
        end = self.length + x_BnC.size(1)
        buffer_BTC = self._buffers.get(module)
        if buffer_BTC is None:
            buffer_BTC = x_BnC.new_empty(x_BnC.size(0), max_tokens, x_BnC.size(2))
            self._buffers[module] = buffer_BTC
        buffer_BTC[:, self.length : end] = x_BnC
        return buffer_BTC[:, :end]

    def reorder(self, index_B: Tensor) -> None:
        """Keeps the sequences at ``index_B`` (any length, repeats allowed), in that order."""
        for module, buffer in self._buffers.items():
            self._buffers[module] = buffer.index_select(0, index_B)

    def clone(self) -> DecodingState:
        """An independent copy, to continue one prompt in several ways."""
        copy = DecodingState()
        copy.length = self.length
        copy._buffers = {module: buffer.clone() for module, buffer in self._buffers.items()}
        return copy


@dataclass
class ForwardContext:
    """Padding, decoding state and routing decisions of one forward pass."""

    #: True at real tokens, (B, n), or None where there is no padding
    valid_Bn: Tensor | None = None
    #: None outside incremental decoding
    state: DecodingState | None = None
    #: routing decisions by layer; a layer finding its own here keeps to it, so that a block that is computed again
    #: in the backward pass (activation checkpointing) routes as the first time
    plans: dict[nn.Module, Any] = field(default_factory=dict)

    def remember(self, module: nn.Module, x_BnC: Tensor, max_tokens: int) -> tuple[Tensor, int]:
        """All positions so far of a token-mixing module's input, and where the new ones start."""
        if self.state is None:
            return x_BnC, 0
        return self.state.append(module, x_BnC, max_tokens), self.state.length
