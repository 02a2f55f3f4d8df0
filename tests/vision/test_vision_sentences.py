"""Bad input of ``smlp vision``: one sentence each, on standard error, and status 1."""

import argparse
import builtins
import importlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from running import REPOSITORY

from data_prep.images import fetch
from smlp.cli.main import main
from smlp.errors import UserError

SMALL = ["--img-size", "8", "--in-chans", "1", "--mean", "0.3", "--std", "0.4", "-j", "0", "-b", "8", "--epochs", "1"]
VIT = "vit_tiny_patch16_224"
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "digits"
    fetch("digits", folder, limit=2, quiet=True)
    return folder


@pytest.fixture
def digits(whole, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(whole, tmp_path / "digits")


def sentence(capsys, *words):
    """The one line that a failing command prints."""
    assert main(["vision", *map(str, words)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("smlp: error: ") and "Traceback" not in line
    return line


def train(capsys, digits, *options, model="smlp_mixer_tiny"):
    out = digits.parent / "output"
    words = ("train", "--data-dir", digits, "--model", model, "--output", out, "--experiment", "one", *SMALL, *options)
    line = sentence(capsys, *words)
    assert not (out / "one").exists()
    return line


def test_folders_without_classes(digits, capsys):
    assert f"--data-dir {digits / 'train'} has no folder train" in train(capsys, digits / "train")
    for image in (digits / "validation").glob("*/*"):
        image.rename(image.with_suffix(".webp"))
    assert f"{digits / 'validation'} holds no images in folders of classes" in train(capsys, digits)
    for folder in (digits / "validation").iterdir():
        shutil.rmtree(folder)
    assert f"{digits / 'validation'} holds no images in folders of classes" in train(capsys, digits)


def test_images_outside_of_classes_and_a_single_class(digits, capsys):
    image = next((digits / "train" / "3").iterdir())
    for split in ("train", "validation"):
        stray = shutil.copy(image, digits / split / "stray.png")
        assert f"images without a class, such as {stray}" in train(capsys, digits)
        stray.unlink()
    for name in range(1, 10):
        shutil.rmtree(digits / "train" / str(name))
    assert f"{digits / 'train'} has a single class" in train(capsys, digits)


@pytest.mark.parametrize("place", ["train/3/below", "train/.hidden", "validation/3/below"])
def test_images_in_folders_that_are_no_classes(digits, capsys, place):
    (digits / place).mkdir()
    image = shutil.copy(next((digits / "train" / "3").glob("*.png")), digits / place)
    assert f"{image}: images belong in {digits / place.split('/')[0]}/CLASS" in train(capsys, digits)


@pytest.mark.parametrize("place", ["train/{}/up", "validation/{}/up", "train/up{}"])
def test_links_to_folders_above(digits, capsys, place):
    """Two of them have 2^40 paths, which timm would follow."""
    for name in "12":
        (digits / place.format(name)).symlink_to(digits)
    assert "is a link to a folder" in train(capsys, digits)


def test_slurms_variables_tell_the_ranks_of_a_step_alone(digits, capsys, monkeypatch):
    """A batch script has most of them, too."""
    for name, value in (("JOB_ID", "5"), ("NTASKS", "2"), ("PROCID", "0"), ("LOCALID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "no folder none" in train(capsys, digits, "--train-split", "none")
    step = {"STEP_NUM_TASKS": "2", "STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "2", "STEP_ID": "0"}
    for name, value in {**step, "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_PORT", "0x")
    assert "MASTER_PORT is '0x', not a number" in train(capsys, digits)
    monkeypatch.delenv("MASTER_PORT")
    met = []
    monkeypatch.setattr("smlp.vision.train.meet", lambda place, backend, _: met.append((place, backend)))
    assert "no folder none" in train(capsys, digits, "--train-split", "none", "--device", "cpu")
    ((place, backend),) = met
    assert (place.rank, place.world_size, backend) == (0, 2, "gloo") and place.init_method.startswith("tcp://localhost")


@pytest.mark.parametrize("mode", ["I;16", "F"])
def test_pixels_of_more_than_8_bits(digits, capsys, mode):
    image = digits / "validation" / "3" / "deep.png"
    Image.new(mode, (8, 8), 3).save(image, "PNG" if mode == "I;16" else "TIFF")
    words = ("train", "--data-dir", digits, "--model", "smlp_mixer_tiny", *SMALL, "--output", digits.parent / "output")
    assert f"{image} has {mode} pixels, not 8 bits: convert it, or leave it out" in sentence(capsys, *words)


def test_a_class_of_validation_alone(digits, capsys):
    shutil.rmtree(digits / "train" / "4")
    assert "has the class 4, which is not among the 9 classes of training" in train(capsys, digits)


def test_labels_and_images_have_one_order(digits, monkeypatch):
    """timm numbers the classes of each folder by itself."""
    from smlp.vision.data import class_names, open_split

    shutil.rmtree(digits / "validation" / "0")
    names = class_names(open_split(str(digits), "train", None, 1))
    samples = open_split(str(digits), "validation", names, 1).reader.samples
    assert {(path.split("/")[-2], label) for path, label in samples} == {(str(label), label) for label in range(1, 10)}
    for name in ("a", "A", "01", "001"):  # which timm numbers in an order that differs between processes
        shutil.copytree(digits / "train" / "0", digits / "train" / name)
        shutil.copy(next((digits / "train" / "9").iterdir()), digits / "train" / "9" / f"{name}.png")
    names = class_names(open_split(str(digits), "train", None, 1))
    assert names == ["0", "001", "01", *map(str, range(1, 10)), "A", "a"]
    found = [path for path, _ in open_split(str(digits), "train", None, 1).reader.samples]
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *args, **more: ((a, b[::-1], c[::-1]) for a, b, c in walk(*args, **more)))
    again = [path for path, _ in open_split(str(digits), "train", None, 1).reader.samples]
    assert again == found


def test_pictures_of_extreme_sides_and_programs_for_a_printer(digits):
    from smlp.vision.data import open_split

    strip, program = (digits / "validation" / "7" / name for name in ("a.png", "b.png"))
    Image.new("1", (10**6, 1)).save(strip)
    program.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    images = open_split(str(digits), "validation", None)
    named = [images.reader.filename(index, absolute=True) for index in range(len(images))]
    with pytest.raises(UserError, match=r"a.png has 1,000,000 x 1 pixels: remove or replace it"):
        images[named.index(str(strip))]
    with pytest.raises(UserError, match=r"b.png cannot be opened as an image \(cannot identify image file"):
        images[named.index(str(program))]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [None, ZeroDivisionError, Image.DecompressionBombError])
def test_images_that_do_not_open(digits, capsys, monkeypatch, workers, error):
    broken = digits / "validation" / "7" / "broken.png"
    broken.write_bytes(next((digits / "train" / "3").iterdir()).read_bytes()[:60])
    if error:  # what Pillow's readers of rare formats raise
        opened = Image.open
        monkeypatch.setattr(
            Image, "open", lambda file, **_: (_ for _ in ()).throw(error()) if "broken" in file.name else opened(file)
        )
    words = ("train", "--data-dir", digits, "--model", "smlp_mixer_tiny", *SMALL, "-j", workers)
    line = sentence(capsys, *words, "--output", digits.parent / "output")
    assert line.startswith(f"smlp: error: {broken} cannot be opened as an image (") and line.endswith(
        "remove or replace it"
    )


@pytest.mark.slow
def test_sizes_that_patches_do_not_divide(digits, capsys):
    ours = train(capsys, digits, "--img-size", "9")
    assert "img_size=9 must be a multiple of patch_size=4" in ours
    line = train(capsys, digits, "--img-size", "40", "--model-kwargs", "depth=1", model=VIT)
    assert line.endswith(f"--img-size 40: {VIT} has patches of 16 x 16 pixels, which do not divide it")


def test_batches(digits, capsys):
    assert "--batch-size 21 on 1 rank(s) is more than the 20 images" in train(capsys, digits, "-b", "21")
    assert "--batch-size 7 is odd" in train(capsys, digits, "-b", "7", "--mixup", "0.5")
    assert "--cutmix-minmax 0.2 0.2 is 1 to 1 pixels of 8: " in train(capsys, digits, "--cutmix-minmax", "0.2", "0.2")
    assert "--grad-accum-steps 3 is more than the 2 batches" in train(capsys, digits, "--grad-accum-steps", "3")


def test_augmentations_that_fail_on_an_image(digits, capsys, monkeypatch):
    """timm accepts any magnitude; what fails, fails on an image."""
    from timm.data.auto_augment import RandAugment

    def fails(self, image):
        raise OverflowError("magnitude of 1e9")

    monkeypatch.setattr(RandAugment, "__call__", fails)
    words = ("train", "--data-dir", digits, "--model", "smlp_mixer_tiny", *SMALL, "--aa", "rand-m9")
    line = sentence(capsys, *words, "--output", digits.parent / "output")
    assert "--aa and the other options of augmentation, on " in line and "OverflowError magnitude of 1e9" in line


def test_models_and_their_settings(digits, capsys):
    assert "did you mean smlp_mixer_tiny" in train(capsys, digits, model="smlp_mixer_tinny")
    assert "--model-kwargs depth: KEY=VALUE is expected" in train(capsys, digits, "--model-kwargs", "depth")
    assert "smlp_mixer_tiny" in train(capsys, digits, "--model-kwargs", "colour=3")
    assert "there is no module no_such" in train(capsys, digits, "--device-modules", "no_such")
    assert "takes full names of modules, got '.x'" in train(capsys, digits, "--device-modules", ".x")
    assert "--torchcompile 'a b' is not a backend of torch.compile; there are " in train(
        capsys, digits, "--torchcompile", "a b"
    )
    assert "--device nope cannot be used here" in train(capsys, digits, "--device", "nope")
    assert "--num-classes 9" in train(capsys, digits, "--num-classes", "9")


@pytest.fixture(scope="module")
def trained(whole, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    words = ("train", "--data-dir", whole, "--model", "smlp_mixer_tiny", *SMALL, "--output", out, "--experiment", "run")
    assert main(["vision", *map(str, words)]) == 0
    return out / "run" / "last.pth.tar"


def test_a_checkpoint_of_another_resolution(digits, trained, capsys):
    wanted = "was trained on images of 8 pixels, --img-size is 16: give --change-resolution to convert its weights"
    assert wanted in train(capsys, digits, "--img-size", "16", "--initial-checkpoint", trained)
    line = sentence(capsys, "evaluate", trained, "--data-dir", digits, "--img-size", "16", "-j", "0")
    assert wanted in line


def test_checkpoints_of_something_else(digits, trained, capsys, tmp_path):
    other = train(capsys, digits, "--initial-checkpoint", trained, model="smlp_gmlp_tiny")
    assert f"{trained} belongs to another model than smlp_gmlp_tiny: it lacks " in other
    damaged = tmp_path / "damaged.pth.tar"
    damaged.write_bytes(trained.read_bytes()[:5000])
    assert f"{damaged} (5,000 bytes) is truncated or not a checkpoint" in train(capsys, digits, "--resume", damaged)
    damaged.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "weights_only" not in train(capsys, digits, "--resume", damaged), "no advice to run code of the file"
    torch.save([1, 2], damaged)
    assert f"{damaged} holds no weights" in train(capsys, digits, "--resume", damaged)
    torch.save(torch.load(trained, weights_only=False)["state_dict"], damaged)
    assert "holds only weights: start from it with --initial-checkpoint" in train(capsys, digits, "--resume", damaged)
    assert "name it with --model" in sentence(capsys, "evaluate", damaged, "--data-dir", digits)
    weights = torch.load(damaged)
    torch.save({"state_dict": weights, "args": argparse.Namespace(model=None)}, damaged)
    named = ("--model", "smlp_mixer_tiny", *SMALL[:8])
    assert main(["vision", "evaluate", str(damaged), "--data-dir", str(digits), *named]) == 0, "named by hand"
    torch.save({"model": {name: tensor.to_sparse() for name, tensor in weights.items()}}, damaged)
    assert "is sparse, quantized, " in sentence(capsys, "evaluate", damaged, "--data-dir", digits)
    torch.save({"model": weights, "cfg": {}}, damaged)
    assert "is a checkpoint of fairseq-train" in sentence(capsys, "evaluate", damaged, "--data-dir", digits)
    assert "there is no checkpoint" in train(capsys, digits, "--resume", tmp_path / "none.pth.tar")


def test_a_flipped_bit_in_a_checkpoint(digits, trained, capsys, tmp_path):
    content = bytearray(trained.read_bytes())
    with zipfile.ZipFile(trained) as file:
        record = max(file.infolist(), key=lambda one: ("/data/" in one.filename, one.file_size))
    content[record.header_offset + len(record.filename) + 200] ^= 1
    (tmp_path / "flipped.pth.tar").write_bytes(content)
    for words in (["evaluate", "--data-dir", digits], ["plot"]):
        assert "differs from its checksum" in sentence(capsys, *words, tmp_path / "flipped.pth.tar")


def test_a_checkpoint_runs_no_code(digits, capsys, tmp_path):
    class Evil:
        def __reduce__(self):
            return builtins.open, (str(tmp_path / "made"), "w")

    torch.serialization.add_safe_globals([argparse.Namespace])
    torch.save({"state_dict": {}, "args": Evil()}, tmp_path / "evil.pth.tar")
    assert "is not a checkpoint of timm, or is damaged" in train(capsys, digits, "--resume", tmp_path / "evil.pth.tar")
    assert argparse.Namespace in torch.serialization.get_safe_globals(), "fairseq's checkpoints need it too"
    assert not (tmp_path / "made").exists()


def test_a_folder_that_holds_a_run(trained, whole, capsys):
    from smlp.vision.setup import run_folder

    words = ("train", "--data-dir", whole, "--model", "smlp_mixer_tiny", *SMALL)
    line = sentence(capsys, *words, "--output", trained.parents[1], "--experiment", "run")
    assert f"continue it with --resume {trained}" in line
    line = sentence(capsys, "train", "--data-dir", whole, "--model", "mine/none", "--output", whole.parent / "output")
    assert "--model mine/none: timm has no such model" in line
    link = trained.parents[1] / "link.pth.tar"
    link.symlink_to(trained)
    resumed = argparse.Namespace(resume=str(link), experiment=None, output=None, rank=0)
    assert run_folder(resumed).samefile(trained.parent), "not the folder of the link"
    (trained.parents[1] / "best").mkdir()
    shutil.copy(trained, trained.parents[1] / "best" / "model_best.pth.tar")
    line = sentence(capsys, *words, "--output", trained.parents[1], "--experiment", "best")
    assert "best already holds a run: there is model_best.pth.tar; name another --experiment" in line
    (trained.parents[1] / "few").mkdir()
    older = Path(shutil.copy(trained, trained.parents[1] / "few" / "checkpoint-0.pth.tar"))
    line = sentence(capsys, *words, "--output", trained.parents[1], "--experiment", "few")
    assert "few already holds a run: there is checkpoint-0.pth.tar; name another --experiment" in line
    shutil.copy(trained, older.parent / "last.pth.tar")  # later progress, which would be lost
    assert f"continue it with --resume {older.parent / 'last.pth.tar'}" in sentence(capsys, *words, "--resume", older)
    for name in ("..", ".", "a/b"):
        assert "is a name for a folder in --output" in sentence(capsys, *words, "--experiment", name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "0.5"], "--lr was 0.001, not 0.5: give --lr as it was, or start from the weights"),
        (["--opt", "sgd"], "--opt was adamw, not sgd"),
        (["--weight-decay", "0"], "--weight-decay was"),
        (["--opt-betas", "0.5", "0.6"], "--opt-betas was None, not [0.5, 0.6]"),
        (["--layer-decay", "0.5"], "--layer-decay was None, not 0.5"),
        (["--model-kwargs", "num_layers=2"], "--model-kwargs was "),
    ],
)
def test_a_resumed_optimizer_keeps_its_options(digits, trained, capsys, tmp_path, options, message):
    words = ("--resume", trained, "--epochs", "2", "--output", tmp_path, *options)
    assert message in train(capsys, digits, *words)


def test_damaged_options_of_a_resumed_run(digits, trained, capsys, tmp_path):
    content = torch.load(trained, weights_only=False)
    content["args"].model_kwargs = None
    torch.save(content, tmp_path / "last.pth.tar")
    line = train(capsys, digits, "--resume", tmp_path / "last.pth.tar", "--output", tmp_path)
    assert "last.pth.tar is damaged: it was trained with --model-kwargs None" in line


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["state"][0].pop("exp_avg_sq"),
        lambda state: state["state"][0].update(step=torch.tensor(-5.0)),
        lambda state: state["state"].update({999: {"exp_avg": torch.zeros(3)}}),
        lambda state: state["param_groups"][0].update(betas=(2.0, 0.9)),
        lambda state: state["param_groups"][1].update(initial_lr=-5.0),
    ],
)
def test_damaged_optimizers_of_a_resumed_run(digits, trained, capsys, tmp_path, damage):
    content = torch.load(trained, weights_only=False)
    damage(content["optimizer"])
    torch.save(content, tmp_path / "last.pth.tar")
    line = train(capsys, digits, "--resume", tmp_path / "last.pth.tar", "--output", tmp_path)
    assert "last.pth.tar is damaged: its optimizer does not fit the model" in line


