"""A training loop made of timm's parts, with the option names of timm's ``train.py``, which timm's package lacks.

What differs from that script: a resumed run continues bit for bit, because every random number follows from the seed,
the epoch and the rank (the random state is set at the start of each epoch, and workers start anew); an image that does
not open ends the run instead of being replaced; accuracies count every image once on any number of ranks.
"""

from __future__ import annotations

import math
import os
import time
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import timm.utils
import torch
import torch.distributed as dist
from timm.models import model_parameters
from timm.utils import AverageMeter, update_summary
from timm.utils.clip_grad import dispatch_clip_grad

from smlp.errors import NaNError, UserError
from smlp.files import locked
from smlp.launch.ranks import Place, device_index, has_terminal, place_of
from smlp.launch.team import Team, leave, meet
from smlp.vision.checkpoints import safe_classes_kept
from smlp.vision.evaluate import validate
from smlp.vision.setup import SUMMARY, Training, run_folder

_PATIENCE = timedelta(minutes=30)  # that a rank waits for the others
_UNFINISHED = "tmp.pth.tar"  # timm's name of a checkpoint that is being written


def train(args: Namespace) -> dict[str, float]:
    """Train as the options of ``smlp vision train`` say, on one rank or, under torchrun, on all.

    The folder of the run gets timm's files: ``args.yaml``, ``summary.csv``, ``last.pth.tar``, ``model_best.pth.tar``
    and ``checkpoint-EPOCH.pth.tar``. The options in a checkpoint also have ``classes``, in the order of their
    labels.

    Returns:
        The last row of the summary: ``epoch``, ``train_loss``, ``eval_top1``, ...

    Raises:
        UserError: options, data and checkpoints do not fit together; NaNError: the loss is not a number.
    """
    place = place_of(os.environ, is_interactive=has_terminal())
    device = _device_of(place, args.device)
    args.device, args.distributed = str(device), place is not None
    args.rank, args.world_size = (0, 1) if place is None else (place.rank, place.world_size)
    if place is not None:
        meet(place, "nccl" if device.type == "cuda" else "gloo", _PATIENCE)
    try:
        folder = run_folder(args)
        held = locked(folder, "smlp vision train", "--output") if args.rank == 0 else nullcontext()
        with held, safe_classes_kept():
            return _Loop(args, device, folder).all_epochs()
    finally:
        leave()


