"""Training on a CPU: memory that a tensor gave back is kept for the next one.

glibc asks the kernel for each large block and hands it back when it is freed, so that every activation and gradient of
every update is mapped anew and cleared page by page: a tenth to a fifth of an update's time (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST_INT = 2**31 - 1
_AT_A_TIME = 64 * 2**20  # bytes that the heap grows by beyond what is asked for


def apply() -> None:
    from fairseq.trainer import Trainer

    build_trainer = Trainer.__init__

    @functools.wraps(build_trainer)
    def trainer_init(self: Trainer, *args: Any, **kw: Any) -> None:
        build_trainer(self, *args, **kw)
        if not self.cuda:
            keep_freed_memory()

    Trainer.__init__ = trainer_init


def keep_freed_memory() -> bool:
    """Sets glibc's allocator so; whether that was done.

    Left alone where the environment sets the allocator (``MALLOC_...``, ``GLIBC_TUNABLES``, ``LD_PRELOAD``) or there
    is no glibc.
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _LARGEST_INT, _M_TOP_PAD: _AT_A_TIME}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