def test_damaged_summaries(tmp_path):
    from smlp.vision.setup import _trim

    for content in (b"epoch,loss\nabc,1\n", b"epoch\n\xff\xfe\n", b"epoch,loss\n1e400,1\n"):
        (tmp_path / "summary.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"summary.csv is damaged: .*; move it away"):
            _trim(tmp_path / "summary.csv", 2)
        assert (tmp_path / "summary.csv").read_bytes() == content
    for cut in (b"1,2.", b"1,2.2,0.1e"):
        (tmp_path / "summary.csv").write_bytes(b"epoch,loss,lr\n0,2.3,1\n" + cut)
        _trim(tmp_path / "summary.csv", 2)
        assert (tmp_path / "summary.csv").read_bytes() == b"epoch,loss,lr\n0,2.3,1\n"
    for content, ending in ((b"epoch,loss\n0,2.3", b"\r\n"), (b"epoch,loss\r0,2.3\r", b""), (b"epoch,loss", b"\r\n")):
        (tmp_path / "summary.csv").write_bytes(content)
        _trim(tmp_path / "summary.csv", 2)
        assert (tmp_path / "summary.csv").read_bytes() == content + ending


def test_a_resumed_run_has_the_width_that_another_resolution_gave_it():
    from smlp.vision.setup import _OF_THE_CHECKPOINT, check_resumed

    asked = {"model": "smlp_mixer_tiny", "classes": ["0"], "model_ema": False, "change_resolution": False}
    before = argparse.Namespace(**asked, model_kwargs={"norm_eps": 0.001, "token_dim": 256})
    for words in ({}, {"norm_eps": 0.001}):
        options = {**dict.fromkeys(_OF_THE_CHECKPOINT), **asked, "resume": "last.pth.tar", "model_kwargs": words}
        args = argparse.Namespace(**options)
        check_resumed(args, {"args": before})
        assert args.model_kwargs == before.model_kwargs
    args.model_kwargs = {"norm_eps": 0.001, "token_dim": 8}
    with pytest.raises(UserError, match="--model-kwargs was "):
        check_resumed(args, {"args": before})


def test_a_resumed_run_keeps_its_classes(digits, trained, capsys, tmp_path):
    for split in ("train", "validation"):
        shutil.copytree(Path(digits) / split, tmp_path / "other" / split)
        (tmp_path / "other" / split / "0").rename(tmp_path / "other" / split / "zero")
    line = train(capsys, tmp_path / "other", "--resume", trained, "--epochs", "2", "--output", tmp_path)
    assert f"trained on other classes ('0' where {tmp_path / 'other'} has '1')" in line


def test_schedules_that_do_not_fall(digits, capsys):
    assert "--min-lr 5 is above --lr 0.001" in train(capsys, digits, "--min-lr", "5")
    assert "--warmup-lr 10 is above --lr 0.001" in train(capsys, digits, "--warmup-lr", "10")


def test_augmentation_that_is_turned_off(digits, capsys):
    for words in (["--hflip", "1"], ["--scale", "0.3", "0.5"], ["--aa", "rand-m9"], ["--reprob", "0.9"]):
        line = train(capsys, digits, "--no-aug", *words)
        assert f"{words[0]} has no effect without augmentation, which --no-aug turns off" in line


def test_resolutions_that_cannot_be_changed(digits, trained, capsys):
    options = ("--initial-checkpoint", trained, "--change-resolution")
    assert "not a multiple of the 2 at img_size=8" in train(capsys, digits, *options, "--img-size", "12")
    vit = train(capsys, digits, *options, "--img-size", "16", "--model-kwargs", "depth=1", "patch_size=4", model=VIT)
    assert f"for smlp_mixer_* and smlp_gmlp_*, not for timm's {VIT}" in vit
    words = (*options, "--img-size", "16", "--model-kwargs", "embed_dim=32")
    line = train(capsys, digits, *words)
    assert "give the --model-kwargs of its training" in line and "--change-resolution" not in line


def test_options_that_contradict_each_other(digits, trained, capsys):
    assert "give one of the two" in train(capsys, digits, "--resume", trained, "--initial-checkpoint", trained)
    assert "--initial-checkpoint, which is missing" in train(capsys, digits, "--change-resolution")


def test_a_loss_that_is_no_number(digits, capsys, tmp_path):
    words = (
        "train",
        "--data-dir",
        digits,
        "--model",
        "smlp_mixer_tiny",
        *SMALL,
        "--epochs",
        "3",
        "--warmup-epochs",
        "0",
    )
    line = sentence(capsys, *words, "--opt", "sgd", "--lr", "1e6", "--output", tmp_path / "out")
    assert "lower --lr or set --clip-grad" in line
    folder = tmp_path / "out" / "smlp_mixer_tiny-8-42"
    assert not (folder / "model_best.pth.tar").exists()
    assert ("earlier epochs" in line) == any(folder.glob("*.pth.tar"))


def test_without_the_extra(monkeypatch, capsys, digits, trained, tmp_path):
    """Every command but ``table`` says so; ``data`` says it before it downloads."""
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "images need timm: pip install" in train(capsys, digits)
    comparison = tmp_path / "digits.yaml"
    comparison.write_text((EXAMPLES / "vision" / "digits.yaml").read_text())
    for words in (
        ("evaluate", trained, "--data-dir", digits),
        ("compare", comparison, "--out", tmp_path / "compared"),
        ("plot", trained, "--out", tmp_path / "pictures"),
    ):
        assert "images need timm: pip install" in sentence(capsys, *words)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    url = ("--url", "http://127.0.0.1:1/nothing")
    assert "images need Pillow (" in sentence(capsys, "data", "cifar10", "--out", tmp_path / "data", *url)
    assert not (tmp_path / "data.partial").exists()
    assert main(["vision", "table"]) == 0


def test_a_torchvision_that_does_not_fit(monkeypatch, capsys, digits):
    real = importlib.import_module

    def fails(name, package=None):
        if name == "timm":
            raise RuntimeError("operator torchvision::other does not exist")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", fails)
    assert "torchvision::other does not exist): install matching versions of torch" in train(capsys, digits)


def test_grey_and_colour_images_are_read_as_the_model_wants(digits):
    from smlp.vision.data import open_split

    path = next((digits / "train" / "3").iterdir())
    with Image.open(path) as image:
        assert image.mode == "L" and image.size == (8, 8)
    for channels, mode in ((1, "L"), (3, "RGB")):
        images = open_split(str(digits), "train", None, channels)
        images.transform = lambda image: image.mode
        assert images[0][0] == mode


def test_values_that_timm_fails_with(digits, capsys):
    for words, said in (
        (["--opt", "nope"], "timm does not take --opt 'nope'"),
        (["--opt-betas", "1", "2"], "--opt-betas 1 2: two betas or more from 0 to below 1 are needed"),
        (["--opt", "adahessian"], "--opt adahessian needs second derivatives, which training does not compute"),
        (["--opt-betas", "0.9"], "--opt-betas 0.9: two betas or more from 0 to below 1 are needed"),
        (["--opt-betas", "0.9", "0.99", "0.8"], "--opt-betas 0.9 0.99 0.8: --opt adamw takes 2 betas"),
        (["--opt", "sgd", "--opt-betas", "0.1", "0.2"], "--opt-betas has no effect with --opt sgd"),
        (["--opt", "sgd", "--opt-eps", "0.1"], "--opt-eps has no effect with --opt sgd"),
        (["--momentum", "0.2"], "--momentum has no effect with --opt adamw"),
        (["--cutmix", "1", "--cutmix-minmax", "0.2", "0.8"], "--cutmix and --cutmix-minmax are both given"),
        (["--sched", "step", "--decay-epochs", "0"], "--decay-epochs must be above 0, got 0"),
        (["--decay-milestones", "5", "3"], "--decay-milestones 5 3: epochs from 1 on, in order, are needed"),
        (["--decay-rate", "0.5"], "--decay-rate has no effect without --sched step, multistep or poly"),
        (["--mixup-mode", "elem"], "--mixup-mode has no effect without --mixup or --cutmix"),
        (["--clip-grad", "0"], "--clip-grad must be above 0, got 0"),
        (["--mean", "nan"], "--mean nan: means are finite"),
        (["--mean", "0.5", "0.5"], "--mean 0.5 0.5: images of 1 channels need 1 numbers, or one"),
        (["--input-size", "3", "8", "8"], "--input-size 3 8 8: --in-chans is 1"),
        (["--model-kwargs", "a=1", "a=2"], "--model-kwargs a=1 a=2: a setting is given twice"),
        (["--aa", "x"], "timm does not take --aa, "),
        (["--interpolation", "x"], "--interpolation: KeyError 'x'"),
        (["--scale", "nan", "nan"], "--scale nan nan: two numbers above 0 and at most 1 are needed"),
        (["--ratio", "0", "0"], "--ratio 0 0: two numbers above 0 are needed"),
        (["--cutmix-minmax", "1", "0"], "--cutmix-minmax 1 0: two numbers"),
        (["--std", "-1"], "--std -1: deviations are above 0"),
        (["--crop-pct", "0.001"], "--crop-pct must be at least 0.1, got 0.001"),
        (["--model-kwargs", "in_chans=3"], "in_chans does not go there; give --in-chans"),
        (["--model-kwargs", "pretrained_cfg=5"], "pretrained_cfg does not go there"),
        (["--model-kwargs", "features_only=True"], "features_only does not go there"),
        (["--model-kwargs", f"embed_dim={10**30}"], "embed_dim must be at most 2,147,483,647, got 1000"),
        (["--model-kwargs", f"mlp_width={2**31}"], "mlp_width must be at most 2,147,483,647, got 2147483648"),
        (["--device", "hpu"], "--device hpu cannot be used here: "),
        (["--experiment", "../x"], "--experiment '../x' is a name for a folder in --output"),
    ):
        assert said in train(capsys, digits, *words)


def test_settings_that_do_not_fit_into_memory_or_integers(digits, capsys):
    huge = train(capsys, digits, "--model-kwargs", f"embed_dim={2**31 - 1}", f"ffn_dim={2**31 - 1}")
    assert "does not take these settings: there is not enough memory for this" in huge and "alloc_cpu" not in huge
    line = train(capsys, digits, "--model-kwargs", f"embed_dim={10**30}", "patch_size=2", model=VIT)
    assert f"--model {VIT} does not take these settings: " in line and "frame #" not in line


def test_options_of_an_evaluation_that_do_not_fit_the_checkpoint(digits, trained, capsys):
    for words, said in (
        (["--mean", "0.1", "0.2"], "--mean 0.1 0.2: images of 1 channels need 1 numbers, or one"),
        (["--input-size", "3", "8", "8"], "--input-size 3 8 8: --in-chans is 1"),
        (["--interpolation", "x"], "timm does not take --interpolation: KeyError 'x'"),
        (["--amp-dtype", "bfloat16"], "--amp-dtype has no effect without --amp"),
        (["--std", "1e-45"], f"the loss of {trained} on {digits / 'validation'} is nan: "),
    ):
        assert said in sentence(capsys, "evaluate", trained, "--data-dir", digits, "-j", "0", *words)


def test_damaged_weights_have_no_accuracy(digits, trained, capsys, tmp_path):
    content = torch.load(trained, weights_only=False)
    content["state_dict"]["head.weight"].fill_(float("nan"))
    torch.save(content, tmp_path / "nan.pth.tar")
    line = sentence(capsys, "evaluate", tmp_path / "nan.pth.tar", "--data-dir", digits, "-j", "0")
    assert f"head.weight of {tmp_path / 'nan.pth.tar'} is not finite: its training has diverged" in line
    head = content["state_dict"]["head.weight"]
    content["state_dict"]["head.weight"] = head.to(torch.int8)
    torch.save(content, tmp_path / "odd.pth.tar")
    line = sentence(capsys, "evaluate", tmp_path / "odd.pth.tar", "--data-dir", digits, "-j", "0")
    assert "odd.pth.tar does not fit smlp_mixer_tiny: head.weight has type torch.int8, not floats" in line
    for odd in (head.to_sparse(), head.to("meta"), head.to(torch.complex64)):
        content["state_dict"]["head.weight"] = odd
        torch.save(content, tmp_path / "odd.pth.tar")
        line = sentence(capsys, "evaluate", tmp_path / "odd.pth.tar", "--data-dir", digits, "-j", "0")
        assert "odd.pth.tar: head.weight is sparse, quantized, complex, expanded or without values" in line
    content["state_dict"]["head.weight"] = torch.zeros(1).expand(10**6, 10**6)
    torch.save(content, tmp_path / "odd.pth.tar")
    line = sentence(capsys, "evaluate", tmp_path / "odd.pth.tar", "--data-dir", digits, "-j", "0")
    assert "odd.pth.tar holds a tensor of shape (1000000, 1000000) in a record of 4 bytes, which is not read" in line


DEEP = {"num_layers": 10**4}, {"layers": [1, 10**6]}, {"depth": ((1, 10**9, 0), (1, 4, 0))}, {"depth_token_only": 10**9}
DEPTHS = [("model_kwargs", kwargs) for kwargs in DEEP]


def test_recorded_sizes_take_no_memory(digits, trained, capsys, tmp_path):
    """They are compared with the weights before a model of these sizes is made."""
    path = tmp_path / "large.pth.tar"
    for name, value in (("num_classes", 10**9), ("model_kwargs", {"embed_dim": 10**7}), ("img_size", 8000), *DEPTHS):
        content = torch.load(trained, weights_only=False)
        setattr(content["args"], name, value)
        torch.save(content, path)
        line = sentence(capsys, "evaluate", path, "--data-dir", digits, "-j", "0")
        assert f"{path} does not fit smlp_mixer_tiny: " in line


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        ("densenet121", {"block_config": (10**8, 1, 1, 1)}),
        ("dpn48b", {"k_sec": (3, 10**8, 6, 3)}),
        ("resnet50", {"layers": [10**8, -(10**8) - 5, 1, 1]}),
        ("hiera_tiny_224", {"stages": (1, 10**8, 1, 1)}),
        ("rexnet_100", {"depth_mult": 1e7}),
        ("vit_tiny_patch16_224", {}),  # of some hundred tensors
    ],
)
def test_recorded_depths_take_no_time(model, kwargs, monkeypatch):
    from smlp.vision import checkpoints

    monkeypatch.setattr(checkpoints, "_MOST_PARAMETERS", 100)
    sizes = {"in_chans": 3, "num_classes": 10, "img_size": None, "drop": 0.0, "drop_path": None, "device_modules": None}
    args = argparse.Namespace(model=model, model_kwargs=kwargs, pretrained=False, **sizes)
    with pytest.raises(UserError, match=rf"^a.pth does not fit {model}: .*it has 1 tensors"):
        checkpoints.check_fit({"state_dict": {"a": torch.zeros(1)}}, "a.pth", args)


