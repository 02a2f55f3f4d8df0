"""Sequences of different lengths that are read side by side, with one decoding state and no padding.

Spatial weights are indexed by absolute position, so that nothing may stand before a sequence: all rows begin at
position 0 and are at the same position always. A row that knows its next ids (a longer prompt) reads those, while
others read what has just been chosen for them.

Letters: ``R`` rows, ``n`` tokens that are read at once, ``H`` width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState


class SharedPositions:
    """Rows of ids and the state of a decoder that has read them up to a common position.

    Args:
        decoder: in evaluation mode.
        rows: known ids of each sequence, at least one each; append to ``rows`` what is chosen.
        capacity: most ids of a row that are read, so that no room is kept for others.
    """

    def __init__(self, decoder: Decoder, rows: Sequence[Sequence[int]], capacity: int) -> None:
        self.decoder = decoder
        self.rows = [list(row) for row in rows]
        self._capacity = min(capacity, decoder.config.max_tokens)
        self._state = DecodingState(self._capacity)
        #: ids at the start of each row that were forgotten
        self._forgotten = 0

    @property
    def num_read(self) -> int:
        """Ids of each row that have been read, forgotten ones included."""
        return self._forgotten + self._state.length

    @property
    def waiting(self) -> list[int]:
        """The rows of which all ids have been read: they need another one."""
        return [row for row, ids in enumerate(self.rows) if len(ids) == self.num_read]

    def read(self) -> Tensor:
        """Reads as many tokens as every row has; returns their hidden states (R, n, H).

        At the end of the context, the later half of every row is read anew from position 0.
        """
        config = self.decoder.config
        shortest = min(map(len, self.rows))
        if shortest - self._forgotten > config.max_tokens:
            self._forgotten = shortest - max(config.max_tokens // 2, config.prefix_tokens + 1)
            self._state = DecodingState(self._capacity)
        start = self.num_read
        tokens_Rn = torch.tensor(
            [ids[start:shortest] for ids in self.rows], device=self.decoder.embedding.weight.device
        )
        return self.decoder.features(tokens_Rn, self._state)[0]

    def keep(self, index: Sequence[int]) -> None:
        """Keeps the rows at ``index`` (repeats allowed), in that order."""
        if list(index) == list(range(len(self.rows))):
            return
        self.rows = [list(self.rows[row]) for row in index]
        self._state.reorder(torch.tensor(index, dtype=torch.long, device=self.decoder.embedding.weight.device))
