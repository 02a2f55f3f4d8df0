"""``smlp vision compare`` and the command files of examples/vision."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from image_models import train_in_this_process
from running import REPOSITORY

from data_prep.images import fetch
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.vision.compare import _RunChain, check_equal_flops

EXAMPLES = REPOSITORY / "examples" / "vision"
TINY = """
data: {data}
seeds: {seeds}
options: >-
  --img-size 8 --in-chans 1 --no-aug -j 0 -b 32 --epochs 2 --warmup-epochs 1 --lr 3e-3
models:
  first: --model smlp_mixer_tiny --model-kwargs num_layers=1 embed_dim=8 ffn_dim=16 token_dim={width}
  second: --model smlp_mixer_tiny --model-kwargs num_layers=1 embed_dim=8 ffn_dim=16 token_dim=8 {more}
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "digits"
    fetch("digits", folder, limit=8, quiet=True)
    return folder


@pytest.fixture
def in_process(monkeypatch):
    return train_in_this_process(monkeypatch)


def write(tmp_path, digits, **changes):
    path = tmp_path / "comparison.yaml"
    path.write_text(TINY.format(**{"data": digits, "seeds": "[1, 2]", "width": 8, "more": "", **changes}))
    return path


def run(path, out, *options):
    return main(["vision", "compare", str(path), "--out", str(out), *options])


def test_a_folder_of_images_that_is_missing(digits, tmp_path, in_process, capsys):
    assert run(write(tmp_path, tmp_path / "none"), tmp_path / "out") == 1
    assert "there is no folder" in capsys.readouterr().err and not in_process


