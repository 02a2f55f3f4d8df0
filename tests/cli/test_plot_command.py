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
from tiny_checkpoints import write_checkpoint

import smlp
from smlp.cli.main import main
from smlp.plots.attention import SeenText, attention_map
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
    names = ["toeplitz", "layers", "filters_layer0", "filters_layer1", "tokens_layer1", "features_layer1"]
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
    out = tmp_path / "new" / "pictures"  # the file of numbers is in the folder that the pictures make
    assert plot(path, "--out", out, "--json", out / "found.json") == 0
    found, printed = json.loads((out / "found.json").read_text()), capsys.readouterr().out
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
    names = {"toeplitz.png", "layers.png", *(f"filters_layer{layer}.png" for layer in (0, 2, 3))}
    assert {path.name for path in out.glob("*.png")} == names
    assert [len(layer["matrices"]) for layer in found["spatial"]] == [1, 1, 4, 1], "numbers are of all"


def test_chosen_layers_and_experts_as_svg_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("smlp.plots.weights.MOST_MATRICES", 2)
    path = save(tmp_path, "gmlp_moe_tiny", num_experts=3)
    for name, experts in (("some", "2"), ("all", "all")):
        assert plot(path, "--out", tmp_path / name, "--layers", "1", "--experts", experts, "--format", "svg") == 0
    assert {each.name for each in (tmp_path / "some").iterdir()} == {"filters_layer1.svg", "layers.svg", "toeplitz.svg"}
    names = {"filters_layer1_0.svg", "filters_layer1_1.svg", "layers.svg", "toeplitz.svg"}
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


def save_encoder(folder: Path, arch: str, **overrides: object) -> Path:
    """A checkpoint of a small encoder with random weights, and the dictionary of ``data``."""
    words = [f"w{number}" for number in range(20)]
    return write_checkpoint(folder, words, arch, num_dense_layers=3, num_sparse_layers=0, **overrides)[0]


def test_filters_of_an_encoder(data, tmp_path, capsys):
    path = save_encoder(tmp_path, "gmlp_mlm_tiny", spatial_weights="full")
    assert plot(path, "--out", tmp_path, "--json", tmp_path / "found.json") == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    names = ["toeplitz", "layers", *(f"filters_layer{layer}" for layer in range(3))]
    assert found["figures"] == [str(tmp_path / f"{name}.png") for name in names] and found["left_out"] == []
    assert all(is_drawn(Path(figure)) for figure in found["figures"])
    layers = spatial_layers(smlp.load_pretrained(path).core)
    for layer, facts in zip(layers, found["spatial"], strict=True):
        (numbers,) = filter_numbers(layer)
        assert (facts["is_causal"], facts["is_toeplitz"]) == (False, False)
        assert facts["random_toeplitz_share"]["mean"] == pytest.approx(23 / 144)
        assert facts["matrices"][0]["toeplitz_share"] == pytest.approx(numbers.toeplitz_share)
        assert facts["middle_row"] == {"index": 0, "weights": layer.weight(0)[6].tolist()}
        row = next(line for line in printed.splitlines() if line.startswith(f"{layer.layer} "))
        assert f"{numbers.toeplitz_share:.4f}" in row and row.endswith(f"{numbers.ahead_share:.2%}")
    assert "by construction" not in printed
    toeplitz = save_encoder(tmp_path / "toeplitz", "gmlp_mlm_tiny")
    assert plot(toeplitz, "--out", tmp_path, "--data", data, "--layers", 1) == 0
    printed = capsys.readouterr().out
    assert "Toeplitz by construction" in printed and "--data: the model has no experts" in printed


