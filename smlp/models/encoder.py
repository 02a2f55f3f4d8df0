"""The fairseq model ``smlp_encoder``, a thin wrapper of :class:`smlp.nn.encoder.Encoder`; its architectures are the
presets of encoders (``--arch gmlp_mlm`` and others)."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqEncoder, FairseqEncoderModel, register_model
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor, nn

from smlp.costs.memory import check_weights
from smlp.errors import UserError
from smlp.fairseq_compat.experts import SpreadExperts
from smlp.fairseq_compat.settings import settle_context
from smlp.models.fitting import check_fit
from smlp.models.options import MODEL_OPTIONS, RUN_OPTIONS, configuration, option, register_architectures
from smlp.nn.encoder import Encoder, cut_context
from smlp.parallel import one_process

logger = logging.getLogger(__name__)

#: prefix of the heads' tensors in a checkpoint
_HEADS = ("encoder.core.sentence_heads.", "encoder.core.span_head.")

EncoderConfig = dataclasses.make_dataclass(
    "EncoderConfig",
    [
        *MODEL_OPTIONS,
        option("max_positions", int, "T, the longest sequence that the model is built for (default: the task's)"),
        *RUN_OPTIONS,
    ],
    bases=(FairseqDataclass,),
)
EncoderConfig.__module__ = __name__


class CoreEncoder(FairseqEncoder):
    """fairseq's encoder interface over the core encoder."""

    def __init__(self, dictionary: Any, core: Encoder) -> None:
        super().__init__(dictionary)
        self.core = core

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **unused: Any) -> Tensor:
        """Return the hidden states (B, n, H) of ids (B, n)."""
        return self.core.features(src_tokens)

    def max_positions(self) -> int:
        """Return the context, T tokens."""
        return self.core.config.max_tokens


@register_model("smlp_encoder", dataclass=EncoderConfig)
class MLPEncoder(FairseqEncoderModel):
    """Every encoder of this package, as a fairseq model for the tasks ``masked_lm``, ``sentence_prediction`` and
    ``squad``."""

    #: experts among its parameters: none yet
    experts: SpreadExperts

    @classmethod
    def build_model(cls, args: Any, task: Any) -> MLPEncoder:
        """Build the model for fairseq's options and the task's dictionary.

        Raises:
            UserError: a setting is wrong, or the task asks for a language model.
        """
        if isinstance(task, LanguageModelingTask):
            raise UserError(
                f"--arch {args._name} is an encoder, whose positions see later ones: it does not work with --task "
                "language_modeling; give --task masked_lm"
            )
        settle_context(args, task.cfg)
        config = configuration(args, task.source_dictionary)
        check_weights(config)
        model = cls(CoreEncoder(task.source_dictionary, Encoder(config)))
        model.experts = SpreadExperts.of(model, one_process(1))
        return model

    @property
    def core(self) -> Encoder:
        """Return the model without fairseq."""
        return self.encoder.core

    @property
    def classification_heads(self) -> nn.ModuleDict:
        """Return the heads for sentences, by name; fairseq's criterion reads this."""
        return self.core.sentence_heads

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        masked_tokens: Tensor | None = None,
        features_only: bool = False,
        classification_head_name: str | None = None,
        span: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return logits, hidden states or scores, as the arguments ask, and an empty dictionary.

        Args:
            src_tokens: ids (B, n).
            src_lengths: not needed: padding is known by its id.
            masked_tokens: which positions the logits are for, (B, n) bool; all by default.
            features_only: return hidden states (B, n, H).
            classification_head_name: of the head whose scores (B, C) to return.
            span: return the scores of the first and last token of an answer, (B, n, 2).
        """
        x_BnH = self.encoder(src_tokens)
        if classification_head_name is not None:
            return self.classification_heads[classification_head_name](x_BnH), {}
        if span:
            assert self.core.span_head is not None, "the task asks for it when it builds the model"
            return self.core.span_head(x_BnH), {}
        return x_BnH if features_only else self.core.predict(x_BnH, masked_tokens), {}

    def register_classification_head(self, name: str, num_classes: int, **unused: Any) -> None:
        """Add a head for sentences, or replace the one of that name."""
        self.core.add_sentence_head(name, num_classes)

    def register_span_head(self) -> None:
        """Add the head for spans."""
        self.core.add_span_head()

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load parameters. A longer context is cut; heads of other tasks are left out, new ones keep their values.

        Raises:
            UserError: the state is of another vocabulary, context or size; one sentence says which.
        """
        own, config = self.state_dict(), self.core.config
        shapes = {name: tensor.shape for name, tensor in own.items()}
        state = cut_context(state_dict, shapes, config.max_tokens)
        if any(state[name] is not tensor for name, tensor in state_dict.items()):
            T = config.max_tokens
            logger.info(
                f"the checkpoint's context is cut to this run's {T} tokens: Toeplitz weights keep their central "
                f"{2 * T - 1} numbers, all other weights over positions those of the first {T}"
            )
        dropped = [name for name in state if name.startswith(_HEADS) and shapes.get(name) != state[name].shape]
        fresh = [name for name in own if name.startswith(_HEADS) and (name not in state or name in dropped)]
        for what, names in (("leaves out", dropped), ("begins with new weights in", fresh)):
            if names:
                logger.info(f"this run {what} {', '.join(names)}")
        state = {name: tensor for name, tensor in state.items() if name not in dropped}
        state |= {name: tensor for name, tensor in own.items() if name.startswith(_HEADS) and name not in state}
        check_fit(state, own, shapes, config, strict)
        return super().load_state_dict(state, strict, model_cfg, args)


register_architectures("smlp_encoder", is_bidirectional=True)