def test_folders_whose_names_begin_with_a_dash(digits, tmp_path, in_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-d").symlink_to(digits)
    assert main(["vision", "compare", str(write(tmp_path, "-d", seeds="[1]")), "--out=-o"]) == 0
    assert len(in_process) == 2


def test_a_comparison_reports_every_seed_and_paired_differences(digits, tmp_path, in_process, capsys):
    out = tmp_path / "out"
    assert run(write(tmp_path, digits, more="--smoothing 0.5"), out) == 0
    assert len(in_process) == 4 and "--resume" not in in_process[0]
    results = json.loads((out / "results.json").read_text())
    first, second = results["rows"]
    curves = results["curves"]
    assert {len(curve) for by_seed in curves.values() for curve in by_seed.values()} == {2}
    for row in (first, second):
        by_seed = {seed: curve[-1] for seed, curve in curves[row["model"]["value"]].items()}
        assert row["top1"]["by_seed"] == by_seed
        assert row["top1"]["value"] == pytest.approx(sum(by_seed.values()) / 2)
    differences = [curves["second"][seed][-1] - curves["first"][seed][-1] for seed in ("1", "2")]
    assert second["difference"]["value"] == pytest.approx(sum(differences) / 2)
    is_seen = not second["difference"]["low"] <= 0 <= second["difference"]["high"]
    assert second["verdict"]["value"] == ("seen" if is_seen else "not seen")
    assert (out / "curves.png").stat().st_size > 1000 and "| second |" in (out / "results.md").read_text()
    # finished runs are kept, and a seed can be added
    assert run(write(tmp_path, digits, seeds="[1, 2, 3]", more="--smoothing 0.5"), out) == 0
    assert len(in_process) == 6
    capsys.readouterr()
    summary = out / "runs" / "first-s1" / "summary.csv"
    header, *rows = summary.read_text().splitlines(keepends=True)
    whole = (out / "results.json").read_bytes()
    for left, sentence in (
        (rows[:1], "ends with epoch 0, and the run had 2 epochs: remove"),
        ([rows[1], rows[0]], "is damaged: each epoch needs a row"),
        ([rows[0]] * 2, "is damaged: each epoch needs a row"),
    ):
        summary.write_text("".join((header, *left)))
        assert run(write(tmp_path, digits, more="--smoothing 0.5"), out) == 1
        assert f"{summary} {sentence}" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == whole
    summary.write_text("".join((header, *rows[:1])))
    (summary.parent / "done.json").unlink()
    assert run(write(tmp_path, digits, more="--smoothing 0.5"), out) == 1
    assert f"failed: {summary} ends with epoch 0, and the run had 2 epochs" in capsys.readouterr().out
    assert run(write(tmp_path, digits, more="--smoothing 0.4"), out) == 1
    assert "was made with models.second = " in capsys.readouterr().err


def test_other_images_and_a_folder_of_something_else(digits, tmp_path, in_process, capsys):
    images, out = tmp_path / "images", tmp_path / "out"
    shutil.copytree(digits, images)
    out.mkdir()
    (out / "results.md").write_text("of the user")
    assert run(write(tmp_path, images, seeds="[1]"), out) == 1 and not in_process
    assert f"--out {out} has a results.md of something else" in capsys.readouterr().err
    (out / "results.md").unlink()
    assert run(write(tmp_path, images, seeds="[1]"), out) == 0
    (images / ".DS_Store").touch()
    assert run(write(tmp_path, images, seeds="[1]"), out) == 0, "only images count"
    image = next((images / "train" / "3").iterdir())
    (images / "paper" / "figures").mkdir(parents=True)
    shutil.copy(image, images / "paper" / "figures")
    assert run(write(tmp_path, images, seeds="[1]"), out) == 0, "only images of the two splits count"
    image.rename(tmp_path / "image.png")
    image.symlink_to(tmp_path / "image.png")
    assert run(write(tmp_path, images, seeds="[1]"), out) == 0
    shutil.copy(next((images / "train" / "4").iterdir()), tmp_path / "image.png")
    assert run(write(tmp_path, images), out) == 1
    assert f"{out} was made with images.train = " in capsys.readouterr().err


def test_costs_are_those_of_the_model_that_is_trained(digits, tmp_path, capsys):
    images = shutil.copytree(digits, tmp_path / "images")
    assert run(write(tmp_path, images), tmp_path / "out", "--dry-run") == 0
    whole = capsys.readouterr().out.splitlines()[0]
    (images / "train" / "empty").mkdir()
    (images / "train").rename(images / "training")
    assert run(write(tmp_path, images), tmp_path / "out", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[0] == whole


def test_attention_is_not_counted_as_free(digits, tmp_path, capsys):
    """A CPU's own attention has no formula in torch's counter."""
    vit = "--model vit_tiny_patch16_224 --img-size 32 --model-kwargs patch_size=2 depth=1 embed_dim=64 num_heads=2 "
    path = write(tmp_path, digits)
    head, _, _ = path.read_text().partition("  first")
    path.write_text(f"{head}  one: {vit} mlp_ratio=1\n  two: {vit} mlp_ratio=1\n")
    assert run(path, tmp_path / "out", "--dry-run") == 0
    tokens, width = 257, 64
    macs = 256 * 2 * 2 * width + tokens * width**2 * (3 + 1 + 2) + 2 * tokens**2 * width + 10 * width
    assert f" {2 * macs / 1e6:.2f} million FLOPs an image" in capsys.readouterr().out.splitlines()[0]


def test_a_mixer_whose_resolution_is_changed_is_counted_with_its_wider_network(digits, tmp_path, in_process, capsys):
    """Twice the side has four times the tokens, and four times the hidden width over them."""
    out = tmp_path / "out"
    assert run(write(tmp_path, digits, seeds="[1]"), out) == 0
    start, said = out / "runs" / "second-s1" / "last.pth.tar", []
    changed = f"--img-size 16 --initial-checkpoint {start} --change-resolution"
    for width, more in ((8, "--img-size 16"), (32, "--img-size 16"), (8, changed)):
        path = write(tmp_path, digits, more=more)
        path.write_text(path.read_text().replace("token_dim=8 --img", f"token_dim={width} --img"))
        capsys.readouterr()
        assert run(path, tmp_path / "b", "--dry-run") == 1
        said.append(capsys.readouterr().err)
    assert said[0] != said[1] == said[2] and "they may differ by 3%" in said[2]
    with pytest.raises(UserError, match="an image costs 1,029 FLOPs in b and 971 in c: they may differ by 3%"):
        check_equal_flops({"a": {"flops": 1000}, "b": {"flops": 1029}, "c": {"flops": 971}})


def test_a_run_below_a_folder_named_like_an_option_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    last = Path("-out", "a-s1", "last.pth.tar")
    last.parent.mkdir(parents=True)
    last.touch()
    step = _RunChain(last.parent, [], threads=1, failed=[]).next_step(0)
    assert step.command[-2:] == ["--resume", f"./{last}"]


def test_an_interrupted_run_is_resumed_and_a_failed_one_named(digits, tmp_path, in_process, capsys):
    out, path = tmp_path / "out", write(tmp_path, digits, seeds="[1]")
    assert run(path, out) == 0
    (out / "runs" / "first-s1" / "done.json").unlink()
    assert run(path, out) == 0
    assert in_process[-1][-2:] == ["--resume", str(out / "runs" / "first-s1" / "last.pth.tar")]
    shutil.copy(in_process[-1][-1], tmp_path / "start.pth.tar")
    (out / "runs" / "first-s1" / "done.json").unlink()
    (out / "runs" / "first-s1" / "last.pth.tar").unlink()
    assert run(path, out) == 0, "killed while the last checkpoint was replaced"
    assert "--resume" in in_process[-1] and in_process[-1][-1] != str(out / "runs" / "first-s1" / "last.pth.tar")
    started, other = (
        write(tmp_path, digits, seeds="[1]", more=f"--initial-checkpoint {tmp_path}/start.pth.tar"),
        tmp_path / "b",
    )
    assert run(started, other) == 0 and "--initial-checkpoint" in in_process[-1]
    (other / "runs" / "second-s1" / "done.json").unlink()
    assert run(started, other) == 0 and "--initial-checkpoint" not in in_process[-1]
    shutil.copy(other / "runs" / "second-s1" / "last.pth.tar", tmp_path / "start.pth.tar")
    assert run(started, other) == 1
    assert f"{other} was made with the sha256 of {tmp_path}/start.pth.tar = " in capsys.readouterr().err
    (tmp_path / "start.pth.tar").unlink()
    assert run(started, other) == 0, "its runs are done"
    write(tmp_path, digits, seeds="[1]")
    second = out / "runs" / "second-s1"
    for file in (second / "done.json", *second.glob("*.pth.tar")):
        file.unlink()
    (second / "tmp.pth.tar").write_bytes(b"the first checkpoint, half written")
    assert run(path, out) == 0 and "--resume" not in in_process[-1]
    assert len((second / "summary.csv").read_text().splitlines()) == 3  # and the header
    (out / "runs" / "second-s1" / "done.json").unlink()
    (out / "runs" / "second-s1" / "last.pth.tar").write_bytes(b"damaged")
    assert run(path, out) == 1
    assert "failed: second-s1 ended with status 1" in capsys.readouterr().out
    lost = write(tmp_path, digits, seeds="[1]")
    lost.write_text(lost.read_text().replace("--no-aug", f"--no-aug --initial-checkpoint {tmp_path}/lost.pth.tar"))
    assert run(lost, tmp_path / "none") == 1 and not (tmp_path / "none" / "results.md").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": "''"}, "data and at least two models are needed"),
        ({"width": 64}, "they may differ by 3%"),
        ({"more": "--epochs 3"}, "models.second has --epochs, which must be the same for all"),
        ({"more": "--cooldown-epochs 3"}, "second is trained for 5 epochs and first for 2: they must be the same"),
        ({"more": "--val-split=train"}, "models.second has --val-split, which must be the same for all"),
        ({"more": "--seed 3"}, "models.second has --seed, which the command sets"),
        ({"more": "--resum x"}, "comparison.yaml: options of smlp vision train: unrecognized arguments: --resum x"),
        ({"seeds": "[2147483648]"}, "seeds must be at most 2,147,483,647"),
        ({"seeds": "[1, 1]"}, "seeds has a seed twice: [1, 1]"),
        ({"seeds": "[x]"}, "seeds must be a whole number"),
        ({"seeds": "[]"}, "seeds is empty: name at least one"),
        ({"more": "--lr x"}, "comparison.yaml: options of smlp vision train: argument --lr: "),
    ],
    ids=[
        "no-data",
        "flops",
        "epochs",
        "cooldown",
        "split",
        "own-option",
        "abbreviated",
        "large",
        "twice",
        "no-number",
        "no-seed",
        "no-option",
    ],
)
def test_comparisons_that_are_refused(digits, tmp_path, capsys, changes, sentence):
    assert run(write(tmp_path, digits, **changes), tmp_path / "out") == 1
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../first", ".", "-a", "a\\nb", "x" * 201])
def test_models_without_names_for_folders(digits, tmp_path, capsys, name):
    path = write(tmp_path, digits)
    path.write_text(path.read_text().replace("first:", f'"{name}":'))
    assert run(path, tmp_path / "out") == 1
    assert "cannot name folders of runs: at most 200 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cifar10", "digits"])
