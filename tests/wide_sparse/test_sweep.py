"""``smlp wide-sparse run`` and ``report``: series of image models along an axis."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from image_models import train_in_this_process
from running import REPOSITORY

from data_prep.images import fetch
from smlp.cli.main import main
from smlp.vision import compare
from smlp.wide_sparse import features, sweep

EXAMPLES = sorted((REPOSITORY / "examples" / "wide_sparse").glob("*.yaml"))
TINY = """
title: A tiny sweep
paper: "Figure 5: the error falls"
data: {data}
seeds: {seeds}
x: width
connections: 512
similarity: {similarity}
options: --img-size 8 --in-chans 1 --no-aug -j 0 -b 32 --epochs 1 --lr 3e-3 {options}
series:
  S-Mixer:
    options: --model smlp_s_mixer
    settings: {{patch_size: 2, num_layers: 1}}
    points: [{{embed_dim: 8, mixed_tokens: 8}}]
  SW-MLP:
    options: --model smlp_sparse_mlp {more}
    settings: {{patch_size: 2, num_layers: 2, embed_dim: 8}}
    points: [{{mlp_width: 32, mask_density: 0.5}}, {{mlp_width: 64, mask_density: {density}}}]
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "digits"
    fetch("digits", folder, limit=16, quiet=True)
    return folder


def write(tmp_path, digits, **changes):
    path = tmp_path / "sweep.yaml"
    given = {"seeds": "[1, 2]", "similarity": "S-Mixer", "options": "", "more": "", "density": 0.125}
    path.write_text(TINY.format(**{"data": digits, **given, **changes}))
    return path


def run(path, out, *options):
    return main(["wide-sparse", "run", str(path), "--out", str(out), *options])


def test_similarity_is_that_of_mixed_classes(digits, tmp_path, monkeypatch):
    """The folder has the images class by class, so that the first batch in its order would be of one class."""
    seen = []
    monkeypatch.setattr(features, "evaluation_loader", lambda images, *rest: seen.append(images.reader.samples) or [])
    monkeypatch.setattr(features, "compare_models", lambda *rest: {"inputs": 1, "cka": [[1.0]]})
    train_in_this_process(monkeypatch)
    assert run(write(tmp_path, digits, seeds="[1]"), tmp_path / "out") == 0
    first, *others = seen
    labels = [label for _, label in first]
    assert len(set(labels[:20])) > 5 and labels != sorted(labels) and others and all(one == first for one in others)


def test_similarity_of_few_images_in_a_split_of_another_name(digits, tmp_path, monkeypatch, capsys):
    images = shutil.copytree(digits, tmp_path / "images")
    (images / "validation").rename(images / "heldout")
    train_in_this_process(monkeypatch)
    path, out = write(tmp_path, images, seeds="[1]", options="--val-split heldout"), tmp_path / "out"
    kept = [next((images / "heldout" / label).iterdir()) for label in "012"]
    for image in {*(images / "heldout").glob("*/*")} - {*kept}:
        image.rename(tmp_path / f"{image.parent.name}-{image.name}")
    assert run(path, out) == 1 and not out.exists()
    assert "has 3 images in heldout, and similarity needs at least 4" in capsys.readouterr().err
    for image in tmp_path.glob("*-*.png"):
        label, _, name = image.name.partition("-")
        image.rename(images / "heldout" / label / name)
    assert run(path, out) == 0
    assert "CKA with S-Mixer" in (out / "report.md").read_text()
    images.rename(tmp_path / "moved")
    assert main(["wide-sparse", "report", str(out)]) == 0, "only the CKA needs the images"
    assert f"There is no CKA: --data-dir {images}" in (out / "report.md").read_text()


def test_more_series_than_colours_are_all_drawn(tmp_path, monkeypatch):
    series = {str(number): ["model", "model"] for number in range(9)}  # two at one place
    record = {"title": "many", "x": "width", "series": series, "facts": {"model": {"width": 4}}}
    shown = []
    monkeypatch.setattr("smlp.plots.drawing.save", lambda figure, path: shown.extend(figure.axes[0].containers))
    sweep._draw(record, {"model": {1: 2.0}}, tmp_path / "many.png")
    assert len(shown) == 9


