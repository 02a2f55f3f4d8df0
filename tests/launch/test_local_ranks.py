"""``smlp train --nproc N``: N ranks on this machine that start together and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launched import finish, is_running, make_plugin, start, wait_for
from running import HELPERS, TINY_LM, Finished, as_user, run_python
from slurm_variables import LAST_TASK

from smlp.cli.main import main
from smlp.cli.train import check_nproc, read_launch_options
from smlp.errors import UserError
from smlp.fairseq_compat import startup
from smlp.launch import local, machine
from smlp.launch.stop_signals import EXIT_STOPPED

pytestmark = pytest.mark.timeout(120)

# What a small program for the ranks starts with.
RANK = """
import os, signal, subprocess, sys, time
rank, here = int(os.environ["RANK"]), os.path.dirname(sys.argv[0])

def note(text, name=None):
    with open(os.path.join(here, name or f"rank{rank}"), "a") as file:
        file.write(text)

def meet(ranks):
    "Waits until all ranks are here."
    note("x", "met")
    while os.path.getsize(os.path.join(here, "met")) < ranks:
        time.sleep(0.01)
"""


def launch(folder: Path, num_ranks: int, script: str, options: str = "", **variables: str) -> subprocess.Popen[str]:
    """The launcher by itself, with a program that does not take seconds to start."""
    (folder / "rank.py").write_text(RANK + script)
    launcher = (
        "import signal, sys; from smlp.launch.local import run_ranks; "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # the tests may run under nohup
        f"sys.exit(run_ranks([sys.executable, sys.argv[1]], {num_ranks}, {options}))"
    )
    return start("-c", launcher, folder / "rank.py", **variables)


def test_what_ranks_get_and_what_they_print(tmp_path: Path) -> None:
    script = """
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
sys.stdout.write(" ".join([str(rank), *(os.environ[name] for name in names)]) + "\\n")
print("warning", end="", file=sys.stderr)
note(os.environ["MASTER_PORT"], "ports")
"""
    done = finish(launch(tmp_path, 3, script, OMP_NUM_THREADS="5"))
    assert done.rc == 0
    lines = ["0 3 0 3 127.0.0.1 5", "[rank 1] 1 3 1 3 127.0.0.1 5", "[rank 2] 2 3 2 3 127.0.0.1 5"]
    assert sorted(done.stdout.splitlines()) == sorted(lines)
    assert "[rank 1] warning\n" in done.stderr and "[rank 2] warning\n" in done.stderr
    assert done.stderr.count("warning") == 3
    ports = (tmp_path / "ports").read_text()
    assert ports == ports[: len(ports) // 3] * 3


def test_a_full_disk_does_not_stop_the_ranks(tmp_path: Path) -> None:
    """Their lines are lost, but the pipe is emptied: otherwise they would wait for ever."""
    (tmp_path / "rank.py").write_text(RANK + "\nif rank: print('x' * 500_000)\n")
    launcher = (
        "import sys; from smlp.launch.local import run_ranks; sys.exit(run_ranks([sys.executable, sys.argv[1]], 2))"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", launcher, str(tmp_path / "rank.py")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=as_user(), text=True, timeout=60)
    assert "Traceback" not in done.stderr


def test_threads_share_the_cores(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "num_cores", lambda: 8)
    assert local.rank_environment(3)["OMP_NUM_THREADS"] == "2"
    assert local.rank_environment(16)["OMP_NUM_THREADS"] == "1"


def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path) -> None:
    """cgroups of version 2, of version 1, and with a name that only the host knows; the strictest limit counts."""
    membership, cgroups = tmp_path / "cgroup", tmp_path / "fs"
    (cgroups / "outer" / "inner").mkdir(parents=True)
    membership.write_text("0::/outer/inner\n")
    assert machine.cpu_quota(cgroups, membership) >= 2**31
    (cgroups / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(cgroups, membership) >= 2**31
    (cgroups / "outer" / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(cgroups, membership) == 1.5
    named = membership.read_bytes()
    membership.write_bytes(b"no name\n1:name=\xff\x0b:/\xfe\n" + named)  # which Linux allows
    assert machine.cpu_quota(cgroups, membership) == 1.5
    membership.write_bytes(named)
    (cgroups / "cpu").mkdir()
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n")
    assert machine.cpu_quota(cgroups, membership) == 3.0
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.cpu_quota(cgroups, membership) >= 2**31
    assert machine.cpu_quota(cgroups, tmp_path / "none") >= 2**31


def test_threads_beyond_the_quota_are_left_out(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    assert machine.num_cores() == 1
    taken = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    startup.limit_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # the user's own setting wins
    startup.limit_threads()
    assert taken == [1]


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
@pytest.mark.parametrize("is_busy", [False, True])
def test_beside_busy_programs_waiting_threads_sleep(given: dict[str, str], is_busy: bool, monkeypatch) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(machine, "others_running", lambda: int(is_busy))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert main(["user-dir"]) == 0
    expected = {"GOMP_SPINCOUNT": str(machine.SPIN_COUNT)} if is_busy and not given else given
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


@pytest.mark.parametrize(
    ("load", "others"), [("0.5 0.5 0.5 1/300 77", 0), ("9 9 9 4/300 77", 3), ("9 9", 0), ("9 9 9 x/3 7", 0), (None, 0)]
)
def test_threads_of_others_are_counted(load: str | None, others: int, tmp_path: Path) -> None:
    if load is not None:
        (tmp_path / "loadavg").write_text(load)
    assert machine.others_running(tmp_path / "loadavg") == others


def test_the_command_sets_its_threads_before_torch_is_imported() -> None:
    code = "import sys; import smlp.cli.main; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).rc == 0


def test_a_rank_that_fails_ends_the_others_and_gives_the_status(tmp_path: Path) -> None:
    """Rank 0 says its last words within the grace, rank 2 needs SIGTERM, rank 3 SIGKILL."""
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 3 else signal.SIG_DFL)
meet(4)
if rank == 1:
    sys.exit(3)
if rank == 0:
    time.sleep(0.3)
    print("last words")
    sys.exit(4)
time.sleep(60)
"""
    began = time.monotonic()
    done = finish(launch(tmp_path, 4, script, "grace=1.0, termination=1.0"))
    assert 2 < time.monotonic() - began < 50
    assert (done.rc, done.stdout) == (3, "last words\n")
    assert done.stderr == "smlp: rank 1 of 4 ended first, with exit status 3\n"


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    script = "meet(3)\nif rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    done = finish(launch(tmp_path, 3, script, "grace=0.2"))
    assert (done.rc, done.stderr) == (137, "smlp: rank 2 of 3 ended first, killed by SIGKILL\n")


