"""Launch settings of the Triton kernels: a few for each, of which the fastest is found out at first use.

No choice changes the order of a sum: BLOCK_K and BLOCK, which would, are the same throughout a list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from smlp.ops.triton_kernels import project

Settings = dict[str, int]

#: by bytes of an element. Shared memory: (BLOCK_M + BLOCK_N) * BLOCK_K * bytes * num_stages, at most 160 KiB on sm_80.
PROJECTION: dict[int, list[Settings]] = {
    2: [
        {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    ],
    4: [
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 8, "num_stages": 3},
    ],
}
WEIGHT_GRADIENT: dict[int, list[Settings]] = {
    2: [
        {"BLOCK": 128, "num_warps": 8, "num_stages": 3},
        {"BLOCK": 128, "num_warps": 4, "num_stages": 3},
        {"BLOCK": 128, "num_warps": 8, "num_stages": 4},
    ],
    4: [
        {"BLOCK": 64, "num_warps": 4, "num_stages": 3},
        {"BLOCK": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK": 64, "num_warps": 4, "num_stages": 4},
    ],
}
NUM_CHOICES = 3

#: whether TRITON_INTERPRET was set when Triton was imported
INTERPRETED = not isinstance(project, triton.JITFunction)

_WARM_UP, _REPEATS = 2, 8
_fastest: dict[Hashable, Settings] = {}
_prescribed: ContextVar[int | None] = ContextVar("prescribed", default=None)


@contextlib.contextmanager
def prescribed(number: int) -> Iterator[None]:
    """Inside the block, every kernel is launched with this one of its choices, or the next that the device can run."""
    token = _prescribed.set(number)
    try:
        yield
    finally:
        _prescribed.reset(token)


def launch(run: Callable[[Settings], None], choices: Sequence[Settings], kind: Hashable) -> None:
    """Runs a kernel with the settings that are the fastest for this kind of problem; measures them if it is a new kind.

    Args:
        run: launches the kernel; must not depend on what the outputs held before.
        choices: settings.
        kind: what the measurement holds for, devices and sizes included.

    Raises:
        OutOfResources: the device is too small for every choice.
    """
    number = _prescribed.get()
    if number is not None:
        _first_that_fits(run, [*choices[number:], *choices[:number]])
        return
    choice = _fastest.get(kind)
    if choice is None:
        choice = _fastest[kind] = choices[0] if INTERPRETED else _measured(run, choices)
    run(choice)


def size_class(*sizes: int) -> tuple[int, ...]:
    """Sizes between the same powers of two count as one kind."""
    return tuple(size.bit_length() for size in sizes)


def _first_that_fits(run: Callable[[Settings], None], choices: Sequence[Settings]) -> None:
    for choice in choices[:-1]:
        with contextlib.suppress(OutOfResources):
            run(choice)
            return
    run(choices[-1])


def _measured(run: Callable[[Settings], None], choices: Sequence[Settings]) -> Settings:
    """The choice with which the kernel takes the least time, among those that the device can run."""
    times = []
    for number, choice in enumerate(choices):
        try:
            times.append((_milliseconds(run, choice), number))
        except OutOfResources:
            if number == len(choices) - 1 and not times:
                raise
    return choices[min(times)[1]]


def _milliseconds(run: Callable[[Settings], None], choice: Settings) -> float:
    """Time ``_REPEATS`` launches, one after the other."""
    for _ in range(_WARM_UP):
        run(choice)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        run(choice)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
