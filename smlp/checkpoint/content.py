"""Check that the content of a file is a checkpoint of one of this package's models, from which training can resume."""

from __future__ import annotations

import math
import numbers
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smlp.checkpoint.export import PREFIXES
from smlp.config import ModelConfig
from smlp.config.presets import from_training_options
from smlp.errors import UserError
from smlp.text.tokenizer import Vocabulary

_EMBEDDING = "embedding.weight"
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")
_MOST_TOKENS = 1 << 20  # largest context if no tensor bounds it

_MOST_STEPS = 1 << 31  # most updates or epochs, from which 32-bit seeds are derived

_ABSENT = object()


def progress_problems(state: Any, path: str | Path) -> list[str]:
    """Return what training could not resume from, one sentence each.

    Args:
        state: content of a fairseq checkpoint. Missing entries are left to fairseq, which reads its older formats.
        path: of the checkpoint.
    """
    problems = []
    for way, is_right, expected in _PROGRESS:
        value = _at(state, way)
        if value is not _ABSENT and not is_right(value):
            shown = ".".join(step for step in way if isinstance(step, str))
            problems.append(f"{path} is damaged: {shown} is {value!r:.60}, {expected}")
    moments = _at(state, ("last_optimizer_state", "state"))
    by_parameter = isinstance(moments, Mapping) and all(
        type(number) is int and isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
        for number, value in moments.items()
    )
    if moments is not _ABSENT and not by_parameter:
        problems.append(f"{path} is damaged: its optimizer state is not stored by parameter")
    return problems


#: moments that have their parameter's shape with every optimizer
SHAPED_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def moment_problems(state: Any, path: str | Path) -> list[str]:
    """Return what is wrong with the optimizer's state, one sentence for each parameter that lacks a moment.

    Args:
        state: of a checkpoint with all its experts, in which :func:`progress_problems` has found nothing wrong.
        path: of the checkpoint.
    """
    moments = _at(state, ("last_optimizer_state", "state"))
    if moments is _ABSENT or not moments:
        return []
    # An optimizer may keep different moments for matrices and vectors, but the same ones for all matrices.
    kinds: dict[tuple[int, bool], set[str]] = {}
    for of_parameter in moments.values():
        kinds.setdefault(_kind(of_parameter), set()).update(of_parameter)
    of_all = set.intersection(*([names for (dims, _), names in kinds.items() if dims > 0] or kinds.values()))
    problems = []
    for number, of_parameter in moments.items():
        lacking = sorted((kinds[_kind(of_parameter)] | of_all) - of_parameter.keys())
        if lacking:
            problems.append(
                f"{path} is damaged: the optimizer state of parameter {number} lacks {', '.join(lacking)}, which other "
                "parameters have; --reset-optimizer starts with new moments"
            )
        elif not _is_step(step := _value(of_parameter.get("step", 0))):
            problems.append(
                f"{path} is damaged: the optimizer's step of parameter {number} is {step!r:.60}, not a number from 0 "
                f"to {_MOST_STEPS}; --reset-optimizer starts with new moments"
            )
        for moment, value in of_parameter.items():  # what torch would convert without a word, or fail on
            if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_complex()):
                kind = f"is a tensor of {value.dtype}, {value.layout}"
                problems.append(damaged_moment(path, moment, f"number {number}", kind))
    return problems


def moment_fault(moment: str, value: Tensor) -> str | None:
    """Return what is wrong with a moment, for :func:`damaged_moment`; None if an optimizer can go on with it."""
    if value.isnan().any():
        return "has NaN"
    if moment == "exp_avg" and value.isinf().any():  # squares may overflow
        return "is infinite"
    return "is negative" if "exp_avg_sq" in moment and (value < 0).any() else None


def damaged_moment(path: str | Path, moment: str, name: str, fault: str) -> str:
    """Return the sentence about a parameter's moment that cannot be used."""
    return f"{path} is damaged: {moment} of parameter {name} {fault}; --reset-optimizer starts with new moments"


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor without axes."""
    return (isinstance(value, numbers.Real) and not isinstance(value, bool)) or getattr(value, "shape", None) == ()


def _is_step(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= _MOST_STEPS


def _value(number: Any) -> Any:
    """Return the value of a tensor without axes, which may still be in a file; anything else as it is."""
    number = number.load() if hasattr(number, "load") else number
    return number.item() if getattr(number, "shape", None) == () else number


def _kind(of_parameter: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of dimensions of a parameter's moments, 0 if it has none, and whether Adafactor factors them.

    It keeps a mean for each row and column of a matrix, which has as many dimensions as the moments of a vector.
    """
    dims = max((len(value.shape) for value in of_parameter.values() if hasattr(value, "shape")), default=0)
    return dims, any(name.endswith(("_row", "_col")) for name in of_parameter)


