"""The fairseq model ``smlp``, a thin shell around :class:`smlp.nn.decoder.Decoder`, and every preset as an architecture
of it (``--arch NAME``)."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_REGISTRY,
    FairseqIncrementalDecoder,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from fairseq.utils import split_paths
from omegaconf import II
from torch import Tensor

from smlp.config import LEAKY_WARNING, ModelConfig, all_settings
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import FROM_TASK, PRESETS, TASK_OPTIONS, from_training_options
from smlp.config.settings import help_of
from smlp.costs.memory import check_weights
from smlp.criterions.choice import settle_criterion
from smlp.errors import UserError
from smlp.fairseq_compat.experts import SpreadExperts
from smlp.fairseq_compat.lost_ranks import collective_timeout
from smlp.fairseq_compat.profiling import WARM_UP
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState, ForwardContext
from smlp.parallel import Ranks, connect, one_process
from smlp.text.binarized import count_tokens

logger = logging.getLogger(__name__)

_STATE_KEY = "smlp_decoding_state"
#: endings of the names of spatial weights, whose last axis is the context
_SPATIAL_WEIGHTS = (".heads.weight", ".experts.weight", ".gating.weight")
_OPTION_TYPES = {"int": int, "float": float, "float | None": float, "str": str, "bool": bool}


def _option(name: str, kind: type, help_text: str, default: Any = None) -> tuple[str, Any, Any]:
    """Return an option of the command line, for a dataclass; None means: as the architecture says."""
    # fairseq knows typing.Optional, not `|`; a flag, too, is None where it is not given
    option_type = Optional[kind] if default is None else kind  # noqa: UP045
    return name, option_type, dataclasses.field(default=default, metadata={"help": help_text})


_SETTINGS = [
    _option(setting.name, _OPTION_TYPES[setting.type], help_of(setting))
    for name, setting in all_settings().items()
    if name not in FROM_TASK
]
_OPTIONS = [
    _option(
        "expert_parallel_size",
        int,
        "ranks that share one set of experts: 1 puts all experts on every rank (default: the largest number that "
        "divides both the ranks and the experts)",
    ),
    _option(
        "profile_updates",
        int,
        f"profile so many updates, after {WARM_UP} that warm up: a Chrome trace of each rank and a table of what each "
        "component of the model costs",
    ),
    _option("profile_dir", str, "where to write them (default: the --save-dir)"),
    _option(
        "data_order_file", str, "write down here what each update is trained on: a line with a digest of its tokens"
    ),
    _option(
        "update_times_file",
        str,
        "write down here how long each update took: a line with its tokens, seconds and seconds of waiting for data",
    ),
    _option(
        "environment_file",
        str,
        "add a line to this file at each start: versions, machine, ranks, git revision, plugins",
    ),
    _option(
        "other_dictionary",
        bool,
        "train on from a checkpoint whose dictionary has the same size as that of the data, but other symbols or "
        "another order; otherwise that is refused",
        default=False,
    ),
]
LanguageModelConfig = dataclasses.make_dataclass(
    "LanguageModelConfig",
    [
        *_SETTINGS,
        ("add_bos_token", bool, II("task.add_bos_token")),
        ("tokens_per_sample", int, II("task.tokens_per_sample")),
        ("train_subset", str, II("dataset.train_subset")),
        ("max_target_positions", Optional[int], II("task.max_target_positions")),  # noqa: UP045
        *_OPTIONS,
        ("heartbeat_timeout", int, II("distributed_training.heartbeat_timeout")),
    ],
    bases=(FairseqDataclass,),
)
LanguageModelConfig.__module__ = __name__


def balance_routers(core: Decoder, data: str, subset: str) -> None:
    """Give balanced hash routers (``hash_kind=balanced``) the token counts of the training split of all shards.

    If there is no training split in mmap format, as in evaluation, their tables stay empty: a checkpoint has its own,
    and without one the first forward pass is refused.

    Raises:
        UserError: the training data cannot be read.
    """
    if not core.needs_token_counts:
        return
    present = []
    for folder in split_paths(data):
        # fairseq reads SUBSET, SUBSET1, SUBSET2, ... as one
        for number in itertools.count():
            prefix = Path(folder) / f"{subset}{number or ''}"
            if not Path(f"{prefix}.idx").exists():
                break
            present.append(prefix)
    if not present:
        return
    frequencies_V = sum(count_tokens(prefix, core.config.vocab_size) for prefix in present)
    core.balance_routers(torch.from_numpy(frequencies_V))


class LanguageModelDecoder(FairseqIncrementalDecoder):
    """fairseq's decoder interface over the core decoder."""

    def __init__(self, dictionary, core: Decoder) -> None:
        super().__init__(dictionary)
        self.core = core

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out=None,
        incremental_state: dict | None = None,
        features_only: bool = False,
        context: ForwardContext | None = None,
        **unused,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits (B, n, V), or features (B, n, H), and a dictionary with ``"aux_losses"`` (and no attention).

        With ``incremental_state``, ``prev_output_tokens`` is the whole sequence so far, and the result is for the
        tokens that were not seen before. With ``context``, routing is observed (or fixed) there.
        """
        state = None
        if incremental_state is not None:
            state = incremental_state.setdefault(_STATE_KEY, DecodingState())
            prev_output_tokens = prev_output_tokens[:, state.length :]
        x_BnH, aux_losses = self.core.features(prev_output_tokens, state, context)
        return (x_BnH if features_only else self.core.project(x_BnH)), {"aux_losses": aux_losses, "attn": None}

    def extract_features(self, prev_output_tokens: Tensor, **kwargs) -> tuple[Tensor, dict[str, Any]]:
        """Return features (B, n, H) before the output projection."""
        return self.forward(prev_output_tokens, features_only=True, **kwargs)

    def output_layer(self, features: Tensor, **unused) -> Tensor:
        """Project features (B, n, H) to logits (B, n, V)."""
        return self.core.project(features)

    def max_positions(self) -> int:
        """Return the context, T tokens."""
        return self.core.config.max_tokens

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> None:
        """Reorder the state of decoding to follow the beams."""
        state = incremental_state.get(_STATE_KEY)
        if state is not None:
            state.reorder(new_order)


@register_model("smlp", dataclass=LanguageModelConfig)
class SparseMLPLanguageModel(FairseqLanguageModel):
    """Every architecture of this package, as a fairseq language model."""

    #: updates of the weights done so far; fairseq says so before each forward pass in training
    num_updates = 0
    #: which of its parameters are of experts, and where they live
    experts: SpreadExperts

    def set_num_updates(self, num_updates: int) -> None:
        """Remember the number of updates; fairseq calls this before each training step."""
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    @classmethod
    def build_model(cls, args, task) -> SparseMLPLanguageModel:
        """Build the model for fairseq's options and the task's dictionary."""
        dictionary = task.target_dictionary
        arch = getattr(args, "_name", None) or getattr(args, "arch", "smlp")
        options = {name: getattr(args, name, None) for name in (*all_settings(), *TASK_OPTIONS)}
        config = from_training_options(arch, options, len(dictionary), dictionary.pad())
        if config.is_leaky:
            logger.warning(LEAKY_WARNING)
        for name, reason in ignored_settings(config, PRESETS.get(arch, {})).items():
            logger.warning("--%s has no effect: %s", name.replace("_", "-"), reason)
        ranks = _ranks_for(config.moe.num_experts if config.num_sparse_layers else 1, args)
        check_weights(config, ranks.layout.group_size)
        core = Decoder(config, ranks)
        balance_routers(core, task.args.data, getattr(args, "train_subset", None) or "train")
        model = cls(LanguageModelDecoder(dictionary, core))
        model.experts = SpreadExperts.of(model, ranks)
        return model

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load parameters; of a state with all experts, those of this rank.

        Raises:
            UserError: the state is of another vocabulary, context or size; one sentence says which.
        """
        own = self.state_dict()
        check_fit(state_dict, self.experts.whole_shapes(own), self.decoder.core.config, strict)
        return super().load_state_dict(self.experts.cut(state_dict), strict, model_cfg, args)