def test_a_sweep_reports_errors_differences_and_similarity(digits, tmp_path, monkeypatch, capsys):
    started, out = train_in_this_process(monkeypatch), tmp_path / "out"
    assert run(write(tmp_path, digits), out) == 0
    assert len(started) == 6
    points, between = json.loads((out / "report.json").read_text())
    mixer, narrow, wide = points["rows"]
    assert [row["width"]["value"] for row in (mixer, narrow, wide)] == [64, 32, 64]
    assert [row["connections"]["value"] for row in (mixer, narrow, wide)] == [512, 512, 512]
    assert mixer["channels"]["value"] == 8 and narrow["channels"]["value"] is None
    name = "SW-MLP mlp_width=32 mask_density=0.5"
    last = (out / "runs" / f"{name}-s2" / "summary.csv").read_text().splitlines()
    accuracy = float(last[-1].split(",")[last[0].split(",").index("eval_top1")])
    assert narrow["error"]["by_seed"]["2"] == pytest.approx(100 - accuracy)
    by_seed = {seed: value - wide["error"]["by_seed"][seed] for seed, value in narrow["error"]["by_seed"].items()}
    assert narrow["difference"]["by_seed"] == pytest.approx(by_seed)
    assert wide["difference"]["value"] is None, "the widest is not compared with itself"
    (row,) = between["rows"]
    assert row["x"]["value"] == 64 and row["series"]["value"] == "SW-MLP minus S-Mixer"
    expected = [wide["error"]["by_seed"][seed] - mixer["error"]["by_seed"][seed] for seed in ("1", "2")]
    assert row["difference"]["value"] == pytest.approx(sum(expected) / 2)
    assert set(wide["cka"]["by_seed"]) == {"1", "2"} and -1 <= wide["cka"]["value"] <= 1
    text = (out / "report.md").read_text()
    assert "# A tiny sweep" in text and "The paper: Figure 5: the error falls." in text
    assert (out / "report.png").stat().st_size > 1000
    # a checkpoint that is gone costs its similarity alone
    gone = out / "runs" / f"{name}-s2" / "last.pth.tar"
    gone.rename(out / "kept")
    assert main(["wide-sparse", "report", str(out)]) == 0
    assert f"{name} has no CKA with seed 2: there is no checkpoint {gone}." in (out / "report.md").read_text()
    row = json.loads((out / "report.json").read_text())[0]["rows"][1]
    assert set(row["cka"]["by_seed"]) == {"1"} and set(row["error"]["by_seed"]) == {"1", "2"}
    (out / "kept").rename(gone)
    # finished runs are kept, a seed is added, and a report can be made again
    assert run(write(tmp_path, digits, seeds="[1, 2, 3]", similarity="null"), out) == 0
    assert len(started) == 9
    (out / "report.md").unlink()
    assert main(["wide-sparse", "report", str(out)]) == 0
    assert "3 seeds" in (out / "report.md").read_text()
    assert run(write(tmp_path, digits, options="--epochs 2"), out) == 1
    assert "was made with options = " in capsys.readouterr().err
    # damaged files are named
    summary = f"runs/{name}-s2/summary.csv"
    for file, content in ((summary, ""), (summary, "epoch,eval_top1\n0,x\n"), ("sweep.json", "{}")):
        before = (out / file).read_text()
        (out / file).write_text(content)
        assert main(["wide-sparse", "report", str(out)]) == 1
        assert f"{file} is damaged: " in capsys.readouterr().err
        (out / file).write_text(before)
    (out / "comparison.json").write_text("{}")
    assert run(write(tmp_path, digits), out) == 1
    assert "comparison.json is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": "''"}, "data and at least two points are needed"),
        ({"density": 0.5}, "mlp_width=64 mask_density=0.5 has 2,048 connections in a layer, +300.0% from the 512"),
        ({"more": "--model-kwargs num_layers=3"}, "series.SW-MLP.options has --model-kwargs, whose values belong in"),
        ({"options": "--model-kwargs num_layers=3"}, "options has --model-kwargs, whose values belong in settings"),
        ({"more": "--seed 3"}, "series.SW-MLP.options has --seed, which the command sets"),
        ({"more": "'"}, "cannot be split into words: No closing quotation"),
        ({"similarity": "SW-MLP"}, "similarity must name a series with exactly one point, got 'SW-MLP'"),
        ({"seeds": "[1, 1]"}, "seeds has a seed twice"),
    ],
)
def test_sweeps_that_are_refused(digits, tmp_path, capsys, changes, sentence):
    path = write(tmp_path, digits, **changes)
    assert run(path, tmp_path / "out") == 1
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_sweep_that_is_stopped_before_a_run_ends(digits, tmp_path, monkeypatch, capsys):
    """It exits as stopped, and its folder is known as that of a sweep, so that reports can be made meanwhile."""
    monkeypatch.setattr(compare, "run_chains", lambda *arguments: signal.SIGTERM)
    assert run(write(tmp_path, digits), tmp_path / "out") == 75
    assert "the same command resumes" in capsys.readouterr().out
    assert main(["wide-sparse", "report", str(tmp_path / "out")]) == 1
    assert "no run has ended yet" in capsys.readouterr().err


