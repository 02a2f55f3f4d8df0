"""Record the operations of a function on a GPU once and replay them as a single launch (a CUDA graph)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

#: calls with a shape after which it is recorded: shapes that do not come again are not worth it
_CALLS_BEFORE = 2
#: recordings that are kept, and shapes that are counted
_MOST_RECORDINGS, _MOST_SHAPES = 4, 64


class Replayed:
    """A function of one tensor that launches many small operations, which takes a CPU longer than the GPU computes.

    On other devices it is called as it is. On a GPU, too, until a shape has come often enough; results are the same.

    Args:
        function: from a tensor to a tensor, without gradients. Neither its steps nor what else it reads may depend on
            the values; it must not wait for the GPU or copy from the CPU.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self._calls: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return self.function(x)
        kind = (x.shape, x.dtype, torch.cuda.current_stream(x.device))
        recording = self._recordings.get(kind)
        if recording is None:
            if len(self._calls) >= _MOST_SHAPES:
                self._calls.clear()
            self._calls[kind] += 1
            if self._calls[kind] <= _CALLS_BEFORE:
                return self.function(x)
            while len(self._recordings) >= _MOST_RECORDINGS:
                del self._recordings[next(iter(self._recordings))]
            recording = self._recordings[kind] = _Recording(self.function, x)
        return recording.replay(x)


class _Recording:
    """The operations for one shape, with the memory that they use."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.x = x.clone()
        self.graph = torch.cuda.CUDAGraph()
        # other threads, such as those that pin batches, may use the GPU meanwhile
        with torch.cuda.device_of(x), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = function(self.x)

    def replay(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.result.clone()
