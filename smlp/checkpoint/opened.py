"""Open a checkpoint in one file, in parts, or exported, without reading its tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from smlp.checkpoint.content import SHAPED_MOMENTS, check_is_ours, config_of, moment_problems, progress_problems
from smlp.checkpoint.export import is_export, prefix_of, read_export, read_safetensors
from smlp.checkpoint.index import ExpertIndex
from smlp.checkpoint.lazy import LazyTensor, is_finite
from smlp.checkpoint.parts import attach
from smlp.checkpoint.torch_file import existing_file, is_verifying, read_structure
from smlp.config import ModelConfig
from smlp.config.presets import FROM_TASK
from smlp.errors import UserError
from smlp.files import is_safetensors
from smlp.moe.experts import expert_parameters
from smlp.moe.routers import ExpertOffsets
from smlp.nn.build import model_of, without_weights
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder, add_heads

_SHOWN = 3  # most tensors named in a message


@dataclass
class Checkpoint:
    """A checkpoint as fairseq writes it in one file, with lazy tensors."""

    path: Path
    #: ``cfg``, ``model`` and so on; a checkpoint in parts has all experts here, and no index
    state: dict[str, Any]
    config: ModelConfig
    #: None unless the checkpoint is in parts
    index: ExpertIndex | None = None
    #: the dictionary and the tokenizer of an export, by file name
    files: dict[str, LazyTensor] = field(default_factory=dict)
    is_export: bool = False

    @property
    def paths(self) -> list[Path]:
        """Return the checkpoint's own file, then its parts."""
        return [self.path, *(self.path.parent / part.file for part in (self.index.parts if self.index else ()))]

    @property
    def arch(self) -> str:
        """Return the name of the architecture."""
        return str(self.state["cfg"]["model"].get("_name"))

    @property
    def num_updates(self) -> int:
        """Return the number of updates done."""
        history = self.state.get("optimizer_history") or [{}]
        return history[-1].get("num_updates", 0)

    @property
    def optimizer(self) -> dict[int, dict[str, Any]] | None:
        """Return the optimizer's state by position of the parameter; None if the checkpoint has none."""
        return (self.state.get("last_optimizer_state") or {}).get("state")

    @functools.cached_property
    def skeleton(self) -> Decoder | Encoder:
        """Return the model on the meta device, without weights, with the heads that the checkpoint has."""
        with without_weights():
            model = model_of(self.config)
            if isinstance(model, Encoder):
                add_heads(model, self.state["model"])
            return model

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the skeleton that are trained, by name, in the order of the optimizer's state."""
        return [pair for pair in self.skeleton.named_parameters() if pair[1].requires_grad]

    @property
    def prefix(self) -> str:
        """Return what the names in ``state["model"]`` begin with."""
        return prefix_of(self.config)

    @property
    def num_criterion_parameters(self) -> int:
        """Return how many tensors follow the model's in the optimizer's state: those of a criterion that learns."""
        return len(self.state.get("criterion") or ())

    @property
    def expert_names(self) -> list[str]:
        """Return the names of the expert parameters in ``state["model"]``."""
        return [self.prefix + name for name, _, _ in expert_parameters(self.skeleton)]

    @property
    def positions(self) -> dict[str, int]:
        """Return the positions of the expert parameters in the optimizer's state, by name."""
        numbers = {self.prefix + name: number for number, (name, _) in enumerate(self.trained)}
        return {name: numbers[name] for name in self.expert_names if name in numbers}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint without reading its tensors.

    Raises:
        UserError: a file is missing, truncated or of another checkpoint, or it holds another kind of model.
    """
    path, files, settings = existing_file(path), None, None
    if is_safetensors(path):
        state, files, settings = read_safetensors(path)
    else:
        state = read_structure(path)
        if is_export(state):
            state, files, settings = read_export(state, path)
    check_is_ours(state, path)
    for problem in progress_problems(state, path):
        raise UserError(problem if files is None else problem.replace(": optimizer_history.", ": "))
    if files is not None:
        config = config_of(state, path)
        for name in FROM_TASK:  # for readers of the export that know no fairseq
            if settings.get(name) != getattr(config, name):
                raise UserError(
                    f"{path} is a damaged export: {name} is {settings.get(name)!r} in its settings, but "
                    f"{getattr(config, name)} follows from its cfg and its weights"
                )
        return Checkpoint(path, state, config, files=files, is_export=True)
    reader = attach(state, path, compare=False)
    for part in reader.index.parts if reader else ():
        reader.open(part)
    if reader and state.get("last_optimizer_state"):
        state["last_optimizer_state"]["state"] = dict(sorted(state["last_optimizer_state"]["state"].items()))
    checkpoint = Checkpoint(path, state, config_of(state, path), reader and reader.index)
    if reader:
        order = [checkpoint.prefix + name for name in checkpoint.skeleton.state_dict()]
        model = state["model"]
        state["model"] = {name: model[name] for name in [*order, *model] if name in model}
    return checkpoint


def fit_problems(checkpoint: Checkpoint, reads_weights: bool | None = None) -> list[str]:
    """Return where the tensors do not fit the configuration, or have weights that are not finite, one sentence each.

    Args:
        checkpoint: to look at.
        reads_weights: whether to read the weights; by default, unless the environment says not to check any.
    """
    if reads_weights is None:
        reads_weights = is_verifying()
    path, skeleton, prefix = checkpoint.path, checkpoint.skeleton, checkpoint.prefix
    wanted = {prefix + name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    is_real = {prefix + name: tensor.is_floating_point() for name, tensor in skeleton.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.state["model"].items()}
    problems = []
    for what, names in (("lacks", wanted.keys() - found.keys()), ("has besides", found.keys() - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN]) + (" and others" if len(names) > _SHOWN else "")
            problems.append(f"{path} does not fit its configuration ({checkpoint.arch}): it {what} {shown}")
    problems += [
        f"{path} does not fit its configuration ({checkpoint.arch}): {name} has shape {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    problems += [
        f"{path} does not fit its configuration ({checkpoint.arch}): {name} has type {found_tensor.dtype}, not floats"
        for name, found_tensor in checkpoint.state["model"].items()
        if name in wanted and is_real[name] and not found_tensor.dtype.is_floating_point
    ]
    learnt = {prefix + name for name, _ in skeleton.named_parameters()}  # routers' offsets are always in float32
    kinds = {tensor.dtype for name, tensor in checkpoint.state["model"].items() if name in learnt}
    if len(kinds) > 1:
        problems.append(f"{path} has weights of several types: {', '.join(sorted(map(str, kinds)))}")
    held = checkpoint.index.positions if checkpoint.index else {}
    moved = sorted(name for name, number in checkpoint.positions.items() if held.get(name, number) != number)
    if moved:
        problems.append(
            f"{path} is damaged: its index has {moved[0]} at place {held[moved[0]]} of the optimizer's state, not "
            f"{checkpoint.positions[moved[0]]}"
        )
    problems += _moment_problems(checkpoint)
    if not problems and reads_weights:
        problems = [*_infinite_weights(checkpoint), *_unknown_experts(checkpoint)]
    return problems


def _infinite_weights(checkpoint: Checkpoint) -> list[str]:
    """Return which weights are NaN or infinite, one sentence each; it reads them all, as checksums do. Buffers may
    have minus infinity, which masks have, but offsets of experts do not."""
    masks = {
        checkpoint.prefix + f"{path}.{name}".lstrip(".")
        for path, module in checkpoint.skeleton.named_modules(remove_duplicate=False)
        if not isinstance(module, ExpertOffsets)
        for name in module._buffers
    }
    return [
        f"{name} of {checkpoint.path} is not finite: its training has diverged, or the file is damaged"
        for name, tensor in checkpoint.state["model"].items()
        if tensor.dtype.is_floating_point and not is_finite(tensor, is_mask=name in masks)
    ]


def _unknown_experts(checkpoint: Checkpoint) -> list[str]:
    """Return which tables of ids name experts that the model does not have, one sentence each."""
    num_experts = checkpoint.config.num_experts
    return [
        f"{name} of {checkpoint.path} names experts that are not there: the model has {num_experts}"
        for name, tensor in checkpoint.state["model"].items()
        if name.endswith("router.table") and any(((i < 0) | (i >= num_experts)).any() for i in tensor.pieces())
    ]


def _moment_problems(checkpoint: Checkpoint) -> list[str]:
    """Return what is wrong with the moments, one sentence each; --fp16 flattens them into one, whose shape passes."""
    problems = moment_problems(checkpoint.state, checkpoint.path)
    if problems:
        return problems
    parameters, moments = checkpoint.trained, checkpoint.optimizer or {}
    if len(moments) == 1 and len(parameters) > 1:
        return []
    for number, of_parameter in moments.items():
        if len(parameters) <= number < len(parameters) + checkpoint.num_criterion_parameters:
            continue
        if number >= len(parameters):
            problems.append(
                f"{checkpoint.path} has an optimizer state for parameter {number}, but the model has {len(parameters)} "
                "parameters"
            )
            continue
        name, shape = parameters[number][0], tuple(parameters[number][1].shape)
        for moment, value in of_parameter.items():
            is_shaped = moment in SHAPED_MOMENTS or len(getattr(value, "shape", ())) == len(shape)
            if isinstance(value, LazyTensor) and is_shaped and value.shape != shape:
                problems.append(f"{checkpoint.path}: {moment} of {name} has shape {value.shape}, not {shape}")
    return problems
