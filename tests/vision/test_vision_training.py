"""``smlp vision train`` and ``evaluate`` on scikit-learn's digits: a tiny model, a few updates."""

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from running import REPOSITORY

from data_prep.images import fetch
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.vision.checkpoints import create_model, image_config, load_weights, read_checkpoint

TINY = ["--img-size", "8", "--in-chans", "1", "--mean", "0.3059", "--std", "0.3763", "--crop-pct", "1", "-j", "0"]
SIZES = ["--model-kwargs", "num_layers=2", "embed_dim=16", "ffn_dim=32", "token_dim=16", "patch_size=2"]
RECIPE = [
    *("-b", "32", "--lr", "3e-3", "--warmup-epochs", "1", "--epochs", "2", "--clip-grad", "1", "--scale", "0.7", "1"),
    *("--mixup", "0.2", "--cutmix", "1", "--reprob", "0.2", "--drop-path", "0.1", "--model-ema", "--sched-on-updates"),
    *("--model-ema-decay", "0.9"),
]


HEADS = ("head", "head_dist")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "digits"
    fetch("digits", folder, limit=16, quiet=True)
    return str(folder)


def train(digits, *options, model="smlp_mixer_tiny"):
    return main(["vision", "train", "--data-dir", digits, "--model", model, *TINY, *SIZES, *map(str, options)])


def evaluated(checkpoint, digits, *options):
    """The JSON of ``smlp vision evaluate``."""
    report = checkpoint.parent / "report.json"
    command = ["vision", "evaluate", checkpoint, "--data-dir", digits, "-j", "0", "--json", report, *options]
    assert main(list(map(str, command))) == 0
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def two_epochs(digits, tmp_path_factory):
    """The folder of a run of two epochs with everything that is random."""
    out = tmp_path_factory.mktemp("output")
    assert train(digits, *RECIPE, "--output", out, "--experiment", "whole") == 0
    return out / "whole"


def test_a_checkpoint_that_cannot_be_written_is_one_sentence(digits, tmp_path, monkeypatch, capsys):
    def full(self, epoch, metric):
        (tmp_path / "full" / "tmp.pth.tar").write_bytes(b"PK")
        raise RuntimeError("[enforce fail at inline_container.cc:862] . unexpected pos 64 vs 0")

    monkeypatch.setattr("timm.utils.CheckpointSaver.save_checkpoint", full)
    options = ("--epochs", "1", "--warmup-epochs", "0", "-b", "80", "--no-aug", "--output", tmp_path)
    assert train(digits, *options, "--experiment", "full") == 1
    error = capsys.readouterr().err
    assert "full: the checkpoint of epoch 0 cannot be written (is the disk full?)" in error and error.count("\n") == 1
    assert not (tmp_path / "full" / "tmp.pth.tar").exists()


def test_what_evaluation_would_not_see_is_said(digits, tmp_path, capsys):
    """Images of kinds that timm passes over, and the edges of images that training sees whole."""
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    (data / "train" / "3" / "more.webp").write_bytes(b"RIFF")
    options = ("--epochs", "1", "--warmup-epochs", "0", "-b", "80", "--no-aug", "--output", tmp_path)
    assert train(str(data), *options) == 0
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "1 images such as" in said and "3/more.webp are left out: timm reads" in said
    assert train(digits, *options, "--experiment", "cut", "--crop-pct", "0.875") == 0
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "validation cuts out 0.875 of their side: --crop-pct 1 takes whole" in said


