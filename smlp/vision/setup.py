"""The parts of a training on images, which are timm's: model, data, optimizer, average, schedule and checkpoints."""

from __future__ import annotations

import csv
import inspect
import math
import pickle
import sys
from argparse import Namespace
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import timm.utils
import torch
import yaml
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import resume_checkpoint, safe_model_name
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler_factory import scheduler_kwargs
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler
from timm.utils.checkpoint_saver import load_checkpoint_metadata
from timm.utils.summary import trim_summary
from torch import nn

from smlp.errors import UserError, one_line
from smlp.files import number_of
from smlp.vision.checkpoints import (
    at_resolution,
    check_fit,
    check_recorded,
    create_model,
    image_config,
    load_weights,
    read_checkpoint,
)
from smlp.vision.data import (
    class_names,
    evaluation_loader,
    open_split,
    said_by_timm,
    training_loader,
    warn_of_unread,
)
from smlp.vision.evaluate import precision_of
from smlp.vision.image_options import MOMENTUM, listed

_KEPT = ("betas", "eps", "momentum", "weight_decay", "lr_scale")  # settings of an optimizer that training keeps
SUMMARY, LAST, _BEST = "summary.csv", "last.pth.tar", "model_best.pth.tar"
#: options that a resumed model and optimizer have from their checkpoint
_OF_THE_CHECKPOINT = (
    *("model", "model_kwargs", "img_size", "in_chans"),
    *("opt", "opt_eps", "opt_betas", "momentum", "weight_decay", "layer_decay", "lr"),
)


def run_folder(args: Namespace) -> Path:
    """Return the folder of the run; a resumed run continues where its checkpoint lies, unless told otherwise."""
    if args.resume and args.experiment is None and args.output is None:
        folder = Path(args.resume).resolve().parent  # not that of a link to it
    else:
        model = safe_model_name(args.model, remove_source=False)  # which refuses a name with "/" otherwise
        name = args.experiment or f"{model}-{args.img_size or 'default'}-{args.seed}"
        folder = Path(args.output or "output/train") / name
    held = next((file for file in (*checkpoints_in(folder), folder / SUMMARY) if file.exists()), None)
    if args.rank == 0 and held is not None and not (args.resume and _continues(args.resume, held)):
        advice = f"continue it with --resume {held}, or name" if held.name == LAST else f"there is {held.name}; name"
        raise UserError(f"{folder} already holds a run: {advice} another --experiment")
    return folder


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run that are whole, the last one first."""
    named = [folder / name for name in (LAST, _BEST) if (folder / name).exists()]
    return [*named, *sorted(folder.glob("checkpoint-*.pth.tar"))]


def _continues(resumed: str, held: Path) -> bool:
    """Return whether a run goes on where its checkpoint lies: from the last one, or, if that is gone, another."""
    return held.samefile(resumed) if held.name == LAST else Path(resumed).resolve().parent.samefile(held.parent)


def check_used(args: Namespace, settings: Mapping[str, Any]) -> None:
    """Refuse options of other optimizers, which timm would ignore.

    Raises:
        UserError: the optimizer has no such setting.
    """
    given = (
        ("--opt-eps", args.opt_eps is not None, {"eps"}),
        ("--opt-betas", args.opt_betas is not None, {"betas", "beta1"}),
        ("--momentum", args.momentum != MOMENTUM, {"momentum"}),
    )
    for option, is_given, names in given:
        if is_given and names.isdisjoint(settings):
            raise UserError(f"{option} has no effect with --opt {args.opt}")


def check_resumed(args: Namespace, checkpoint: dict[str, Any]) -> None:
    """Refuse to continue a run with other classes, another model, or options that its optimizer's state would overrule.

    Raises:
        UserError: the message names what differs.
    """
    before = checkpoint.get("args")
    check_recorded(before, f"--resume {args.resume}")
    classes = getattr(before, "classes", args.classes)
    if not isinstance(classes, list):
        raise UserError(f"--resume {args.resume} is damaged: its classes are {classes!r:.40}")
    if classes != args.classes:
        pairs = zip_longest(classes, args.classes, fillvalue="none")
        was, now = next((old, new) for old, new in pairs if old != new)
        raise UserError(
            f"--resume {args.resume} was trained on other classes ({was!r} where {args.data_dir} has {now!r}): start "
            "from its weights with --initial-checkpoint"
        )
    args.change_resolution |= bool(getattr(before, "change_resolution", False))  # the next resume has to know
    had = getattr(before, "model_kwargs", {})
    if not args.model_kwargs:
        args.model_kwargs = had
    elif "token_dim" in had:  # --change-resolution sets the width of the network over tokens
        width = {"token_dim": had["token_dim"]}
        args.model_kwargs = {**args.model_kwargs, **width} if args.change_resolution else {**width, **args.model_kwargs}
    if getattr(before, "model_ema", False) and not args.model_ema:
        raise UserError(f"--resume {args.resume} has an average of its weights, which would be lost: give --model-ema")
    for name in _OF_THE_CHECKPOINT:
        now = getattr(args, name)
        if (was := getattr(before, name, now)) != now:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"--resume {args.resume} goes on with its model and optimizer, and {option} was {was}, not {now}: "
                f"give {option} as it was, or start from the weights with --initial-checkpoint"
            )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of an optimizer."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _are_same(own: dict[str, Any], found: dict[str, Any]) -> bool:
    """Return whether a group that was read has the settings of the run, and the rate at which its schedule began."""
    numbers = {name for name, value in own.items() if isinstance(value, (int, float))}
    same = all(found.get(name) == own[name] for name in _KEPT if name in own)
    return numbers <= found.keys() and same and found.get("initial_lr", own["lr"]) == own["lr"]


def _are_moments(state: Any) -> bool:
    """Return whether an optimizer's state has all moments of each parameter, and steps that are numbers."""
    moments, groups = (state.get("state"), state.get("param_groups")) if isinstance(state, dict) else (None, None)
    if not isinstance(moments, dict) or not all(isinstance(own, dict) for own in moments.values()):
        return False
    known = {number for group in groups or () for number in group["params"]}
    kinds = {frozenset(own) for own in moments.values()}  # several: matrices may have others than vectors
    partial = any(own and own < other for own in kinds for other in kinds)
    steps = [float(own["step"]) for own in moments.values() if "step" in own]
    return moments.keys() <= known and not partial and all(0 <= step < math.inf for step in steps)


