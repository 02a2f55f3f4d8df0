"""scripts/reproduction/verdicts.py: which models stand for the paper's, and what becomes of its sentences."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import experiment_folder as folder
import pytest
from experiment_folder import MODELS, SEEDS, run_folder, write_experiment
from running import REPOSITORY, run_python

from smlp.experiments.report.paper import closest_to_paper
from smlp.experiments.report.results import read_results
from smlp.experiments.report.table import Table

SCRIPT = REPOSITORY / "scripts" / "reproduction" / "verdicts.py"
SPEC = importlib.util.spec_from_file_location("verdicts", SCRIPT)
script = importlib.util.module_from_spec(SPEC)
sys.modules["verdicts"] = script  # its dataclasses look themselves up there
SPEC.loader.exec_module(script)
pytestmark = pytest.mark.timeout(120)
SMLP, GMLP = ("smlp", "smlp_tiny"), ("gmlp_lm", "gmlp_lm_tiny")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Writes the folder of some models."""

    def make(models: dict) -> Path:
        monkeypatch.setattr(folder, "MODELS", models)
        return write_experiment(tmp_path)

    return make


@pytest.fixture
def out(made) -> Path:
    """The folder of the models that the other tests of the report have."""
    return made(MODELS)


def claims_table(out: Path) -> Table:
    return script.claims_table(read_results(out))


def verdicts(out: Path) -> dict[str, str]:
    return {row["claim"].value: row["verdict"].value for row in claims_table(out).rows}


def test_the_model_that_is_most_like_the_papers_speaks(made):
    linear = {"num_experts": 16, "feature_experts": "linear"}
    models = {
        "linear": (*SMLP, linear, -0.5, 0.8),
        "E=1": (*SMLP, {"num_experts": 1}, -0.4, 0.8),
        "E=4": (*SMLP, {"num_experts": 4}, 0.2, 0.8),
        "E=8": (*SMLP, {"num_experts": 8}, -0.3, 0.8),
        "E=8 again": (*SMLP, {"num_experts": 8, "dropout": 0.0}, -0.3, 0.8),
        "h=8": (*GMLP, {"num_heads": 8}, 0.1, 0.5),
        "h=1": (*GMLP, {"num_heads": 1}, 0.0, 0.5),
        "Transformer h=2": ("dense_lm", "dense_lm_tiny", {"num_heads": 2}, 0.0, 0.5),
        "Transformer h=8": ("dense_lm", "dense_lm_tiny", {"num_heads": 8}, 0.0, 0.5),
    }
    out = made(models)
    assert verdicts(out) == {
        "E=8 has lower perplexity than Transformer h=8": "agrees",
        "E=8 has lower perplexity than h=1": "agrees",
    }
    assert closest_to_paper(read_results(out), "switch_lm") is None


def test_a_single_expert_is_no_sparse_model(made):
    models = {
        "gMLP": MODELS["gMLP"],
        "E=1": (*SMLP, {"num_experts": 1}, -0.4, 0.8),
        "MoE E=1": ("gmlp_moe", "gmlp_moe_tiny", {"num_experts": 1}, 0.4, 0.8),
        "MoE E=8": ("gmlp_moe", "gmlp_moe_tiny", {"num_experts": 8}, 0.4, 0.8),
    }
    out = made(models)
    assert verdicts(out) == {
        "E=1 has lower perplexity than gMLP": "not measured",
        "MoE E=1 has higher perplexity than gMLP": "not measured",
        "MoE E=8 has higher perplexity than gMLP": "agrees",
        "MoE E=8 has higher perplexity than MoE E=1": "not measured",
    }
    assert any("(it has a single expert, or `linear` ones)" in note for note in claims_table(out).notes)


