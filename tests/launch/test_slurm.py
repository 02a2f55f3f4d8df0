"""Training on a real Slurm: several nodes, pre-emption, other numbers of nodes, failures, and what docs/slurm.md shows.

Run by ``scripts/test.sh --slurm``; not a part of the default suite.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import make_plugin
from layouts import ADAM, SIZES, SPARSE, UPDATES, same, saved
from running import REPOSITORY, USER_DIR
from slurm_cluster import missing, running_cluster
from slurm_jobs import SUBMIT, Jobs, programs_first
from zeroshot_data import write_tasks

from smlp.cli.main import main

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

MODEL = ["--arch", "smlp_tiny", *SPARSE, *SIZES, *ADAM, "--log-format", "simple"]
TRAIN_LOSS = re.compile(r"epoch \d+: +\d+ / \d+ (loss=[\d.]+),.* num_updates=(\d+)")
EVALUATED = re.compile(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)")
# Waits for Slurm's signal before the fourth update; in the first start of a job only.
UNTIL_SIGNALLED = """
import time
from pathlib import Path
from smlp.fairseq_compat import stopping

def wait():
    if os.environ["SLURM_PROCID"] == "0":
        name = "waiting" + os.environ.get("SLURM_ARRAY_TASK_ID", "")
        Path(os.environ["SLURM_SUBMIT_DIR"], "slurm-logs", name).touch()
    limit = time.monotonic() + 60
    while stopping.stop_signals.received is None and time.monotonic() < limit:
        time.sleep(0.05)

first = "SLURM_RESTART_COUNT" not in os.environ
before(Trainer, "train_step", lambda self: first and self.get_num_updates() == 3, wait)
"""
FAILS = """
from pathlib import Path

def fail():
    Path(os.environ["SLURM_SUBMIT_DIR"], "slurm-logs", "failing").touch()
    {how}

before(Trainer, "train_step", lambda self: os.environ["SLURM_PROCID"] == "1" and self.get_num_updates() == 2, fail)
"""


@pytest.fixture(scope="module")
def jobs(tiny_data, tmp_path_factory) -> Iterator[Jobs]:
    """A cluster of four nodes, and a folder as a user has it: the clone's folders and data-bin/."""
    reason = missing()
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    folder = tmp_path_factory.mktemp("user")
    for name in ("smlp", "examples", "scripts"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "data-bin").symlink_to(tiny_data)
    environment = {**programs_first(dict(os.environ), Path(sys.executable).parent), "CUDA_VISIBLE_DEVICES": ""}
    with running_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=4, cpus=4, environment=environment) as cluster:
        yield Jobs(cluster, folder)


@pytest.fixture(scope="module")
def local(tiny_data, tmp_path_factory, run_fairseq_many) -> dict[int, tuple[dict, list]]:
    """By number of updates: what one process saves, and its losses as logged."""
    results = {}
    for updates in (UPDATES, 2 * UPDATES):
        folder = tmp_path_factory.mktemp(f"local{updates}")
        args = [tiny_data, "--user-dir", USER_DIR, *MODEL, "--update-freq", 4, "--save-dir", folder]
        (run,) = run_fairseq_many([{"tool": "train", "args": [*args, "--max-update", updates]}])
        assert run.rc == 0, run.stderr
        results[updates] = saved(folder), losses(run.stdout)
        assert len(results[updates][1]) == updates
    return results


@pytest.fixture(scope="module")
def two_nodes(jobs) -> Path:
    """Save-dir of a job of two nodes with a rank each, that was never stopped."""
    number = jobs.submit(nodes(2, 1), *model(2), "--save-dir", "runs/two")
    jobs.trained(number)
    (jobs.folder / "runs" / "two.log").write_text(jobs.log(number, 0))
    return jobs.folder / "runs" / "two"


@pytest.fixture(scope="module")
def four_tasks(jobs) -> Path:
    """Save-dir of four ranks on two nodes, started by the page's ``srun`` and nothing else, never stopped."""
    done = jobs.run(
        "bash", "-ec", " ".join(map(str, [shown("fairseq-train").rstrip(), *MODEL, "--save-dir runs/four"]))
    )
    assert done.rc == 0, done.stderr
    (jobs.folder / "runs" / "four.log").write_text(done.stdout)
    return jobs.folder / "runs" / "four"