def _fits(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether moments have the shapes of their parameters."""
    return all(
        state[name].shape == parameter.shape
        for parameter, state in optimizer.state.items()
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
        if isinstance(state.get(name), torch.Tensor) and state[name].dim() > 0
    )


def schedule_of(args: Namespace, optimizer: Any, updates_per_epoch: int = 1) -> tuple[Any, int]:
    """Return timm's schedule of the learning rate and the epochs of the run, with --cooldown-epochs and such."""
    return create_scheduler_v2(optimizer, **{**scheduler_kwargs(args), "updates_per_epoch": updates_per_epoch})


def _epoch_of(path: Path) -> int:
    """Return the epoch of a checkpoint; -1 if it is not there or not whole."""
    try:
        return int(load_checkpoint_metadata(path)["epoch"])
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError):
        return -1


class _Saver(CheckpointSaver):
    """timm's, which also ends a save that a kill interrupted."""

    _is_saved = False

    def finish(self, last: str) -> None:
        """Do what follows once the last checkpoint is written, unless it was done: timm resumes as if it always was."""
        found = load_checkpoint_metadata(last)
        state = found["saver"]
        epoch, metric = state.get("pending", (None, None))
        if metric is None or "loss" in str(getattr(found.get("args"), "eval_metric", "")):  # timm's own may rank by it
            return
        kept, best = state["checkpoint_files"], state["best_metric"]
        is_kept = len(kept) < self.max_history or kept[-1][1] is None or metric > kept[-1][1]
        lacks_own = is_kept and _epoch_of(Path(self._checkpoint_path(epoch))) != epoch
        if lacks_own or ((best is None or metric > best) and _epoch_of(Path(last).with_name(_BEST)) < epoch):
            self.load_state_dict({**state, "pending": (None, None)})
            self._is_saved = True
            self.save_checkpoint(epoch, metric)
            self._is_saved = False

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_saved:
            super()._save(*args, **kwargs)

    def _replace(self, src: str, dst: str) -> None:
        if not self._is_saved:
            super()._replace(src, dst)


