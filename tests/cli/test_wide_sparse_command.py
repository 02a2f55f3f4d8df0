"""``smlp wide-sparse``: its output, its JSON, and what it says about wrong input."""

import json
from argparse import Namespace

import pytest
import torch
from PIL import Image
from tiny_checkpoints import write_checkpoint

from smlp.cli.main import main
from smlp.launch.machine import let_torchvision_load
from smlp.plots.filters import spatial_layers
from smlp.vision.presets import preset

WORDS = [f"word{number}" for number in range(12)]


def test_table(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["wide-sparse", "table", "--arch", "smlp_tiny", "--arch", "smlp_sparse_mlp", "--json", str(file)]) == 0
    assert "sMoE" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content.keys() == {"presets"}
    row = next(row for row in content["presets"] if row["kind"] == "sMoE")
    assert row["uses"] == 32 and row["connections"] == 256 * 128 * 129 / 2 and row["executed"] == 256 * 128 * 128


def test_spectrum_of_random_matrices(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["wide-sparse", "spectrum", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [360, 252, 203, 173, 152, 136, 124, 113, 104, 96, 89, 83, 64]
    edges = [row["formula"] for row in rows]
    assert edges == sorted(edges) and all(row["mixer"] < row["formula"] < row["printed"] for row in rows)


def test_spectrum_of_a_checkpoint(tmp_path, capsys):
    path, model = write_checkpoint(tmp_path, WORDS)
    file = tmp_path / "layers.json"
    assert main(["wide-sparse", "spectrum", str(path), "--json", str(file)]) == 0
    layers = json.loads(file.read_text())["layers"]
    assert {layer["kind"] for layer in layers} == {"SGU", "sMoE (deterministic)"}
    for layer, found in zip(layers, spatial_layers(model), strict=True):
        assert layer["size"] == 12 and layer["edge"] == pytest.approx(1.6487, abs=1e-4)
        weight = found.experts.weight[0].detach().double().tril()
        expected = torch.linalg.matrix_norm(weight, 2) / (12 * weight.square().sum() / 78).sqrt()
        assert layer["largest"][0] == pytest.approx(expected.item())


def test_spatial_weights_that_are_no_numbers(tmp_path, capsys, monkeypatch):
    """Also where checkpoints are not checked when they are opened."""
    monkeypatch.setenv("SMLP_VERIFY_CHECKPOINTS", "0")
    path, _ = write_checkpoint(tmp_path, WORDS)
    state = torch.load(path, weights_only=True)
    for name, value in state["model"].items():
        if value.shape[-2:] == (12, 12):
            state["model"][name] = value.fill_(float("nan"))
    torch.save(state, path)
    assert main(["wide-sparse", "spectrum", str(path)]) == 1
    assert f"{path}: the spatial weights of layer 0 are no finite numbers" in capsys.readouterr().err


def test_cka_of_two_checkpoints(tmp_path, capsys):
    let_torchvision_load()
    import timm

    import smlp.vision.timm_models  # noqa: F401

    torch.manual_seed(0)
    for number in range(8):
        folder = tmp_path / "data" / "validation" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    paths = []
    for name, settings in (("smlp_rp_s_mixer", {"mixed_tokens": 3}), ("smlp_sparse_mlp", {"mlp_width": 30})):
        settings |= {"img_size": 8, "num_layers": 2, "num_classes": 2}
        assert preset(name, **settings).num_tokens == 4
        model = timm.create_model(name, **settings)
        args = Namespace(
            model=name, num_classes=2, img_size=8, in_chans=None, model_kwargs=settings, classes=["0", "1"]
        )
        args.model_kwargs = {key: value for key, value in settings.items() if key not in ("img_size", "num_classes")}
        paths.append(str(tmp_path / f"{name}.pth.tar"))
        torch.save({"state_dict": model.state_dict(), "args": args, "epoch": 0}, paths[-1])
    options = ["--data-dir", str(tmp_path / "data"), "-b", "4"]
    file = tmp_path / "cka.json"
    assert main(["wide-sparse", "cka", *paths, *options, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["first"] == ["0.tokens", "0.channels", "1.tokens", "1.channels"] and found["second"] == ["0", "1"]
    assert found["images"] == 8 and len(found["cka"]) == 4
    assert main(["wide-sparse", "cka", paths[0], paths[0], *options, "--json", str(file)]) == 0
    same = json.loads(file.read_text())["cka"]
    assert all(same[i][i] == pytest.approx(1) for i in range(4))
    content = torch.load(paths[0], weights_only=False)
    content["args"].__dict__.update(mean=[0.9] * 3, std=[0.05] * 3)
    torch.save(content, other := str(tmp_path / "other.pth.tar"))
    found = []
    for pair in ([paths[0], other], [other, paths[0]]):
        assert main(["wide-sparse", "cka", *pair, *options, "--json", str(file)]) == 0
        found.append(torch.tensor(json.loads(file.read_text())["cka"]))
    torch.testing.assert_close(found[0], found[1].T)  # each model gets the images as it wants them
    assert (found[0].diagonal() - 1).abs().max() > 1e-3
    content["args"].crop_pct = 0.5
    torch.save(content, other)
    assert main(["wide-sparse", "cka", paths[0], other, *options]) == 1
    assert "must take the same images: crop_pct is" in capsys.readouterr().err
    assert main(["wide-sparse", "cka", *paths, *options[:-1], "16"]) == 1
    assert "has 8 images in validation, less than --batch-size 16" in capsys.readouterr().err
    content = torch.load(paths[1], weights_only=False)
    content["state_dict"]["stem.proj.weight"].fill_(0.0)
    torch.save(content, paths[1])
    file.unlink()
    assert main(["wide-sparse", "cka", *paths, *options, "--json", str(file)]) == 1
    error = capsys.readouterr().err
    assert f"branch 0.tokens of {paths[0]} and 0 of {paths[1]} have no CKA" in error and not file.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["table", "--arch", "smlp_tyni"], "unknown architecture 'smlp_tyni'; did you mean 'smlp_tiny'?"),
        (["spectrum", "nothing.pt"], "there is no checkpoint nothing.pt"),
        (["spectrum", "--arch", "dense_lm_tiny"], "dense_lm_tiny has no spatial matrices"),
        (["spectrum", "--trials", "-1"], "--trials must be at least 0, got -1"),
        (["spectrum", "--seed", "3"], "--seed 3 would not be used: it is for --arch and --trials"),
        (["spectrum", "x.pt", "--seed", "3"], "--seed 3 would not be used: it is for --arch and --trials"),
        (["spectrum", "x.pt", "--trials", "2"], "--trials 2 would not be used: it is for random matrices"),
        (["spectrum", "--arch", "smlp_tiny", "--dict", "d"], "--dict d would not be used: it is for CHECKPOINT"),
        (["cka", "a", "b", "--data-dir", "c", "-b", "3"], "must be at least 4, got 3"),
        (["cka", "a", "b", "--data-dir", "c"], "there is no checkpoint a"),
        (["cka", "a", "b", "--data-dir", "c", "--dict", "d"], "--dict d would not be used: c holds no binarised text"),
    ],
)
def test_wrong_input_is_a_sentence(words, sentence, capsys):
    assert main(["wide-sparse", *words]) == 1
    shown = capsys.readouterr().err
    assert sentence in shown and shown.count("\n") == 1
