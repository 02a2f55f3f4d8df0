"""Sparse upcycling: turn a dense checkpoint into a sparse model with the same outputs (Komatsuzaki et al., 2022).

A Transformer's experts are copies of a block's feed-forward network. The sparse blocks of sMLP and gMLP-MoE are grown:
they are added to the model's own blocks and add nothing at first. docs/checkpoints.md has a table of the architectures
and of the gates that copies make up for, and says how equal experts become different.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smlp.checkpoint.export import PREFIXES, new_history, new_state
from smlp.checkpoint.lazy import HeldTensor, LazyTensor, MadeTensor, repeated, scaled
from smlp.checkpoint.load import dictionary_record
from smlp.checkpoint.opened import Checkpoint
from smlp.config import SETTINGS, ModelConfig, differences, flatten, unflatten
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import FROM_TASK, PRESETS, preset
from smlp.errors import UserError
from smlp.moe.routers.hashed import balanced_table, random_table
from smlp.nn.blocks import sparse_block
from smlp.nn.build import without_weights
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer_files import DICTIONARY, RECORD, Vocabulary, record_in, record_of

#: small enough that the gate in float32 or float64 equals that of a zero router exactly; representable in bfloat16
TINY = 1e-20
#: the smallest positive float16
TINY_FP16 = 2.0**-24

_PREFIX, _ = PREFIXES

# Settings taken from the dense model; the others are the new architecture's.
_FROM_DENSE = (
    *FROM_TASK,
    *("embed_dim", "ffn_dim", "dense_block", "num_heads", "positions", "activation", "dropout"),
    *("attention_dropout", "layer_norm", "embedding_norm", "spatial_weights", "embed_scaling"),
    *("checkpoint_activations", "embed_init_std", "spatial_init_scale", "spatial_init_average"),
)
_GROWN = ("smlp", "gmlp_moe")
# Inverse of the sum of a token's initial gates, as a function of the number of experts E.
_INVERSE_GATE = {"hash": lambda E: 1, "gshard": lambda E: 1, "switch": lambda E: E, "base": lambda E: 2}
# Parameters of routers; the rest of their state dicts are buffers.
_LEARNT_BY_ROUTERS = (".weight", ".centroids")
# Parameters that are zero in a new sparse block, so that it adds nothing.
_SILENT = ("feature_moe.experts.weight", "feature_moe.experts.bias", "experts.w2", "experts.b2", "w_out", "b_out")


def target_config(dense: Checkpoint, arch: str, overrides: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of the sparse model.

    Args:
        dense: checkpoint of the dense model.
        arch: architecture of the sparse model; sizes are the dense model's.
        overrides: settings of experts and router, and numbers of layers, by name.

    Raises:
        UserError: the dense model cannot become such a model with equal outputs.
    """
    own, goal = dense.config, preset(arch)
    if own.is_bidirectional:
        raise UserError(f"{dense.path} ({dense.arch}) is an encoder, and there are no sparse encoders")
    if own.num_sparse_layers:
        raise UserError(f"{dense.path} ({dense.arch}) has {own.num_sparse_layers} sparse blocks already")
    if not goal.num_sparse_layers:
        raise UserError(f"--arch {arch} has no sparse blocks")
    router = overrides.get("router", goal.router)
    if router not in _INVERSE_GATE:
        raise UserError(f"upcycling supports the routers {', '.join(_INVERSE_GATE)}, not {router}")
    if goal.sparse_block not in _GROWN and not goal.sparse_block == goal.dense_block == "transformer":
        raise UserError(
            f"upcycling to {arch}: {goal.sparse_block} blocks cannot be made from {goal.dense_block} blocks, only "
            f"transformer blocks from transformer blocks; {' and '.join(_GROWN)} blocks can be added to any model"
        )
    if own.dense_block != goal.dense_block:
        raise UserError(
            f"the blocks of {dense.path} ({dense.arch}) are {own.dense_block} blocks, those of {arch} are "
            f"{goal.dense_block} blocks"
        )
    numbers = _layer_numbers(dense, arch, goal, overrides)
    # also keep settings that a plug-in's blocks define
    kept = {name: value for name, value in flatten(own).items() if name in _FROM_DENSE or name not in SETTINGS}
    try:
        config = unflatten({**flatten(goal), **kept, **overrides, **numbers})
    except UserError as error:
        raise UserError(f"{dense.path} cannot become a {arch}: {error}") from error
    if config.has_feature_moe and config.feature_experts == "additive":
        raise UserError(
            "feature_experts=additive adds a block's features to its output whatever its weights are, so that a new "
            "block would change the outputs: upcycling supports gated and linear"
        )
    return config


