"""Any checkpoint, opened: written by one process, by several ranks, or exported; its tensors are still in the files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from smlp.checkpoint.export import PREFIX, is_export, read_export, read_safetensors
from smlp.checkpoint.index import ExpertIndex
from smlp.checkpoint.lazy import LazyTensor, joined_rows
from smlp.checkpoint.parts import ExpertRows, attach
from smlp.checkpoint.progress import progress_problems
from smlp.checkpoint.torch_file import existing_file, read_structure
from smlp.config import ModelConfig
from smlp.config.presets import from_training_options
from smlp.errors import UserError
from smlp.moe.experts import expert_parameters
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer import Vocabulary

_EMBEDDING = PREFIX + "embedding.weight"
_BLOCKS = PREFIX + "blocks."
_MOST_TOKENS = 1 << 20


@dataclass
class Checkpoint:
    """The content of a checkpoint, as fairseq writes it in one file, with lazy tensors."""

    path: Path
    #: ``cfg``, ``model`` and so on; of a checkpoint in parts with all experts, and without the index
    state: dict[str, Any]
    config: ModelConfig
    #: of a checkpoint in parts
    index: ExpertIndex | None = None
    #: of an export: the dictionary and the tokenizer, by file name
    files: dict[str, LazyTensor] = field(default_factory=dict)
    is_export: bool = False

    @property
    def paths(self) -> list[Path]:
        """Its files: the one that names it, and its parts."""
        return [self.path, *(self.path.parent / part.file for part in (self.index.parts if self.index else ()))]

    @property
    def arch(self) -> str:
        """Name of the architecture."""
        return str(self.state["cfg"]["model"].get("_name"))

    @property
    def num_updates(self) -> int:
        """Updates done."""
        history = self.state.get("optimizer_history") or [{}]
        return history[-1].get("num_updates", 0)

    @property
    def optimizer(self) -> dict[int, dict[str, Any]] | None:
        """State of the optimizer by position of the parameter; None if the checkpoint has none."""
        return (self.state.get("last_optimizer_state") or {}).get("state")

    @functools.cached_property
    def skeleton(self) -> Decoder:
        """The model without weights."""
        with torch.device("meta"):
            return Decoder(self.config)

    @property
    def expert_names(self) -> list[str]:
        """Names of expert parameters in ``state["model"]``."""
        return [PREFIX + name for name, _, _ in expert_parameters(self.skeleton)]

    @property
    def positions(self) -> dict[str, int]:
        """Of expert parameters in the optimizer's state, by name."""
        numbers = {PREFIX + name: number for number, (name, _) in enumerate(self.skeleton.named_parameters())}
        return {name: numbers[name] for name in self.expert_names}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint; takes little memory and reads no tensor.

    Raises:
        UserError: a file is missing, truncated or of another checkpoint, or there is another kind of model in it.
    """
    path = existing_file(path)
    if path.suffix == ".safetensors":
        return _of_export(path, *read_safetensors(path))
    state = read_structure(path)
    if is_export(state):
        return _of_export(path, *read_export(state, path))
    _check(state, path)
    index = attach(state, path, read_structure)
    if index is not None:
        state["model"] = _lazy(state["model"])
        if state.get("last_optimizer_state"):
            moments = state["last_optimizer_state"]["state"]
            state["last_optimizer_state"]["state"] = {number: _lazy(moments[number]) for number in sorted(moments)}
    checkpoint = Checkpoint(path, state, config_of(state, path), index)
    if index is not None:
        order = [PREFIX + name for name in checkpoint.skeleton.state_dict()]
        model = state["model"]
        state["model"] = {name: model[name] for name in [*order, *model] if name in model}
    return checkpoint


def _of_export(path: Path, state: dict[str, Any], files: dict[str, LazyTensor]) -> Checkpoint:
    _check(state, path)
    return Checkpoint(path, state, config_of(state, path), files=files, is_export=True)


def _check(state: Any, path: Path) -> None:
    """Refuse what is no checkpoint, or from which training could not resume."""
    check_is_ours(state, path)
    for problem in progress_problems(state, path):
        raise UserError(problem)


def check_is_ours(state: Any, path: str | Path) -> None:
    """Refuses the content of a file that is no checkpoint of one of this package's models.

    Raises:
        UserError: it is not; the message names the file.
    """
    if isinstance(state, Mapping) and "expert_ids" in state:
        raise UserError(f"{path} holds some experts of a checkpoint: name the file of the checkpoint itself")
    is_checkpoint = isinstance(state, Mapping) and isinstance(state.get("model"), Mapping)
    if not is_checkpoint or not isinstance(state.get("cfg"), Mapping):
        raise UserError(f"{path} is no checkpoint of fairseq-train: it has no model and configuration")
    options = state["cfg"].get("model")
    if not isinstance(options, Mapping) or _EMBEDDING not in state["model"]:
        name = options.get("_name") if isinstance(options, Mapping) else getattr(options, "arch", None)
        raise UserError(f"{path} holds another kind of model ({name}), not one of smlp's")
    for name, tensor in state["model"].items():
        if not hasattr(tensor, "shape") or not isinstance(name, str):
            raise UserError(f"{path} is damaged: it has {tensor!r:.40} as {name}, which is no tensor")
    if len(state["model"][_EMBEDDING].shape) != 2:
        raise UserError(f"{path} is damaged: {_EMBEDDING} has shape {tuple(state['model'][_EMBEDDING].shape)}")


def config_of(state: Mapping[str, Any], path: str | Path) -> ModelConfig:
    """The configuration of the model in a checkpoint.

    Raises:
        UserError: it cannot be built.
    """
    options, (num_rows, width) = state["cfg"]["model"], state["model"][_EMBEDDING].shape
    try:
        config = from_training_options(options.get("_name"), options, num_rows, Vocabulary.pad)
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the configuration in {path} is of no model that can be built: {error}") from error
    # Before anything of these sizes is made: they may be any numbers.
    blocks = {name.split(".")[3] for name in state["model"] if name.startswith(_BLOCKS)}
    axis = max(max(tensor.shape, default=0) for tensor in state["model"].values())
    experts = config.moe.num_experts if config.num_sparse_layers else 0
    for what, size, most in (
        ("blocks", config.num_layers, len(blocks)),
        ("experts", experts, axis),
        ("features", config.embed_dim, width),
        ("positions", config.max_tokens, max(axis, _MOST_TOKENS)),  # of which sinusoids are no tensor in the file
    ):
        if size > most:
            raise UserError(
                f"{path} does not fit its configuration ({options.get('_name')}), which has {size:,} {what}: the "
                f"tensors in it are of {most:,} at most"
            )
    return config


def _lazy(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _joined(value) if isinstance(value, ExpertRows) else value for name, value in tensors.items()}


def _joined(rows: ExpertRows) -> LazyTensor:
    """An expert tensor (E, ...) whose rows are in several files."""
    reader, places = rows.reader, {}
    for part in reader.index.parts:
        tensor = reader.open(part)[rows.key]
        places |= {expert: (tensor, row) for row, expert in enumerate(part.expert_ids)}
    return joined_rows([places[expert] for expert in sorted(places)])
