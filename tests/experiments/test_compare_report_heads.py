"""Figure 4 of the report: models by their number of heads, and sMLP with them."""

from __future__ import annotations

import math
from pathlib import Path

import experiment_folder as folder
import pytest
from experiment_folder import cell, tables, write_experiment

from smlp.experiments.report.draw_curves import styles
from smlp.experiments.report.draw_points import draw_heads
from smlp.experiments.report.results import read_results

pytestmark = pytest.mark.timeout(120)
HEADS = {f"gMLP h={heads}": ("gmlp_lm", "gmlp_lm_tiny", {"num_heads": heads}, 0.1 * heads, 0.5) for heads in (4, 1, 2)}
SMLP = ("smlp", "smlp_tiny", {}, -0.2, 0.8)


def drawn(out: Path):
    pytest.importorskip("matplotlib")
    experiment = read_results(out)
    return draw_heads(experiment, styles(experiment.models))


def made(tmp_path: Path, monkeypatch, models: dict) -> Path:
    monkeypatch.setattr(folder, "MODELS", models)
    return write_experiment(tmp_path)


def test_smlp_is_a_horizontal_line_with_its_interval(tmp_path, monkeypatch):
    out = made(tmp_path, monkeypatch, {**HEADS, "sMLP": SMLP})
    figure = drawn(out)
    (axes,) = figure.axes
    final = cell(tables(out)["quality-valid"], "sMLP", "per_token")
    # nll_after_prefix of the made-up scores is 0.05 nats lower than that of all positions
    scale = math.exp(-0.05)
    line = next(line for line in axes.get_lines() if line.get_label() == "sMLP (8 experts)")
    assert list(line.get_ydata()) == pytest.approx([final.value * scale] * 2)
    band = axes.patches[-1].get_bbox()
    assert (band.y0, band.y1) == pytest.approx((final.low * scale, final.high * scale))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels) == ["gMLP", "sMLP (8 experts)"]
    assert [row["model"].value for row in tables(out)["heads"].rows] == ["gMLP h=1", "gMLP h=2", "gMLP h=4", "sMLP"]


def test_two_lines_of_a_family_have_labels_of_their_own(tmp_path, monkeypatch):
    kind = {
        f"T h={n}": ("gmlp_lm", "gmlp_lm_tiny", {"num_heads": n, "spatial_weights": "toeplitz"}, -1, 1) for n in (1, 4)
    }
    labels = {text.get_text() for text in drawn(made(tmp_path, monkeypatch, {**HEADS, **kind})).legends[0].get_texts()}
    assert labels == {"gMLP: gMLP h=1, ...", "gMLP: T h=1, ..."}


def test_without_models_that_differ_in_heads_there_is_no_figure(tmp_path, monkeypatch):
    out = made(tmp_path, monkeypatch, {"gMLP h=1": HEADS["gMLP h=1"], "sMLP": SMLP})
    assert drawn(out) is None
    assert "heads" not in tables(out)


@pytest.mark.parametrize("overrides", [{"num_experts": 1}, {"feature_experts": "linear"}], ids=str)
def test_what_the_paper_does_not_call_smlp_is_not_drawn(tmp_path, monkeypatch, overrides):
    out = made(tmp_path, monkeypatch, {**HEADS, "sMLP": ("smlp", "smlp_tiny", overrides, -0.2, 0.8)})
    assert len(drawn(out).legends[0].get_texts()) == 1
    assert len(tables(out)["heads"].rows) == 3


def test_smlp_with_different_heads_is_a_line_of_its_own(tmp_path, monkeypatch):
    wide = ("smlp", "smlp_tiny", {"num_heads": 2}, -0.1, 0.8)
    out = made(tmp_path, monkeypatch, {**HEADS, "sMLP": SMLP, "sMLP h=2": wide})
    assert [text.get_text() for text in drawn(out).legends[0].get_texts()] == ["gMLP", "sMLP-deterministic"]
    assert len(tables(out)["heads"].rows) == 5