def test_files_that_are_no_sweeps(tmp_path, digits, capsys):
    good = write(tmp_path, digits).read_text()
    for old, new, sentence in (
        ("x: width", "x: height", "x must be one of width, channels, tokens, layers, density, got 'height'"),
        ("x: width", "x: channels", "mask_density=0.5 has no place on the axis x=channels"),
        ("mlp_width: 64, mask_density: 0.125", "mlp_width: 32, mask_density: 0.5", "mask_density=0.5' twice"),
        ("points: [{embed_dim: 8, mixed_tokens: 8}]", "points: []", "series.S-Mixer.points needs at least one point"),
        ("  S-Mixer:", "  ../../S-Mixer:", "series.'../../S-Mixer' cannot name folders of runs"),
        ("embed_dim: 8", "embed_dim: null", "--model-kwargs embed_dim=None: None is not a value"),
        ("num_layers: 2", "num_layers: 1000000000", "num_layers must be at most 10,000, got 1000000000"),
        ("title:", "titel: x\ntitle:", "titel is unknown; did you mean 'title'?"),
        ("num_layers: 2", "num_layers: 3", "similarity needs models with equally many branches, got"),
    ):
        (tmp_path / "sweep.yaml").write_text(good.replace(old, new))
        assert run(tmp_path / "sweep.yaml", tmp_path / "out") == 1
        assert sentence in capsys.readouterr().err
    timms = "options: --model vit_tiny_patch16_224\n    points: [{patch_size: 2, depth: 1}]\n"
    (tmp_path / "sweep.yaml").write_text(f"{good.replace('similarity: S-Mixer', '')}  ViT:\n    {timms}")
    assert run(tmp_path / "sweep.yaml", tmp_path / "out") == 1
    assert "--model vit_tiny_patch16_224 is timm's, but a sweep needs smlp_* models" in capsys.readouterr().err
    assert main(["wide-sparse", "report", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no sweep of smlp wide-sparse run: there is no sweep.json" in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_run(path, digits, monkeypatch, capsys):
    """Every model of the files can be made, stands on the axis, and has the connections of its sweep."""
    read = sweep.read_sweep(path)
    assert len(read.comparison.seeds) >= 3
    cost = {"flops": 1, "parameters": 1}
    monkeypatch.setattr(sweep, "costs", lambda comparison, parse: dict.fromkeys(comparison.models, cost))
    assert run(path, Path("nowhere"), "--dry-run") == 0 and not Path("nowhere").exists()


def test_of_models_at_one_place_those_of_one_shape_are_compared():
    """Swapped C and S give one width."""
    facts = {
        f"{series} {channels}": {"width": 696, "channels": channels, "tokens": tokens, "layers": 4, "density": 0.1}
        for series in ("A", "B")
        for channels, tokens in ((8, 87), (87, 8))
    }
    errors = {name: {1: 10.0 + facts[name]["channels"], 2: 10.5 + facts[name]["channels"]} for name in facts}
    series = {"A": ["A 8", "A 87"], "B": ["B 8", "B 87"]}
    (table,) = sweep._series_tables({"series": series, "facts": facts, "x": "width"}, errors)
    assert [row["difference"].value for row in table.rows] == [0.0, 0.0]
    facts["B 87"]["channels"] = 88
    (table,) = sweep._series_tables({"series": series, "facts": facts, "x": "width"}, errors)
    assert len(table.rows) == 1


@pytest.mark.parametrize(("layers", "head"), [((2, 4), "first"), ((4, 4), "widest")])
def test_what_the_points_of_a_series_are_compared_with(layers, head):
    facts = {
        f"A {number}": {"width": 64 if head == "first" else 64 * (number + 1), "channels": 8, "tokens": 8}
        | {"layers": depth, "density": 0.5, "connections": 1, "flops": 1, "parameters": 1}
        for number, depth in enumerate(layers)
    }
    record = {"title": "t", "series": {"A": list(facts)}, "facts": facts, "seeds": [1, 2], "similarity": None}
    table = sweep._points_table(record, {"A 0": {1: 5.0, 2: 6.0}, "A 1": {1: 4.0, 2: 5.5}}, {})
    assert f"minus the {head} (points)" in [column.head for column in table.columns]
    (compared,) = [row for row in table.rows if "difference" in row]
    assert compared["difference"].value == (-0.75 if head == "first" else 0.75)