def rows(folder):
    with open(folder / "summary.csv", newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        del row["train_images_per_second"]
    return found


def same(first, second):
    """Whether two values of a checkpoint, tensors within them too, are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_a_resumed_run_continues_bit_for_bit(digits, two_epochs, tmp_path):
    first = two_epochs / "checkpoint-0.pth.tar"
    torch.serialization.add_safe_globals([argparse.Namespace])
    assert train(digits, *RECIPE, "--output", tmp_path, "--experiment", "resumed", "--resume", first) == 0
    whole, resumed = (read_checkpoint(str(run / "last.pth.tar")) for run in (two_epochs, tmp_path / "resumed"))
    for name in ("epoch", "state_dict", "state_dict_ema", "optimizer", "metric"):
        assert same(whole[name], resumed[name]), name
    assert rows(tmp_path / "resumed") == rows(two_epochs)[1:]
    assert (tmp_path / "resumed" / "model_best.pth.tar").is_file(), "the best of this folder, whatever was before"
    assert not same(read_checkpoint(str(first))["state_dict"], whole["state_dict"])
    assert argparse.Namespace in torch.serialization.get_safe_globals(), "fairseq's checkpoints need it too"


def test_a_run_resumes_in_its_own_folder(digits, tmp_path, capsys):
    options = [*RECIPE[2:], "-b", "64", "--log-interval", "1"]
    assert train(digits, *options, "--output", tmp_path, "--experiment", "run") == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1 [")]
    progress = r"epoch 1 \[{}/2\] loss [\d.]+, learning rate [\d.e-]+, [\d,]+ images/s, {} s left"
    assert re.fullmatch(progress.format(1, r"[\d,]+"), first) and re.fullmatch(progress.format(2, 0), second)
    for shown in ("epochs 2 to 2 of 2 batches", "none left of 3 epochs of 2 batches"):
        assert train(digits, *options, "--epochs", "3", "--resume", tmp_path / "run" / "last.pth.tar") == 0
        assert shown in capsys.readouterr().out
        assert [row["epoch"] for row in rows(tmp_path / "run")] == ["0", "1", "2"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", [1, 2])
def test_a_save_that_a_kill_interrupted_is_ended(digits, tmp_path, monkeypatch, place):
    """Once the last checkpoint is written, those of the epoch and of the best epoch are still to come."""
    top1 = iter([10.0, 30.0, 20.0] * 2)
    monkeypatch.setattr("smlp.vision.train.validate", lambda *args: {"loss": 1.0, "top1": next(top1), "top5": 0.0})
    options = ["--epochs", "3", "--warmup-epochs", "0", "-b", "80", "--no-aug", "--checkpoint-hist", "2"]
    assert train(digits, *options, "--output", tmp_path, "--experiment", "whole") == 0
    link, calls = os.link, []

    def killed(source, target):
        calls.append(target)
        if len(calls) == 2 + place:  # of the second epoch
            raise Killed
        link(source, target)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("os.link", killed)
        train(digits, *options, "--output", tmp_path, "--experiment", "cut")
    assert (tmp_path / "cut" / "checkpoint-1.pth.tar").exists() == (place == 2)
    assert train(digits, *options, "--resume", tmp_path / "cut" / "last.pth.tar") == 0
    # a save that is whole stays as it is
    assert train(digits, *options, "--checkpoint-hist", "1", "--resume", tmp_path / "whole" / "last.pth.tar") == 0
    found = [
        {path.name: read_checkpoint(str(path))["epoch"] for path in (tmp_path / name).glob("*.pth.tar")}
        for name in ("whole", "cut")
    ]
    assert found[0] == found[1] and found[0]["model_best.pth.tar"] == 1 and len(found[0]) == 4


def test_seeds_and_epochs_draw_different_batches(digits, tmp_path):
    for seed in (1, 2):
        assert train(digits, *RECIPE, "--output", tmp_path, "--experiment", f"seed{seed}", "--seed", seed) == 0
    assert rows(tmp_path / "seed1") != rows(tmp_path / "seed2")


def test_evaluation_repeats_the_validation_of_training(digits, two_epochs):
    report = evaluated(two_epochs / "last.pth.tar", digits)
    last = rows(two_epochs)[-1]
    assert report["top1"] == float(last["eval_top1"]) and report["top5"] == float(last["eval_top5"])
    assert report["loss"] == pytest.approx(float(last["eval_loss"]), rel=1e-5)
    assert report["weights"] == "state_dict_ema" and report["images"] == 160
    assert report["images_per_second"] > 0 and report["images_per_second_with_loading"] > 0
    without = evaluated(two_epochs / "last.pth.tar", digits, "--no-ema")
    assert without["weights"] == "state_dict" and without["loss"] != report["loss"]


def test_the_classes_are_those_of_the_training_whatever_names_the_model(digits, two_epochs, tmp_path):
    """A split without the first class would number the others anew."""
    shutil.copytree(f"{digits}/validation", tmp_path / "some" / "validation")
    shutil.rmtree(tmp_path / "some" / "validation" / "0")
    path = two_epochs / "last.pth.tar"
    want = evaluated(path, str(tmp_path / "some"))
    named = evaluated(path, str(tmp_path / "some"), "--model", read_checkpoint(str(path))["args"].model)
    assert (named["loss"], named["top1"]) == (want["loss"], want["top1"])


def test_weights_without_a_training_are_evaluated_with_the_models_options(digits, two_epochs, tmp_path):
    content = torch.load(two_epochs / "last.pth.tar", weights_only=False)
    want = evaluated(two_epochs / "last.pth.tar", digits, "--no-ema")["loss"]
    weights = content["state_dict"]
    for kind in (
        {"model": {f"module.{name}": tensor for name, tensor in weights.items()}},
        {"state_dict": weights, "args": {"model": "smlp_mixer_tiny"}},
    ):
        torch.save(kind, tmp_path / "weights.pth")
        report = evaluated(tmp_path / "weights.pth", digits, "--model", "smlp_mixer_tiny", *TINY, *SIZES)
        assert report["loss"] == want


def test_a_model_of_the_users_takes_images_of_any_size(digits, tmp_path, monkeypatch, capsys):
    """It has none of timm's records of weights; an evaluation takes images as the training did."""
    (tmp_path / "of_the_user.py").write_text(
        "from timm.models import register_model\nfrom torch import nn\n"
        "@register_model\ndef mine(pretrained=False, num_classes=10, in_chans=3, **kw):\n"
        "    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * in_chans, num_classes))\n"
        "    model.num_classes = num_classes\n    return model\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["--device-modules", "of_the_user"]
    options = ["--data-dir", digits, "--model", "mine", *own, "--in-chans", "1", "--input-size", "1", "8", "8"]
    options += ["--no-aug", "-j", "0", "-b", "80", "--epochs", "1", "--warmup-epochs", "0", "--crop-pct", "1"]
    assert main(["vision", "train", *options, "--output", str(tmp_path), "--experiment", "run"]) == 0
    assert (
        main(["vision", "train", *options, "--output", str(tmp_path), "--experiment", "a", "--grad-checkpointing"]) == 1
    )
    assert "timm does not take --grad-checkpointing with mine: AttributeError" in capsys.readouterr().err
    report = evaluated(tmp_path / "run" / "last.pth.tar", digits, *own, "-vb", "7")
    assert (report["image_size"], report["batch_size"]) == (8, 7)
    wide = evaluated(tmp_path / "run" / "last.pth.tar", digits, *own, "--input-size", "1", "8", "16")
    assert wide["image_size"] == [8, 16]
    assert report["loss"] == pytest.approx(float(rows(tmp_path / "run")[-1]["eval_loss"]), rel=1e-5)
    model = create_model(read_checkpoint(str(tmp_path / "run" / "last.pth.tar"))["args"])
    images = {"img_size": None, "input_size": None, "mean": None, "std": None, "crop_pct": None, "interpolation": ""}
    assert image_config(argparse.Namespace(in_chans=1, **images), model)["input_size"] == (1, 224, 224)


def test_every_head_is_initialised_anew_for_other_classes(capsys):
    """Distilled models have two."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), **{name: torch.nn.Linear(2, 3) for name in HEADS}})
    model.pretrained_cfg = {"classifier": HEADS}
    state = {
        name: torch.ones(5 if name.startswith("head") else 2, *own.shape[1:])
        for name, own in model.state_dict().items()
    }
    load_weights(model, {"state_dict": state}, "old.pth", argparse.Namespace(model="deit"), new_head=True)
    assert model["body"].weight.eq(1).all() and not model["head_dist"].weight.eq(1).any()
    assert capsys.readouterr().out.count("the head is initialised anew") == 4
    asked = argparse.Namespace(model="deit", img_size=16, change_resolution=False)
    trained = {"state_dict": state, "args": argparse.Namespace(img_size=8)}
    with pytest.raises(UserError, match="of 8 pixels, --img-size is 16: give the size of its training"):
        load_weights(model, trained, "old.pth", asked)


def test_accuracy_is_a_count_over_all_images(digits, two_epochs, monkeypatch):
    """Against a loop over single images, without timm's loader."""
    from argparse import Namespace

    import numpy as np
    from PIL import Image

    from smlp.vision.checkpoints import create_model, load_weights
    from smlp.vision.data import open_split

    checkpoint = read_checkpoint(str(two_epochs / "last.pth.tar"))
    args: Namespace = checkpoint["args"]
    model = create_model(args).eval()
    load_weights(model, checkpoint, "last.pth.tar", args)
    samples = open_split(digits, "validation", args.classes, 1).reader.samples
    correct = dict.fromkeys((1, 5), 0)
    for path, label in samples:
        pixels = torch.from_numpy(np.asarray(Image.open(path), dtype=np.float32))
        with torch.no_grad():
            logits = model(((pixels / 255 - 0.3059) / 0.3763)[None, None])[0]
        for k in correct:
            correct[k] += int(label in logits.topk(k).indices)
    report = evaluated(two_epochs / "last.pth.tar", digits, "-b", "48")
    assert (report["top1"], report["top5"]) == tuple(100 * count / len(samples) for count in correct.values())


def test_mixed_precision_and_accumulation(digits, tmp_path):
    """Two batches of an update are one of twice the size; bfloat16 changes the numbers a little."""
    plain = ["--no-aug", "--lr", "1e-3", "--warmup-epochs", "0", "--epochs", "1"]
    base = read_run(digits, tmp_path, "base", *plain, "-b", "32")
    halves = read_run(digits, tmp_path, "halves", *plain, "-b", "16", "--grad-accum-steps", "2")
    amp = read_run(digits, tmp_path, "amp", *plain, "-b", "32", "--amp")
    assert halves == pytest.approx(base, rel=1e-4)
    assert amp == pytest.approx(base, rel=2e-2) and amp != base
    plain_loss, loss = (float(rows(tmp_path / name)[-1]["train_loss"]) for name in ("base", "amp"))
    assert loss == pytest.approx(plain_loss, rel=5e-4)  # a loss of 2.3 in bfloat16 is a multiple of 1/64


def read_run(digits, out, name, *options):
    assert train(digits, *options, "--output", out, "--experiment", name) == 0
    return float(rows(out / name)[-1]["eval_loss"])


def test_gmlp_trains_with_fine_tuning_of_another_head(digits, two_epochs, tmp_path, capsys):
    best = two_epochs / "model_best.pth.tar"
    options = ["--epochs", "1", "-b", "80", "--no-aug", "--initial-checkpoint", best, "--num-classes", "12"]
    assert train(digits, *options, "--output", tmp_path, "--experiment", "tuned") == 0
    assert "another number of classes, so the head is initialised anew" in capsys.readouterr().out
    assert train(digits, *options[:5], "--output", tmp_path, "--experiment", "gmlp", model="smlp_gmlp_tiny") == 0


@pytest.mark.parametrize("model", ["smlp_mixer_tiny", "smlp_gmlp_tiny"])
def test_change_of_resolution(digits, tmp_path, model):
    """Twice the size: evaluation converts, fine-tuning converts, and its checkpoint is evaluated as it is."""
    brief = ["--epochs", "1", "-b", "80", "--no-aug", "--output", tmp_path]
    assert train(digits, *brief, "--experiment", "small", model=model) == 0
    small = tmp_path / "small" / "last.pth.tar"
    at_once = evaluated(small, digits, "--img-size", "16", "--change-resolution")
    assert at_once["image_size"] == 16 and at_once["weights"] == "state_dict"
    bare = tmp_path / "bare.pth"  # which does not say at which size it was trained
    torch.save(read_checkpoint(str(small))["state_dict"], bare)
    sizes = ["--model", model, *TINY[2:-2], *SIZES, "--img-size", "16"]
    assert evaluated(bare, digits, *sizes, "--change-resolution")["loss"] == at_once["loss"]
    named = [*TINY[2:-2], "--input-size", "1", "8", "8", *SIZES, "img_size=8"]  # a size among the model's own settings
    command = ["vision", "train", "--data-dir", digits, "--model", model, *named, "-j", "0", *brief]
    assert main([*map(str, command), "--experiment", "named"]) == 0
    again = evaluated(tmp_path / "named" / "last.pth.tar", digits, "--img-size", "16", "--change-resolution")
    assert again["loss"] == at_once["loss"]
    larger = [
        "--initial-checkpoint",
        small,
        "--change-resolution",
        "--lr",
        "0",
        "--min-lr",
        "0",
        "--warmup-epochs",
        "0",
    ]
    assert train(digits, *brief, *larger, "--img-size", "16", "--experiment", "large", model=model) == 0
    (row,) = rows(tmp_path / "large")
    assert float(row["eval_loss"]) == pytest.approx(at_once["loss"], rel=1e-6)
    again = evaluated(tmp_path / "large" / "last.pth.tar", digits)
    assert again["loss"] == pytest.approx(at_once["loss"], rel=1e-6) and again["image_size"] == 16
    resumed = ["-b", "80", "--no-aug", *larger[3:], "--img-size", "16", "--output", tmp_path]
    for epochs, before, name in ((2, "large", "resumed"), (3, "resumed", "again")):
        last = tmp_path / before / "last.pth.tar"  # --model-kwargs name the width at the smaller size
        more = ["--epochs", epochs, "--experiment", name, "--resume", last]
        assert train(digits, *resumed, *more, model=model) == 0


@pytest.mark.parametrize("kind", ["mixer", "gmlp"])
def test_weights_of_timms_models_are_evaluated_in_ours(digits, tmp_path, kind):
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    sizes = {"num_classes": 10, "img_size": 8, "in_chans": 1, "patch_size": 2, "num_blocks": 2, "embed_dim": 16}
    gated = {"block_layer": SpatialGatingBlock, "mlp_layer": GatedMlp, "mlp_ratio": 6} if kind == "gmlp" else {}
    torch.manual_seed(0)
    theirs = MlpMixer(**sizes, **gated).eval()
    torch.nn.init.normal_(theirs.head.weight)
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    widths = ["ffn_dim=96"] if kind == "gmlp" else ["ffn_dim=64", "token_dim=8", "activation=gelu"]
    ours = [*("--model", f"smlp_{kind}_tiny", *TINY), "--model-kwargs", *widths, "num_layers=2", "embed_dim=16"]
    report = evaluated(tmp_path / "timm.pth", digits, *ours, "patch_size=2")
    from smlp.vision.data import open_split

    images = open_split(digits, "validation", None, 1)
    images.transform = lambda image: torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 8, 8)
    pixels, labels = zip(*(images[place] for place in range(len(images))), strict=True)
    with torch.no_grad():
        logits = theirs((torch.stack(pixels) / 255 - 0.3059) / 0.3763)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    assert report["loss"] == pytest.approx(loss.item(), rel=1e-4)


def on_two_ranks(digits, out, *options):
    """Train through torchrun's variables and gloo."""
    command = ["vision", "train", "--data-dir", digits, "--model", "smlp_mixer_tiny", *TINY, *SIZES, *options]
    command += ["--nproc", "2", "--device", "cpu", "--output", out]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "smlp", *map(str, command)],
        env=environment,
        cwd=out,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output


