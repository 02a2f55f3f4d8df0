"""Record the operations of a function on a GPU once and replay them as a single launch (a CUDA graph)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from smlp.ops.fast_paths import allowed

#: calls with the same shapes after which they are recorded: shapes that do not come again are not worth it
_CALLS_BEFORE = 2
#: recordings that are kept, and kinds of calls that are counted
_MOST_RECORDINGS, _MOST_KINDS = 4, 64

_Function = Callable[..., tuple[Tensor, ...]]


class Replayed:
    """A function of tensors that launches many small operations, which takes a CPU longer than the GPU computes.

    On other devices it is called as it is; on a GPU, too, until the same shapes have come often enough. Results are the
    same. Those of a recording hold until the next call. If the operations cannot be recorded, one warning says so.

    Args:
        function: from tensors to tensors, without gradients. It may change its inputs; nothing else that it reads may
            change. Its steps must not depend on values, wait for the GPU or copy from the CPU.
    """

    def __init__(self, function: _Function) -> None:
        self.function = function
        self._calls: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording | None] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        first = inputs[0]
        if not _can_record(first):
            return self.function(*inputs)
        kind = (torch.cuda.current_stream(first.device), *((x.shape, x.dtype) for x in inputs))
        # the first that come often are kept: recording takes far longer than a call, so none makes room for another
        if kind not in self._recordings and len(self._recordings) < _MOST_RECORDINGS:
            if len(self._calls) >= _MOST_KINDS:
                self._calls.clear()
            self._calls[kind] += 1
            if self._calls[kind] > _CALLS_BEFORE:
                self._recordings[kind] = _recorded(self.function, inputs)
        recording = self._recordings.get(kind)
        return self.function(*inputs) if recording is None else recording.replay(inputs)


def _can_record(x: Tensor) -> bool:
    return x.is_cuda and allowed(x) and not torch.cuda.is_current_stream_capturing()


class _Recording:
    """The operations for one kind of inputs, with the memory that they use."""

    def __init__(self, function: _Function, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = [x.clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        # other threads, such as those that pin batches, may use the GPU meanwhile
        with torch.cuda.device_of(inputs[0]), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = function(*self.inputs)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.results


def _recorded(function: _Function, inputs: tuple[Tensor, ...]) -> _Recording | None:
    try:
        return _Recording(function, inputs)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        warnings.warn(f"operations are launched one by one: they could not be recorded: {reason}", stacklevel=3)
        return None
