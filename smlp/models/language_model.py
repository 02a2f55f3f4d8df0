"""The fairseq model ``smlp``, a thin wrapper of :class:`smlp.nn.decoder.Decoder`; its architectures are the presets
of language models (``--arch NAME``)."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    FairseqIncrementalDecoder,
    FairseqLanguageModel,
    register_model,
)
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.utils import split_paths
from omegaconf import II
from torch import Tensor

from smlp.costs.memory import check_weights
from smlp.errors import UserError
from smlp.fairseq_compat.data import subsets
from smlp.fairseq_compat.experts import SpreadExperts
from smlp.fairseq_compat.lost_ranks import collective_timeout
from smlp.models.fitting import check_fit
from smlp.models.options import MODEL_OPTIONS, RUN_OPTIONS, configuration, register_architectures
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState, ForwardContext
from smlp.parallel import Ranks, connect, one_process
from smlp.text.binarized import count_tokens

logger = logging.getLogger(__name__)
_STATE_KEY = "smlp_decoding_state"
LanguageModelConfig = dataclasses.make_dataclass(
    "LanguageModelConfig",
    [
        *MODEL_OPTIONS,
        ("add_bos_token", bool, II("task.add_bos_token")),
        ("tokens_per_sample", int, II("task.tokens_per_sample")),
        ("train_subset", str, II("dataset.train_subset")),
        ("max_target_positions", Optional[int], II("task.max_target_positions")),  # noqa: UP045
        *RUN_OPTIONS,
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
    prefixes = [Path(folder) / name for folder in split_paths(data) for name in subsets(folder, subset)]
    present = [prefix for prefix in prefixes if Path(f"{prefix}.idx").exists()]
    if present:
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

        With ``incremental_state``, ``prev_output_tokens`` is the whole sequence so far, and the result is for the new
        tokens only. ``context`` records routing decisions, or fixes them.
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
        """Reorder the decoding state to follow the beams."""
        state = incremental_state.get(_STATE_KEY)
        if state is not None:
            state.reorder(new_order)


@register_model("smlp", dataclass=LanguageModelConfig)
class SparseMLPLanguageModel(FairseqLanguageModel):
    """Every architecture of this package, as a fairseq language model."""

    #: updates done so far; in training, fairseq sets it before each forward pass
    num_updates = 0
    #: which parameters belong to experts, and the ranks that hold them
    experts: SpreadExperts

    def set_num_updates(self, num_updates: int) -> None:
        """Remember the number of updates; fairseq calls this before each training step."""
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    @classmethod
    def build_model(cls, args, task) -> SparseMLPLanguageModel:
        """Build the model for fairseq's options and the task's dictionary."""
        dictionary = task.target_dictionary
        config = configuration(args, dictionary)
        if isinstance(task, MaskedLMTask | SentencePredictionTask):
            raise UserError(
                f"--arch {args._name} is a language model, whose positions see earlier ones only: --task "
                f"{task.cfg._name} needs an encoder, such as --arch gmlp_mlm_tiny"
            )
        ranks = _ranks_for(config.num_experts if config.num_sparse_layers else 1, args)
        check_weights(config, ranks.layout.group_size)
        core = Decoder(config, ranks)
        # by which samples are left out; the smallest one of an ensemble
        task.model_context = min(config.max_tokens, getattr(task, "model_context", config.max_tokens))
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
        check_fit(state_dict, own, self.experts.whole_shapes(own), self.decoder.core.config, strict)
        return super().load_state_dict(self.experts.cut(state_dict), strict, model_cfg, args)


def _ranks_for(num_experts: int, args: Any) -> Ranks:
    """Return the ranks of this run. Models without experts need none: fairseq keeps their parameters equal."""
    size = getattr(args, "expert_parallel_size", None)
    if num_experts == 1:
        if size not in (None, 1):
            logger.warning("--expert-parallel-size has no effect: the model has no experts")
        return one_process(1)
    timeout = collective_timeout(getattr(args, "heartbeat_timeout", None))
    return connect(num_experts, size, timeout)


register_architectures("smlp", is_bidirectional=False)
