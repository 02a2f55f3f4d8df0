"""Time alternatives in turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: on a GPU, what is measured at a time
_SECONDS_AT_A_TIME, _MOST_CALLS = 0.02, 50


def interleaved(
    variants: Mapping[str, Callable[[], Any]], repeats: int, device: str, clock: Callable[[], float] | None = None
) -> dict[str, float]:
    """Return the median seconds of each variant, by the clock on the wall if no other is given.

    Each is called once beforehand, and then ``repeats`` times in turn with the others. On a GPU, so many calls follow
    each other that the next one is launched while it computes, as in training.
    """
    clock = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    num_calls = dict.fromkeys(variants, 1)
    for number in range(-1 if device == "cuda" else 0, repeats + 1):
        for name, variant in variants.items():
            _wait(device)
            start = clock()
            for _ in range(num_calls[name]):
                variant()
            _wait(device)
            taken = (clock() - start) / num_calls[name]
            if number > 0:
                seconds[name].append(taken)
            elif device == "cuda" and number == 0:
                num_calls[name] = min(max(round(_SECONDS_AT_A_TIME / taken), 1), _MOST_CALLS)
    return {name: statistics.median(values) for name, values in seconds.items()}


def training_step(forward: Callable[[], Tensor], grad: Tensor, leaves: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that does a forward pass, and a backward pass from ``grad`` to new gradients of ``leaves``."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(grad)

    return run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_extra_bytes(function: Callable[[], Any], device: str) -> int:
    """Return the most bytes of tensors that were alive at one time during a call and not before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _LiveStorages() as live:
        function()
    return live.peak


class _LiveStorages(TorchDispatchMode):
    """Counts the storages that operators return, until they are freed."""

    #: fast paths are taken as they are without it (smlp/ops/fast_paths.py)
    any_operator = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if _is_dense(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_dense, tree_leaves(result)):
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
            if pointer and pointer not in before and pointer not in self.known:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                self.known[pointer] = weakref.finalize(storage, self._freed, pointer, storage.nbytes())
        return result

    def _freed(self, pointer: int, num_bytes: int) -> None:
        if self.known.pop(pointer, None) is not None:
            self.now -= num_bytes


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def copy_rate(device: str, repeats: int) -> float:
    """Return the bytes per second, read and written, of a copy on the device as it is just now."""
    source = torch.ones(2**28 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / interleaved({"copy": lambda: target.copy_(source)}, repeats, device)["copy"]
