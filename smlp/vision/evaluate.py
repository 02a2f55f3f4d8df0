"""Accuracy and speed of a model on a split of a data set."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import accuracy
from torch import nn
from torch.nn.functional import cross_entropy

from smlp.errors import NaNError, UserError
from smlp.launch.team import Team
from smlp.vision.checkpoints import (
    TAKEN_OVER,
    at_resolution,
    check_fit,
    create_model,
    image_config,
    load_weights,
    read_checkpoint,
    trained_with,
)
from smlp.vision.data import evaluation_loader, open_split, said_by_timm, warn_of_unread
from smlp.vision.image_options import check_images


@torch.no_grad()
def validate(
    model: nn.Module, loader: Any, args: Namespace, precision: Callable[[], AbstractContextManager]
) -> dict[str, float]:
    """Evaluate on every image once, whatever the number of ranks: the copies that fill up the last batch do not count.

    Returns:
        Means over all images: ``loss`` (cross-entropy), ``top1`` and ``top5`` in per cent; ``images``; ``seconds`` of
        the forward passes on the slowest rank, and ``timed_images``, both without the first batch.
    """
    model.eval()
    own = len(range(args.rank, len(loader.dataset), args.world_size))
    sums, seconds, timed = torch.zeros(4, dtype=torch.float64), 0.0, 0
    device = next(model.parameters()).device
    seen = 0
    for number, (images, targets) in enumerate(loader):
        start = _now(device)
        with precision():
            logits = model(images)
        took = _now(device) - start
        if number:
            seconds, timed = seconds + took, timed + len(images)
        logits, targets = logits[: own - seen].float(), targets[: own - seen]
        seen += len(targets)
        if len(targets):
            top1, top5 = (len(targets) * share / 100 for share in accuracy(logits, targets, topk=(1, 5)))
            loss = cross_entropy(logits, targets, reduction="sum")
            sums += torch.stack([loss, top1, top5, top1.new_tensor(len(targets))]).cpu().double()
    slowest = torch.tensor([seconds], dtype=torch.float64)
    if args.distributed:
        sums, slowest = sums.to(device), slowest.to(device)
        dist.all_reduce(sums)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        timed *= args.world_size
    loss, top1, top5, images = sums.tolist()
    return {
        "loss": loss / images,
        "top1": 100 * round(top1) / images,
        "top5": 100 * round(top5) / images,
        "images": int(images),
        "seconds": slowest.item(),
        "timed_images": timed,
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def precision_of(args: Namespace, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return the context of forward passes that ``--amp`` and ``--amp-dtype`` ask for."""
    if args.amp_dtype is None:  # CPUs have products in bfloat16 alone
        args.amp_dtype = "float16" if device.type == "cuda" else "bfloat16"
    dtype = getattr(torch, args.amp_dtype)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=args.amp)


def model_of(args: Namespace, checkpoint: dict[str, Any] | None = None) -> nn.Module:
    """Return the trained model of ``args.checkpoint``.

    Args:
        args: options; those that describe the model or its images are by default those of the training, except for the
            settings of another model than the one that ``args.model`` names. The classes are the training's.
        checkpoint: its content, if it was read already.

    Raises:
        UserError: the checkpoint does not name its model, or does not fit the options.
    """
    checkpoint = checkpoint or read_checkpoint(args.checkpoint)
    is_recorded = args.model is None or getattr(checkpoint.get("args"), "model", None) is not None
    trained = trained_with(checkpoint, args.checkpoint) if is_recorded else Namespace()
    is_same = args.model in (None, getattr(trained, "model", None))
    others = (() if is_same else ("model_kwargs",)) + (() if args.img_size is None else ("input_size",))
    for name in (name for name in TAKEN_OVER if name not in others):
        if getattr(args, name, None) in (None, {}, ""):
            setattr(args, name, getattr(trained, name, getattr(args, name, None)))
    if args.num_classes is None:
        args.num_classes = checkpoint["state_dict"].get("head.bias", torch.empty(0)).numel() or None
    args.pretrained, args.drop, args.drop_path = False, None, None
    if getattr(args, "change_resolution", False):
        checkpoint = at_resolution(checkpoint, args.checkpoint, args, use_ema=not args.no_ema)
    check_fit(checkpoint, args.checkpoint, args, use_ema=not args.no_ema)
    model = create_model(args)
    load_weights(model, checkpoint, args.checkpoint, args, use_ema=not args.no_ema)
    return model


def evaluate(args: Namespace) -> dict[str, Any]:
    """Evaluate a checkpoint on a split of ``args.data_dir``.

    Returns:
        The model, its parameters, what :func:`validate` measured, and images per second: ``images_per_second`` of the
        forward passes, ``images_per_second_with_loading`` of everything.

    Raises:
        UserError: checkpoint, data and options do not fit together, or the loss is no finite number.
    """
    checkpoint = read_checkpoint(args.checkpoint)
    model = model_of(args, checkpoint)
    channels = 3 if args.in_chans is None else args.in_chans
    check_images(args, channels)
    dataset = open_split(args.data_dir, args.split, args.classes, channels)
    warn_of_unread(dataset)
    if len(dataset.reader.class_to_idx) > model.num_classes:
        raise UserError(
            f"{dataset.reader.root} has {len(dataset.reader.class_to_idx)} classes, but the model has "
            f"{model.num_classes}"
        )
    device = Team().device(args.device)
    args.rank, args.world_size, args.distributed = 0, 1, False
    config = image_config(args, model)
    with said_by_timm("--interpolation"):
        loader = evaluation_loader(dataset, args, config, device)
    start = time.perf_counter()
    found = validate(model.to(device), loader, args, precision_of(args, device))
    if not math.isfinite(found["loss"]):
        raise NaNError(
            f"the loss of {args.checkpoint} on {dataset.reader.root} is {found['loss']}: its weights are damaged "
            "or have diverged, or --mean and --std do not fit the images"
        )
    height, width = config["input_size"][1:]
    took, seconds, timed = time.perf_counter() - start, found.pop("seconds"), found.pop("timed_images")
    return {
        "checkpoint": str(Path(args.checkpoint)),
        "model": args.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "image_size": width if height == width else [height, width],
        "weights": "state_dict" if args.no_ema or checkpoint.get("state_dict_ema") is None else "state_dict_ema",
        "epoch": checkpoint.get("epoch"),
        **found,
        "device": device.type,
        "precision": args.amp_dtype if args.amp else "float32",
        "batch_size": args.validation_batch_size or args.batch_size,
        "images_per_second": timed / seconds if seconds else None,
        "images_per_second_with_loading": found["images"] / took,
    }