def _at(state: Any, way: Sequence[str | int]) -> Any:
    for step in way:
        found = isinstance(state, list) and bool(state) if step == -1 else isinstance(state, Mapping) and step in state
        if not found:
            return _ABSENT
        state = state[step]
    return state


def _whole(least: int, most: int = _MOST_STEPS) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: type(value) is int and least <= value <= most,
        f"but must be a whole number from {least} to {most}",
    )


_NAME = (lambda value: value is None or (isinstance(value, str) and value.isprintable()), "not a name")
_NUMBER_OR_NONE = (lambda value: value is None or _is_number(value), "not a number")
_MAPPING = (lambda value: value is None or isinstance(value, Mapping), "not a dictionary")
#: entry of ``extra_state`` about validations without an improvement
PLATEAU = "smlp_plateau"
#: entries that training resumes from: path of keys in a checkpoint (-1: the last of a list), test of the value, and the
#: wording of the message if it fails
_PROGRESS: tuple[tuple[tuple[str | int, ...], Callable[[Any], bool], str], ...] = (
    (("optimizer_history",), lambda value: not value or isinstance(value, list), "not a list"),
    (("extra_state",), *_MAPPING),
    (("criterion",), *_MAPPING),
    (("extra_state", "train_iterator"), lambda value: isinstance(value, Mapping), "not a dictionary"),
    (("extra_state", "metrics"), *_MAPPING),
    (("extra_state", "dictionary"), *_MAPPING),
    (("extra_state", PLATEAU), *_MAPPING),
    (("optimizer_history", -1), lambda value: isinstance(value, Mapping), "not a dictionary"),
    (("optimizer_history", -1), lambda value: value != {}, "without the name of a criterion"),
    (("optimizer_history", -1, "criterion_name"), *_NAME),
    (("optimizer_history", -1, "optimizer_name"), *_NAME),
    (("optimizer_history", -1, "lr_scheduler_state"), *_MAPPING),
    (("optimizer_history", -1, "lr_scheduler_state", "best"), *_NUMBER_OR_NONE),
    (("last_optimizer_state",), *_MAPPING),
    (("optimizer_history", -1, "num_updates"), *_whole(0)),
    (("extra_state", "train_iterator", "epoch"), *_whole(1)),
    (("extra_state", "train_iterator", "iterations_in_epoch"), *_whole(0)),
    (("extra_state", "train_iterator", "num_shards"), *_whole(1)),
    (("extra_state", "train_iterator", "num_batches"), *_whole(1)),
    (("extra_state", "train_iterator", "seed"), *_whole(0, 1 << 33)),  # 32 bits, and an epoch may be added
    (
        ("extra_state", "previous_training_time"),
        # a tensor with several ranks; below 0 where a clock was set back
        lambda value: _is_number(value) and -1e7 < _value(value) < math.inf,
        "not a number of seconds",
    ),
    (("extra_state", "best"), *_NUMBER_OR_NONE),
    (("extra_state", "val_loss"), *_NUMBER_OR_NONE),
    (("extra_state", PLATEAU, "best"), lambda value: _is_number(value), "not a number"),
    (("extra_state", PLATEAU, "num_runs"), *_whole(0)),
    (("extra_state", PLATEAU, "num_bad_epochs"), *_whole(0)),
    (
        ("extra_state", PLATEAU, "annealed"),
        lambda value: isinstance(value, Mapping) and value.keys() == {"from", "lr"},
        "not a rate with the --lr that it was made of",
    ),
    (("extra_state", PLATEAU, "annealed", "from"), lambda value: isinstance(value, float) and value >= 0, "not a rate"),
    (("extra_state", PLATEAU, "annealed", "lr"), lambda value: isinstance(value, list), "not a list"),
)