@pytest.mark.parametrize("arch", ["amlp_mlm_tiny", "gmlp_lm_tiny"])
def test_which_tokens_the_tiny_attention_connects(arch, data, tmp_path, capsys):
    path = save_encoder(tmp_path, arch, gmlp_attention_dim=4)
    arguments = ["--out", tmp_path, "--json", tmp_path / "found.json", "--layers", 0]
    assert plot(path, *arguments) == 0
    assert "the tiny attention connects: give a text with --text" in capsys.readouterr().out
    assert plot(path, *arguments, "--text", "w1 w2 ||| w3 w4 w5", "--text", "w6  nothing") == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    pair, alone = found["attention"]
    model = smlp.load_pretrained(path)
    is_encoder = arch == "amlp_mlm_tiny"
    ids = model.tokenize("w1 w2", "w3 w4 w5") if is_encoder else [2, *model.tokenize("w1 w2\nw3 w4 w5")]
    assert [token["id"] for token in pair["tokens"]] == ids == ([0, 5, 6, 2, 7, 8, 9, 2] if is_encoder else ids)
    assert alone["text"] == "w6  nothing" and "<unk>" in [token["symbol"] for token in alone["tokens"]]
    symbols = model.vocabulary.symbols
    direct = attention_map(model.core, SeenText("", ids), symbols)
    assert np.allclose(pair["weights"], direct.weight_nn) and pair["layers"] == [0, 1] == direct.layers
    assert pair["layer_of_weight"] == direct.layer_nn.tolist()
    best = direct.strongest()[0]
    strongest = {"from": best.query, "to": best.key, "weight": pytest.approx(best.weight), "layer": best.layer}
    assert pair["strongest"][0] == strongest
    line = f"{symbols[ids[best.query]]} ({best.query}) -> {symbols[ids[best.key]]} ({best.key})"
    assert line in printed and "layers 0 to 1 in 'w1 w2 ||| w3 w4 w5'" in printed
    assert is_drawn(tmp_path / "attention_0.png") and is_drawn(tmp_path / "attention_1.png")
    assert plot(path, *arguments, "--data", data, "--text", "w1 w2") == 0
    assert "--data: the model has no experts" in capsys.readouterr().out
    assert plot(path, *arguments, "--data", data) == 0 and "--data:" not in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())["attention"]
    assert [each["text"] for each in found] == [f"line {number} of valid" for number in (1, 2, 3, 4)]
    assert [len(each["tokens"]) for each in found] == [9, 9, 9, 9]


REFUSED = {
    "a dense Transformer": ("dense_lm_tiny", [], "no spatial filters, and it has no experts either"),
    "attention without data": ("base_lm_tiny", [], "give --data to draw which tokens go to which of its experts"),
    "a layer too many": ("base_lm_tiny", ["--layers", "0,2"], "--layers names 2, but the model has 2 layers: 0 to 1"),
    "no number": ("base_lm_tiny", ["--layers", "0-1"], "--layers takes numbers with commas between them"),
    "a number of many digits": ("base_lm_tiny", ["--layers", "9" * 5000], "--layers takes numbers with commas"),
    "an expert too many": ("smlp_tiny", ["--experts", "9"], "--experts names 9, but the model has 4"),
    "nothing to draw": ("base_lm_tiny", ["--layers", "0", "--data", "{data}"], "no layer that --layers names has"),
    "no tokens": ("smlp_tiny", ["--limit-tokens", "0"], "--limit-tokens must be at least 1, got 0"),
    "a split without data": ("smlp_tiny", ["--subset", "test"], "--subset test would not be used"),
    "pieces without data": ("smlp_tiny", ["--pieces", "5"], "--pieces 5 would not be used"),
    "a limit without data": ("smlp_tiny", ["--limit-tokens", "9"], "--limit-tokens 9 would not be used"),
    "pieces of an encoder": ("amlp_mlm_tiny", ["--data", "{data}", "--pieces", "5"], "--pieces 5 would not be used"),
    "pieces of a dense decoder": (
        "gmlp_lm_tiny",
        ["--data", "{data}", "--pieces", "5"],
        "--pieces 5 would not be used: it is for the text that a decoder with experts routes",
    ),
    "no such split": ("smlp_tiny", ["--data", "{data}", "--subset", "gone"], "there is no data file"),
    "a BERT": ("bert_mlm_tiny", ["--data", "{data}"], "by self-attention for one, so that it has no spatial filters"),
    "a Mixer": ("mixer_mlm_tiny", ["--text", "w1"], "by two matrices with an activation function between them"),
    "text without attention": (
        "gmlp_mlm_tiny",
        ["--text", "w1"],
        "--text: the first half of the model's layers has no",
    ),
    "a long text": ("amlp_mlm_tiny", ["--text", "w1 " * 11], "of 13 tokens is longer than the model's context of 12"),
    "half a pair": ("amlp_mlm_tiny", ["--text", "w1 |||"], "--text 'w1 |||': a text is empty"),
    "three texts": ("amlp_mlm_tiny", ["--text", "w1 ||| w2 ||| w1"], "3 texts, but models read at most two together"),
    "a file in the way": ("smlp_tiny", ["--out", "{data}/dict.txt"], "dict.txt is a file: name a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_in_one_sentence(case, data, tmp_path, capsys):
    arch, options, message = REFUSED[case]
    path = save_encoder(tmp_path, arch) if "_mlm" in arch else save(tmp_path, arch)
    older = tmp_path / "older.json"
    older.write_text("{}\n")
    options = ["--out", tmp_path / "out", *(option.replace("{data}", str(data)) for option in options)]
    assert plot(path, "--json", older, *options) == 1 and older.exists()
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
    assert 'pip install -e ".[plots]"' in capsys.readouterr().err
