"""``smlp train --dry-run``: every rank's host, device and experts, and the command, without training."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest
import torch
from slurm_variables import ALLOCATION, BATCH_SCRIPT, LAST_TASK

from smlp.cli import main
from smlp.errors import UserError
from smlp.launch.plan import PlannedRank, rank_table, ranks_from_environment, ranks_here, ranks_of_nodes

pytestmark = pytest.mark.timeout(120)

HERE = socket.gethostname()


def test_the_table_of_a_cluster() -> None:
    table = rank_table(ranks_of_nodes(2, 4, cpu=False), num_experts=16, group_size=4, command="train it")
    assert table.splitlines() == [
        "rank  host   device  experts",
        "   0  node0  cuda:0  0-3",
        "   1  node0  cuda:1  4-7",
        "   2  node0  cuda:2  8-11",
        "   3  node0  cuda:3  12-15",
        "   4  node1  cuda:0  0-3",
        "   5  node1  cuda:1  4-7",
        "   6  node1  cuda:2  8-11",
        "   7  node1  cuda:3  12-15",
        "8 ranks; 16 experts in each sparse layer, 4 on a rank; expert-parallel size 4, 2 copies of each expert",
        "each rank runs: train it",
    ]


def test_a_plan_has_an_end() -> None:
    with pytest.raises(
        UserError, match="--nodes 3 with --gpus-per-node 100000000 are 300,000,000 ranks: at most 65,536"
    ):
        ranks_of_nodes(3, 10**8, cpu=False)
    with pytest.raises(UserError, match="--nproc 100000000 are 100,000,000 ranks: at most 65,536"):
        ranks_here(10**8, 0)
    many = {"MASTER_ADDR": "n1", "MASTER_PORT": "1", "WORLD_SIZE": "100000000", "RANK": "0"}
    with pytest.raises(UserError, match="WORLD_SIZE 100000000 are 100,000,000 ranks: at most 65,536"):
        ranks_from_environment(many, 0, is_interactive=False)


def test_the_default_is_the_largest_group_that_fits() -> None:
    table = rank_table([PlannedRank("a", "cpu")] * 4, num_experts=6, group_size=None, command="")
    assert "expert-parallel size 2, 2 copies" in table and "0-2\n" in table and "3-5\n" in table
    with pytest.raises(UserError, match="an expert-parallel size of 4 must divide both the 4 ranks and the 6 experts"):
        rank_table([PlannedRank("a", "cpu")] * 4, num_experts=6, group_size=4, command="")


def test_a_dense_model_is_whole_on_each_rank() -> None:
    table = rank_table([PlannedRank("a", "cpu")] * 2, num_experts=0, group_size=None, command="")
    assert table.splitlines()[1].split() == ["0", "a", "cpu", "-"]
    assert "2 ranks; no experts: every rank holds the whole model" in table


def test_seats_from_the_environment() -> None:
    def ranks(variables: dict[str, str], num_gpus: int = 0) -> list[str] | None:
        found = ranks_from_environment(variables, num_gpus, is_interactive=False)
        return found and [f"{planned.host} {planned.device}" for planned in found[0]] + [found[1]]

    assert ranks({}) is None
    assert ranks(LAST_TASK, 2) == ["n1 cuda:0", "n1 cuda:1", "n2 cuda:0", "n2 cuda:1", 3]
    assert ranks({**LAST_TASK, "SLURM_DISTRIBUTION": "cyclic"}) == ["n1 cpu", "n2 cpu", "n1 cpu", "n2 cpu", 3]
    # with one GPU bound to each task all of them see it as the first
    assert ranks(LAST_TASK, 1) == ["n1 cuda:0", "n1 cuda:0", "n2 cuda:0", "n2 cuda:0", 3]
    # in a batch script: what srun would start, seen from outside of it
    assert ranks(BATCH_SCRIPT) == ["n1 cpu", "n1 cpu", "n2 cpu", "n2 cpu", 0]
    assert ranks(ALLOCATION) == ["n1 cpu", "n1 cpu", "n1 cpu", 0]
    one_each = {**BATCH_SCRIPT, "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert ranks(one_each, 2) == ["n1 cuda:0", "n1 cuda:1", "n2 cuda:0", "n2 cuda:1", 0]
    torchrun = {"MASTER_ADDR": "n1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert ranks(torchrun, 2) == [f"{HERE} cuda:0", f"{HERE} cuda:1", "node1 cuda:0", "node1 cuda:1", 0]


def test_seats_on_this_machine() -> None:
    assert ranks_here(2, 0) == [PlannedRank(HERE, "cpu")] * 2
    assert ranks_here(2, 2) == [PlannedRank(HERE, "cuda:0"), PlannedRank(HERE, "cuda:1")]


@pytest.fixture
def shown(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def show(*arguments: str, **variables: str) -> list[str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main.main(["train", "--dry-run", "nowhere", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return show


def test_a_plan_for_this_machine(shown) -> None:
    lines = shown("--nproc", "4", "--num-experts", "4", "--expert-parallel-size", "2", "--save-dir", "a b")
    assert [line.split() for line in lines[1:5]] == [
        [str(rank), HERE, "cpu", experts] for rank, experts in enumerate(["0-1", "2-3", "0-1", "2-3"])
    ]
    command = shlex.split(lines[-1].partition(": ")[2])
    assert command[0] == "fairseq-train" and "nowhere" in command and "a b" in command
    assert command[command.index("--arch") + 1] == "smlp_tiny"  # what is not given is spelt out
    assert "--nproc" not in command and "--dry-run" not in command


def test_a_plan_makes_no_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--nproc", "1", "data-bin", "--arch", "smlp_tiny", "--optimizer", "adam", "--batch-size", "1", "--cpu"]
    assert main.main(["train", "--dry-run", *arguments]) == 0
    assert capsys.readouterr().out.endswith(" --distributed-world-size 1\n") and not list(tmp_path.iterdir())


def test_a_plan_for_a_cluster(shown) -> None:
    lines = shown("--arch", "smlp", "--nodes", "4", "--gpus-per-node", "8", "--distributed-world-size", "32", "--fp16")
    assert lines[32].split() == ["31", "node3", "cuda:7", "31"]
    assert "32 ranks; 32 experts in each sparse layer, 1 on a rank" in lines[33]
    assert "no experts" in shown("--arch", "gmlp_lm_tiny", "--nodes", "1", "--gpus-per-node", "2", "--cpu")[-2]


def test_only_the_first_task_prints(shown) -> None:
    assert shown(**LAST_TASK) == []
    assert len(shown(SLURM_PROCID="0")) == 1 + 4 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "4", "--expert-parallel-size", "3"], "an expert-parallel size of 3 must divide both the 4 ranks"),
        (["--nodes=2", "--gpus-per-node=2", "--distributed-world-size=8"], "size 8, but there are 4 ranks"),
        (["--arch", "smlp_tyni"], "did you mean 'smlp_tiny'"),
        (["--nodes", "2"], "must be given together"),
        (["--nproc", "2", "--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded needs GPUs"),
        (["--nodes=2", "--gpus-per-node=2", "--ddp-backend=fully_sharded"], "copies of each other"),
        (["--nproc", "2", "--amp"], "--amp skips updates on single ranks"),
        (["--nproc", "2", "--fp16"], "--fp16 trains on a GPU only"),
        (["--nproc", "2", "--update-freq", "2,0"], "--update-freq must be at least 1, got 0"),
        (["--nodes=2", "--gpus-per-node=2", "--cpu", "--fp16"], "--fp16 trains on a GPU only"),
    ],
)
def test_plans_that_do_not_work_out(monkeypatch, capsys, arguments: list[str], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main.main(["train", "--dry-run", "nowhere", *arguments]) == 1
    assert message in capsys.readouterr().err