def check_is_ours(state: Any, path: str | Path) -> None:
    """Raise if the content of a file is not a checkpoint of one of this package's models.

    Raises:
        UserError: the message names the file.
    """
    if isinstance(state, Mapping) and "expert_ids" in state:
        raise UserError(f"{path} holds only some experts of a checkpoint: name the checkpoint's own file")
    is_checkpoint = isinstance(state, Mapping) and isinstance(state.get("model"), Mapping)
    if not is_checkpoint or not isinstance(state.get("cfg"), Mapping):
        raise UserError(f"{path} is not a checkpoint of fairseq-train: it has no model and configuration")
    options = state["cfg"].get("model")
    embedding = embedding_name(state["model"])
    if not isinstance(options, Mapping) or embedding is None:
        name = options.get("_name") if isinstance(options, Mapping) else getattr(options, "arch", None)
        for prefix in PREFIXES:
            if any(str(key).startswith(prefix) for key in state["model"]) and embedding is None:
                raise UserError(f"{path} is damaged: it lacks {prefix}{_EMBEDDING}")
        raise UserError(f"{path} holds another kind of model ({name}), not one of smlp's")
    for group in ("criterion", "distributed_training", "optimizer"):
        held = state["cfg"].get(group) or {}
        # options of a criterion or an optimizer that has no dataclass
        if not isinstance(held, Mapping) and (group == "distributed_training" or not isinstance(held, Namespace)):
            raise UserError(f"{path} is damaged: cfg.{group} is {held!r:.60}, not options")
    if not str(options.get("_name")).isprintable():
        raise UserError(f"{path} is damaged: its architecture is {options['_name']!r:.60}")
    for name, tensor in state["model"].items():
        if not isinstance(name, str):
            raise UserError(f"{path} is damaged: its model has {name!r:.40} in place of a tensor's name")
        if not hasattr(tensor, "shape"):
            raise UserError(f"{path} is damaged: it has {tensor!r:.40} as {name}, which is not a tensor")
    if len(state["model"][embedding].shape) != 2:
        raise UserError(f"{path} is damaged: {embedding} has shape {tuple(state['model'][embedding].shape)}")


def embedding_name(model: Mapping[str, Any]) -> str | None:
    """Return the name of the embedding among a checkpoint's tensors; None in another package's model."""
    return next((prefix + _EMBEDDING for prefix in PREFIXES if prefix + _EMBEDDING in model), None)


def older_settings(state: Mapping[str, Any]) -> dict[str, str]:
    """Return settings that an old checkpoint lacks and for which its architecture now has another value."""
    has_norm = any(name.endswith(".core.embedding_norm.weight") for name in state["model"])
    return {} if has_norm or "embedding_norm" in state["cfg"]["model"] else {"embedding_norm": "none"}


def config_of(state: Mapping[str, Any], path: str | Path) -> ModelConfig:
    """Return the configuration of the model in a checkpoint, to build the model.

    Raises:
        UserError: no such model can be built, or its sizes exceed those of the tensors.
    """
    config, arch = recorded_config(state, path), state["cfg"]["model"].get("_name")
    check_sizes(config, {name: tensor.shape for name, tensor in state["model"].items()}, path, arch)
    return config


def recorded_config(state: Mapping[str, Any], path: str | Path) -> ModelConfig:
    """Return the configuration that a checkpoint, or what its parts share, records; its sizes may be any.

    Raises:
        UserError: no such model can be built.
    """
    embedding = embedding_name(state["model"])
    assert embedding is not None, "the caller has checked it"
    options, num_rows = {**state["cfg"]["model"], **older_settings(state)}, state["model"][embedding].shape[0]
    try:
        return from_training_options(options.get("_name"), options, num_rows, Vocabulary.pad)
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the configuration in {path} does not describe a model that can be built: {error}") from error


def check_sizes(config: ModelConfig, shapes: Mapping[str, Sequence[int]], path: str | Path, arch: str | None) -> None:
    """Refuse a configuration, which may hold any numbers, before anything of sizes that no tensor has is allocated.

    Args:
        config: to check.
        shapes: of the tensors that are stored with it, by name.
        path, arch: for the message.

    Raises:
        UserError: the message names the size.
    """
    blocks = {found[1] for name in shapes if (found := _BLOCK.search(name))}
    shapes = {name: shape for name, shape in shapes.items() if math.prod(shape)}  # one without elements may claim any
    axis = max((max(shape, default=0) for shape in shapes.values()), default=0)
    embeddings = (shapes.get(prefix + _EMBEDDING) for prefix in (*PREFIXES, "core.", ""))
    width = next((shape[-1] for shape in embeddings if shape), axis)
    experts = config.num_experts if config.num_sparse_layers else 0
    for what, size, most in (
        ("blocks", config.num_layers, len(blocks)),
        ("experts", experts, axis),
        ("features", config.embed_dim, width),
        ("symbols", config.vocab_size, axis),
        ("positions", config.max_tokens, max(axis, _MOST_TOKENS)),  # sinusoidal positions are not stored
    ):
        if size > most:
            raise UserError(
                f"{path} does not fit its configuration ({arch}), which has {size:,} {what}: its tensors have at most "
                f"{most:,}"
            )