def test_large_models_stand_beside_the_papers_large_ones(made):
    models = {
        "sMLP": ("smlp", "smlp_large", {}, -0.2, 0.8),
        "Enlarged": ("switch_lm", "switch_lm_enlarged", {}, 0.0, 0.6),
        "Switch": ("switch_lm", "switch_lm_large", {}, 0.0, 0.6),
    }
    rows = {row["claim"].value: row for row in claims_table(made(models)).rows}
    printed = {
        "sMLP has lower perplexity than Switch": 100 * (9.84 / 10.45 - 1),
        "sMLP has lower perplexity than Enlarged": 100 * (9.84 / 10.09 - 1),
        "sMLP has higher words per second than Switch": 100 * (144 / 139 - 1),
        "sMLP has higher words per second than Enlarged": 100 * (144 / 126 - 1),
    }
    assert {claim: rows[claim]["printed"].value for claim in printed} == pytest.approx(printed)
    assert {rows[claim]["where"].value for claim in printed} == {"Table 4, bottom"}
    assert "sMLP has lower perplexity at equal training time than Enlarged" not in rows, "Figure 5 has none"


def test_both_variants_of_figure_5(made):
    rows = {row["claim"].value: row for row in claims_table(made(MODELS)).rows}
    partial = rows["sMLP-partial has lower perplexity than Switch"]
    assert (partial["where"].value, partial["printed"].value) == ("Figure 5, top", "no numbers")
    assert partial["measured"].value == pytest.approx(100 * (2**0.2 - 1))
    assert partial["verdict"].value == "differs"


def test_perplexity_at_equal_training_time(made):
    """Switch ends after 24 s, when sMLP has done 30 of its updates."""
    table = claims_table(made(MODELS))
    row = next(row for row in table.rows if "equal training time" in row["claim"].value)
    assert row["claim"].value == "sMLP has lower perplexity at equal training time than Switch"
    assert row["where"].value == "Figure 5, bottom"
    # sMLP: 8 - 30 / 10 - 0.2 bits, Switch: 8 - 40 / 10 - 0.1
    assert row["measured"].value == pytest.approx(100 * (2 ** (4.8 - 3.9) - 1), rel=1e-2)
    assert row["verdict"].value == "differs"
    assert row["measured"].source.startswith("runs/{sMLP-s1,sMLP-s2,sMLP-s3,Switch-s1,Switch-s2,Switch-s3}/train.log: ")
    assert any("in the midst of its schedule" in note for note in table.notes)


def test_before_the_first_validation_there_is_no_perplexity():
    points = [SimpleNamespace(num_updates=update, bits=10 - update / 20) for update in (100, 200)]
    timeline = SimpleNamespace(update_at=lambda seconds: 10 * seconds)
    run = SimpleNamespace(curve=SimpleNamespace(valid=points), timeline=timeline)
    assert script._perplexity_at(run, 9.9) is None
    assert script._perplexity_at(run, 15) == pytest.approx(2**2.5)


def test_the_papers_numbers_stand_beside(out):
    table = claims_table(out)
    rows = {row["claim"].value: row for row in table.rows}
    quality = rows["sMLP has lower perplexity than Switch"]
    assert quality["printed"].value == pytest.approx(100 * (13.46 / 15.31 - 1))
    assert quality["measured"].value == pytest.approx(100 * (2**-0.1 - 1))
    assert quality["verdict"].value == "agrees"
    speed = rows["sMLP has higher words per second than Switch"]
    assert (speed["verdict"].value, speed["measured"].text[:7]) == ("differs", "-25.0 %")


def test_a_verdict_needs_an_interval_without_zero(out):
    def verdict() -> str:
        rows = claims_table(out).rows
        return next(row["verdict"].value for row in rows if row["claim"].value == "sMLP has lower perplexity than gMLP")

    assert verdict() == "agrees"
    path = run_folder(out, "sMLP", 3) / "scores.json"
    path.write_text(path.read_text().replace('"nll_after_prefix": 2.', '"nll_after_prefix": 3.'))
    assert verdict() == "not decided (interval holds 0)"
    for seed in (1, 3):
        shutil.rmtree(run_folder(out, "sMLP", seed))
    assert verdict() == "not decided (agrees with one seed)"
    shutil.rmtree(run_folder(out, "sMLP", 2))
    assert verdict() == "not measured"