def test_the_models_of_the_examples_have_equal_flops(name, tmp_path, digits, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = (EXAMPLES / f"{name}.yaml").read_text()
    path = tmp_path / "comparison.yaml"
    path.write_text(text.replace(f"data: data/{name}", f"data: {digits}"))
    assert run(path, tmp_path / "out", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["Mixer", "gMLP", "ResMLP", "ViT"]
    assert len(lines) == 4 + 12
    path.write_text(text.replace(f"data: data/{name}", f"data: {tmp_path / 'none'}"))
    assert run(path, tmp_path / "out", "--dry-run") == 0, "without data, all have as many classes"


STUB = """#!/usr/bin/env bash
echo "$@" >> {log}
[ "$2" != train ] || case "$*" in *{fails}*) exit 3 ;; *) exit 0 ;; esac
"""


@pytest.mark.parametrize(
    ("fails", "named"), [("smlp_mixer_tiny", "mixer5"), ("smlp_gmlp_tiny", "gmlp5"), ("none", None)]
)
def test_the_recipe_for_cifar10_trains_two_models_and_evaluates_both(fails, named, tmp_path):
    """A training that fails ends the script, names its log, and does not leave the other one behind."""
    program, log, out = tmp_path / "smlp", tmp_path / "calls", tmp_path / "out"
    program.write_text(STUB.format(log=log, fails=fails))
    program.chmod(0o755)
    for name in ("gmlp5", "mixer"):  # the second is of all images
        (out / name).mkdir(parents=True)
        (out / name / "last.pth.tar").touch()
    command = ["bash", str(EXAMPLES / "cifar10.sh"), str(out)]
    environment = {**os.environ, "SMLP": str(program), "EPOCHS": "2", "LIMIT": "5"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    calls = [line.split() for line in log.read_text().splitlines()]
    trainings = {call[call.index("--experiment") + 1]: call for call in calls if call[1] == "train"}
    assert trainings.keys() == {"mixer5", "gmlp5"} and "--resume" not in trainings["mixer5"]
    assert trainings["gmlp5"][-2:] == ["--resume", f"{out}/gmlp5/last.pth.tar"]
    evaluated = [call[2] for call in calls if call[1] == "evaluate"]
    if named is None:
        assert done.returncode == 0 and len(evaluated) == 2
    else:
        assert done.returncode == 1 and not evaluated
        assert done.stderr == f"cifar10.sh: the training of {named} failed, see {out}/{named}.log\n"


RECIPES = {
    "smlp_gmlp_s16": ["--drop-path 0.05", "--weight-decay 0.05", "--aa original", "--mixup 0.8", "--opt-eps 1e-6"],
    "smlp_gmlp_b16": ["--drop-path 0.2", "--sched cosine"],
    "smlp_mixer_b16": ["--drop-path 0.1", "--weight-decay 0.1", "--aa rand-m15-n2", "--mixup 0.5"],
}


@pytest.mark.parametrize("model", RECIPES)
def test_imagenet_recipes_are_those_of_the_papers(model, monkeypatch):
    from smlp.vision import train

    def recipe(**variables):
        command = ["bash", str(EXAMPLES / "imagenet.sh"), model, "DATA", "--seed", "7"]
        environment = {**os.environ, "TRAIN_COMMAND": "echo", **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    done = recipe(GPUS="8")
    assert done.returncode == 0 and all(option in done.stdout for option in RECIPES[model])
    given = []
    monkeypatch.setattr(train, "train", given.append)
    assert main(["vision", "train", *done.stdout.split()]) == 0
    (args,) = given
    assert 8 * args.batch_size * args.grad_accum_steps == 4096 and args.seed == 7
    assert (args.epochs, args.lr, args.clip_grad, args.opt) == (300, 1e-3, 1.0, "adamw")
    assert recipe(GPUS="3").returncode == 1