def _layer_numbers(dense: Checkpoint, arch: str, goal: ModelConfig, overrides: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of dense and sparse blocks: from the overrides, the architecture, or what is left."""
    total, names = dense.config.num_layers, ("num_dense_layers", "num_sparse_layers")
    given = {name: overrides[name] for name in names if name in overrides}
    grows = goal.sparse_block in _GROWN
    if grows:
        if given.setdefault("num_dense_layers", total) != total:
            raise UserError(
                f"{arch} adds new sparse blocks: all {total} blocks of {dense.path} stay dense, so "
                f"num_dense_layers cannot be {given['num_dense_layers']}"
            )
    elif len(given) == 1:
        ((name, number),) = given.items()
        given[names[1 - names.index(name)]] = total - number
    dense_ones, sparse_ones = (given.get(name, getattr(goal, name)) for name in names)
    if not grows and (dense_ones < 0 or dense_ones + sparse_ones != total):
        raise UserError(
            f"{dense.path} has {total} blocks, {arch} would have {dense_ones} dense and {sparse_ones} sparse ones: "
            f"give --num-dense-layers and --num-sparse-layers that add up to {total}"
        )
    if sparse_ones < 1:
        raise UserError(f"num_sparse_layers is {sparse_ones}: at least one block must be sparse")
    return dict(zip(names, (dense_ones, sparse_ones), strict=True))


def upcycled(
    dense: Checkpoint,
    arch: str,
    overrides: Mapping[str, Any],
    router_scale: float | None = None,
    seed: int = 1,
    frequencies_V: Tensor | None = None,
) -> Checkpoint:
    """Return a checkpoint of a sparse model with the outputs of a dense one, without optimizer, at update 0.

    Args:
        dense: checkpoint of the dense model.
        arch, overrides: see :func:`target_config`.
        router_scale: magnitude of the initial weights of Switch's gate and BASE's centroids; by default :data:`TINY`,
            or :data:`TINY_FP16` for a checkpoint of fp16 training, in which smaller numbers are zero.
        seed: of the new weights.
        frequencies_V: how often each token occurs in the training data, (V,), for ``hash_kind=balanced``.

    Raises:
        UserError: see :func:`target_config`.
    """
    config = target_config(dense, arch, overrides)
    ignored = ignored_settings(config, PRESETS[arch])
    for name in overrides:
        if name in ignored:
            raise UserError(f"--{name.replace('_', '-')} would not be used: {ignored[name]}")
    is_balanced = config.router == "hash" and config.hash_kind == "balanced"
    if is_balanced and frequencies_V is None:
        raise UserError("hash_kind=balanced needs the training data: give --data")
    if frequencies_V is not None and not is_balanced:
        raise UserError("--data would not be used: it is for the router hash with hash_kind=balanced")
    if router_scale is not None and (config.sparse_block in _GROWN or config.router in ("hash", "gshard")):
        raise UserError(f"--router-scale would not be used: the router of {arch} starts as in a new model")
    if "centroid_init_gain" in overrides and config.sparse_block not in _GROWN:
        raise UserError(
            "--centroid-init-gain would not be used: --router-scale says how the router of copied blocks starts"
        )
    if "spatial_bias_init" in overrides:  # ignored_settings has refused it for other blocks
        raise UserError("--spatial-bias-init would not be used: new blocks start with a bias of 0 and add nothing")
    with without_weights():
        shapes = {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
    making = _Making(dense, config, shapes, router_scale, seed, frequencies_V)
    model = {_PREFIX + name: making.tensor(name) for name in shapes}
    assert all(model[_PREFIX + name].shape == shape for name, shape in shapes.items())
    own = {name: value for name, value in flatten(config).items() if name not in FROM_TASK}
    cfg = dense.state["cfg"]
    cfg = {**cfg, "model": {**cfg["model"], **own, "_name": arch}}
    state = new_state(cfg, model, [new_history(cfg, 0)])
    if (record := record_in(dense.state)) is not None:
        state["extra_state"][RECORD] = record
    return Checkpoint(dense.path, state, config, files=dense.files, is_export=dense.is_export)


def check_same_dictionary(dense: Checkpoint, data: Path) -> None:
    """Refuse data whose dictionary, if it is there, is not that of the dense model.

    Raises:
        UserError: it has another size or other symbols.
    """
    if not (data / DICTIONARY).is_file():
        return
    theirs, record = Vocabulary.load(data / DICTIONARY), dictionary_record(dense)
    if len(theirs) != dense.config.vocab_size or record not in (None, record_of(theirs.symbols)):
        raise UserError(
            f"--data {data} has another dictionary ({len(theirs)} symbols) than {dense.path} was trained with "
            f"({dense.config.vocab_size})"
        )


def training_arguments(checkpoint: Checkpoint) -> list[str]:
    """Return the options of ``fairseq-train`` for a checkpoint's model: the architecture and what differs from it."""
    words = ["--arch", checkpoint.arch]
    for name, value in differences(checkpoint.config, preset(checkpoint.arch)).items():
        # No option turns off a flag that the architecture has on; training warns of one that changes results.
        if name not in FROM_TASK and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    options = checkpoint.state["cfg"]["model"]
    words += ["--tokens-per-sample", str(options["tokens_per_sample"])]
    if options.get("max_target_positions"):
        words += ["--max-target-positions", str(options["max_target_positions"])]
    return [*words, "--add-bos-token"] if options.get("add_bos_token") else words


class _Making:
    """Makes the tensors of the sparse model by name."""

    def __init__(
        self,
        dense: Checkpoint,
        config: ModelConfig,
        shapes: Mapping[str, tuple[int, ...]],
        router_scale: float | None,
        seed: int,
        frequencies_V: Tensor | None,
    ) -> None:
        self.config, self.shapes, self.seed, self.frequencies_V = config, shapes, seed, frequencies_V
        self.weights = {name.removeprefix(_PREFIX): tensor for name, tensor in dense.state["model"].items()}
        self.dtype = self.weights["embedding.weight"].dtype
        if router_scale is None:
            common = dense.state["cfg"].get("common") or {}
            in_fp16 = self.dtype == torch.float16 or common.get("fp16")
            router_scale = TINY_FP16 if in_fp16 else TINY
        if not torch.tensor(router_scale, dtype=self.dtype):
            dtype = str(self.dtype).removeprefix("torch.")
            raise UserError(f"--router-scale {router_scale:g} is 0 in {dtype}: all experts would tie for every token")
        self.router_scale = router_scale
        self.sparse = set(config.sparse_layer_indices())
        self.grows = config.sparse_block in _GROWN
        # for each block, the number of the dense model's block it is made from
        kept = [index for index in range(config.num_layers) if not (self.grows and index in self.sparse)]
        self.source = {index: number for number, index in enumerate(kept)}

    def tensor(self, name: str) -> LazyTensor:
        if not name.startswith("blocks."):
            return self.weights[name]
        _, number, rest = name.split(".", 2)
        index = int(number)
        if index not in self.sparse:
            return self.weights[f"blocks.{self.source[index]}.{rest}"]
        if self.grows:
            return self._of_new_block(index, rest)
        return self._of_copied_block(index, rest)

    def _of_copied_block(self, index: int, name: str) -> LazyTensor:
        prefix = f"blocks.{self.source[index]}."
        copies = {
            "token_moe.experts.norm_weight": ("norm.weight", 1),
            "token_moe.experts.norm_bias": ("norm.bias", 1),
            "token_moe.experts.w1": ("feed_forward.fc1.weight", 1),
            "token_moe.experts.b1": ("feed_forward.fc1.bias", 1),
            "token_moe.experts.w2": ("feed_forward.fc2.weight", self._inverse_gate()),
            "token_moe.experts.b2": ("feed_forward.fc2.bias", self._inverse_gate()),
        }
        if name in copies:
            source, factor = copies[name]
            return repeated(scaled(self.weights[prefix + source], factor), self.config.num_experts)
        if name.startswith("token_moe.router."):
            return self._router(index, name)
        return self.weights[prefix + name]

    def _inverse_gate(self) -> int:
        config = self.config
        if config.router == "base" and config.base_gate == "one":
            return 1
        return _INVERSE_GATE[config.router](config.num_experts)

    def _router(self, index: int, name: str) -> LazyTensor:
        config, generator = self.config, torch.Generator().manual_seed(self.seed + index)
        if name.endswith(".table"):
            return HeldTensor(self._table(index))
        if not name.endswith(_LEARNT_BY_ROUTERS):  # offsets, and the phase of a warm-up
            return HeldTensor(config.router_kind.build(config).state_dict()[name.removeprefix("token_moe.router.")])
        shape = (config.num_experts, config.embed_dim)
        if config.router == "gshard":
            weight = (2 * torch.rand(shape, generator=generator) - 1) * config.embed_dim**-0.5
        else:
            # Random signs times one magnitude: float16 has hardly any other numbers this small.
            signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
            weight = signs * self.router_scale
        return HeldTensor(weight.to(self.dtype))

    def _table(self, index: int) -> Tensor:
        config = self.config
        if config.router == "hash" and config.hash_kind == "balanced":
            return balanced_table(self.frequencies_V, config.num_experts)
        return random_table(config.vocab_size, config.num_experts, config.for_router(index).hash_seed)

    def _of_new_block(self, index: int, name: str) -> LazyTensor:
        shape = self.shapes[f"blocks.{index}.{name}"]
        if name.endswith(_SILENT):
            return MadeTensor(shape, self.dtype, lambda: torch.zeros(shape))
        if name.startswith("token_moe.router.") and not name.endswith(_LEARNT_BY_ROUTERS):
            return self._router(index, name)
        return MadeTensor(shape, self.dtype, lambda: self._new_block(index)[name])

    @functools.lru_cache(maxsize=1)  # noqa: B019  the cache lives as long as the result
    def _new_block(self, index: int) -> dict[str, Tensor]:
        """Return the initial values of a new sparse block; only the last one is kept in memory."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + index)
            return sparse_block(self.config, index).state_dict()