def test_checkpoints_with_damaged_entries(digits, trained, capsys, tmp_path):
    path = tmp_path / "damaged.pth.tar"
    for name, value in (
        ("mean", "abc"),
        ("std", [None]),
        ("crop_pct", 1e-4),
        ("classes", 5),
        ("model_kwargs", [1]),
        ("model", 5),
        ("img_size", "8"),
        ("img_size", 10**5),
        ("input_size", [1, 20_000, 20_000]),
    ):
        content = torch.load(trained, weights_only=False)
        setattr(content["args"], name, value)
        torch.save(content, path)
        line = sentence(capsys, "evaluate", path, "--data-dir", digits, "-j", "0")
        assert f"{path} is damaged: it was trained with --{name.replace('_', '-')} {value!r}" in line
    content["args"] = argparse.Namespace(model_kwargs={"pretrained_cfg": 5}, model="smlp_mixer_tiny")
    torch.save(content, path)
    assert "pretrained_cfg does not go there" in sentence(capsys, "evaluate", path, "--data-dir", digits, "-j", "0")
    content = torch.load(trained, weights_only=False)
    content["args"].model_ema = True
    torch.save(content, path)
    assert "has an average of its weights, which would be lost" in train(capsys, digits, "--resume", path)
    for name, value, words in (
        ("state_dict_ema", 5, "damaged.pth.tar is damaged: its state_dict_ema holds no weights"),
        ("state_dict_ema", {}, "damaged.pth.tar is damaged: its state_dict_ema holds no weights"),
        (
            "state_dict_ema",
            {"a": torch.zeros(1)},
            "damaged.pth.tar belongs to another model than smlp_mixer_tiny: it lacks",
        ),
        ("epoch", "x", "damaged.pth.tar is damaged: its epoch is 'x'"),
        ("epoch", float("nan"), "damaged.pth.tar is damaged: its epoch is nan"),
        ("epoch", -5, "damaged.pth.tar is damaged: its epoch is -5"),
        ("optimizer", 5, "damaged.pth.tar is damaged: AttributeError"),
    ):
        content = torch.load(trained, weights_only=False)
        content[name] = value
        torch.save(content, path)
        assert words in train(capsys, digits, "--resume", path, "--model-ema", "--epochs", "2")


def test_a_pipe_is_no_image(digits, capsys):
    os.mkfifo(digits / "train" / "3" / "pipe.png")
    words = ("train", "--data-dir", digits, "--model", "smlp_mixer_tiny", *SMALL, "--output", digits.parent / "output")
    assert "pipe.png is not a regular file but a named pipe" in sentence(capsys, *words)
