"""SIGUSR1, SIGTERM and SIGHUP as a request to save and leave, which a cluster sends before it takes a machine away.

A terminal that closes sends SIGHUP; under nohup it stays ignored.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

#: exit status of a run that was stopped by a signal and can be resumed: EX_TEMPFAIL of sysexits.h, "try again"
EXIT_STOPPED = 75
#: exit status of a command that Ctrl-C has interrupted: 128 + SIGINT, as a shell reports it
EXIT_INTERRUPTED = 130
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)

# Slurm signals each process of a step, and launchers forward signals: one request may arrive several times.
REPEAT_SECONDS = 2.0
# How long a worker waits to learn whether the signal was meant for all processes or for it alone.
_WORKER_SECONDS = 1.0
# A worker reads 0 (nothing has happened), the number of a signal, or this (the process is about to end).
_LEAVING = 255


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals, without SIGHUP if this process ignores it, as under nohup."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class StopSignals:
    """Remembers that this process was asked to stop, from :meth:`install` on; until then the signals end it.

    The same signal again, more than ``REPEAT_SECONDS`` after the first, ends the process at once with status 128 +
    its number, even while the main thread waits inside a library and runs no handler: a thread reads the numbers that
    Python writes to a pipe.

    Processes forked after :meth:`prepare` (the workers of a data loader) get the same signals if a cluster sends them
    to all processes at once. They ignore SIGUSR1 and SIGHUP. They also ignore SIGTERM if this process got it as well;
    otherwise it ends the worker, as its owner means it to.
    """

    def __init__(self) -> None:
        self._owner: int | None = None  # the process that these signals were sent to
        self._is_listening = False
        self._is_registered = False
        self._previous: dict[int, Any] = {}
        self._writing = -1
        self._state: mmap.mmap | bytearray = bytearray(1)  # one byte
        self._first: dict[int, float] = {}
        self._worker_status = 0

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that came."""
        number = self._state[0]
        return signal.Signals(number) if number in SIGNALS else None

    def prepare(self) -> None:
        """Handle signals for child processes that are forked from now on. The second call does nothing."""
        if self._owner == os.getpid():
            return
        if not self._is_registered:
            os.register_at_fork(after_in_child=self._after_fork)
            atexit.register(self.leave)
            self._is_registered = True
        self._owner, self._is_listening = os.getpid(), False
        self._state = mmap.mmap(-1, 1)  # shared with forked processes
        self._first.clear()

    def install(self) -> None:
        """Begin to listen. Does nothing the second time, or outside of the main thread, where Python cannot listen."""
        self.prepare()
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        self._is_listening = True
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        for number in heard(SIGNALS):
            self._previous[number] = signal.signal(number, self._mark)
            signal.siginterrupt(number, False)  # system calls of a running save are not interrupted

    def leave(self) -> None:
        """Ignore the signals from now on, because this process is about to end; SIGTERM ends its workers again."""
        if self._owner == os.getpid():
            self._state[0] = _LEAVING
            for number in self._previous if self._is_listening else ():
                signal.signal(number, signal.SIG_IGN)

    def uninstall(self) -> None:
        """Restore what the signals meant before :meth:`install`, unless this process is about to end."""
        if self._owner == os.getpid() and self._state[0] != _LEAVING:
            self._state[0] = _LEAVING
            self._owner = None
            if self._is_listening:
                self._is_listening = False
                for number, handler in self._previous.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(-1)
                os.close(self._writing)

    def become_worker(self, status: int) -> None:
        """Set what the signals mean in a process that was forked by the one that called :meth:`prepare`.

        Args:
            status: exit status with which SIGTERM ends it.
        """
        if self._owner != os.getppid():
            return
        self._worker_status = status
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated_in_worker)

    def _watch(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._note(number)
        os.close(reading)

    def _mark(self, number: int, frame: FrameType | None = None) -> None:
        if self._state[0] == 0:
            self._state[0] = number

    def _note(self, number: int) -> None:
        self._mark(number)
        if self._state[0] == _LEAVING:
            return
        now = time.monotonic()
        if now - self._first.setdefault(number, now) > REPEAT_SECONDS:
            os._exit(128 + number)

    def _after_fork(self) -> None:
        self.become_worker(128 + signal.SIGTERM)

    def _terminated_in_worker(self, number: int, frame: FrameType | None) -> None:
        limit = time.monotonic() + _WORKER_SECONDS
        while self._state[0] == 0 and time.monotonic() < limit:
            time.sleep(0.01)
        if self._state[0] in (0, _LEAVING):
            os._exit(self._worker_status)
