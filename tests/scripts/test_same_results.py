"""scripts/same_results.py finds what differs between two records; nothing is trained here."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from running import REPOSITORY

SPEC = importlib.util.spec_from_file_location("same_results", REPOSITORY / "scripts" / "same_results.py")
same_results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(same_results)

LOGGED = {"logged": [{"loss": 5.25, "gnorm": 1.5}, {"loss": 5.0, "gnorm": 1.25}]}


@pytest.fixture
def check(tmp_path, capsys):
    """``check(recorded, steps)`` compares what steps return now with recorded results: the verdict and the output."""

    def run(recorded, steps):
        base, out = tmp_path / "base", tmp_path / "out"
        for folder in (base / "results", out):
            folder.mkdir(parents=True)
        for name, result in recorded.items():
            (base / "results" / f"{name}.json").write_text(json.dumps(result))
        made = {name: lambda result=result: result for name, result in steps.items()}
        fake = SimpleNamespace(tree=REPOSITORY, out=out, base=base, all=lambda: made)
        return same_results.check(fake, "*"), capsys.readouterr().out

    return run


def test_equal_results_pass(check):
    agrees, output = check(
        {"train-a": LOGGED, "help": {"smlp": "usage\n"}}, {"train-a": LOGGED, "help": {"smlp": "usage\n"}}
    )
    assert agrees and output.endswith("2 steps done, 0 differ from the record\n")


def test_a_changed_loss_and_the_largest_difference_are_named(check):
    agrees, output = check(
        {"train-a": LOGGED}, {"train-a": {"logged": [LOGGED["logged"][0], {"loss": 4.5, "gnorm": 1.0}]}}
    )
    assert not agrees
    assert "train-a differs, numbers by up to 0.5\n  logged/1/loss\n    was 5.0\n    is  4.5\n" in output


def test_missing_and_new_steps_and_values_are_named(check):
    agrees, output = check({"train-a": LOGGED, "score": {"nll": 1.0}}, {"score": {"loss": 1.0}, "train-b": LOGGED})
    assert not agrees
    assert "train-a differs\n  the step is missing now\n" in output
    assert "train-b differs\n  the step is not in the record\n" in output
    assert "score differs\n  nll\n    was 1.0\n    is  'nothing'\n  loss\n    was 'nothing'\n    is  1.0\n" in output


def test_an_empty_record_does_not_pass(check):
    assert not check({}, {})[0]


def test_only_the_changed_lines_of_a_page_are_shown():
    lines, _ = same_results.differences({"smlp": "usage\n  --old\nend"}, {"smlp": "usage\n  --new\nend"})
    assert lines == ["  smlp", "    -  --old", "    +  --new"]


def test_a_changed_byte_of_a_checkpoint_is_found(tmp_path):
    weight = torch.ones(3, dtype=torch.bfloat16)
    state = {
        "model": {"weight": weight, "step": torch.tensor(2)},
        "last_optimizer_state": [{"exp_avg": torch.zeros(2)}],
    }
    for name in ("old", "new"):
        parts = tmp_path / name / "experts" / f"update_2_{name.encode().hex():0>8}"  # a random name in training
        parts.mkdir(parents=True)
        torch.save(state, parts / "experts_0-3.pt")
        weight[1] = 1.0078125  # the next number above 1
    old, new = (
        {key: same_results.digest(value) for key, value in same_results.tensors(tmp_path / name)}
        for name in ("old", "new")
    )
    assert set(old) == set(new) and len(old) == 3
    changed = "experts/update_2/experts_0-3.pt/model/weight"
    assert [key for key in old if old[key] != new[key]] == [changed]
    assert old[changed].startswith("torch.bfloat16 [3] ")
    assert same_results.largest_tensor_difference(tmp_path / "old", tmp_path / "new") == 0.0078125


def test_what_another_run_changes_is_left_out_and_its_name_stays():
    cell = {"value": 2.5, "source": "runs/a/train.log: train_wall, wps"}
    verdict = {"value": "agrees", "source": "computed from the columns before"}
    result = {"loss": 1.5, "seconds": 0.1, "row": {"measured": cell, "verdict": verdict}, "path": "/here/data"}
    assert same_results.lasting(result, {"/here": "DIR"}) == {
        "loss": 1.5, "seconds": "left out", "row": {"measured": "left out", "verdict": "left out"}, "path": "DIR/data",
    }  # fmt: skip
