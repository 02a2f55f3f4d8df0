"""Makes one rank of a run fail at a place of the code, as often as wanted for tests.

Used in the processes of ``fairseq_forks``. A fault is ``{"rank": 1, "place": "smlp.moe.exchange:TokenExchange.combine",
"call": 3, "how": "kill"}``: at the third call of that function on rank 1 the process kills itself. ``how`` may also be
``raise`` (an error of its own), ``exit`` (with status 0, as if it had come to its end), ``stall`` (it waits, holding
its connections), ``full`` (the disk is full) or ``delay`` (every call takes 50 ms longer, and that is all).
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import time
from typing import Any


def prepare(fault: dict, rank: int) -> None:
    """Sets the fault once the plug-in is loaded: fairseq sets up its task after that."""
    if fault["rank"] != rank:
        return
    from fairseq import tasks

    setup = tasks.setup_task

    @functools.wraps(setup)
    def setup_task(*args: Any, **kw: Any) -> Any:
        tasks.setup_task = setup
        _set(fault)
        return setup(*args, **kw)

    tasks.setup_task = setup_task


def _set(fault: dict) -> None:
    module, _, path = fault["place"].partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def faulty(*args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault["how"] == "delay":
            time.sleep(0.05)
        elif calls == fault.get("call", 1):
            _fail(fault["how"])
        return original(*args, **kw)

    setattr(owner, name, faulty)


def _fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("a fault of this rank's own")
    elif how == "exit":
        os._exit(0)
    elif how == "stall":
        time.sleep(60)
    elif how == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    raise AssertionError(how)
