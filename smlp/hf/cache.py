"""The state of incremental decoding as a cache of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from smlp.nn.state import DecodingState


class SmlpCache(Cache):
    """Keep the decoding state of a batch of sequences.

    Positions are absolute: every sequence begins at position 0, however much padding stands before it. Without padding,
    all sequences share one state; otherwise each has its own.

    Args:
        starts_B: number of padded places on the left of each sequence, or None if no sequence has any.
        max_tokens: T, positions of the model.
        device: the model's device.
    """

    def __init__(self, starts_B: Tensor | None, max_tokens: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layers=[])
        self.device = device
        self.starts_B = starts_B
        self.max_tokens = max_tokens
        #: places read, padding included
        self.length = 0
        #: one for all sequences, or one for each
        self.states = [DecodingState() for _ in range(1 if starts_B is None else len(starts_B))]

    def check(self, num_seqs: int, has_mask: bool, starts_B: Tensor | None) -> None:
        """Check that a batch continues these sequences.

        Args:
            num_seqs: B, of the batch.
            has_mask: whether padding is known.
            starts_B: number of padded places on the left of each sequence, or None if no sequence has any.

        Raises:
            ValueError: it has another number of them, or other padding before them.
        """
        if self.length == 0 and has_mask:
            self.starts_B, self.states = starts_B, [DecodingState() for _ in range(1 if starts_B is None else num_seqs)]
        if self.batch_size not in (0, num_seqs):
            raise ValueError(f"the cache is of {self.batch_size} sequences, and this batch has {num_seqs}")
        if not has_mask:
            return
        own_B, given_B = (0 if starts is None else starts for starts in (self.starts_B, starts_B))
        if bool(torch.as_tensor(own_B != given_B).any()):
            raise ValueError("attention_mask has other padding before the sequences than the cache was made with")

    def groups(self, tokens_Bn: Tensor) -> list[tuple[Tensor, DecodingState]]:
        """Return the next tokens, without padding, of each group of sequences that share a state, and that state."""
        if self.starts_B is None:
            return [(tokens_Bn, self.states[0])]
        first_B = (self.starts_B - self.length).clamp(min=0).tolist()
        rows = zip(tokens_Bn, first_B, self.states, strict=True)
        return [(row[first:].unsqueeze(0), state) for row, first, state in rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of places read, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return T."""
        return self.max_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only the sequences at ``beam_idx`` (any length, repeats allowed), in that order."""
        if self.starts_B is None:
            self.states[0].reorder(beam_idx)
            return
        self.starts_B = self.starts_B[beam_idx]
        self.states = [self.states[row].clone() for row in beam_idx.tolist()]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at ``indices``, as :meth:`reorder_cache` does."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.reorder_cache(torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Return B."""
        return self.states[0].num_seqs or 0 if self.starts_B is None else len(self.starts_B)

    def reset(self) -> None:
        """Forget everything."""
        self.length, self.starts_B, self.states = 0, None, [DecodingState()]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to forget the last places, which assisted generation asks for.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a cache of smlp cannot drop its last positions, so assisted generation is not possible"
        )


def joined(features: Tensor, shapes: Sequence[int], width: int) -> Tensor:
    """Return the hidden states (B, n, H) of groups of one sequence each, with zeros at padded places on the left.

    Args:
        features: of all groups, one after the other, (N, H).
        shapes: number of tokens of each group.
        width: n.
    """
    rows = features.split(list(shapes))
    return torch.stack([torch.cat([row.new_zeros(width - len(row), row.size(1)), row]) for row in rows])
