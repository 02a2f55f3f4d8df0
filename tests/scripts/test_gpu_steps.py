"""scripts/gpu: steps that go on where they were, and checks that can fail; rehearsed on the CPU."""

import json
import subprocess
import sys
import time

import pytest
import torch
from running import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts" / "gpu"))

import checks
import steps

from smlp.errors import UserError

FOLDER = REPOSITORY / "scripts" / "gpu"


def command(code):
    return [sys.executable, "-c", code]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_no_step_outlives_the_script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    import training_runs

    def popen(command, preexec_fn=None, **more):
        raise InterruptedError if preexec_fn else AssertionError("the command would go on without its parent")

    monkeypatch.setattr(subprocess, "Popen", popen)
    for start in (
        lambda: steps._run(steps.Step("one", ["true"], 1), tmp_path, 1.0),
        lambda: training_runs._watch(["true"], None, None),
    ):
        with pytest.raises(InterruptedError):
            start()


def test_steps_are_resumed_and_failures_are_kept(tmp_path, capsys):
    flag = tmp_path / "flag"
    twice = f"""
import pathlib, sys
begun = pathlib.Path({str(tmp_path / "begun")!r})
status = 0 if begun.exists() else 75
begun.touch()
sys.exit(status)
"""
    wanted = [
        steps.Step("good", command("print('fine')"), 1),
        steps.Step("absent", command("print('no GPU'); raise SystemExit(3)"), 1),
        steps.Step("once", command(f"import pathlib, sys; sys.exit(not pathlib.Path({str(flag)!r}).exists())"), 1),
        steps.Step("later", command(twice), 1, goes_on=75),
    ]
    end = time.monotonic() + 100
    assert steps.run_steps(wanted[:3], tmp_path, "check-cpu", end) == 1
    record = json.loads((tmp_path / "check-cpu.json").read_text())
    assert {name: one["status"] for name, one in record["steps"].items()} == {
        "good": "passed", "absent": "skipped", "once": "failed",
    }  # fmt: skip
    assert record["steps"]["good"]["message"] == "fine" and record["about"]["python"]
    flag.touch()
    capsys.readouterr()
    assert steps.run_steps(wanted, tmp_path, "check-cpu", end) == steps.TIME_IS_UP
    told = capsys.readouterr().out
    assert "good: passed already" in told and "once: passed in" in told and "the same command resumes" in told
    assert steps.run_steps(wanted, tmp_path, "check-cpu", end) == 0


def test_a_step_is_repeated_where_the_code_is_another(tmp_path, capsys, monkeypatch):
    """Also in a copy without git."""
    (tmp_path / "smlp").mkdir()
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    wanted = [steps.Step("good", command("print('fine')"), 1)]
    for code, again in (("x = 1", True), ("x = 1", False), ("x = 2", True), ("x = 2", False)):
        (tmp_path / "smlp" / "a.py").write_text(code)
        (tmp_path / "smlp" / "__pycache__").mkdir(exist_ok=True)
        (tmp_path / "smlp" / "__pycache__" / str(again)).touch()
        assert steps.run_steps(wanted, tmp_path, "check-cpu", time.monotonic() + 100) == 0
        assert ("good: passed in" in capsys.readouterr().out) == again
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "one_gpu.yaml").touch()
    assert steps.run_steps(wanted, tmp_path, "check-cpu", time.monotonic() + 100) == 0
    assert "good: passed in" in capsys.readouterr().out, "an experiment is part of what steps run"


def test_a_step_that_hangs_is_ended_and_none_begins_after_the_time(tmp_path, monkeypatch):
    slow = steps.Step("slow", command("import time; time.sleep(60)"), 0.01)
    assert steps.run_steps([slow], tmp_path, "check-cpu", time.monotonic() + 100) == 1
    assert "not done after 1 s" in json.loads((tmp_path / "check-cpu.json").read_text())["steps"]["slow"]["message"]
    late = steps.Step("late", command("import time; time.sleep(60)"), 1)
    monkeypatch.setattr(steps, "environment", lambda: {"git": None})
    (tmp_path / "late.json").write_text('{"steps": {"late": {"status": "failed", "seconds": 1.0}}}')
    assert steps.run_steps([late], tmp_path, "late", time.monotonic() + 1.5) == steps.TIME_IS_UP
    never = steps.Step("never", command("raise SystemExit(1)"), 1)
    assert steps.run_steps([never], tmp_path, "other", time.monotonic()) == steps.TIME_IS_UP


@pytest.mark.slow
def test_the_rehearsal(tmp_path):
    words = ["bash", str(FOLDER / "check.sh"), "--device", "cpu", "--out", str(tmp_path), "--only"]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, "experts", "syncs"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "experts: passed" in done.stdout and "syncs: skipped" in done.stdout
    done = subprocess.run([*words, "nothing"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "there is no step nothing; there are kernels, experts" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match="torch sees no GPU here"):
        steps.main(["check"])


@pytest.mark.slow
def test_checks_find_differences(monkeypatch, tmp_path):
    project = checks.causal_spatial_projection

    def leaking(*given):
        return project(*given) + (1e-3 * given[0].sum() if given[0].dtype == torch.bfloat16 else 0)

    monkeypatch.setattr(checks, "causal_spatial_projection", leaking)
    with pytest.raises(checks.Wrong, match="bfloat16"):
        checks.kernels("cpu", tmp_path)
    monkeypatch.setattr(checks, "PRESETS", ["gmlp_lm_tiny"])
    monkeypatch.setattr(checks, "UPDATES", 4)
    assert checks.losses("cpu", tmp_path) == "1 architectures agree with the CPU"
    losses_of = checks._losses_of
    monkeypatch.setattr(
        checks,
        "_losses_of",
        lambda arch, device: [loss * (1.001 if device == "gpu" else 1) for loss in losses_of(arch, "cpu")],
    )
    with pytest.raises(checks.Wrong, match="gmlp_lm_tiny"):
        checks.losses("gpu", tmp_path)
