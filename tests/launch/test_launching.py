"""Which rank a process is: torchrun, srun, neither; what fairseq is told; what is refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from running import TINY_LM, run_python
from slurm_variables import ALLOCATION, BATCH_SCRIPT, INTERACTIVE_STEP, LAST_TASK, ONE_TASK

from smlp.errors import UserError
from smlp.fairseq_compat import apply
from smlp.launch.local import free_port
from smlp.launch.ranks import Place, device_index, place_of
from smlp.launch.slurm import expand_counts, expand_hosts, port_of, tasks_of_job

pytestmark = pytest.mark.timeout(120)

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
NO_LOCAL_RANK = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    {
        "localhost": ("localhost",),
        "n[1-3]": ("n1", "n2", "n3"),
        "n[09-11,20],login,x[2]y": ("n09", "n10", "n11", "n20", "login", "x2y"),
        "r[1-2]n[1-2].site.org": ("r1n1.site.org", "r1n2.site.org", "r2n1.site.org", "r2n2.site.org"),
        "node-a[1-2],node-b": ("node-a1", "node-a2", "node-b"),
    }.items(),
)
def test_lists_of_hosts(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[1-3", "n]1", "a,,b", "n[x]", "n[1-]", "n[-2]", "n[3-1]", "n[1-2] n3", f"[{'9' * 5000}]"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"list of hosts .*: start the ranks with torchrun"):
        expand_hosts(text)


def test_numbers_of_tasks() -> None:
    assert expand_counts("4(x2),1,3") == (4, 4, 1, 3)
    for text in ("2x3", "9" * 5000, "0(x2)", "1(x0)"):
        with pytest.raises(UserError, match=re.escape(f"'{text}'")):
            expand_counts(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "n[1-2000][1-2000]", "a,n[1-1048576]"])
def test_a_list_of_hosts_is_bounded(text: str) -> None:
    with pytest.raises(UserError, match="has more than 1,048,576 hosts"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["2(x999999999)", "999999999", "1(x1000000),50000"])
def test_numbers_of_tasks_are_bounded(text: str) -> None:
    with pytest.raises(UserError, match="has more than 1,048,576 tasks"):
        expand_counts(text)


def test_steps_at_the_same_time_have_different_ports() -> None:
    ports = {port_of(job, step) for job in range(100_000, 100_100) for step in range(100)}
    assert len(ports) == 10_000
    assert min(ports) > 1024 and max(ports) < 32768


def test_a_task_of_srun_is_a_rank() -> None:
    place = place_of(LAST_TASK)
    assert (place.rank, place.world_size, place.local_rank, place.local_size, place.node) == (3, 4, 1, 2, 1)
    assert place.init_method == f"tcp://n1:{port_of(71, 0)}"
    assert place_of(LAST_TASK, port=1234).init_method == "tcp://n1:1234"
    assert place_of({**LAST_TASK, "MASTER_ADDR": "ib1", "MASTER_PORT": "5"}).init_method == "tcp://ib1:5"
    for address in ("fe80::1", "[fe80::1]"):
        ours = place_of({**LAST_TASK, "MASTER_ADDR": address, "MASTER_PORT": "5"})
        assert ours.init_method == "tcp://[fe80::1]:5"


@pytest.mark.parametrize("variables", [{}, BATCH_SCRIPT, ONE_TASK, INTERACTIVE_STEP, ALLOCATION])
def test_nobody_waits_for_ranks_that_no_one_started(variables: dict[str, str]) -> None:
    assert place_of(variables) is None


def test_an_interactive_shell_of_several_tasks_is_on_its_own() -> None:
    shell = {**LAST_TASK, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "42439"}
    assert place_of(shell, is_interactive=True) is None
    # srun in that shell: its tasks inherit the variable, but not the terminal
    assert place_of(shell, is_interactive=False).world_size == 4


def test_torchrun_comes_before_srun() -> None:
    place = place_of({**LAST_TASK, **TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (3, 8, 1, 4)
    assert place.init_method == "env://"
    assert place_of({**LAST_TASK, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x', not a number"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE 4"),
        ({**TORCHRUN, "RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({**TORCHRUN, "MASTER_PORT": "0x50"}, "MASTER_PORT is '0x50', not a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000: ports go from 1 to 65,535"),
        ({**TORCHRUN, "MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        ({**LAST_TASK, "MASTER_PORT": "0"}, "MASTER_PORT is 0: ports"),
        ({**LAST_TASK, "MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 and LOCAL_WORLD_SIZE 1: ranks count from 0"),
        ({**NO_LOCAL_RANK, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK is not set and LOCAL_WORLD_SIZE 0"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9+', not a number"),
        ({**LAST_TASK, "SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({**LAST_TASK, "SLURM_PROCID": "9" * 5000}, "SLURM_PROCID is '9+', not a number"),
        ({**LAST_TASK, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, "4 tasks, but SLURM_STEP_TASKS_PER_NODE has 6"),
        ({**LAST_TASK, "SLURM_STEP_NODELIST": "n1"}, "SLURM_STEP_NODELIST 1 hosts"),
        ({**LAST_TASK, "SLURM_PROCID": "7"}, "SLURM_PROCID is 7 and SLURM_LOCALID 1, but there are 4 tasks, 2 of them"),
        ({**LAST_TASK, "SLURM_LOCALID": "2"}, "SLURM_PROCID is 3 and SLURM_LOCALID 2, but there are 4 tasks, 2 of"),
    ],
)
def test_variables_that_contradict_each_other(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place_of(variables)


def test_hosts_of_ranks() -> None:
    tasks = tasks_of_job({**ALLOCATION, "SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "3,1"})
    assert tasks.host_of_ranks() == ["a", "a", "a", "b"]
    cyclic = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "3,1", "SLURM_DISTRIBUTION": "cyclic"}
    assert tasks_of_job({**ALLOCATION, **cyclic}).host_of_ranks() == ["a", "b", "a", "a"]
    assert tasks_of_job({**ALLOCATION, **cyclic, "SLURM_DISTRIBUTION": "plane=2"}).host_of_ranks() == ["?"] * 4
    assert tasks_of_job(ONE_TASK) is None


def test_devices() -> None:
    torchrun = Place("torchrun", 5, 8, 1, 4, "env://")
    srun = Place("srun", 5, 8, 1, 4, "tcp://n1:1")
    assert device_index(torchrun, visible=4) == device_index(srun, visible=4) == 1
    assert device_index(srun, visible=1) == 0  # Slurm binds one to each task
    assert device_index(Place("srun", 5, 8, 3, 4, "tcp://n1:1", has_own_devices=True), visible=2) == 1
    for place, visible in ((torchrun, 1), (torchrun, 3), (srun, 3)):
        with pytest.raises(UserError, match=f"4 ranks on a machine with {visible} visible GPU"):
            device_index(place, visible)
    with pytest.raises(UserError, match="at least 3 ranks on a machine with 2 visible GPUs"):
        device_index(Place("torchrun", 2, 3, 2, None, "env://"), visible=2)
    without = place_of(NO_LOCAL_RANK)
    assert device_index(without, visible=1) == 0
    with pytest.raises(UserError, match="LOCAL_RANK is not set, which tells rank 3 the number of its GPU among the 4"):
        device_index(without, visible=4)


def configuration(cpu: bool = False, path: str | None = None, **changes: Any) -> Any:
    """fairseq's, as far as ranks are concerned."""
    from fairseq.dataclass.configs import DistributedTrainingConfig
    from omegaconf import OmegaConf

    parts = {
        "common": {"cpu": cpu, "tpu": False},
        "common_eval": {"path": path},
        "distributed_training": OmegaConf.merge(OmegaConf.structured(DistributedTrainingConfig), changes),
    }
    return OmegaConf.create(parts)