def test_a_rank_that_ends_before_the_others_is_named(tmp_path: Path) -> None:
    """It ended well, as if it had come to its end; what failed is the one that missed it."""
    script = """
if rank == 1:
    sys.exit(0)
time.sleep(0.5)
sys.exit(3)
"""
    done = finish(launch(tmp_path, 2, script))
    first = "rank 1 of 2 ended first, with exit status 0"
    assert (done.rc, done.stderr) == (3, f"smlp: {first}; rank 0 then failed, with exit status 3\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells from /proc")
def test_a_frozen_rank_is_named(tmp_path: Path) -> None:
    script = """
if rank == 1:
    note("x", "met")
    os.kill(os.getpid(), signal.SIGSTOP)
meet(1)
time.sleep(0.5)
sys.exit(3)
"""
    done = finish(launch(tmp_path, 2, script, "grace=0.2, termination=0.2"))
    frozen = "rank 1 was suspended by a signal such as SIGSTOP"
    assert (done.rc, done.stderr) == (3, f"smlp: rank 0 of 2 ended first, with exit status 3; {frozen}\n")


def test_a_rank_that_does_not_end_with_the_others(tmp_path: Path) -> None:
    """With a limit, which is --heartbeat-timeout."""
    script = "if rank == 1:\n    time.sleep(60)\n"
    done = finish(launch(tmp_path, 2, script, "termination=0.2, patience=0.5"))
    said = "smlp: rank 0 of 2 ended first, with exit status 0; rank 1 had not ended 0.5 seconds later\n"
    assert (done.rc, done.stderr) == (143, said)


