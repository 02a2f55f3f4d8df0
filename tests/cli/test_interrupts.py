"""Ctrl-C in the middle of an import is heard when the import is over."""

import os
import signal
import sys
import threading
import time

import pytest
from running import run_python

from smlp.cli.doctor import Check
from smlp.cli.interrupts import interrupted_after_imports
from smlp.cli.main import main

pytestmark = pytest.mark.usefixtures("sigint_is_heard")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that is interrupted while it is imported, as a library does that swallows what it does not expect."""
    (tmp_path / "interrupted_import.py").write_text(
        "import os, signal, time\n"
        "heard = False\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.2)\n"
        "except KeyboardInterrupt:\n"
        "    heard = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "interrupted_import"
    sys.modules.pop("interrupted_import", None)


def wait_for_interrupt():
    for _ in range(1000):
        time.sleep(0.01)


def test_an_import_is_finished_first(module):
    with pytest.raises(KeyboardInterrupt), interrupted_after_imports():
        imported = __import__(module)
        wait_for_interrupt()
    assert not imported.heard and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_import_it_is_heard_at_once():
    with pytest.raises(KeyboardInterrupt), interrupted_after_imports():
        os.kill(os.getpid(), signal.SIGINT)
        wait_for_interrupt()


def test_a_command_ends_with_the_status_of_an_interrupt(module, monkeypatch):
    monkeypatch.setattr("smlp.cli.user_dir.run", lambda args: __import__(module) and wait_for_interrupt())
    assert main(["user-dir"]) == 130


def test_what_a_library_swallows_is_heard_later(monkeypatch):
    def swallowed():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            wait_for_interrupt()
        except KeyboardInterrupt:
            pass
        yield Check("first", "ok", "")

    monkeypatch.setattr("smlp.cli.doctor.machine_checks", swallowed)
    assert main(["doctor"]) == 130
    monkeypatch.setattr("smlp.cli.doctor.machine_checks", lambda: [Check("first", "ok", "")])
    assert main(["doctor"]) == 0


def test_at_exit_there_is_nothing_left_to_interrupt():
    """A library's exit function is interrupted; its traceback would be all that comes of it."""
    code = (
        "import atexit, os, signal, sys, time\n"
        "from smlp.cli.main import main\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.05), print('done')))\n"
        "sys.exit(main(['user-dir']))\n"
    )
    done = run_python("-c", code)
    assert (done.rc, done.stderr) == (0, "") and done.stdout.endswith("done\n")


def test_other_handlers_and_threads_are_left_alone(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupted_after_imports():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def elsewhere():
        with interrupted_after_imports():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