def _device_of(place: Place | None, wanted: str | None) -> torch.device:
    """Return the device that is asked for; among several ranks, each has a GPU of its own."""
    device = Team().device(wanted)
    if place is not None and device.type == "cuda":
        device = torch.device("cuda", device_index(place, torch.cuda.device_count()))
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class _Loop(Training):
    """The loop over epochs and batches."""

    def all_epochs(self) -> dict[str, float]:
        """Train and evaluate epoch by epoch; save after each."""
        row: dict[str, float] = {}
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        first, end = self.first_epoch, self.num_epochs
        epochs = f"epochs {first} to {end - 1}" if first < end else f"none left of {end} epochs"
        self._say(
            f"{self.args.model}: {parameters:,} parameters, {len(self.batches.dataset):,} images, {epochs} of "
            f"{len(self.batches)} batches on {self.args.world_size} rank(s) of {self.device.type}, in {self.folder}"
        )
        for epoch in range(self.first_epoch, self.num_epochs):
            if self.mixes and self.args.mixup_off_epoch and epoch >= self.args.mixup_off_epoch:
                self.batches.mixup_enabled = False
            trained = self._one_epoch(epoch)
            rate = self.optimizer.param_groups[0]["lr"]
            evaluated = self._evaluate(epoch)
            self.set_rate(epoch + 1, (epoch + 1) * self.updates_per_epoch)
            self._say(
                f"epoch {epoch}: training loss {trained['loss']:.4f}; validation loss {evaluated['loss']:.4f}, top-1 "
                f"{evaluated['top1']:.2f} %, top-5 {evaluated['top5']:.2f} %; "
                f"{trained['images_per_second']:,.0f} images/s"
            )
            if self.saver is not None:
                update_summary(epoch, trained, evaluated, str(self.folder / SUMMARY), lr=rate)
                self._save(epoch, evaluated["top1"])
            named = {f"train_{name}": value for name, value in trained.items()}
            row = {"epoch": epoch, **named, **{f"eval_{name}": value for name, value in evaluated.items()}}
        return row

    def _one_epoch(self, epoch: int) -> dict[str, float]:
        args, steps = self.args, self.args.grad_accum_steps
        # no two seeds, ranks or epochs may share random numbers (several ranks share torch's orders of images)
        drawn = np.random.SeedSequence([args.seed, epoch, args.rank]).generate_state(1)
        timm.utils.random_seed(int(drawn[0]))
        if args.distributed:
            self.batches.sampler.set_epoch(epoch)
        self.network.train()
        self.optimizer.zero_grad()
        losses, recent, start, num_batches = AverageMeter(), AverageMeter(), time.perf_counter(), len(self.batches)
        for number, (images, targets) in enumerate(self.batches):
            is_last = number + 1 == num_batches
            does_update = is_last or (number + 1) % steps == 0
            joined = min(steps, num_batches - number // steps * steps)  # batches of this update
            waits = args.distributed and not does_update
            with self.network.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with self.precision():
                    outputs = self.network(images)
                loss = self.criterion(outputs.float(), targets)  # in float32 on a CPU, too
                self._backward(loss / joined, does_update)
            recent.update(loss.detach())
            if does_update:
                update = epoch * self.updates_per_epoch + number // steps + 1
                self.optimizer.zero_grad()
                if self.average is not None:
                    self.average.update(self.model, step=update)
                self.set_rate(None, update)
            if is_last or (number + 1) % args.log_interval == 0:
                sentence = f"training loss is {{}} after batch {number + 1} of epoch {epoch}"
                losses.update(self._checked(recent.avg, sentence), recent.count)
                recent.reset()
                speed = (number + 1) * args.batch_size * args.world_size / (time.perf_counter() - start)
                left = (num_batches - number - 1) * args.batch_size * args.world_size / speed
                self._say(
                    f"epoch {epoch} [{number + 1}/{num_batches}] loss {losses.avg:.4f}, learning rate "
                    f"{self.optimizer.param_groups[0]['lr']:.3g}, {speed:,.0f} images/s, {left:,.0f} s left"
                )
        total = torch.tensor([losses.avg], dtype=torch.float64, device=self.device)
        if args.distributed:
            dist.all_reduce(total)
        return {"loss": total.item() / args.world_size, "images_per_second": speed}

    def _backward(self, loss: torch.Tensor, does_update: bool) -> None:
        """Add the gradients of a loss; clip them and update the weights after the last of an update."""
        args = self.args
        # adaptive clipping leaves out the head (Brock et al., 2021), as timm's own training does
        parameters = model_parameters(self.model, exclude_head=args.clip_mode == "agc")
        if self.scaler is not None:
            clipping = {"clip_grad": args.clip_grad, "clip_mode": args.clip_mode, "parameters": parameters}
            self.scaler(loss, self.optimizer, need_update=does_update, **clipping)
            return
        loss.backward()
        if does_update:
            if args.clip_grad is not None:
                dispatch_clip_grad(parameters, args.clip_grad, mode=args.clip_mode)
            self.optimizer.step()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Evaluate the moving average if there is one, or else the model."""
        model = self.model if self.average is None else self.average.module
        found = validate(model, self.held_out, self.args, self.precision)
        self._checked(found["loss"], f"validation loss is {{}} after epoch {epoch}")
        return {name: found[name] for name in ("loss", "top1", "top5")}

    def _save(self, epoch: int, top1: float) -> None:
        """Save a checkpoint.

        Raises:
            UserError: torch cannot write it.
        """
        try:
            self.saver.save_checkpoint(epoch, metric=top1)  # type: ignore[union-attr]
        except RuntimeError as error:
            if "inline_container" not in str(error):
                raise
            (self.folder / _UNFINISHED).unlink(missing_ok=True)
            raise UserError(
                f"{self.folder}: the checkpoint of epoch {epoch} cannot be written (is the disk full?); those of "
                "earlier epochs are intact"
            ) from error

    def _checked(self, loss: Any, sentence: str) -> float:
        """Return a loss as a number.

        Raises:
            NaNError: it is not finite; the message is the sentence with the loss in its braces, and advice.
        """
        if not math.isfinite(value := float(loss)):
            earlier = f"; the checkpoints in {self.folder} are from earlier epochs"
            has_some = any(self.folder.glob("*.pth.tar"))
            raise NaNError(f"the {sentence.format(value)}: lower --lr or set --clip-grad{earlier if has_some else ''}")
        return value

    def _say(self, line: str) -> None:
        if self.args.rank == 0:
            print(line, flush=True)