def settled(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], gpus: int = 0, **changes: Any) -> Any:
    """What becomes of fairseq's settings on a machine with that many GPUs."""
    from smlp.fairseq_compat.processes import settle_ranks

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    # fairseq computes the default when it is imported
    cfg = configuration(**{"distributed_world_size": max(1, gpus), **changes})
    settle_ranks(cfg)
    return cfg.distributed_training


def test_srun_on_cpus(monkeypatch) -> None:
    distributed = settled(monkeypatch, LAST_TASK, distributed_port=777)
    assert (distributed.distributed_rank, distributed.distributed_world_size) == (3, 4)
    assert (distributed.distributed_init_method, distributed.distributed_backend) == ("tcp://n1:777", "gloo")
    assert (distributed.distributed_no_spawn, distributed.device_id) == (True, 0)


def test_srun_on_gpus(monkeypatch) -> None:
    distributed = settled(monkeypatch, LAST_TASK, gpus=2)
    assert (distributed.distributed_rank, distributed.distributed_world_size, distributed.device_id) == (3, 4, 1)
    assert (distributed.distributed_no_spawn, distributed.distributed_backend) == (True, "nccl")
    assert settled(monkeypatch, LAST_TASK, gpus=1).device_id == 0


def test_srun_with_one_task_for_all_gpus_of_a_node(monkeypatch) -> None:
    """As fairseq's own documentation has it: the task spawns a process for each GPU."""
    variables = {**LAST_TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    variables["SLURM_LOCALID"] = "0"
    distributed = settled(monkeypatch, variables, gpus=4)
    assert (distributed.distributed_rank, distributed.distributed_world_size) == (4, 8)
    assert (distributed.distributed_no_spawn, distributed.distributed_num_procs) == (False, 4)
    assert settled(monkeypatch, variables, gpus=4, distributed_no_spawn=True).distributed_world_size == 2


def test_cpu_on_a_machine_with_gpus(monkeypatch) -> None:
    """fairseq's default is as many ranks as there are GPUs, which --cpu does not use."""
    assert settled(monkeypatch, {}, gpus=4, cpu=True).distributed_world_size == 1
    distributed = settled(monkeypatch, TORCHRUN, gpus=2, cpu=True)
    assert (distributed.distributed_world_size, distributed.distributed_backend) == (4, "gloo")


def test_explicit_options_come_first(monkeypatch) -> None:
    given = {"distributed_init_method": "tcp://a:1", "distributed_world_size": 2, "distributed_no_spawn": True}
    distributed = settled(monkeypatch, {**LAST_TASK, **TORCHRUN}, **given)
    assert (distributed.distributed_init_method, distributed.distributed_world_size) == ("tcp://a:1", 2)
    assert distributed.distributed_rank == 0


def test_evaluation_by_srun_stays_one_process_each(monkeypatch) -> None:
    assert settled(monkeypatch, LAST_TASK, path="checkpoint.pt").distributed_init_method is None


@pytest.mark.parametrize(
    ("variables", "gpus", "changes", "message"),
    [
        (LAST_TASK, 0, {"distributed_world_size": 8}, "srun started 4 ranks, but --distributed-world-size says 8"),
        (TORCHRUN, 0, {"distributed_world_size": 8}, "started 4 ranks, but --distributed-world-size says 8"),
        (TORCHRUN, 1, {}, "at least 2 ranks on a machine with 1 visible GPU: .* use CPUs"),
        ({}, 2, {"distributed_world_size": 16}, "16, but 2 GPUs are visible here: .* srun or torchrun"),
        ({}, 0, {"distributed_rank": 1}, "--distributed-rank is 1 and --distributed-world-size 1: ranks count from 0"),
        ({}, 0, {"distributed_world_size": 2}, "2 needs 2 GPUs .* smlp train --nproc 2"),
    ],
)
def test_ranks_that_cannot_be_started(monkeypatch, variables, gpus, changes, message) -> None:
    with pytest.raises(UserError, match=message):
        settled(monkeypatch, variables, gpus, **changes)


def test_a_world_size_that_equals_the_default_counts_if_it_is_typed(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fairseq-train", "--distributed-world-size", "1"])
    with pytest.raises(UserError, match="srun started 4 ranks, but --distributed-world-size says 1"):
        settled(monkeypatch, LAST_TASK)


def test_fairseq_itself_does_not_look_at_slurm(monkeypatch) -> None:
    """In a batch script on a node with two GPUs it spawns two processes, as it does outside of Slurm."""
    apply()
    from fairseq.distributed import utils as distributed_utils

    distributed = settled(monkeypatch, BATCH_SCRIPT, gpus=2)
    distributed_utils.infer_init_method(distributed)
    assert distributed.distributed_init_method.startswith("tcp://localhost:")
    assert (distributed.distributed_world_size, distributed.distributed_num_procs) == (2, 2)


AS_SRUN = """
import os
rank = os.environ.pop("RANK")
for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name)
os.environ.update({variables!r}, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0")
import smlp.models, atexit, torch.distributed
atexit.register(lambda: print("connected at exit:", torch.distributed.is_initialized()))
"""


def test_tasks_of_srun_train_together(tiny_data, tmp_path, run_fairseq_many) -> None:
    """Two processes with Slurm's variables and nothing else, as ``srun fairseq-train`` starts them."""
    plugin = tmp_path / "as_srun"
    plugin.mkdir()
    one_node = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    (plugin / "__init__.py").write_text(AS_SRUN.format(variables={**LAST_TASK, **one_node}))
    port = free_port()
    args = [tiny_data, "--user-dir", plugin, *TINY_LM, "--max-update", "2", "--no-save", "--distributed-port", port]
    batch = {**BATCH_SCRIPT, "SLURM_CONF": ""}
    alone = tmp_path / "in_batch"
    alone.mkdir()
    (alone / "__init__.py").write_text(f"import os\nos.environ.update({batch!r})\nimport smlp.models\n")
    together, single = run_fairseq_many(
        [
            {"tool": "train", "args": args, "ranks": 2},
            {"tool": "train", "args": [tiny_data, "--user-dir", alone, *args[3:]]},
        ]
    )
    assert together.rc == 0, together.stderr
    assert f"distributed init (rank 0): tcp://localhost:{port}" in together.stdout
    assert "training on 2 devices" in together.stdout and "num_updates 2" in together.stdout
    assert together.stdout.count("connected at exit: False") == 2
    assert single.rc == 0, single.stderr
    assert "training on 1 devices" in single.stdout
    assert "one process in a Slurm job of 4 tasks: start it with srun" in single.stdout


def test_a_terminal_is_seen_behind_redirections() -> None:
    """In a shell with a terminal, whatever a command's input and output are; not in a process cut off from it."""
    ask = "from smlp.launch.ranks import has_terminal; import sys; sys.exit(int(has_terminal()))"
    with_terminal = (
        "import os, pty, sys\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0:\n"
        "    for stream in range(3):\n"
        "        os.dup2(os.open(os.devnull, os.O_RDWR), stream)\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', {ask!r}])\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert run_python("-c", with_terminal).rc == 1
    assert run_python("-c", f"import os; os.setsid()\n{ask}").rc == 0
