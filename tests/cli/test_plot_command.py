"""``smlp plot weights``: pictures, table, JSON and refusals."""

from __future__ import annotations

import json
import struct
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from checkpoint_states import in_parts, save

import smlp
from smlp.cli.main import main
from smlp.plots.filters import filter_numbers, spatial_layers

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("matplotlib")


def write_mmap(prefix: Path, lines: list[np.ndarray]) -> None:
    """Binarised text as fairseq-preprocess writes it."""
    lengths = np.array([len(line) for line in lines], dtype="<i4")
    offsets = (lengths.cumsum(dtype=np.int64) - lengths) * 4
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 4, len(lines))
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + offsets.astype("<i8").tobytes())
    prefix.with_suffix(".bin").write_bytes(np.concatenate(lines).astype("<i4").tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """200 tokens of 20 words in 25 lines."""
    folder, draw = tmp_path_factory.mktemp("plots") / "data", np.random.default_rng(0)
    folder.mkdir()
    write_mmap(folder / "valid", [np.append(draw.integers(4, 24, 7), 2) for _ in range(25)])
    save(folder, "base_lm_tiny").unlink()  # its dict.txt stays
    return folder


def plot(*arguments: object) -> int:
    """``smlp plot weights ARGUMENTS``."""
    return main(["plot", "weights", *map(str, arguments)])


def is_drawn(path: Path) -> bool:
    """Whether a PNG shows more than a blank page."""
    from matplotlib.image import imread

    picture = imread(path)
    shades = np.unique((255 * picture[..., :3]).astype(int) @ [1, 256, 65536])
    return min(picture.shape[:2]) > 300 and len(shades) > 50


def test_pictures_numbers_and_table_of_partial_routing(data, tmp_path, capsys):
    path, out = save(tmp_path, "smlp_partial_tiny", num_heads=1, num_experts=2), tmp_path / "deep" / "pictures"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status = plot(path, "--data", data, "--out", out, "--json", tmp_path / "found.json", "--limit-tokens", 144)
    printed = capsys.readouterr()
    assert status == 0 and printed.err == ""
    names = ["toeplitz", "filters_layer0", "filters_layer1", "tokens_layer1", "features_layer1"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted(each.name for each in out.iterdir()) == sorted(f"{name}.png" for name in names)
    assert found["figures"] == [str(out / f"{name}.png") for name in names]
    assert all(is_drawn(out / f"{name}.png") for name in names)
    decoder = smlp.load_pretrained(path).decoder
    for layer, facts in zip(spatial_layers(decoder), found["spatial"], strict=True):
        assert [facts[key] for key in ("layer", "kind", "size")] == [layer.layer, layer.kind, layer.size]
        assert facts["random_toeplitz_share"]["mean"] == pytest.approx(2 / (layer.size + 1))
        shares = [each.toeplitz_share for each in filter_numbers(layer)]
        assert [each["toeplitz_share"] for each in facts["matrices"]] == pytest.approx(shares)
        row = next(line for line in printed.out.splitlines() if line.startswith(f"{layer.layer} "))
        assert f"{min(shares):.4f}" in row and f"{max(shares):.4f}" in row and layer.kind in row
    assert found["arch"] == "smlp_partial_tiny" and found["tokens_fed"] == 144 and found["sequences_fed"] == 12
    (tokens,), (features,) = found["token_routing"], found["feature_routing"]
    assert sum(tokens["load"]) == pytest.approx(1) and sorted(tokens["order_of_experts"]) == [0, 1]
    fed = [piece["count"] for piece in found["pieces"]]
    assert sum(fed) == 144, "all pieces are counted apart, so that their means make that of all tokens"
    of_pieces = np.average(tokens["mean_affinity_of_pieces"], axis=0, weights=fed)
    assert of_pieces == pytest.approx(tokens["mean_affinity"]) and min(tokens["mean_affinity"]) > 0
    assert np.array(tokens["counts"]).sum(axis=1).tolist() == fed
    assert np.array(features["counts"]).sum() == 12 * 16 and len(features["agreement"]) == 16
    assert "144 tokens in 12 sequences" in printed.out and "at random 50.00%" in printed.out
    assert found["pieces"][0]["symbol"] in ("</s>", *(f"w{number}" for number in range(20)))


def test_what_is_left_out_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("smlp.plots.weights.MOST_MATRICES", 2)
    monkeypatch.setattr("smlp.plots.weights.MOST_LAYERS", 2)
    path = save(tmp_path, "smlp_tiny", num_dense_layers=3, num_heads=1)
    assert plot(path, "--out", tmp_path, "--json", tmp_path / "found.json") == 0
    found, printed = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert [line.split(":")[0] for line in found["left_out"]] == [
        "spatial filters of SGU",
        "spatial filters of sMoE (deterministic)",
        "which tokens and features go to which expert",
        "deterministic routing of features",
    ]
    assert "2 of 3 layers are drawn (0, 3)" in found["left_out"][0]
    assert "2 of 4 experts of a layer are drawn" in found["left_out"][1]
    assert "expert i of 0 .. 3 mixes the 4 of 16 features from number 4*i on" in found["left_out"][3]
    assert all(f"left out: {line}" in printed for line in found["left_out"])
    names = {"toeplitz.png", *(f"filters_layer{layer}.png" for layer in (0, 2, 3))}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    assert [len(layer["matrices"]) for layer in found["spatial"]] == [1, 1, 4, 1], "numbers are of all"


def test_chosen_layers_and_experts_as_svg_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("smlp.plots.weights.MOST_MATRICES", 2)
    path = save(tmp_path, "gmlp_moe_tiny", num_experts=3)
    for name, experts in (("some", "2"), ("all", "all")):
        assert plot(path, "--out", tmp_path / name, "--layers", "1", "--experts", experts, "--format", "svg") == 0
    assert {each.name for each in (tmp_path / "some").iterdir()} == {"filters_layer1.svg", "toeplitz.svg"}
    names = {"filters_layer1_0.svg", "filters_layer1_1.svg", "toeplitz.svg"}
    assert {each.name for each in (tmp_path / "all").iterdir()} == names
    for same in ("toeplitz.svg", "filters_layer1{}.svg"):
        first, second = (tmp_path / folder / same.format(end) for folder, end in (("some", ""), ("all", "_1")))
        assert first.read_bytes() == second.read_bytes()
        assert ElementTree.parse(first).getroot().tag.endswith("svg")


def test_experts_in_parts_and_attention_with_data(data, tmp_path, capsys):
    whole = save(tmp_path, "gshard_lm_tiny")
    found = []
    for name, path in (("whole", whole), ("parts", in_parts(whole, tmp_path / "split", 2))):
        arguments = ["--data", data, "--out", tmp_path / name, "--json", tmp_path / f"{name}.json", "--pieces", 5]
        assert plot(path, *arguments) == 0
        found.append(json.loads((tmp_path / f"{name}.json").read_text()))
        assert [each.name for each in (tmp_path / name).iterdir()] == ["tokens_layer1.png"]
    assert found[0]["token_routing"] == found[1]["token_routing"] and len(found[0]["pieces"]) == 5
    assert found[0]["spatial"] == []
    assert "spatial filters: there are none, for tokens are mixed without spatial weights" in capsys.readouterr().out


REFUSED = {
    "a dense Transformer": ("dense_lm_tiny", [], "no spatial filters, and it has no experts either"),
    "attention without data": ("base_lm_tiny", [], "give --data to draw which tokens go to which of its experts"),
    "a layer too many": ("base_lm_tiny", ["--layers", "0,2"], "--layers names 2, but the model has 2 layers: 0 to 1"),
    "no number": ("base_lm_tiny", ["--layers", "0-1"], "--layers takes numbers with commas between them"),
    "an expert too many": ("smlp_tiny", ["--experts", "9"], "--experts names 9, but the model has 4"),
    "nothing to draw": ("base_lm_tiny", ["--layers", "0", "--data", "{data}"], "no layer that --layers names has"),
    "no tokens": ("smlp_tiny", ["--limit-tokens", "0"], "--limit-tokens must be at least 1, got 0"),
    "no such split": ("smlp_tiny", ["--data", "{data}", "--subset", "gone"], "there is no data file"),
    "a file in the way": ("smlp_tiny", ["--out", "{data}/dict.txt"], "dict.txt is a file: name a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_in_one_sentence(case, data, tmp_path, capsys):
    arch, options, message = REFUSED[case]
    path = save(tmp_path, arch)
    options = ["--out", tmp_path / "out", *(option.replace("{data}", str(data)) for option in options)]
    assert plot(path, *options) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err
    assert not (tmp_path / "out").exists()


def test_no_older_json_passes_for_that_of_a_command_that_was_stopped(tmp_path, monkeypatch):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("smlp.plots.weights.plot_weights", stop)
    path, older = save(tmp_path, "smlp_tiny"), tmp_path / "weights.json"
    older.write_text("{}\n")
    assert plot(path, "--json", older, "--layers", "x") == 1 and older.exists()
    assert plot(path, "--json", older, "--out", tmp_path / "out") == 130 and not older.exists()


def test_a_folder_of_pictures_that_can_have_no_such_name(tmp_path, capsys):
    assert plot(save(tmp_path, "smlp_tiny"), "--out", "a\0b") == 1
    assert "cannot write picture 'a\\x00b/" in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot(tmp_path / "no.pt") == 1
    assert 'pip install "smlp[plots]"' in capsys.readouterr().err
