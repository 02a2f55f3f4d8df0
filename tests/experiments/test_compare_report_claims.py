"""Whose models speak for the paper's in the report's verdicts, and which of its sentences are judged."""

from __future__ import annotations

from pathlib import Path

import experiment_folder as folder
import pytest
from experiment_folder import MODELS, tables, write_experiment

from smlp.experiments.report.runs import read_experiment
from smlp.experiments.report.speakers import speaker

pytestmark = pytest.mark.timeout(120)
SMLP, GMLP = ("smlp", "smlp_tiny"), ("gmlp_lm", "gmlp_lm_tiny")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Writes the folder of some models."""

    def make(models: dict) -> Path:
        monkeypatch.setattr(folder, "MODELS", models)
        return write_experiment(tmp_path)

    return make


def verdicts(out: Path) -> dict[str, str]:
    return {row["claim"].value: row["verdict"].value for row in tables(out)["claims"].rows}


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
    assert speaker(read_experiment(out), "switch_lm") is None


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
    assert any("(it has a single expert, or `linear` ones)" in note for note in tables(out)["claims"].notes)


def test_large_models_stand_beside_the_papers_large_ones(made):
    models = {
        "sMLP": ("smlp", "smlp_large", {}, -0.2, 0.8),
        "Enlarged": ("switch_lm", "switch_lm_enlarged", {}, 0.0, 0.6),
        "Switch": ("switch_lm", "switch_lm_large", {}, 0.0, 0.6),
    }
    rows = {row["claim"].value: row for row in tables(made(models))["claims"].rows}
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
    rows = {row["claim"].value: row for row in tables(made(MODELS))["claims"].rows}
    partial = rows["sMLP-partial has lower perplexity than Switch"]
    assert (partial["where"].value, partial["printed"].value) == ("Figure 5, top", "no numbers")
    assert partial["measured"].value == pytest.approx(100 * (2**0.2 - 1))
    assert partial["verdict"].value == "differs"


def test_perplexity_at_equal_training_time(made):
    """Switch ends after 24 s, when sMLP has done 30 of its updates."""
    table = tables(made(MODELS))["claims"]
    row = next(row for row in table.rows if "equal training time" in row["claim"].value)
    assert row["claim"].value == "sMLP has lower perplexity at equal training time than Switch"
    assert row["where"].value == "Figure 5, bottom"
    # sMLP: 8 - 30 / 10 - 0.2 bits, Switch: 8 - 40 / 10 - 0.1
    assert row["measured"].value == pytest.approx(100 * (2 ** (4.8 - 3.9) - 1), rel=1e-2)
    assert row["verdict"].value == "differs"
    assert row["measured"].source.startswith("runs/{sMLP-s1,sMLP-s2,sMLP-s3,Switch-s1,Switch-s2,Switch-s3}/train.log: ")
    assert any("in the midst of its schedule" in note for note in table.notes)