def test_stopped_ranks_may_take_their_time(tmp_path: Path) -> None:
    """Status 75 is no failure: nobody is hurried, and it is the status of all."""
    script = "if rank == 0:\n    time.sleep(1.0)\n    print('saved')\nsys.exit(75)\n"
    done = finish(launch(tmp_path, 2, script, "grace=0.1, termination=0.1"))
    assert (done.rc, done.stdout, done.stderr) == (75, "saved\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_reach_all_ranks_once(tmp_path: Path, number: signal.Signals) -> None:
    """Where the launcher's process group gets them too, as by a shell."""
    script = f"""
signal.signal({number}, lambda *_: note("signal "))
note("ready ")
time.sleep(0.5)
while "signal" not in open(os.path.join(here, f"rank{{rank}}")).read():
    time.sleep(0.05)
time.sleep(0.3)
sys.exit(75)
"""
    launcher = launch(tmp_path, 2, script)
    for rank in range(2):
        wait_for(tmp_path / f"rank{rank}")
    os.killpg(launcher.pid, number)
    assert finish(launcher).rc == 75
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["ready signal "] * 2


def test_interrupted_ranks_end_without_a_report(tmp_path: Path) -> None:
    script = "note('x')\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    launcher = launch(tmp_path, 2, script)
    for rank in range(2):
        wait_for(tmp_path / f"rank{rank}")
    time.sleep(0.1)
    os.killpg(launcher.pid, signal.SIGINT)
    done = finish(launcher)
    assert (done.rc, done.stderr) == (130, "")


def wait_for_the_end(pids: list[int]) -> None:
    limit = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < limit, pids
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel's help is Linux's")
def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    launcher = launch(tmp_path, 2, "note(str(os.getpid()))\ntime.sleep(60)\n")
    pids = [int(wait_for(tmp_path / f"rank{rank}")) for rank in range(2)]
    launcher.kill()
    launcher.communicate(timeout=10)
    wait_for_the_end(pids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel's help is Linux's")
def test_no_step_outlives_the_command_that_a_signal_ends(tmp_path: Path) -> None:
    """Such as the data of an experiment that are being made."""
    log = tmp_path / "step.log"
    step = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
    program = (
        f"import pathlib; from smlp.launch.local import run_logged; run_logged('x', {step}, pathlib.Path({str(log)!r}))"
    )
    run = start("-c", program)
    pid = int(wait_for(log))
    run.terminate()
    run.communicate(timeout=10)
    wait_for_the_end([pid])


def test_peers_of_a_killed_rank_may_be_noticed_first(monkeypatch) -> None:
    """But ends long after the first failure are no cause of it."""
    now = [100.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    for seconds, status, first in ((0.5, 137, "rank 1 of 3 ended first, killed by SIGKILL"), (2.0, 1, "rank 2 of 3")):
        ranks = local._LocalRanks(["true"], 3, 10.0, 5.0, None)
        for rank, code in ((2, 1), (1, -9)):
            ranks.events.put((rank, code))
            ranks.handle_next_event()
            now[0] += seconds
        assert ranks.status() == status and ranks.report().startswith(first)


def test_of_two_killed_ranks_the_first_is_named() -> None:
    ranks = local._LocalRanks(["true"], 3, 10.0, 5.0, None)
    for rank in (0, 1):
        ranks.events.put((rank, -9))
        ranks.handle_next_event()
    assert ranks.report() == "rank 0 of 3 ended first, killed by SIGKILL"


def test_what_ranks_leave_behind_is_ended(tmp_path: Path) -> None:
    """Such as the data loaders of a rank that was killed."""
    script = "child = subprocess.Popen(['sleep', '60'])\nnote(str(child.pid))\n"
    began = time.monotonic()
    assert finish(launch(tmp_path, 2, script)).rc == 0
    assert time.monotonic() - began < 50
    wait_for_the_end([int(wait_for(tmp_path / f"rank{rank}")) for rank in range(2)])


def test_options_are_taken_out_of_the_command_line() -> None:
    options = read_launch_options(["data", "--nproc", "4", "--arch", "smlp", "--dry-run", "--nproc=2"])
    assert (options.nproc, options.dry_run, options.rest) == (2, True, ["data", "--arch", "smlp"])
    options = read_launch_options(["--dry-run", "--nodes=3", "data", "--gpus-per-node", "8"])
    assert (options.nodes, options.gpus_per_node, options.nproc, options.rest) == (3, 8, None, ["data"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc needs a number of at least 1, not '0'"),
        (["--nproc", "9" * 5000], "--nproc needs a number of at most 18 digits, not '9999"),
        (["--nproc=two"], "--nproc needs a number of at least 1, not 'two'"),
        (["data", "--nproc"], "--nproc needs a number"),
        (["--nodes", "2", "--gpus-per-node", "8"], "--dry-run"),
        (["--nodes", "2", "--dry-run"], "--nodes and --gpus-per-node must be given together"),
        (["--nodes", "2", "--gpus-per-node", "8", "--dry-run", "--nproc", "2"], "give one of the two"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_launch_options(arguments)


@pytest.mark.parametrize(
    ("rest", "variables", "message"),
    [
        ([], LAST_TASK, "--nproc 3, but srun started 4 ranks already"),
        (["--distributed-init-method", "tcp://a:1"], {}, "leave --distributed-init-method out"),
        (["--distributed-world-size", "2"], {}, "--nproc 3 and --distributed-world-size 2 contradict"),
        ([], {}, "--nproc 3 on a machine with 2 visible GPUs: give --nproc 2, or --cpu"),
    ],
)
def test_ranks_that_cannot_be_started_here(monkeypatch, rest, variables, message) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=message):
        check_nproc(read_launch_options(["--nproc", "3", *rest]))
    if not variables and not rest:
        check_nproc(read_launch_options(["--nproc", "3", "--cpu"]))


def test_one_rank_is_one_also_on_a_machine_with_more_gpus(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    trained: list[list[str]] = []
    monkeypatch.setattr("smlp.cli.train.train", lambda words: trained.append(words) or 0)
    assert main(["train", "--nproc", "1", "data"]) == main(["train", "data"]) == 0
    assert trained == [["data", "--distributed-world-size", "1"], ["data"]]
    for name, value in LAST_TASK.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--nproc", "1", "data"]) == 1
    assert "--nproc 1, but srun started 4 ranks already" in capsys.readouterr().err
    assert len(trained) == 2


FAULT = """
def fault():
    {fault}

before(Trainer, "train_step", lambda self: RANK == {rank} and self.get_num_updates() == 2, fault)
"""
# On a machine with two GPUs, to which two processes are spawned. Forked ones, which need no seconds to start.
SPAWN = """
import torch, torch.multiprocessing
cuda, real = torch.cuda, (torch.cuda.is_available, torch.cuda.device_count)

def without_gpus():
    cuda.is_available, cuda.device_count = real

cuda.is_available, cuda.device_count = (lambda: True), (lambda: 2)
os.register_at_fork(after_in_child=without_gpus)
torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
before(Trainer, "train_step",
       lambda self: self.data_parallel_rank == 1 and self.get_num_updates() == 2,
       lambda: os.kill(os.getppid(), signal.SIGUSR1))
"""
FAULTS = {
    "killed": FAULT.format(rank=1, fault="os.kill(os.getpid(), signal.SIGKILL)"),
    "raises": FAULT.format(rank=1, fault="raise ValueError('a fault of its own')"),
    "signalled": FAULT.format(rank=1, fault="print('hello', flush=True); os.kill(os.getppid(), signal.SIGTERM)"),
    "spawned": SPAWN,
}
OPTIONS = {
    "killed": ["--nproc", "3", "--cpu", "--no-save"],
    "raises": ["--nproc=3", "--cpu", "--no-save"],
    "signalled": ["--nproc", "2", "--cpu"],
    "spawned": ["--distributed-world-size", "2", "--distributed-backend", "gloo"],
}


@pytest.fixture(scope="module")
def faulty(tiny_data, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Runs of several ranks, all at the same time, to which something happens at the third update."""
    root = tmp_path_factory.mktemp("faulty")
    cases = {}
    for name, body in FAULTS.items():
        plugin = make_plugin(root / name / f"plugin_{name}", body)
        options = [tiny_data, "--user-dir", plugin, *TINY_LM, *OPTIONS[name], "--max-update", "4000"]
        options += ["--save-dir", root / name / "checkpoints"]
        cases[name] = {"args": ["train", *map(str, options)], "folder": str(root / name)}
    done = run_python(str(HELPERS / "launcher_forks.py"), stdin=json.dumps(cases), timeout=110)
    assert done.rc == 0, done.stderr
    return {
        name: Finished(status, *[(root / name / stream).read_text() for stream in ("out", "err")])
        for name, status in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize(
    ("name", "status", "how"), [("killed", 137, "killed by SIGKILL"), ("raises", 1, "with exit status 1")]
)
def test_a_rank_that_fails_in_training_ends_all(faulty, name: str, status: int, how: str) -> None:
    """All of them have ended, within the time that the fixture allows and before the 4000th update."""
    done = faulty[name]
    assert done.rc == status, done.stderr
    assert done.stderr.splitlines()[-1] == f"smlp: rank 1 of 3 ended first, {how}"
    assert "loss=" in done.stdout
    assert ("ValueError: a fault of its own" in done.stderr) == (name == "raises")


def test_fairseq_spawns_one_process_for_each_gpu(faulty) -> None:
    """As stock fairseq-train does on a machine with GPUs: a signal to it stops all of them, with its exit status."""
    done = faulty["spawned"]
    assert done.rc == EXIT_STOPPED, done.stderr
    assert "training on 2 devices" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "| stopped by" in line]
    assert "checkpoint_last.pt; the same command resumes from it" in line


def test_a_signal_to_the_launcher_stops_all_ranks(faulty) -> None:
    """They train together until then, and say how to go on."""
    done = faulty["signalled"]
    assert done.rc == EXIT_STOPPED, done.stderr
    assert "training on 2 devices" in done.stdout
    assert "[rank 1] hello" in done.stdout.splitlines()
    (line,) = [line for line in done.stdout.splitlines() if "| stopped by" in line]
    assert "checkpoint_last.pt; the same command resumes from it" in line
    assert not [line for line in done.stderr.splitlines() if "Error" in line or "ended first" in line]
