"""End diverged training in one sentence: the update, where numbers stopped being finite, and what to try."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smlp.errors import NaNError
from smlp.moe.routers import ExpertOffsets
from smlp.nn.stack import Stack

#: findings of the NaN detector, which fairseq creates when an update fails
_found: list[str] = []


def apply() -> None:
    from fairseq import trainer as fairseq_trainer
    from fairseq.optim.amp_optimizer import AMPOptimizer

    loss_scale = AMPOptimizer.next_loss_scale

    def next_loss_scale(self: AMPOptimizer) -> float:
        if not self.scaler.is_enabled():  # without a GPU there is no scale to lower
            raise FloatingPointError("gradients are not finite")
        return loss_scale.fget(self)

    AMPOptimizer.next_loss_scale = property(next_loss_scale)
    fairseq_trainer.NanDetector = functools.partial(FirstNaN, report=_found.append)


def diverged(trainer: Any, when: str, error: FloatingPointError) -> NaNError:
    """Return the error that says in one sentence when and where numbers stopped being finite.

    Args:
        trainer: whose update or validation it was.
        when: the update or validation.
        error: what ended it.
    """
    if trainer.data_parallel_world_size > 1:
        when = f"rank {trainer.data_parallel_rank}, {when}"
    where = [damaged_weights(trainer.get_model()), *_found]
    where = next((f", {place}" for place in where if place and place not in str(error)), "")
    if isinstance(error, NaNError):  # its message names the layer and the remedy
        return NaNError(f"{when}{where}: {error}")
    what = "gradients are not finite" if "gradients are" in str(error) else str(error).split(". ")[0]
    return NaNError(
        f"{when}: {what}{where}; training has diverged: lower --lr, lengthen --warmup-updates or set --clip-norm"
    )


def damaged_weights(model: nn.Module) -> str:
    """Return the first parameter, or buffer of our models, that is not finite, as the end of a sentence; else ""."""
    for name, weights in itertools.chain(model.named_parameters(), _buffers(model)):
        num_bad = int((~torch.isfinite(weights.detach())).sum())
        if num_bad:
            return f"with {num_bad:,} of {weights.numel():,} weights of {name} not finite"
    return ""


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint holds besides parameters: offsets of experts, and others without minus infinity, which
    masks have. Buffers of fairseq's own models may be memory that was never written."""
    for path, stack in model.named_modules():
        for name, module in stack.named_modules(prefix=path) if isinstance(stack, Stack) else ():
            for key, buffer in module.named_buffers(prefix=name, recurse=False):
                if key.rpartition(".")[2] not in module._non_persistent_buffers_set and buffer.is_floating_point():
                    is_mask = not isinstance(module, ExpertOffsets)
                    yield key, buffer.clamp(min=torch.finfo(buffer.dtype).min) if is_mask else buffer


def check_weights(trainer: Any) -> None:
    """Refuse to save weights that are not finite: the loss of an update says nothing about what it has made of them.

    Raises:
        NaNError: the message names the first that is not finite.
    """
    if place := damaged_weights(trainer.get_model()):
        what = FloatingPointError(f"no checkpoint is written {place}")
        raise diverged(trainer, f"after update {trainer.get_num_updates()}", what)


class FirstNaN:
    """Finds the module whose output, or else the gradient of whose output, is the first one with NaN or infinity.

    It replaces fairseq's detector, with which fairseq repeats an update whose gradients are not finite. Outputs may be
    nested structures of tensors. Minus infinity is allowed, because masked scores have it.

    Args:
        model: the model.
        report: called with what is found, as the end of a sentence, at most once.
    """

    def __init__(self, model: nn.Module, report: Callable[[str], None]) -> None:
        self._report = report
        self._in_forward: str | None = None
        self._in_backward: str | None = None
        self._hooks = [
            module.register_forward_hook(functools.partial(self._look_at_output, name))
            for name, module in model.named_modules()
        ]

    def __enter__(self) -> FirstNaN:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._in_forward is not None:
            self._report(f"first in the output of {self._in_forward}")
        elif self._in_backward is not None:
            self._report(f"first in the gradient of the output of {self._in_backward}")

    def _look_at_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if self._in_forward is None and has_nan(tensor):
                self._in_forward = name or type(module).__name__
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._look_at_gradient, name or type(module).__name__))

    def _look_at_gradient(self, name: str, grad: Tensor) -> None:
        if self._in_backward is None and has_nan(grad):
            self._in_backward = name


def has_nan(x: Tensor) -> bool:
    """Return whether any floating-point number is NaN or plus infinity."""
    return x.is_floating_point() and bool((torch.isnan(x) | torch.isposinf(x)).any())


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