@pytest.mark.slow
def test_two_ranks_evaluate_every_image_once_and_resume(digits, tmp_path):
    """With an odd number of images, so that timm's sampler repeats one."""
    digits = shutil.copytree(digits, tmp_path / "digits")
    next((digits / "validation" / "3").iterdir()).unlink()
    options = [*RECIPE, "-b", "16", "-vb", "13"]
    on_two_ranks(digits, tmp_path, *options, "--experiment", "two")
    report = evaluated(tmp_path / "two" / "last.pth.tar", digits, "-b", "7")
    last = rows(tmp_path / "two")[-1]
    assert report["top1"] == float(last["eval_top1"]) and report["images"] == 159
    assert report["loss"] == pytest.approx(float(last["eval_loss"]), rel=1e-5)
    first = tmp_path / "two" / "checkpoint-0.pth.tar"
    on_two_ranks(digits, tmp_path, *options, "--experiment", "resumed", "--resume", first)
    whole, resumed = (read_checkpoint(str(tmp_path / run / "last.pth.tar")) for run in ("two", "resumed"))
    for name in ("epoch", "state_dict", "state_dict_ema", "optimizer", "metric"):
        assert same(whole[name], resumed[name]), name


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one(digits, tmp_path):
    """All 160 images are one batch on one rank, and two halves on two."""
    options = [
        "--no-aug",
        "--epochs",
        "2",
        "--warmup-epochs",
        "0",
        "--opt",
        "sgd",
        "--lr",
        "0.1",
        "--clip-grad",
        "0.05",
    ]
    assert train(digits, *options, "-b", "160", "--output", tmp_path, "--experiment", "one") == 0
    on_two_ranks(digits, tmp_path, *options, "-b", "80", "--experiment", "two")
    one, two = (read_checkpoint(str(tmp_path / run / "last.pth.tar"))["state_dict"] for run in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6)


