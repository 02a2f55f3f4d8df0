"""N ranks on this machine, started together and ended together; the port where they meet, and the command of a rank."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from smlp.errors import UserError, last_line
from smlp.launch.machine import memory_bytes, num_cores
from smlp.launch.stop_signals import EXIT_STOPPED, SIGNALS, heard

# After a failure, the other ranks get this long to report their broken connections before they are ended.
GRACE_SECONDS = 10.0
# The ends of ranks that are this close may be noticed in another order: peers of a killed rank end at once.
_SAME_MOMENT = 1.0
# Time from SIGTERM to SIGKILL: a rank that waits inside a library does not react to SIGTERM.
TERMINATION_SECONDS = 5.0
#: memory of a process that has imported torch and fairseq but has no model yet
RANK_BYTES = 2**28
FORWARDED = (signal.SIGINT, *SIGNALS)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: ports at which ranks may meet: from here up to those that the system assigns by itself
_LOWEST = 10000
# The default on Linux; macOS and Windows begin at 49152.
_FIRST_EPHEMERAL = 32768
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    grace: float = GRACE_SECONDS,
    termination: float = TERMINATION_SECONDS,
    patience: float | None = None,
) -> int:
    """Run ``command`` once for each rank, with the variables that torchrun would set, until all have ended.

    Rank 0 prints where this process does, and so do the others, with ``[rank N]`` before each line. SIGINT, SIGTERM,
    SIGUSR1 and SIGHUP are passed on to all ranks. If a rank fails, the others get ``grace`` seconds to end by
    themselves, then SIGTERM, and ``termination`` seconds later SIGKILL. On Linux no rank outlives this process, however
    it ends.

    Args:
        command: program and arguments.
        num_ranks: N.
        grace, termination: seconds.
        patience: seconds that ranks may continue after the first has ended without a failure; unlimited by default.

    Returns:
        The exit status of the rank that failed first (128 + the signal that ended it); without a failure
        ``EXIT_STOPPED`` if a rank ended with it, else 0. Which rank ended first, which one failed and which ones were
        frozen is printed to standard error.

    Raises:
        UserError: this machine does not have enough memory.
    """
    most = max(memory_bytes() // RANK_BYTES, 1)
    if num_ranks > most:
        raise UserError(
            f"--nproc {num_ranks}: this machine has {memory_bytes() / 2**30:.0f} GiB of memory, and each rank takes at "
            f"least {RANK_BYTES / 2**30:g} GiB: give at most {most}"
        )
    return _LocalRanks(command, num_ranks, grace, termination, patience).run()


class _LocalRanks:
    def __init__(
        self, command: Sequence[str], num_ranks: int, grace: float, termination: float, patience: float | None
    ) -> None:
        self.command, self.num_ranks = list(command), num_ranks
        self.grace, self.termination, self.patience = grace, termination, patience
        self.processes: list[subprocess.Popen[bytes]] = []
        #: events for the main thread: a signal's number, or a rank and its return code
        self.events: queue.SimpleQueue[signal.Signals | tuple[int, int]] = queue.SimpleQueue()
        #: return codes by rank, in the order in which they ended
        self.codes: dict[int, int] = {}
        #: ranks that were still running when patience ran out, and those of them that a signal had stopped
        self.late: list[int] = []
        self.frozen: list[int] = []
        self.failed: int | None = None
        self.interrupted = False
        self.failed_at = -math.inf
        #: when patience runs out, and the signal to send then
        self.deadline: float | None = None
        self.next_signal = signal.SIGTERM
        self.readers: list[threading.Thread] = []

    def run(self) -> int:
        with signals_to(self.events.put):
            try:
                self.start()
                while len(self.codes) < self.num_ranks:
                    self.handle_next_event()
            finally:
                self.end_leftovers()
        for reader in self.readers:
            reader.join(timeout=2)  # processes left behind by a rank may keep its output open
        return self.status()

    def start(self) -> None:
        environment = rank_environment(self.num_ranks)
        for rank in range(self.num_ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = None if rank == 0 else subprocess.PIPE
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=own if rank == 0 else {**own, "PYTHONUNBUFFERED": "1"},
                process_group=0,  # Ctrl-C reaches the ranks only once, through this process
                preexec_fn=end_with_parent(),
            )
            self.processes.append(process)
        lock = threading.Lock()
        for rank, process in enumerate(self.processes):
            _thread(self.wait_for, rank)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if source is not None:
                    self.readers.append(_thread(_copy_lines, f"[rank {rank}] ".encode(), source, target, lock))

    def wait_for(self, rank: int) -> None:
        self.events.put((rank, self.processes[rank].wait()))

    def handle_next_event(self) -> None:
        timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            if self.next_signal == signal.SIGTERM:
                self.late = [rank for rank in range(self.num_ranks) if rank not in self.codes]
                self.frozen = [rank for rank in self.late if _is_frozen(self.processes[rank].pid)]
            self.send(self.next_signal)
            self.deadline = time.monotonic() + self.termination
            self.next_signal = signal.SIGKILL
            return
        if isinstance(event, signal.Signals):
            self.send(signal.SIGKILL if self.interrupted and event == signal.SIGINT else event)
            if event == signal.SIGINT:
                self.interrupted = True
                self.lose_patience_after(self.grace)
            return
        rank, code = event
        self.codes[rank] = code
        if self.failed is None and code not in (0, EXIT_STOPPED):
            self.failed, self.failed_at = rank, time.monotonic()
            self.lose_patience_after(self.grace)
        elif self.is_killed_first(code):
            self.failed, self.codes = rank, {rank: code, **self.codes}
        elif self.patience is not None:
            self.lose_patience_after(self.patience)

    def is_killed_first(self, code: int) -> bool:
        """Return whether a rank was killed, not by this process, at the moment of the failure: then it is the cause.

        Of several that were killed, the first is.
        """
        if self.failed is None or self.codes[self.failed] == -signal.SIGKILL:
            return False
        is_ours = self.next_signal == signal.SIGKILL  # SIGTERM has been sent
        return code == -signal.SIGKILL and not is_ours and time.monotonic() < self.failed_at + _SAME_MOMENT

    def lose_patience_after(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        self.deadline = limit if self.deadline is None else min(limit, self.deadline)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that have not ended."""
        for process in self.processes:
            process.send_signal(number)

    def end_leftovers(self) -> None:
        """End ranks that still run after an error here, and processes that ranks left behind, such as data loaders."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def status(self) -> int:
        if self.failed is None:
            return max(self.codes.values())
        code = self.codes[self.failed]
        if not self.interrupted:
            print(f"smlp: {self.report()}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code

    def report(self) -> str:
        """Return which rank ended first, which one failed and which ones were frozen, as a text."""
        first = next(iter(self.codes))
        said = [f"rank {first} of {self.num_ranks} ended first, {_how(self.codes[first])}"]
        if self.failed in self.late:
            said += [f"rank {rank} had not ended {self.patience:g} seconds later" for rank in self.late]
        elif self.failed != first:
            said.append(f"rank {self.failed} then failed, {_how(self.codes[self.failed])}")
        said += [f"rank {rank} was suspended by a signal such as SIGSTOP" for rank in self.frozen]
        return "; ".join(said)


def rank_environment(num_ranks: int) -> dict[str, str]:
    """Return the variables of this process with those that all ranks of one machine share."""
    threads = max(1, num_cores() // num_ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def _how(code: int) -> str:
    return f"with exit status {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _is_frozen(pid: int) -> bool:
    """Return whether a signal has stopped a process; False where that is unknown (not on Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def end_with_parent() -> Callable[[], None] | None:
    """Return a function to run in a child before its program, so that it is killed with this process. Linux only."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(128 + signal.SIGKILL)

    return prepare


@contextmanager
def signals_to(note: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand SIGINT, SIGTERM, SIGUSR1 and SIGHUP to ``note`` inside the block."""

    def handle(number: int, frame: FrameType | None) -> None:
        note(signal.Signals(number))

    previous = {number: signal.signal(number, handle) for number in heard(FORWARDED)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _thread(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _copy_lines(prefix: bytes, source: BinaryIO, target: TextIO, lock: threading.Lock) -> None:
    for line in source:
        try:
            with lock:
                target.buffer.write(prefix + line.rstrip(b"\n") + b"\n")
                target.flush()
        except (OSError, ValueError):
            continue  # nobody reads any more or the disk is full, but the rank would block if the pipe were not emptied


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nobody listens and which the system does not assign by itself.

    Ranks take seconds until they listen on it. By then, a port of the ephemeral range, which binding to port 0 returns,
    may be one end of another connection, so that the ranks cannot bind to it, or talk to another program. The port is
    therefore drawn from those below that range, if the system leaves any there.

    Raises:
        OSError: no port can be bound.
    """
    below = range(_LOWEST, max(_LOWEST, _first_ephemeral()))
    for port in random.SystemRandom().sample(below, min(_TRIES, len(below))):
        try:
            return _bound(port)
        except OSError:
            continue
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        return listener.getsockname()[1]


def _first_ephemeral() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_EPHEMERAL


def this_program() -> list[str]:
    """Return ``python -m smlp`` for the package that is running.

    A folder of that name in the current directory counts only if it did for this process.
    """
    return this_module("smlp")


def this_module(name: str) -> list[str]:
    """Return ``python -m NAME``, as :func:`this_program` does."""
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    return [sys.executable, *([] if by_module else ["-P"]), "-m", name]


def run_logged(name: str, command: Sequence[str], log: Path, folder: Path | None = None) -> str:
    """Run the command of a step in a folder with its output in a file, and return the output.

    On Linux the command does not outlive this process.

    Raises:
        UserError: it failed; the message names the step, the file and the output's last line.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=False, preexec_fn=end_with_parent()
        )
    if done.returncode != 0:
        raise failed_step(name, done.returncode, log)
    return log.read_text(errors="replace")


def failed_step(name: str, status: int, log: Path) -> UserError:
    """Return the error of a step whose output is in a file."""
    last = last_line(log.read_text(errors="replace"))
    return UserError(f"step '{name}' failed with status {status}, see {log} (last line: {last})")
