"""Limit the CPU time of one document, so that a busy machine drops no more documents than an idle one.

Python code and regular expressions are interrupted directly (:class:`CpuLimit`). A parser in C returns control
only when it is done, so it runs in a process of its own (:class:`Helper`), which the kernel ends when its time is up.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any

from smlp.launch.local import this_module

DEFAULT_SECONDS = 60.0
# Signals for a parser that accesses invalid memory or runs out of memory.
_CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE, -signal.SIGKILL}


class DocumentFailed(Exception):
    """A document cannot be finished. The message is a fixed phrase, by which dropped documents are counted."""


def took_too_long(seconds: float) -> DocumentFailed:
    """Return the exception for a document that has used up its time, which may depend on the machine."""
    return DocumentFailed(f"took more than {seconds:g} s of CPU time")


class CpuLimit:
    """Raise :class:`DocumentFailed` within ``with limit:`` once this process has spent its seconds of CPU time.

    Signals reach the main thread only, in which all steps do their work; in other threads there is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._works = threading.current_thread() is threading.main_thread()
        if self._works:
            signal.signal(signal.SIGPROF, self._stop)

    def _stop(self, *_: Any) -> None:
        raise took_too_long(self._seconds)

    def __enter__(self) -> None:
        if self._works:
            signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        if self._works:
            signal.setitimer(signal.ITIMER_PROF, 0)


class Helper:
    """A process that applies a function to one document after the other; it is restarted after a failure.

    Args:
        function: ``MODULE:NAME``; its arguments and results can be pickled.
        seconds: of CPU time for a document.
        packages: that the function imports; loading them is not counted as a document's time.
    """

    def __init__(self, function: str, seconds: float, packages: tuple[str, ...] = ()) -> None:
        self._words = [*this_module("data_prep.flow.limits"), function, str(seconds), *packages]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns.

        Raises:
            DocumentFailed: it took too long, or the process crashed.
        """
        if self._process is None:
            self._process = self._started()
        try:
            pickle.dump(arguments, self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise self._failure() from None
        except BaseException:  # after an interrupt, the pipe would still deliver this document's result
            self.close()
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        if process.stdout.read(1) != b"!":
            raise RuntimeError(f"{' '.join(self._words)} did not start: exit status {process.wait()}")
        return process

    def _failure(self) -> Exception:
        status = self._process.wait()
        self.close()
        if status == -signal.SIGPROF:
            return took_too_long(self._seconds)
        if status in _CRASHES:
            return DocumentFailed("the parser crashed on it or ran out of memory")
        return RuntimeError(f"{' '.join(self._words)} ended with exit status {status}")


@cache
def helper(function: str, seconds: float, packages: tuple[str, ...] = ()) -> Helper:
    """Return this process's only :class:`Helper` for a function; it ends with the process."""
    return Helper(function, seconds, packages)


def _serve(function: str, seconds: str, *packages: str) -> None:
    """Answer documents from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a parser's prints must not mix with the results
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    for package in packages:
        importlib.import_module(package)
    answers.write(b"!")
    answers.flush()
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_PROF, float(seconds))
            answer = work(*arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pickle.dump(answer, answers)
            answers.flush()
        except (EOFError, BrokenPipeError):  # the parent process has ended
            os._exit(0)
        except MemoryError:  # a limit of this process; the document is lost as if the kernel had ended it
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