def _ranks_for(num_experts: int, args: Any) -> Ranks:
    """Return the ranks of this run. Models without experts need none: fairseq keeps their parameters equal."""
    if num_experts == 1:
        return one_process(1)
    timeout = collective_timeout(getattr(args, "heartbeat_timeout", None))
    return connect(num_experts, getattr(args, "expert_parallel_size", None), timeout)


def check_fit(
    state: Mapping[str, Any], shapes: Mapping[str, torch.Size], config: ModelConfig, strict: bool = True
) -> None:
    """Refuse tensors of another vocabulary, context or size.

    Args:
        state: of the checkpoint, by name; all experts.
        shapes: of the model's tensors, by name, with all experts.
        config: of the model.
        strict: every name must be in both.

    Raises:
        UserError: they do not fit; one sentence says what to give instead.
    """
    different = sorted(shapes.keys() ^ state.keys())
    if strict and different:
        raise UserError(
            f"the checkpoint is of another architecture: {len(different)} parameters are in one of the two only, "
            f"the first being {different[0]}; give the --arch, --router, --feature-routing, --positions and "
            "numbers of layers that it was trained with"
        )
    for name, tensor in state.items():
        if name not in shapes or shapes[name] == tensor.shape:
            continue
        theirs, ours = tuple(tensor.shape), tuple(shapes[name])
        if name == "decoder.core.embedding.weight" and theirs[0] != ours[0]:
            raise UserError(
                f"the checkpoint has a vocabulary of {theirs[0]} symbols but the dictionary has {ours[0]}: "
                "use the dict.txt that the checkpoint was trained with"
            )
        if len(theirs) == len(ours) == 3 and name.endswith(_SPATIAL_WEIGHTS) and theirs[-1] != ours[-1]:
            if config.prefix_tokens:
                raise UserError(
                    f"the checkpoint predicts {theirs[-1]} positions of a sample, but --tokens-per-sample "
                    f"{config.max_tokens} with --prefix-fraction {config.moe.prefix_fraction} asks for {ours[-1]} "
                    f"after a prefix of {config.prefix_tokens}"
                )
            raise UserError(
                f"the checkpoint has a context of {theirs[-1]} tokens but --tokens-per-sample asks for a model of "
                f"{ours[-1]}"
            )
        is_of_experts = ".experts." in name or name.endswith((".router.centroids", ".router.weight"))
        if is_of_experts and theirs[0] != ours[0] and theirs[1:] == ours[1:]:
            raise UserError(f"the checkpoint has {theirs[0]} experts in a layer but --num-experts asks for {ours[0]}")
        if name.endswith(".heads.weight") and theirs[0] != ours[0] and theirs[1:] == ours[1:]:
            raise UserError(f"the checkpoint has {theirs[0]} heads in a layer but --num-heads asks for {ours[0]}")
        raise UserError(f"the checkpoint does not fit the model: {name} has shape {theirs}, the model needs {ours}")


def _fill_in(args: Any, arch: str) -> None:
    """Set what the command line does not say: the architecture's settings, and the criterion that it needs."""
    for name, value in PRESETS[arch].items():
        if name not in FROM_TASK and getattr(args, name, None) is None:
            setattr(args, name, value)
    settle_criterion(args, arch)


def _register(arch: str) -> None:
    def fill_in(args: Any) -> None:
        _fill_in(args, arch)

    if arch in ARCH_MODEL_REGISTRY:  # the model's own name, for which fairseq registers an empty function
        ARCH_CONFIG_REGISTRY[arch] = fill_in
    else:
        register_model_architecture("smlp", arch)(fill_in)


for _arch in PRESETS:
    _register(_arch)
