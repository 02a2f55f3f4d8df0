"""Ctrl-C while libraries are imported, and after a command is done.

A command imports its libraries when it needs them. If Ctrl-C comes then, extension modules that meet an exception in
the middle of their initialisation abort the process, or print a traceback and carry on, so that the command does not
stop. So the exception is raised once the import is over.

After a command only the libraries' own exit functions are left, which take a second. Ctrl-C there would print the
traceback of one of them, although the command has succeeded.
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
#: set once Ctrl-C has reached the present command
_asked = threading.Event()


@contextmanager
def interrupted_after_imports() -> Iterator[None]:
    """Let SIGINT raise ``KeyboardInterrupt`` once running imports are over, and ignore it while Python exits.

    Does nothing outside of the main thread, or if SIGINT is ignored or handled by somebody else.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    outermost = sys._getframe(2)  # the caller's frame, above contextlib's

    def handle(number: int, frame: FrameType | None) -> None:
        _asked.set()
        if _is_importing(frame, outermost):
            timer = threading.Timer(_RETRY_SECONDS, _thread.interrupt_main)
            timer.daemon = True
            timer.start()
        else:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    _asked.clear()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.unregister(_ignore)
        atexit.register(_ignore)  # called before the libraries' functions, because it is registered after them


def leave_if_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` if Ctrl-C has come and a library has swallowed its exception."""
    if _asked.is_set():
        raise KeyboardInterrupt


def _ignore() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _is_importing(frame: FrameType | None, outermost: FrameType) -> bool:
    """Return whether an import lies between a frame and the outermost one."""
    while frame is not None and frame is not outermost:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
