"""Configurations for transformers, with every setting of :class:`smlp.config.ModelConfig` by its name."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from smlp.checkpoint.hf_folder import ALIASES
from smlp.config import ModelConfig, all_settings, flatten, unflatten
from smlp.errors import UserError
from smlp.text.tokenizer_files import Vocabulary

#: the file in a folder through which ``trust_remote_code=True`` finds the classes
REMOTE_MODULE = "modeling_smlp"
MOST_LABELS = 1 << 16


class SmlpConfig(PreTrainedConfig):
    """The settings of a language model.

    Args:
        **kwargs: settings by name (missing ones take their defaults), ``arch`` and ``num_updates`` of the training run,
            and the options of every configuration of transformers.

    Raises:
        UserError: a value is out of range, or two do not fit together.
    """

    model_type = "smlp"
    model_class: ClassVar[str] = "SmlpForCausalLM"
    auto_model: ClassVar[str] = "AutoModelForCausalLM"
    #: settings that every model of the class has
    implied: ClassVar[dict[str, Any]] = {}
    has_no_defaults_at_init = True  # all settings are written: defaults may change
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "aux_loss"]
    attribute_map: ClassVar[dict[str, str]] = ALIASES

    arch: str | None = None
    num_updates: int = 0
    use_cache: bool = True
    tie_word_embeddings: bool = True
    #: the first token of every sequence: ``</s>``, or ``<s>`` after training with --add-bos-token
    bos_token_id: int = Vocabulary.eos
    eos_token_id: int = Vocabulary.eos
    pad_token_id: int = Vocabulary.pad

    def __post_init__(self, **kwargs: Any) -> None:
        given = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        known = all_settings()
        settings = self.implied | {name: value for name, value in given.items() if name in known}
        settings = flatten(unflatten(settings))
        auto_map = {
            "AutoConfig": f"{REMOTE_MODULE}.{type(self).__name__}",
            self.auto_model: f"{REMOTE_MODULE}.{self.model_class}",
        }
        super().__post_init__(**{**given, **settings, "auto_map": auto_map})

    @property
    def num_hidden_layers(self) -> int:
        """Return N1 + N2."""
        return self.num_dense_layers + self.num_sparse_layers

    @property
    def num_labels(self) -> int:
        """Return the number of labels, for heads of a user's own: these models have none."""
        return super().num_labels

    @num_labels.setter
    def num_labels(self, num_labels: int) -> None:
        if num_labels > MOST_LABELS:  # transformers gives each a name
            raise UserError(f"num_labels must be at most {MOST_LABELS:,}, got {num_labels:,}")
        PreTrainedConfig.num_labels.fset(self, num_labels)

    def core_config(self) -> ModelConfig:
        """Return the configuration of the model itself.

        Raises:
            UserError: a value is out of range, or two do not fit together.
        """
        return unflatten({name: getattr(self, name) for name in all_settings() if hasattr(self, name)})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: a saved folder has ``modeling_smlp.py`` instead of a copy of this file."""


class SmlpEncoderConfig(SmlpConfig):
    """The settings of an encoder (masked language model)."""

    model_type = "smlp_encoder"
    model_class = "SmlpForMaskedLM"
    auto_model = "AutoModelForMaskedLM"
    implied: ClassVar[dict[str, Any]] = {"direction": "bidirectional", "num_sparse_layers": 0}
