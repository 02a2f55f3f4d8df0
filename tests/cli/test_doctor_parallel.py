"""``smlp doctor --parallel``: it passes here, and fails where something is wrong."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
from rank_running import run_ranks
from running import run_python

from smlp.cli import doctor
from smlp.cli.doctor import OK, PROBLEM, Check
from smlp.cli.main import main
from smlp.launch import team

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.mark.slow
def test_two_ranks_of_this_machine_pass_all_checks(tmp_path):
    file = tmp_path / "report.json"
    run = run_python(
        "-m", "smlp", "doctor", "--parallel", "--nproc", "2", "--dir", tmp_path, "--json", file, timeout=150
    )
    assert run.rc == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"] and len(checks) == 10 and "2 on" in checks["ranks"]["detail"]
    assert "4 over 2 ranks" in checks["experts of smlp_tiny"]["detail"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_a_folder_that_is_not_there_is_a_problem_and_not_made(tmp_path):
    folder = tmp_path / "no" / "folder"
    run = run_python("-m", "smlp", "doctor", "--parallel", "--nproc", "2", "--dir", folder, timeout=150)
    assert run.rc == 1 and not list(tmp_path.iterdir())
    assert f"problem  checkpoint: all ranks: --dir {folder} is not a folder" in run.stdout
    assert "1 problem\n" in run.stdout


@pytest.mark.parametrize("options", [["--parallel", "--nproc", "1"], ["--nproc", "2"]])
def test_bad_numbers_of_ranks(options, capsys):
    assert main(["doctor", *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith("smlp: error: --nproc") and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["reduce_expert_gradients", "global_grad_norm"])
def test_a_wrong_gradient_is_seen(place):
    found = run_ranks("sabotaged_layout", 2, place=place)
    assert "is wrong on rank 1" in found[1] and "gradient" in found[1]


def test_disks_of_their_own_are_seen(tmp_path):
    for rank, found in enumerate(run_ranks("checkpoint_in_own_folder", 2, folder=str(tmp_path))):
        assert found.startswith(f"rank {rank} does not see 1 of the 2 files") and "--dir" in found
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_check_that_fails_on_one_rank_is_reported_by_all(bad, tmp_path):
    failed = [[PROBLEM, f"ranks [{bad}]: cannot do this here"]] * 4
    assert run_ranks("failing_on_one_rank", 2, folder=str(tmp_path), bad=bad) == [failed, failed]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_goes_through_all_checks_and_leaves(rank, monkeypatch, capsys):
    """A rank that stopped at the first problem would leave the others waiting; one that did not leave may abort."""
    done = []

    def checks(device, folder):
        for number in range(3):
            done.append(number)
            yield Check(f"check {number}", PROBLEM if number == 0 else OK, "")

    monkeypatch.setattr(team, "meet", lambda *arguments: done.append("met"))
    monkeypatch.setattr(team, "leave", lambda: done.append("left"))
    monkeypatch.setattr(doctor, "rank_checks", checks)
    status = doctor._check_as_rank(SimpleNamespace(rank=rank), argparse.Namespace(dir=".", json=None))
    assert (status, done) == (1, ["met", 0, 1, 2, "left"])