def nodes(number: int, tasks: int) -> list[str]:
    return [f"--nodes={number}", f"--ntasks-per-node={tasks}"]


def model(ranks: int, updates: int = UPDATES) -> list:
    """Arguments of ``smlp train`` for the same updates on any number of ranks."""
    return ["data-bin", *MODEL, "--update-freq", 4 // ranks, "--max-update", updates]


def losses(log: str) -> list[tuple[str, str]]:
    """Loss and number of each logged update."""
    return TRAIN_LOSS.findall(log)


def equal(folder: Path, want: dict, tolerance: float) -> None:
    got = saved(folder)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        same(got[name], tensor, name, tolerance)


def test_two_nodes_train_what_one_process_does(two_nodes, local):
    log = two_nodes.with_suffix(".log").read_text()
    assert "training on 2 devices" in log
    assert losses(log) == local[UPDATES][1]
    assert len(list(two_nodes.glob("experts/*/*.pt"))) == 2
    equal(two_nodes, local[UPDATES][0], 1e-5)


def test_four_nodes_go_on_from_two(jobs, two_nodes, local):
    save_dir = jobs.folder / "runs" / "grown"
    jobs.run("cp", "-r", two_nodes, save_dir)
    number = jobs.sbatch(nodes(4, 1), *model(4, 2 * UPDATES), "--save-dir", save_dir)
    jobs.trained(number)
    assert "training on 4 devices" in jobs.log(number, 0)
    assert losses(jobs.log(number, 0)) == local[2 * UPDATES][1][UPDATES:]
    equal(save_dir, local[2 * UPDATES][0], 1e-5)


def test_plain_srun_trains_one_model_on_four_ranks(four_tasks, local):
    log = four_tasks.with_suffix(".log").read_text()
    assert "training on 4 devices" in log and log.count("done training") == 1
    assert losses(log) == local[UPDATES][1]
    equal(four_tasks, local[UPDATES][0], 1e-5)


def preempted(jobs: Jobs, start, name: str, size: tuple[int, int], take_away) -> tuple[str, Path]:
    """Starts a run that waits in the middle, has it stopped there, and lets it train to its end."""
    plugin = make_plugin(jobs.folder / "plugins" / name, UNTIL_SIGNALLED)
    save_dir, logs = jobs.folder / "runs" / name, jobs.folder / "slurm-logs"
    waiting = logs / "waiting"
    ranks = size[0] * size[1]
    number = start(nodes(*size), *model(ranks), "--user-dir", plugin, "--save-dir", save_dir)
    jobs.wait_until(number, waiting.exists)
    waiting.unlink()
    take_away(number)
    jobs.wait_until(number, lambda: jobs.look(number).restarts == 1, 90)
    job = jobs.trained(number)
    assert job.restarts == 1
    assert f"{number} | training stopped; the job returns to the queue" in jobs.log(number)
    return number, save_dir


def test_a_job_that_is_told_to_stop_goes_on_by_itself(jobs, four_tasks, local):
    """SIGUSR1, as before the time limit."""
    number, save_dir = preempted(
        jobs, jobs.submit, "signalled", (2, 2), lambda number: jobs.run("scancel", "--signal=USR1", number, timeout=20)
    )
    log = jobs.log(number, 0)
    assert "stopped by SIGUSR1 after update 4" in log and log.count("training on 4 devices") == 2
    assert losses(log) == local[UPDATES][1]
    equal(save_dir, saved(four_tasks), 0)


def test_each_task_of_an_array_goes_on_by_itself(jobs):
    """The one that starts last has the number of the array as its own, which stands for all of them."""
    plugin = make_plugin(jobs.folder / "plugins" / "tasks", UNTIL_SIGNALLED)
    (jobs.folder / "tasks.txt").write_text("a --seed 1\nb --seed 2\n")
    size = [*nodes(1, 1), "--unchecked", "--sweep", "tasks.txt"]
    data, *options = model(1)
    array = jobs.submit(size, data, jobs.folder / "runs" / "tasks", *options, "--user-dir", plugin)
    numbers = [f"{array}_{run}" for run in (1, 2)]
    for run, number in enumerate(numbers, 1):
        jobs.wait_until(number, (jobs.folder / "slurm-logs" / f"waiting{run}").exists)
    jobs.run("scancel", "--signal=USR1", *numbers, timeout=20)
    for number in numbers:
        jobs.wait_until(number, lambda number=number: jobs.look(number).restarts == 1, 90)
    assert [jobs.trained(number).restarts for number in numbers] == [1, 1]


def test_a_job_that_is_preempted_goes_on_by_itself(jobs, two_nodes, local):
    """By a job of a partition that comes first."""

    def take_away(number: str) -> None:
        taken = jobs.look(number).nodes
        done = jobs.run("srun", "--partition=urgent", "--exclusive", f"--nodelist={taken}", "true", timeout=90)
        assert done.rc == 0, done.stderr

    number, save_dir = preempted(jobs, jobs.sbatch, "preempted", (2, 1), take_away)
    assert "stopped by SIGTERM after update 4" in jobs.log(number, 0)
    assert losses(jobs.log(number, 0)) == local[UPDATES][1]
    equal(save_dir, saved(two_nodes), 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise RuntimeError('out of luck')", "out of luck"), ("os.kill(os.getpid(), signal.SIGKILL)", "Killed")],
    ids=["raises", "dies"],
)
def test_a_rank_that_fails_ends_the_job(jobs, how, message):
    name = "raises" if "raise" in how else "dies"
    plugin = make_plugin(jobs.folder / "plugins" / name, FAILS.format(how=how))
    failing = jobs.folder / "slurm-logs" / "failing"
    number = jobs.sbatch(nodes(2, 1), *model(2), "--user-dir", plugin, "--save-dir", f"runs/{name}")
    jobs.wait_until(number, failing.exists)
    job = jobs.end_of(number, 30)
    assert time.time() - failing.stat().st_mtime < 30
    failing.unlink()
    assert (job.state, job.restarts) == ("FAILED", 0) and job.exit_status != 0
    assert message in jobs.log(number, 1)
    assert "task 1" in jobs.log(number) and "failed with exit status" in jobs.log(number)


def test_a_cancelled_job_saves_and_stays_away(jobs):
    plugin = make_plugin(jobs.folder / "plugins" / "cancelled", UNTIL_SIGNALLED)
    waiting = jobs.folder / "slurm-logs" / "waiting"
    number = jobs.sbatch(nodes(1, 1), *model(1), "--user-dir", plugin, "--save-dir", "runs/cancelled")
    jobs.wait_until(number, waiting.exists)
    waiting.unlink()
    jobs.run("scancel", number, timeout=20)
    job = jobs.end_of(number, 40)
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    jobs.wait_until(number, lambda: "so this script does not requeue it" in jobs.log(number), 30)
    assert "stopped by SIGTERM after update 4" in jobs.log(number, 0)
    assert (jobs.folder / "runs" / "cancelled" / "checkpoint_last.pt").exists()


def test_a_job_that_is_stopped_before_its_first_update_begins_anew(jobs):
    number = jobs.sbatch(nodes(1, 1), *model(1), "--save-dir", "runs/early")
    jobs.wait_until(number, (jobs.folder / "slurm-logs" / number / "rank-0.log").exists)
    jobs.run("scancel", "--signal=USR1", number, timeout=20)
    jobs.wait_until(number, lambda: jobs.look(number).restarts == 1, 60)
    assert "num_updates" not in jobs.log(number, 0) and "returns to the queue" in jobs.log(number)
    jobs.run("scancel", number, timeout=20)


def test_every_task_has_its_gpus(jobs, tmp_path):
    """The nodes have some in name; here ``smlp`` only prints what it gets."""
    (tmp_path / "smlp").write_text(
        '#!/bin/bash\necho "task $SLURM_PROCID: $SLURM_GPUS_ON_NODE of $SLURM_JOB_NODELIST"\n'
    )
    (tmp_path / "smlp").chmod(0o755)
    path = f"PATH={tmp_path}:{jobs.cluster.environment['PATH']}"
    sizes = ["--nodes", 2, "--gpus-per-node", 4, "--cpus-per-task=1"]
    done = jobs.run("env", path, "bash", SUBMIT, *sizes, "--", "data-bin", "--save-dir", "runs/gpus")
    assert done.rc == 0, done.stderr
    number = re.match(r"job (\d+): 8 ranks", done.stdout)[1]
    jobs.trained(number)
    for rank in range(8):
        assert jobs.log(number, rank).startswith(f"task {rank}: 4 of ")


# --- docs/slurm.md

MARK = "<!-- run by tests/launch/test_slurm.py -->\n"
PAGE = (REPOSITORY / "docs" / "slurm.md").read_text(encoding="utf-8")
SHOWN = re.findall(re.escape(MARK) + r"```bash\n(.*?)```", PAGE, re.S)
SMALL = " ".join(map(str, [*SPARSE, *SIZES[:12], "--required-batch-size-multiple", 1, "--disable-validation"]))
# This cluster is smaller than that of the page, has no GPUs, and nobody waits for 25,000 updates.
HERE = {
    "--nodes 4 --gpus-per-node 8 --sweep scripts/slurm/sweep.txt": "--nodes 1 --tasks-per-node 1 --sweep list.txt",
    "--nodes 4 --gpus-per-node 8": "--nodes 2 --tasks-per-node 1",
    "--nodes 8 --gpus-per-node 4": "--nodes 1 --tasks-per-node 1",
    "--nodes=4 --ntasks-per-node=8 --gres=gpu:8 \\\n": "--nodes=2 --ntasks-per-node=1 ",
    "--ntasks-per-node=8 --gres=gpu:8 smlp": "--ntasks-per-node=1 smlp",
    "--ntasks-per-node=8 --gres=gpu:8": "--ntasks-per-node=2",
    "--gres=gpu:8": "",
    "--gres=gpu:1": "",
    "--max-update 1000": "--max-update 2",
    "--bf16": f"{SMALL} --num-workers 0 --max-update 2",
}


def shown(word: str) -> str:
    """The command of the page with this word in it, as it is run here."""
    (command,) = [text for text in SHOWN if word in text]
    for old, new in HERE.items():
        command = command.replace(old, new)
    return command


def test_every_marked_command_is_known():
    words = ["doctor", "--dry-run", "--time=24:00:00", "--nodes 8", "--sweep", "eval-lm", "zeroshot", "fairseq-train"]
    assert [shown(word) for word in words] == [shown(text) for text in SHOWN]


def test_the_page_on_the_nodes(jobs):
    done = jobs.run("bash", "-ec", shown("doctor"))
    assert done.rc == 0 and len(re.findall(r"checks, \d+ warnings?, 0 problems", done.stdout)) == 3, done.stdout
    assert "ranks: 2 on" in done.stdout and len(re.findall(r"^127\.\S+ +smlp", done.stdout, re.M)) == 4, done.stdout


def test_the_page_from_the_plan_to_the_evaluation(jobs, tiny_data, run_fairseq_many):
    done = jobs.run("bash", "-ec", shown("--dry-run"))
    assert done.rc == 0, done.stderr
    assert re.search(r"^ *1 +node1 +cpu +2-3$", done.stdout, re.M) and "--update-freq 64" in done.stdout
    assert not (jobs.folder / "runs" / "smlp").exists() and not jobs.cluster.command("squeue", "-h")

    for command, ranks in ((shown("--time=24:00:00"), 2), (shown("--nodes 8").replace("-update 2", "-update 4"), 1)):
        done = jobs.run("bash", "-ec", command)
        assert done.rc == 0, done.stderr
        number = re.match(rf"job (\d+): {ranks} ranks", done.stdout)[1]
        jobs.trained(number)
        assert f"--update-freq {128 // ranks}" in jobs.log(number)
    assert "num_updates 4 |" in jobs.log(number, 0) and "@ 2 updates" in jobs.log(number, 0)

    done = jobs.run("bash", "-ec", shown("eval-lm"))
    assert done.rc == 0, done.stderr
    checkpoint = jobs.folder / "runs" / "smlp" / "checkpoint_last.pt"
    args = [tiny_data, "--user-dir", USER_DIR, "--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", 16]
    (here,) = run_fairseq_many([{"tool": "eval_lm", "args": args}])
    assert EVALUATED.search(done.stdout + done.stderr)[0] == EVALUATED.search(here.stdout + here.stderr)[0]

    # contexts of 16 tokens: what is longer is left out
    write_tasks(jobs.folder / "tasks")
    done = jobs.run("bash", "-ec", f"{shown('zeroshot').rstrip()} --skip-too-long")
    assert done.rc == 0 and done.stdout.count("average") == 1, done.stderr
    alone = ["--tasks", "all", "--data-dir", jobs.folder / "tasks", "--skip-too-long", "--output", jobs.folder / "one"]
    assert main(["zeroshot", "--path", str(checkpoint), *map(str, alone)]) == 0
    assert (jobs.folder / "answers.jsonl").read_bytes() == (jobs.folder / "one").read_bytes()


def test_the_page_on_sweeps(jobs):
    """A command file, options alone, and a run that fails."""
    (jobs.folder / "list.txt").write_text(
        "# what to compare\n\nrecipe examples/smlp.sh --lr 1e-4\nbare --arch smlp_tiny --adam-betas '(0.9, 0.98)'\n"
        "wrong --arch smlp_tiny --train-subset gone\n"
    )
    done = jobs.run("bash", "-ec", shown("--sweep"))
    assert done.rc == 0, done.stderr
    array = re.search(r"^job (\d+):", done.stdout, re.M)[1]
    (jobs.folder / "list.txt").unlink()  # the tasks have a copy
    numbers = [f"{array}_{run}" for run in (1, 2, 3)]
    for number, name in zip(numbers[:2], ("recipe", "bare"), strict=True):
        jobs.trained(number)
        assert f"run {number[-1]} of" in jobs.log(number) and "num_updates 2 |" in jobs.log(number, 0)
        assert (jobs.folder / "runs" / "sweep" / name / "checkpoint_last.pt").exists()
    assert jobs.end_of(numbers[2]).exit_status != 0
    assert "gone" in jobs.log(numbers[2], 0)


COMPARISON = """
data: data-bin
updates: 4
tokens_per_sample: 24
batch_size: 4
log_interval: 2
recipe: {optimizer: adam, lr: 5.0e-3, dropout: 0, num_workers: 0}
models:
  gMLP: {arch: gmlp_lm_tiny, embed_dim: 16, ffn_dim: 16, num_dense_layers: 1}
  sMLP E=2: {arch: smlp_tiny, embed_dim: 16, ffn_dim: 16, num_dense_layers: 1, num_sparse_layers: 1, num_experts: 2}
max_spread: 9
evaluate: {validations: 1}
run: {where: slurm, nodes: 1, tasks_per_node: 2}
"""


def test_a_comparison_is_an_array_and_a_job_that_scores(jobs):
    (jobs.folder / "small.yaml").write_text(COMPARISON)
    done = jobs.run("smlp", "compare", "run", "small.yaml")
    assert done.rc == 0, done.stderr
    training, scoring = re.search(r"job (\d+): 2 runs, 2 ranks each; job (\d+) scores them", done.stdout).groups()
    again = jobs.run("smlp", "compare", "run", "small.yaml")
    assert f"{scoring} are in the queue: nothing is submitted" in again.stdout, again.stdout + again.stderr
    assert jobs.end_of(scoring).state == "COMPLETED", jobs.output(scoring)
    out = jobs.folder / "runs" / "compare" / "small"
    runs = [out / "runs" / name for name in ("gMLP-s1", "sMLP_E_2-s1")]
    assert {json.loads((run / "run.json").read_text())["state"] for run in runs} == {"done"}
    assert all(json.loads((run / "scores.json").read_text())["num_updates"] == 4 for run in runs)
    orders = [(run / "data_order.jsonl").read_text() for run in runs]
    assert orders[0] == orders[1] and len(orders[0].splitlines()) == 4
    assert "training on 2 devices" in (out / "slurm" / "logs" / f"{training}_2" / "rank-0.log").read_text()
    environments = [json.loads((run / "environment.jsonl").read_text()) for run in runs]
    assert [one["world_size"] for one in environments] == [2, 2]
    assert json.loads((out / "environment.json").read_text())["tasks_per_node"] == 2, "not of the job that scores"
    assert not (out / "speed.json").exists(), "one process says nothing about two ranks"
    assert json.loads((out / "slurm" / "jobs.json").read_text()) == [training, scoring]
    assert (runs[0] / "command.txt").read_text().splitlines()[-1].startswith("srun --ntasks=2 ")
    last = jobs.run("smlp", "compare", "run", "small.yaml")
    assert "all runs are trained and scored" in last.stdout, last.stdout + last.stderr