def _trim(summary: Path, first_epoch: int) -> None:
    """Drop the rows from an epoch on, and one that was cut off; the next row would be joined to it."""
    content = summary.read_bytes() if summary.exists() else b""
    if content and not content.endswith((b"\n", b"\r")):
        rows = content.splitlines()
        last = rows[-1]
        is_cut = len(rows) > 1 and not math.isfinite(number_of(last.rpartition(b",")[2].decode(errors="replace")))
        is_whole = last.count(b",") == rows[0].count(b",") and not is_cut
        summary.write_bytes(content + b"\r\n" if is_whole else content.removesuffix(last))
    try:
        trim_summary(str(summary), first_epoch)
    except (ValueError, OverflowError, csv.Error) as error:
        raise UserError(f"{summary} is damaged: {one_line(error)}; move it away to go on without it") from None


class Training:
    """The objects of a training, made in timm's order: model, data, optimizer, resume, average, ranks, schedule.

    Args:
        args: the options of ``smlp vision train``; gets ``classes`` and ``num_classes``.
        device: where to train.
        folder: of the run, for its checkpoints.

    Raises:
        UserError: options, data and checkpoints do not fit together.
    """

    def __init__(self, args: Namespace, device: torch.device, folder: Path) -> None:
        self.args, self.device, self.folder = args, device, folder
        channels = 3 if args.in_chans is None else args.in_chans
        images = open_split(args.data_dir, args.train_split, None, channels)
        args.classes = class_names(images)
        if args.rank == 0:
            warn_of_unread(images)
        held_out = open_split(args.data_dir, args.val_split, args.classes, channels)
        if args.rank == 0:
            warn_of_unread(held_out)
        args.num_classes = args.num_classes or len(args.classes)
        if len(args.classes) > args.num_classes:
            raise UserError(f"--num-classes {args.num_classes}: {images.reader.root} has {len(args.classes)} classes")
        checkpoint = read_checkpoint(args.resume) if args.resume else None
        if checkpoint is not None:
            check_resumed(args, checkpoint)
            check_fit(checkpoint, args.resume, args, use_ema=False)
        initial = read_checkpoint(args.initial_checkpoint) if args.initial_checkpoint else None
        if initial is not None and args.change_resolution:
            initial = at_resolution(initial, args.initial_checkpoint, args)
        timm.utils.random_seed(args.seed)
        self.model = create_model(args).to(device)
        if args.grad_checkpointing:
            with said_by_timm(f"--grad-checkpointing with {args.model}"):
                self.model.set_grad_checkpointing(enable=True)
        if checkpoint is not None:
            load_weights(self.model, checkpoint, args.resume, args, use_ema=False)
        elif initial is not None:
            load_weights(self.model, initial, args.initial_checkpoint, args, new_head=True)
        config = image_config(args, self.model)
        if channels == 1:  # timm's loaders average three numbers so, but its augmentations fail on them
            config.update({name: (sum(config[name]) / len(config[name]),) for name in ("mean", "std")})
        if args.rank == 0 and args.no_aug and config["crop_pct"] < 1:
            print(
                f"smlp: warning: --no-aug trains on whole images, but validation cuts out {config['crop_pct']:.4g} of "
                "their side: --crop-pct 1 takes whole ones there, too",
                file=sys.stderr,
            )
        with said_by_timm("--aa, --mixup, --train-interpolation or --interpolation"):
            self.batches = training_loader(images, args, config, device)
            self.held_out = evaluation_loader(held_out, args, config, device)
        self.mixes = args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None
        self.criterion = SoftTargetCrossEntropy() if self.mixes else LabelSmoothingCrossEntropy(args.smoothing)
        with said_by_timm(f"--opt {args.opt!r} and its options"):
            self.optimizer = create_optimizer_v2(self.model, **optimizer_kwargs(cfg=args))
        check_used(args, self.optimizer.defaults)
        usual = inspect.signature(type(self.optimizer)).parameters.get("betas")
        if args.opt_betas is not None and usual is not None and len(args.opt_betas) != len(usual.default):
            raise UserError(f"--opt-betas {listed(args.opt_betas)}: --opt {args.opt} takes {len(usual.default)} betas")
        if getattr(self.optimizer, "is_second_order", False):
            raise UserError(f"--opt {args.opt} needs second derivatives, which training does not compute")
        self.precision = precision_of(args, device)
        self.scaler = NativeScaler(device.type) if args.amp and args.amp_dtype == "float16" else None
        self.first_epoch = 0 if checkpoint is None else self._resume(args.resume, checkpoint)
        self.average = None
        if args.model_ema:
            self.average = ModelEmaV3(self.model, decay=args.model_ema_decay, use_warmup=args.model_ema_warmup)
            if checkpoint is not None and "state_dict_ema" in checkpoint:
                load_weights(self.average.module, checkpoint, args.resume, args)
        if args.grad_accum_steps > len(self.batches):
            raise UserError(
                f"--grad-accum-steps {args.grad_accum_steps} is more than the {len(self.batches)} batches of an epoch"
            )
        self.updates_per_epoch = math.ceil(len(self.batches) / args.grad_accum_steps)
        self.schedule, self.num_epochs = schedule_of(args, self.optimizer, self.updates_per_epoch)
        self.set_rate(self.first_epoch, self.first_epoch * self.updates_per_epoch)
        self.saver = self._saver() if args.rank == 0 else None
        self.network: nn.Module = (
            torch.compile(self.model, backend=args.torchcompile) if args.torchcompile else self.model
        )
        if args.distributed:
            devices = [device] if device.type == "cuda" else None
            self.network = nn.parallel.DistributedDataParallel(self.network, device_ids=devices)

    def _resume(self, path: str, checkpoint: dict[str, Any]) -> int:
        """Read the state of the optimizer, and return the epoch to begin with."""
        if "optimizer" not in checkpoint:
            raise UserError(f"--resume {path} holds only weights: start from it with --initial-checkpoint")
        if not isinstance(checkpoint.get("epoch", 0), int) or checkpoint.get("epoch", 0) < 0:
            raise UserError(f"--resume {path} is damaged: its epoch is {checkpoint['epoch']!r:.99}")
        settings = _settings(self.optimizer)
        try:
            are_whole = _are_moments(checkpoint["optimizer"])
            epoch = resume_checkpoint(self.model, path, self.optimizer, self.scaler, log_info=False)
        except Exception as error:  # of torch, which trusts the state
            raise UserError(f"--resume {path} is damaged: {type(error).__name__}: {error}") from None
        same = all(map(_are_same, settings, _settings(self.optimizer)))
        if not are_whole or not same or not _fits(self.optimizer):
            raise UserError(f"--resume {path} is damaged: its optimizer does not fit the model")
        return int(epoch or 0)

    def _saver(self) -> CheckpointSaver:
        args = self.args
        (self.folder / "args.yaml").write_text(yaml.safe_dump(vars(args), default_flow_style=False), encoding="utf-8")
        saver = _Saver(
            self.model,
            self.optimizer,
            args=args,
            model_ema=self.average,
            amp_scaler=self.scaler,
            checkpoint_dir=str(self.folder),
            max_history=args.checkpoint_hist,
        )
        if args.resume and Path(args.resume).resolve().parent == self.folder.resolve():  # what is best, and kept
            has_state = saver.load_state_dict_from_checkpoint(args.resume)
            if has_state and Path(args.resume).resolve().name == LAST:
                saver.finish(args.resume)
        _trim(self.folder / SUMMARY, self.first_epoch)
        return saver

    def set_rate(self, epoch: int | None, update: int) -> None:
        """Set the learning rate of the next update; schedules of timm go by epochs or by updates."""
        if self.args.sched_on_updates:
            self.schedule.step_update(update)
        elif epoch is not None:
            self.schedule.step(epoch)