def test_adaptive_clipping_leaves_out_the_head(digits, tmp_path, monkeypatch):
    """As in timm's own training, and in the paper of adaptive gradient clipping."""
    seen = []
    monkeypatch.setattr(
        "smlp.vision.train.dispatch_clip_grad", lambda found, *rest, mode: seen.append(len(list(found)))
    )
    words = ["--epochs", "1", "-b", "160", "--no-aug", "--warmup-epochs", "0", "--output", tmp_path, "--clip-grad", "1"]
    for mode in ("norm", "agc"):
        assert train(digits, *words, "--clip-mode", mode, "--experiment", mode) == 0
    assert seen[1] == seen[0] - 2


@pytest.mark.parametrize("channels", ["1", "3"])
@pytest.mark.parametrize("policy", ["original", "rand-m15-n2"])
def test_the_papers_augmentation(digits, policy, channels, tmp_path):
    """AutoAugment (gMLP) and RandAugment (Mixer), as the recipes for ImageNet have them; of grey images, too."""
    options = ["--in-chans", channels, "--aa", policy, "--epochs", "1", "--warmup-epochs", "0", "-b", "80"]
    assert train(digits, *options, "--output", tmp_path, "--experiment", "augmented") == 0
    (row,) = rows(tmp_path / "augmented")
    assert 0 < float(row["train_loss"]) < 10
