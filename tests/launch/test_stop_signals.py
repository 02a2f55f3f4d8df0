"""Signals as a wish to stop: the process that trains, the processes it forks, a second signal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from running import Finished, run_python

pytestmark = pytest.mark.timeout(60)

BEGIN = """
import ctypes, os, signal, subprocess, sys, time
from smlp.launch import stop_signals
from smlp.launch.stop_signals import StopSignals

os.setpgid(0, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
stop = StopSignals()

def after(seconds, send):
    "Sends a signal later, from a process of its own that does not get it."
    if os.fork() == 0:
        os.setpgid(0, 0)
        time.sleep(seconds)
        send()
        os._exit(0)

def worker(seconds=30):
    "Like a data loader's: forked while the owner listens."
    pid = os.fork()
    if pid == 0:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            time.sleep(0.02)
        os._exit(7)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

own = os.getpid()
"""


def run(script: str, tmp_path: Path) -> Finished:
    (tmp_path / "script.py").write_text(BEGIN + script)
    return run_python(str(tmp_path / "script.py"), timeout=30)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_remembered_and_ends_nothing(tmp_path: Path, number: signal.Signals) -> None:
    done = run(
        f"""
stop.install()
assert stop.received is None
after(0.1, lambda: os.kill(own, {number}))
time.sleep(0.5)
print(stop.received.name)
stop.uninstall()
print(signal.getsignal({number}).name, flush=True)
os.kill(own, {number})
print("not reached")
""",
        tmp_path,
    )
    assert done.stdout.splitlines() == [number.name, "SIG_DFL"], done.stderr
    assert done.rc == -number


def test_nohup_keeps_its_meaning(tmp_path: Path) -> None:
    done = run(
        """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop.install()
os.kill(own, signal.SIGHUP)
time.sleep(0.2)
print(stop.received)
""",
        tmp_path,
    )
    assert (done.rc, done.stdout) == (0, "None\n"), done.stderr


def test_a_second_signal_ends_the_process_even_inside_a_library(tmp_path: Path) -> None:
    """The main thread never comes back to Python, as in a collective whose other ranks are gone."""
    done = run(
        """
stop_signals.REPEAT_SECONDS = 0.5
stop.install()
for moment in (0.1, 0.2, 1.0):
    after(moment, lambda: os.kill(own, signal.SIGTERM))
import threading
threading.Timer(0.6, lambda: print("alive", stop.received.name, flush=True)).start()
reading, writing = os.pipe()
ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
print("not reached")
""",
        tmp_path,
    )
    # the second came at once and counts as the first; the third ended it
    assert (done.rc, done.stdout) == (128 + signal.SIGTERM, "alive SIGTERM\n"), done.stderr


def test_after_leaving_signals_mean_nothing(tmp_path: Path) -> None:
    """To the very end, when Python has taken its own handlers away."""
    done = run(
        """
class Last:
    def __del__(self, kill=os.kill, number=signal.SIGTERM, own=own):
        kill(own, number)

last = Last()
stop.install()
stop.leave()
os.kill(own, signal.SIGTERM)
os.kill(own, signal.SIGUSR1)
stop.uninstall()
os.kill(own, signal.SIGTERM)
sys.exit(75)
""",
        tmp_path,
    )
    assert done.rc == 75, done.stderr


def test_workers_survive_what_all_processes_get(tmp_path: Path) -> None:
    """As Slurm sends signals: to every process of a step."""
    done = run(
        """
stop.install()
pid = worker(seconds=1.5)
time.sleep(0.2)
os.killpg(own, signal.SIGUSR1)
time.sleep(0.2)
os.killpg(own, signal.SIGTERM)
print(ended(pid), stop.received.name)
""",
        tmp_path,
    )
    assert (done.rc, done.stdout) == (0, "7 SIGUSR1\n"), done.stderr


def test_workers_end_when_their_owner_ends_them(tmp_path: Path) -> None:
    """``terminate()`` on one of them, before a signal, and when the owner leaves after one."""
    done = run(
        """
stop.install()
first, second = worker(), worker()
time.sleep(0.2)
os.kill(first, signal.SIGTERM)
print(ended(first), stop.received)
os.killpg(own, signal.SIGTERM)
time.sleep(0.2)
stop.leave()
os.kill(second, signal.SIGTERM)
print(ended(second))
""",
        tmp_path,
    )
    assert (done.rc, done.stdout) == (0, "143 None\n143\n"), done.stderr


def test_workers_ignore_a_signal_for_the_run(tmp_path: Path) -> None:
    done = run(
        """
stop.install()
pid = worker(seconds=0.5)
time.sleep(0.1)
os.kill(pid, signal.SIGUSR1)
print(ended(pid), stop.received)
stop.uninstall()
later = worker()
os.kill(later, signal.SIGUSR1)
print(ended(later))
""",
        tmp_path,
    )
    assert (done.rc, done.stdout) == (0, f"7 None\n{-signal.SIGUSR1}\n"), done.stderr