def test_rounds_of_the_timer_are_no_seeds(out):
    """Words per second and perplexity stand in one column, with intervals over other things."""

    def claims(**rounds: list[float]) -> Table:
        models = {name: {"seconds_per_update": times, "tokens_per_update": 1024} for name, times in rounds.items()}
        (out / "speed.json").write_text(json.dumps({"models": models, "threads": 1, "device": "cpu"}))
        return claims_table(out)

    sentence = "sMLP has higher words per second than Switch"
    rows = {row["claim"].value: row for row in claims(sMLP=[1.0], Switch=[2.0]).rows}
    assert rows[sentence]["verdict"].value == "not decided (agrees with one round)"
    table = claims(sMLP=[1.0, 2.0, 3.0, 4.0], Switch=[1.0, 2.0, 3.0, 4.0])
    row = next(row for row in csv.DictReader(io.StringIO(table.csv())) if row["claim"] == sentence)
    assert (row["measured_seeds"], row["measured_rounds"]) == ("0", "4")
    assert row["verdict"] == "not decided (interval holds 0; the interval is the timer's noise alone)"
    found = {row["claim"]["value"]: row["measured"] for row in table.as_json()["rows"]}
    assert found[sentence]["by_round"] == {number: 0.0 for number in range(4)}
    assert "by_seed" not in found[sentence]
    assert list(found["sMLP has lower perplexity than Switch"]["by_seed"]) == list(SEEDS)
    assert any("their interval is the timer's noise alone, in one process" in note for note in table.notes)


def test_timed_updates_go_before_the_logs(out):
    rounds = {"sMLP": [0.1, 0.1, 0.1], "Switch": [0.2, 0.21, 0.19]}
    models = {name: {"seconds_per_update": times, "tokens_per_update": 1024} for name, times in rounds.items()}
    (out / "speed.json").write_text(json.dumps({"models": models, "rounds": 3, "threads": 1, "device": "cpu"}))
    row = next(row for row in claims_table(out).rows if "words per second" in row["claim"].value)
    assert row["verdict"].value == "agrees (the interval is the timer's noise alone)"
    assert row["measured"].source.startswith("speed.json")


def test_zero_shot_accuracies_are_compared_seed_by_seed(out):
    for seed in SEEDS:
        for model, accuracy in (("sMLP", 0.5), ("Switch", 0.4)):
            task = {"accuracy": accuracy, "chance": 0.5, "n": 100}
            (run_folder(out, model, seed) / "zeroshot.json").write_text(json.dumps({"tasks": {"copa": task}}))
    rows = {row["claim"].value: row["measured"] for row in claims_table(out).rows}
    accuracy = rows["sMLP has higher zero-shot accuracy than Switch"]
    assert accuracy.samples[1] == pytest.approx(100 * (0.5 / 0.4 - 1))


@pytest.mark.slow
def test_the_script_writes_what_it_prints(out):
    run = run_python(SCRIPT, out, "--to", out / "there")
    assert run.rc == 0, run.stderr
    assert run.stdout == (out / "there" / "verdicts.md").read_text()
    assert "5 sentences: 2 agree with what was measured, 3 differ, 0 open." in run.stdout
    table = json.loads((out / "there" / "claims.json").read_text())
    rows = list(csv.DictReader((out / "there" / "claims.csv").open()))
    assert [row["claim"] for row in rows] == [row["claim"]["value"] for row in table["rows"]]
    (out / "there" / "verdicts.md").write_text("of the user\n")
    run = run_python(SCRIPT, out, "--to", out / "there")
    assert run.rc == 1 and "has a verdicts.md of something else" in run.stderr
    run = run_python(SCRIPT, out / "runs")
    assert run.rc == 1 and "experiment.json cannot be read" in run.stderr and run.stderr.count("\n") == 1
