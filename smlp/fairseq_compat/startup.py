"""Save time before and in updates: imports that are not used, the number of threads, freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import types
from collections.abc import Iterator

import torch

from smlp.launch.machine import num_cores

# constant of malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST_INT = 2**31 - 1
_AT_A_TIME = 64 * 2**20  # the heap grows by this many extra bytes
_MOST_GROWTH, _LEAST_GROWTH = 1.5, 256 * 2**20  # of the memory after an update, until holes are given back


def apply() -> None:
    leave_out_compiler()
    limit_threads()


def leave_out_compiler() -> None:
    """Keep torch's optimizers from importing the compiler (3 s) for the sake of not being compiled.

    These methods go through a wrapper that imports ``torch._dynamo`` at the first call, to ask it for a version that
    it leaves alone, and keeps the answer on the function. Where the compiler was not imported there is nothing to be
    left alone by, and the answer is the function itself.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        function = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if function is not None:
            function.__dynamo_disable = function


def limit_threads() -> None:
    """Take no more threads than cores: torch knows a process' affinity but not the CPU quota of its container."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores():
        torch.set_num_threads(num_cores())


class _WhenUsed(types.ModuleType):
    """A stand-in for a module, which is imported when something of it is used."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # queries of the import system
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


class _WhenCalled(types.ModuleType):
    """A stand-in for a module whose functions can be imported from it; it is imported when one of them is called."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # queries of the import system
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)


@contextlib.contextmanager
def without_unused_imports() -> Iterator[None]:
    """Inside the block, let wandb and functions of sklearn.metrics and scipy.stats be imported without loading them.

    ``import fairseq`` asks for wandb (0.4 s), which only ``--wandb-project`` uses, and for statistics for tasks of
    classification (2 s). What is imported in the block stays usable after it; a module that is there already is used
    as it is.
    """
    added: dict[str, types.ModuleType] = {}
    if "sklearn" not in sys.modules:
        added["sklearn"], added["sklearn.metrics"] = _WhenCalled("sklearn"), _WhenCalled("sklearn.metrics")
        added["sklearn"].metrics = added["sklearn.metrics"]
    if "scipy.stats" not in sys.modules:
        added["scipy.stats"] = _WhenCalled("scipy.stats")
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb"):
        added["wandb"] = _WhenUsed("wandb")
    sys.modules.update(added)
    try:
        yield
    finally:
        for name, module in added.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class KeptMemory:
    """Gives holes back to the kernel when they have become many, in a process that keeps freed memory.

    Where the sizes of blocks differ from update to update, as those of experts' tokens do, holes that fit no block
    accumulate without end (to 22 GB, where an update needs 1.2).
    """

    def __init__(self) -> None:
        self._usual: int | None = None  # bytes that the process held after the first update since the last return

    def after_update(self) -> bool:
        """Return the holes if memory has grown by half since they were last returned; return whether that was done."""
        held = _held_bytes()
        if self._usual is None:
            self._usual = held
        elif held > _MOST_GROWTH * self._usual + _LEAST_GROWTH:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self._usual = None
            return True
        return False


def keep_freed_memory() -> KeptMemory | None:
    """Let glibc's allocator keep the memory that a tensor gave back for the next one; return None if it cannot.

    glibc asks the kernel for each large block and hands it back when it is freed, so that every activation and gradient
    of every update is mapped anew and cleared page by page: a tenth to a fifth of an update's time on a CPU
    (docs/performance.md). Nothing changes if the environment sets the allocator (``MALLOC_...``, ``GLIBC_TUNABLES``,
    ``LD_PRELOAD``) or there is no glibc or no ``/proc``.
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return None
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        _held_bytes()
    except (OSError, AttributeError):
        return None
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _LARGEST_INT, _M_TOP_PAD: _AT_A_TIME}
    return KeptMemory() if all([mallopt(name, value) == 1 for name, value in settings.items()]) else None


def _held_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
