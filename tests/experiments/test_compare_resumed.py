"""``smlp compare run`` with a grid and zero-shot tasks, stopped in the middle: the same command goes on, whole."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from running import as_user, run_python
from zeroshot_data import write_tasks

from smlp.experiments.progress import reached

UPDATES = 60
FILE = """
data: DATA
tokens_per_sample: 24
batch_size: 4
updates: UPDATES
log_interval: 1
recipe: {optimizer: adam, lr_scheduler: cosine, clip_norm: 1.0, dropout: 0, num_workers: 0RATE}
models:
  sMLP: {arch: smlp_tiny, embed_dim: 16, ffn_dim: 32, num_dense_layers: 1, num_sparse_layers: 1, num_experts: 2}
evaluate: {validations: 3, speed_rounds: 0ZEROSHOT}
run: {jobs: 2, threads: 1, device: cpu}
"""
GRID = "tune: {lr: [1.0e-5, 1.0e-2], updates: 3}\n"


def write(path, data, rate="", zeroshot="", more=""):
    text = FILE.replace("DATA", str(data)).replace("RATE", rate).replace("ZEROSHOT", zeroshot)
    path.write_text(text.replace("UPDATES", str(UPDATES)) + more)


def read(path):
    return json.loads(path.read_text())


def stop_in_the_middle(command, log):
    """Starts a command, ends it with SIGTERM once the log is at a third; returns status and output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=as_user())
    try:
        deadline = time.monotonic() + 120
        while reached(log).updates < UPDATES // 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, output


@pytest.fixture(scope="module")
def stopped(tiny_data, tmp_path_factory):
    """Folder of the experiment, and what the stopped call, the one after it, and a last one came to."""
    folder = tmp_path_factory.mktemp("stopped")
    write_tasks(folder / "tasks")
    path, out = folder / "small.yaml", folder / "out"
    zeroshot = f", zeroshot: {{data: '{folder / 'tasks'}', tasks: [copa], limit: 2}}"
    write(path, tiny_data, zeroshot=zeroshot, more=GRID)
    words = ["-m", "smlp", "compare", "run", str(path), "--out", str(out)]
    run = out / "runs" / "sMLP-s1"
    first = stop_in_the_middle([sys.executable, *words], run / "train.log")
    when_stopped = reached(run / "train.log").updates
    second = run_python(*words, timeout=200)
    write(path, tiny_data, zeroshot=zeroshot.replace("[copa]", "[copa, piqa]"), more=GRID)
    trained = (run / "checkpoint_last.pt").stat().st_mtime_ns
    third = run_python(*words, timeout=200)
    return out, first, when_stopped, second, third, trained == (run / "checkpoint_last.pt").stat().st_mtime_ns


@pytest.mark.slow
def test_a_stop_and_what_goes_on(stopped):
    out, (status, printed), when_stopped, second, _, _ = stopped
    assert status == 75 and "stopped by SIGTERM; the same command resumes" in printed, printed
    assert UPDATES // 3 <= when_stopped < UPDATES
    assert second.rc == 0, second.stdout + second.stderr
    assert "1 of 1 runs are done" in second.stdout
    order = [json.loads(line) for line in (out / "runs/sMLP-s1/data_order.jsonl").read_text().splitlines()]
    assert [line["update"] for line in order] == list(range(1, UPDATES + 1))
    assert len((out / "runs/sMLP-s1/environment.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_grid_is_done_once_and_chooses(stopped):
    out, (_, printed), *_ = stopped
    tuned = read(out / "tuned.json")
    assert tuned["chosen"] == {"sMLP": 0.01}
    assert tuned["results"]["sMLP"]["0.01"] < tuned["results"]["sMLP"]["1e-05"]
    assert "2 of 2 runs of the grid to do" in printed
    assert "--lr 0.01 " in (out / "runs/sMLP-s1/command.txt").read_text()
    assert not list(out.glob("tune/*/checkpoint*"))


@pytest.mark.slow
def test_a_stopped_run_ends_where_an_unstopped_one_does(stopped, tiny_data, tmp_path):
    write(tmp_path / "whole.yaml", tiny_data, rate=", lr: 1.0e-2")
    done = run_python("-m", "smlp", "compare", "run", tmp_path / "whole.yaml", "--out", tmp_path / "out", timeout=200)
    assert done.rc == 0, done.stdout + done.stderr
    whole, parts = (
        read(out / "runs/sMLP-s1/scores.json")["subsets"]["valid"] for out in (tmp_path / "out", stopped[0])
    )
    assert parts["nll_all"] == pytest.approx(whole["nll_all"], rel=1e-6)


@pytest.mark.slow
def test_a_task_that_comes_later_is_answered_without_training(stopped):
    out, _, _, _, third, is_untouched = stopped
    assert third.rc == 0, third.stdout + third.stderr
    assert is_untouched
    steps = [attempt["step"] for attempt in read(out / "runs/sMLP-s1/run.json")["attempts"]]
    assert steps == ["train", "train", "score", "zeroshot", "zeroshot"]
    assert {"copa", "piqa"} <= set(json.dumps(read(out / "runs/sMLP-s1/zeroshot.json")).replace('"', " ").split())
