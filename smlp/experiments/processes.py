"""Chains of commands: chains run side by side, the commands of a chain one by one, and none outlives this process."""

from __future__ import annotations

import bisect
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from smlp.errors import TRACEBACK
from smlp.launch.local import end_with_parent, signals_to
from smlp.launch.stop_signals import EXIT_INTERRUPTED, EXIT_STOPPED

#: seconds between the request to stop and SIGKILL, enough to save a checkpoint
STOP_SECONDS = 120.0
_POLL_SECONDS = 0.2


@dataclass
class Step:
    """A command of a chain.

    Args:
        name: for messages.
        command: program and arguments.
        output: the file to which its output is appended.
        environment: variables besides those of this process.
    """

    name: str
    command: list[str]
    output: Path
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The end of a step."""

    step: Step
    #: exit status, or 128 + the signal number if it was killed
    status: int
    seconds: float
    #: largest resident set of the process, in MiB
    peak_memory_mib: float
    start: float
    #: whether a stop had been requested by then
    is_stopping: bool = False


class Chain:
    """The steps of one run, made one by one, so that a later one can depend on the results of an earlier one."""

    def next_step(self, slot: int) -> Step | None:
        """Return the next command, for one of the ``jobs`` slots; None if there is nothing more to do."""
        raise NotImplementedError

    def ended(self, result: Ended) -> None:
        """Record that a step has ended, whatever its status."""
        raise NotImplementedError


@dataclass
class _Running:
    chain: Chain
    step: Step
    process: subprocess.Popen[bytes]
    slot: int
    start: float = field(default_factory=time.time)
    #: start by a clock that nobody sets
    began: float = field(default_factory=time.monotonic)


def run_chains(chains: Iterable[Chain], jobs: int, watch: Callable[[], None]) -> signal.Signals | None:
    """Run chains in order, ``jobs`` at a time, until all have ended or a signal asks to stop.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on as SIGTERM, on which a training saves and exits; nothing new is
    started then. On Linux nothing outlives this process.

    Args:
        chains: what to run.
        jobs: at a time.
        watch: called a few times a second.

    Returns:
        The signal that stopped them, or None.
    """
    waiting, running = list(chains), list[_Running]()
    free = list(range(jobs))
    stop_by: float | None = None
    noted: list[signal.Signals] = []
    with signals_to(noted.append):
        try:
            while waiting or running:
                while waiting and free and not noted:
                    chain = waiting.pop(0)
                    if step := chain.next_step(free[0]):
                        running.append(_start(chain, step, free.pop(0)))
                if noted and not running:
                    break
                if noted and stop_by is None:
                    stop_by = time.monotonic() + STOP_SECONDS
                    _signal_all(running, signal.SIGTERM)
                if stop_by is not None and time.monotonic() > stop_by:
                    _signal_all(running, signal.SIGKILL)
                _take_ended(running, free, stopping=bool(noted))
                watch()
                time.sleep(_POLL_SECONDS)
        finally:
            _end_all(running, stop_by)  # after an error: trainings save
    return noted[0] if noted else None


def _end_all(running: Sequence[_Running], last: float | None) -> None:
    """End what still runs, as a signal would, and wait for it until ``last``, if SIGTERM has been sent already."""
    if last is None:  # a second SIGTERM would end trainings before they have saved
        _signal_all(running, signal.SIGTERM)
        last = time.monotonic() + STOP_SECONDS
    for one in running:
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.0, last - time.monotonic()))
    _signal_all(running, signal.SIGKILL)
    for one in running:
        one.process.wait()


def stopped_by(number: signal.Signals) -> int:
    """Say that the signal has stopped a command that can be run again; return its exit status."""
    print(f"stopped by {number.name}; the same command resumes", flush=True)
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED


def _start(chain: Chain, step: Step, slot: int) -> _Running:
    step.output.parent.mkdir(parents=True, exist_ok=True)
    with step.output.open("ab") as output:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={TRACEBACK: "1", **os.environ, **step.environment},
            process_group=0,  # Ctrl-C reaches it only once, through this process
            preexec_fn=end_with_parent(),
        )
    return _Running(chain, step, process, slot)


def _take_ended(running: list[_Running], free: list[int], stopping: bool) -> None:
    """Take steps that have ended out of what runs, and put the next steps of their chains in."""
    for one in list(running):
        pid, status, usage = os.wait4(one.process.pid, os.WNOHANG)
        if pid == 0:
            continue
        running.remove(one)
        code = one.process.returncode = os.waitstatus_to_exitcode(status)
        with suppress(ProcessLookupError):  # processes it left behind, such as data loaders
            os.killpg(pid, signal.SIGKILL)
        code = code if code >= 0 else 128 - code
        seconds = time.monotonic() - one.began
        one.chain.ended(Ended(one.step, code, seconds, usage.ru_maxrss / 1024, one.start, stopping))
        step = None if stopping or code == EXIT_STOPPED else one.chain.next_step(one.slot)
        if step is None:
            bisect.insort(free, one.slot)
        else:
            running.append(_start(one.chain, step, one.slot))


def _signal_all(running: Sequence[_Running], number: signal.Signals) -> None:
    for one in running:
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(one.process.pid, number)
            else:  # send_signal would reap an ended process and lose its resource usage
                os.kill(one.process.pid, number)
