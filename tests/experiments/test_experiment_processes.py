"""Commands that run side by side: so many at a time, chains in order, failures apart, ended together."""

import os
import signal
import sys
import threading
import time

import pytest

from smlp.experiments.processes import Chain, Step, run_chains

pytestmark = pytest.mark.timeout(60)
NOTE = "import sys, time; open(sys.argv[1], 'a').write(f'{sys.argv[2]} {time.time()}\\n')"


class Commands(Chain):
    """Python programs one after the other; stops at the first that fails."""

    def __init__(self, folder, name, *programs):
        self.folder, self.name, self.programs, self.results = folder, name, list(programs), []

    def next_step(self, slot):
        if not self.programs or any(result.status for result in self.results):
            return None
        program = self.programs.pop(0)
        command = [sys.executable, "-c", program, str(self.folder / "notes"), self.name]
        return Step("step", command, self.folder / f"{self.name}.txt", {"SLOT": str(slot)})

    def ended(self, result):
        self.results.append(result)


def notes(folder):
    return [line.split()[0] for line in (folder / "notes").read_text().splitlines()]


def test_chains_run_in_order_and_fail_apart(tmp_path):
    good = Commands(tmp_path, "good", NOTE, NOTE)
    bad = Commands(tmp_path, "bad", NOTE, "raise SystemExit(3)", NOTE)
    empty = Commands(tmp_path, "empty")
    last = Commands(tmp_path, "last", NOTE, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run_chains([good, bad, empty, last], jobs=1, watch=lambda: None) is None
    assert notes(tmp_path) == ["good", "good", "bad", "last"]
    assert [result.status for result in bad.results] == [0, 3]
    assert [result.status for result in last.results] == [0, 128 + signal.SIGKILL]
    assert all(result.peak_memory_mib > 1 for result in good.results)


def test_a_clock_that_is_set_changes_no_duration(tmp_path, monkeypatch):
    chain = Commands(tmp_path, "only", NOTE)
    clock = iter([1e9] + [0.0] * 1000)
    monkeypatch.setattr("smlp.experiments.processes.time.time", lambda: next(clock))
    assert run_chains([chain], jobs=1, watch=lambda: None) is None
    assert 0 <= chain.results[0].seconds < 60


def test_so_many_at_a_time_each_in_a_slot_of_its_own(tmp_path):
    wait = NOTE + "; import os; print(os.environ['SLOT']); time.sleep(1.0); " + NOTE[18:]
    chains = [Commands(tmp_path, f"c{number}", wait) for number in range(4)]
    assert run_chains(chains, jobs=2, watch=lambda: None) is None
    events = sorted((float(line.split()[1]), line.split()[0]) for line in (tmp_path / "notes").read_text().splitlines())
    running, together = set(), 0
    for _, name in events:
        running ^= {name}
        together = max(together, len(running))
    assert together == 2
    assert {(tmp_path / f"c{n}.txt").read_text().strip() for n in (0, 1)} == {"0", "1"}


def test_a_signal_meets_a_program_that_has_just_ended(tmp_path):
    """What it was and used is on record all the same."""
    chain = Commands(tmp_path, "short", NOTE, NOTE)

    def watch():
        while not (tmp_path / "notes").is_file():
            time.sleep(0.05)
        time.sleep(1)  # it has ended, and nobody has looked
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_chains([chain], jobs=1, watch=watch) == signal.SIGTERM
    assert [result.status for result in chain.results] == [0] and chain.results[0].is_stopping
    assert notes(tmp_path) == ["short"]


SAVE = (
    "import signal, sys, time\n"
    "def stop(*_):\n    open(sys.argv[1], 'a').write(f'saved {sys.argv[2]}\\n'); sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(50)\n"
)


def test_an_error_here_lets_the_others_save(tmp_path):
    """Such as a full disk while the end of a step is written down."""

    class Unrecorded(Commands):
        def ended(self, result):
            while not (tmp_path / "a.txt").read_text():
                time.sleep(0.05)
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_chains([Commands(tmp_path, "a", SAVE), Unrecorded(tmp_path, "b", "")], jobs=2, watch=lambda: None)
    assert (tmp_path / "notes").read_text() == "saved a\n"


def test_an_error_here_reaches_a_step_that_has_just_begun(tmp_path):
    """One chain goes on, and the next one that is looked at cannot be recorded."""
    short = "import os, sys\nopen(sys.argv[1] + '-pid', 'w').write(str(os.getpid()) + '.')"
    after = (  # ends once the other one has, whatever the machine does
        "import os, sys, time\nname, pid = sys.argv[1] + '-pid', ''\n"
        "while not pid.endswith('.'):\n"
        "    time.sleep(0.05)\n    pid = open(name).read() if os.path.exists(name) else ''\n"
        "stat = f'/proc/{pid[:-1]}/stat'\n"
        "while os.path.exists(stat) and open(stat).read().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.05)\n"
    )

    class Unrecorded(Commands):
        def ended(self, result):
            while not (tmp_path / "a.txt").read_text():
                time.sleep(0.05)
            raise OSError("no space left")

    def watch():
        time.sleep(1)  # both have ended, and nobody has looked

    chains = [Commands(tmp_path, "a", short, SAVE), Unrecorded(tmp_path, "b", after)]
    with pytest.raises(OSError, match="no space left"):
        run_chains(chains, jobs=2, watch=watch)
    assert (tmp_path / "notes").read_text() == "saved a\n"


def test_an_error_while_stopping_does_not_signal_again(tmp_path):
    """A training that is told twice ends at once, and does not save."""
    count = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], 'a').write('told\\n'))\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists(sys.argv[1] + '-raised'): time.sleep(0.05)\ntime.sleep(1)\n"
    )

    class Unrecorded(Commands):
        def ended(self, result):
            (tmp_path / "notes-raised").touch()
            raise OSError("no space left")

    def watch():
        if all((tmp_path / f"{name}.txt").read_text() for name in "ab"):
            os.kill(os.getpid(), signal.SIGTERM)

    wait = "import time; print('ready', flush=True); time.sleep(50)"
    chains = [Commands(tmp_path, "a", count), Unrecorded(tmp_path, "b", wait)]
    with pytest.raises(OSError, match="no space left"):
        run_chains(chains, jobs=2, watch=watch)
    assert (tmp_path / "notes").read_text() == "told\n"


def test_a_signal_stops_all_and_starts_nothing_new(tmp_path):
    chains = [Commands(tmp_path, "a", SAVE, NOTE), Commands(tmp_path, "b", SAVE), Commands(tmp_path, "c", NOTE)]
    timer = threading.Timer(0, lambda: None)

    def watch():
        ready = all((tmp_path / f"{name}.txt").read_text() for name in "ab")
        if ready and not timer.is_alive() and not timer.finished.is_set():
            timer.start()
            os.kill(os.getpid(), signal.SIGTERM)

    start = time.monotonic()
    assert run_chains(chains, jobs=2, watch=watch) == signal.SIGTERM
    assert time.monotonic() - start < 20
    assert sorted((tmp_path / "notes").read_text().splitlines()) == ["saved a", "saved b"]
    assert [chain.results[0].status for chain in chains[:2]] == [75, 75]
    assert chains[2].results == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
