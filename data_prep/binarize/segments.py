"""The tokens of one part on their way to the shards: one file, in segments that belong to a shard each.

A segment is its tokens followed by its lines' lengths (int32). So a part leaves one file, however many shards there
are, and memory holds a segment for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

SEGMENT_TOKENS = 1 << 19
LENGTH = np.dtype("<i4")


@dataclass(frozen=True)
class Segment:
    """``tokens`` of ``lines`` of a shard; ``ends``: the lines that end a document, which are empty."""

    shard: int
    tokens: int
    lines: int
    ends: int

    def num_bytes(self, token: np.dtype) -> int:
        """On disk."""
        return self.tokens * token.itemsize + self.lines * LENGTH.itemsize


@dataclass
class _Waiting:
    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0


class SegmentWriter:
    """Collects tokens for each shard and writes them in segments."""

    def __init__(self, stream: BinaryIO, num_shards: int) -> None:
        self._stream = stream
        self._waiting = [_Waiting() for _ in range(num_shards)]
        self.segments: list[Segment] = []

    def add(self, shard: int, tokens_N: np.ndarray, lengths_L: np.ndarray) -> None:
        """Tokens of whole lines, with the ``</s>`` of each, and the lines' lengths."""
        waiting = self._waiting[shard]
        waiting.tokens.append(tokens_N)
        waiting.lengths.append(lengths_L)
        waiting.num_tokens += len(tokens_N)
        if waiting.num_tokens >= SEGMENT_TOKENS:
            self._write(shard)

    def finish(self) -> None:
        """Writes what is left, shard by shard."""
        for shard, waiting in enumerate(self._waiting):
            if waiting.num_tokens:
                self._write(shard)

    def _write(self, shard: int) -> None:
        waiting, self._waiting[shard] = self._waiting[shard], _Waiting()
        lengths_L = np.concatenate(waiting.lengths)
        for tokens_N in waiting.tokens:
            self._stream.write(tokens_N.tobytes())
        self._stream.write(lengths_L.astype(LENGTH).tobytes())
        self.segments.append(Segment(shard, waiting.num_tokens, len(lengths_L), int(np.count_nonzero(lengths_L == 1))))
