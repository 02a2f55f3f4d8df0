"""Where the time of runs went, of runs whose attempts are not all known, or that a cluster ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiment_folder import cell, rewrite, run_folder, tables, write_experiment

from smlp.evaluation.curves import log_record
from smlp.experiments.report.timeline import logged_seconds

pytestmark = pytest.mark.timeout(120)
SPLIT = "time-split"


@pytest.fixture
def out(tmp_path) -> Path:
    return write_experiment(tmp_path)


def log_walls(run: Path, walls: dict[int, int], end: int) -> None:
    """Puts ``wall`` into training lines of a log, by update, and into that of the epoch."""
    lines = (run / "train.log").read_text().splitlines()
    for place, line in enumerate(lines):
        record = log_record(line)
        if int(record.get("num_updates", 0)) in walls:
            lines[place] = json.dumps({**record, "wall": str(walls[int(record["num_updates"])])})
    lines.append(json.dumps({"epoch": 1, "train_num_updates": "40", "train_wall": str(end)}))
    (run / "train.log").write_text("\n".join(lines) + "\n")


def train_attempt(seconds: float) -> dict:
    return {"step": "train", "seconds": seconds, "status": 0}


def test_attempts_that_lack_one_give_no_time(out):
    """gMLP trained 20 s; the runs of seed 1 and 2 were resumed after an attempt that nobody wrote down."""
    first, second, _ = (run_folder(out, "gMLP", seed) for seed in (1, 2, 3))
    rewrite(first / "run.json", attempts=[train_attempt(15.0)])
    rewrite(second / "run.json", attempts=[train_attempt(24.0)])
    log_walls(second, {35: 20, 40: 23}, end=26)  # more than the attempts
    table = tables(out)[SPLIT]
    assert cell(table, "gMLP", "other_s").samples == {3: pytest.approx(7.0, abs=0.05)}
    assert cell(table, "gMLP", "other_s").source == "runs/gMLP-s3/run.json: attempts.seconds"
    assert table.notes[1] == (
        "Not known for gMLP-s1, gMLP-s2: an attempt is missing from run.json, perhaps because smlp compare run "
        "was killed with it."
    )
    rewrite(run_folder(out, "gMLP", 3) / "run.json", attempts=[train_attempt(1.0)])
    assert cell(tables(out)[SPLIT], "gMLP", "other_s").text == "–"


def test_a_start_without_its_attempt_gives_no_time(out):
    """The attempt that was written down is longer than all training steps together."""
    run = run_folder(out, "gMLP", 2)
    (run / "environment.jsonl").write_text('{"smlp": "0.1.0"}\n')
    assert set(cell(tables(out)[SPLIT], "gMLP", "other_s").samples) == {1, 2, 3}
    (run / "environment.jsonl").write_text('{"smlp": "0.1.0"}\n' * 2)
    assert set(cell(tables(out)[SPLIT], "gMLP", "other_s").samples) == {1, 3}


def test_on_a_cluster_the_log_says_how_long_it_took(out):
    """The job that scores leaves attempts, those that train leave none."""
    for seed in (1, 2, 3):
        run = run_folder(out, "Switch", seed)
        rewrite(run / "run.json", attempts=[{"step": "score", "seconds": 3.0, "status": 0}])
    log_walls(run_folder(out, "Switch", 1), {35: 25, 40: 28}, end=30)
    log_walls(run_folder(out, "Switch", 2), {35: 31, 40: 34}, end=36)
    log_walls(run_folder(out, "Switch", 3), {35: 40, 40: 10}, end=30)  # resumed at the beginning of an epoch
    table = tables(out)[SPLIT]
    assert cell(table, "Switch", "other_s").samples == pytest.approx({1: 6.0, 2: 12.0}, abs=0.05)
    assert cell(table, "Switch", "other_s").source == "runs/{Switch-s1,Switch-s2}/train.log: wall, the last"
    assert table.notes[1].startswith(
        "Not known for Switch-s3: run.json has no attempts, as on Slurm, and wall in train.log"
    )


def test_wall_of_a_log():
    """At the end of an epoch it is called train_wall, which elsewhere is the time in training steps."""
    lines = [{}, {"num_updates": "5", "wall": "7", "train_wall": "6"}, {"valid_num_updates": "5", "valid_loss": "3"}]
    assert logged_seconds(lines) == 7
    assert logged_seconds([*lines, {"train_num_updates": "5", "train_wall": "9", "train_train_wall": "6"}]) == 9
    assert logged_seconds([*lines, {"num_updates": "10", "wall": "3"}]) is None
    assert logged_seconds([{"num_updates": "5", "train_wall": "6"}]) is None
