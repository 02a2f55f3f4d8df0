"""Ctrl-C while libraries are imported, and when a command is done.

A command imports its libraries when it needs them, and Ctrl-C may come then. Extension modules that meet an exception
in the middle of their initialisation abort the process, or print a traceback and leave it at that, so that the
command does not stop. Hence the exception is raised when the import is over.

Once a command is done, all that is left are the libraries' own exit functions, which take a second: Ctrl-C there would
print the traceback of one of them, beside the status of a command that has succeeded.
"""

from __future__ import annotations

import _thread
import atexit
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_IMPORTING = "<frozen importlib._bootstrap>"
_RETRY_SECONDS = 0.05


@contextmanager
def interrupted_after_imports() -> Iterator[None]:
    """Within it, SIGINT raises ``KeyboardInterrupt`` as always, but after the imports that are under way; while the
    process exits, SIGINT is ignored.

    Does nothing outside of the main thread, or where SIGINT is ignored or somebody else's.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    outermost = sys._getframe(2)  # of the caller: between them is contextlib

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame, outermost):
            timer = threading.Timer(_RETRY_SECONDS, _thread.interrupt_main)
            timer.daemon = True
            timer.start()
        else:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.unregister(_ignore)
        atexit.register(_ignore)  # after the libraries' functions, hence to be called before them


def _ignore() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _is_importing(frame: FrameType | None, outermost: FrameType) -> bool:
    """Whether an import lies between a frame and the one that began to wait."""
    while frame is not None and frame is not outermost:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
