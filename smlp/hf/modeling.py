"""Models of transformers around the decoder and the encoder of this package.

Letters: ``B`` sequences, ``n`` places of the batch, ``m`` tokens of the longest sequence, ``H`` width, ``V``
vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput, MoeCausalLMOutputWithPast
from transformers.utils import cached_file, can_return_tuple, logging
from transformers.utils.hub import get_checkpoint_shard_files

from smlp.checkpoint.content import check_sizes
from smlp.checkpoint.export import safetensors_header
from smlp.checkpoint.hf_folder import INDEX, WEIGHTS
from smlp.errors import UserError
from smlp.hf.cache import SmlpCache, joined
from smlp.hf.config import REMOTE_MODULE, SmlpConfig, SmlpEncoderConfig
from smlp.nn.build import model_of
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder
from smlp.nn.stack import Stack

logger = logging.get_logger(__name__)

_IGNORED = -100
_REMOTE_CODE = '''"""Lets transformers find the classes of the package smlp with trust_remote_code=True."""

# inside of try, where transformers does not look for packages: it would offer PyPI's smlp, which is another project
try:
    from smlp.hf import {config}, {model}  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"{{error}}: this model needs the package smlp-lm with its extra hf, which is imported as smlp; the package "
        "smlp of PyPI is another project"
    ) from error
'''
#: options of transformers that are refused if they are set
_UNSUPPORTED = ("inputs_embeds", "position_ids", "output_hidden_states", "output_attentions", "token_type_ids")


_FINDING = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_QUIETLY = {
    f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo", "connection_errors")
}  # transformers itself raises them afterwards
#: shapes of the weights that are about to be loaded, by name
_stored_shapes: ContextVar[dict[str, tuple[int, ...]] | None] = ContextVar("stored shapes", default=None)


def _shapes_in(name: str | os.PathLike | None, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the weights in a folder or on the Hub; None if there are none, they have other names, or the
    caller has chosen other files."""
    if name is None or not options["use_safetensors"] or options.get("gguf_file") or options.get("key_mapping"):
        return None
    where = {option: options[option] for option in _FINDING if option in options}
    for file in (WEIGHTS, INDEX):
        if variant := options.get("variant"):  # as in model.fp16.safetensors
            stem, _, suffix = file.rpartition(".")
            file = f"{stem}.{variant}.{suffix}"
        path = cached_file(name, file, **where, **_QUIETLY)
        if path is not None:
            files = get_checkpoint_shard_files(name, path, **where)[0] if file.endswith(".json") else [path]
            entries = {key: entry for file in files for key, entry in safetensors_header(file)[0].items()}
            return {key: tuple(entry["shape"]) for key, entry in entries.items() if key != "__metadata__"}
    return None


class _SmlpModel(PreTrainedModel):
    """Base class of both models: initialization, saving, gradient checkpointing and checks of options."""

    config: SmlpConfig
    base_model_prefix = "core"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    core: Stack

    def __init__(self, config: SmlpConfig) -> None:
        super().__init__(config)
        core_config = config.core_config()
        if (other := getattr(config, "transformers_weights", None)) not in (None, WEIGHTS):
            raise UserError(
                f"config.json has transformers_weights = {other!r:.60}: remove it, weights are read from {WEIGHTS} "
                "or the files of its index"
            )
        if (stored := _stored_shapes.get()) is not None:
            check_sizes(core_config, stored, config.name_or_path, config.arch or config.model_type)
        self.core = model_of(core_config)
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> _SmlpModel:
        """Load as transformers does; from safetensors files, unless ``use_safetensors`` is given.

        Raises:
            UserError: ``config.json`` has a size that the weights do not have, before anything of it is allocated (not
                compared with ``key_mapping``), or names another file for them.
        """
        if kwargs.get("use_safetensors") is None:
            kwargs["use_safetensors"] = True
        token = _stored_shapes.set(_shapes_in(pretrained_model_name_or_path, kwargs))
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        finally:
            _stored_shapes.reset(token)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Compute the table of positions, which no file holds; a new model has drawn its weights already."""
        if isinstance(module, Stack) and "positions" in module._buffers:
            module._compute_positions(module.positions)

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Refuse folders that lack weights, since nothing else would give those values, and weights left on disk, which
        accelerate fetches only for modules that read no weights of their parts.

        Raises:
            ValueError: the message names the first weight that is missing, or has another shape.
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        if lacking := sorted(loading_info.missing_keys):
            raise ValueError(f"the folder lacks {len(lacking)} weights of the model, such as {lacking[0]}")
        for name, held, wanted in sorted(loading_info.mismatched_keys):
            raise ValueError(f"{name} has shape {tuple(held)} in the folder, and {tuple(wanted)} in the model")
        if any(weight.is_meta for weight in self.parameters()):
            raise ValueError("device_map leaves weights on disk or on meta, and these models need them in memory")

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the embedding, which is the output matrix too."""
        return self.core.embedding

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Refuse to change the number of rows.

        Raises:
            ValueError: the number is neither None nor the current one.
        """
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"a model of smlp cannot change its vocabulary from {self.config.vocab_size} to {new_num_tokens} "
                "symbols: its dictionary and the tables of routers depend on it"
            )
        return self.core.embedding

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute each block in the backward pass to save memory (``checkpoint_activations``)."""
        self.core.config = dataclasses.replace(self.core.config, checkpoint_activations=True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations for the backward pass."""
        self.core.config = dataclasses.replace(self.core.config, checkpoint_activations=False)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save as transformers does, and add ``modeling_smlp.py`` for ``trust_remote_code=True``."""
        super().save_pretrained(save_directory, **kwargs)
        self._write_remote_code(save_directory)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Upload what has been saved, as transformers does, with ``modeling_smlp.py``."""
        self._write_remote_code(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

    def _write_remote_code(self, folder: str | os.PathLike) -> None:
        text = _REMOTE_CODE.format(config=type(self.config).__name__, model=type(self).__name__)
        (Path(folder) / f"{REMOTE_MODULE}.py").write_text(text, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: a saved folder has ``modeling_smlp.py`` instead of a copy of this file."""

    def _check_options(self, input_ids: Tensor | None, options: dict[str, Any]) -> None:
        """Refuse unsupported options; remove their unset values from the options that go to the loss.

        Raises:
            ValueError: an option is not supported, or ``input_ids`` is missing.
        """
        for name in _UNSUPPORTED:
            value = options.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"a model of smlp does not take {name}")
        if input_ids is None:
            raise ValueError("a model of smlp needs input_ids")
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be (B, n), got {tuple(input_ids.shape)}")


class Alignment:
    """Places of sequences in a padded batch, and their places in the model, where every sequence begins at 0.

    Args:
        mask_Bn: 1 at tokens and 0 at padding, (B, n).

    Raises:
        ValueError: a row has padding between its tokens, or no token, or numbers other than 0 and 1.
    """

    def __init__(self, mask_Bn: Tensor) -> None:
        given_Bn, mask_Bn = mask_Bn, mask_Bn.bool()
        self.starts_B = mask_Bn.int().argmax(1)
        self.lengths_B = mask_Bn.sum(1)
        place_n = torch.arange(mask_Bn.size(1), device=mask_Bn.device)
        ends_B1 = (self.starts_B + self.lengths_B).unsqueeze(1)
        whole_Bn = (place_n >= self.starts_B.unsqueeze(1)) & (place_n < ends_B1)
        if not bool((whole_Bn == given_Bn).all() and self.lengths_B.all()):  # other numbers would count as ones
            raise ValueError(
                "attention_mask must have ones at the tokens of each sequence, at least one, and zeros at the padding "
                "before or after them only: positions of these models are absolute, so none can be left out"
            )
        self._place_n = place_n

    @property
    def has_padding_after(self) -> bool:
        """Return whether padding stands on the right of a sequence."""
        return bool((self.starts_B + self.lengths_B < len(self._place_n)).any())

    def read(self, values_Bn: Tensor, fill: int) -> Tensor:
        """Move sequences to their places in the model: (B, n) to (B, m), with ``fill`` after their ends."""
        place_m = self._place_n[: int(self.lengths_B.max())]
        index_Bm = (place_m + self.starts_B.unsqueeze(1)).clamp(max=len(self._place_n) - 1)
        return values_Bn.gather(1, index_Bm).masked_fill(place_m >= self.lengths_B.unsqueeze(1), fill)

    def put_back(self, x_BmH: Tensor) -> Tensor:
        """Move hidden states back: (B, m, H) to (B, n, H); at padding they mean nothing."""
        index_Bn = (self._place_n - self.starts_B.unsqueeze(1)).clamp(0, x_BmH.size(1) - 1)
        return x_BmH.gather(1, index_Bn.unsqueeze(2).expand(-1, -1, x_BmH.size(2)))


def alignment_of(attention_mask: Tensor | None, num_seqs: int, num_places: int) -> Alignment | None:
    """Return where the sequences of a batch are, or None if there is no padding.

    Raises:
        ValueError: the mask has another size, or a row has padding between its tokens, or no token.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != (num_seqs, num_places):
        raise ValueError(
            f"attention_mask must have a row for each of the {num_seqs} sequences and a column for each of the "
            f"{num_places} places, got {tuple(attention_mask.shape)}"
        )
    return None if bool((attention_mask == 1).all()) else Alignment(attention_mask)


class SmlpForCausalLM(_SmlpModel, GenerationMixin):
    """A language model; a folder from ``smlp export --hf`` holds one.

    Its logits are those of :class:`smlp.nn.decoder.Decoder`. The loss is that of training: cross-entropy of the next
    token, without labels of -100 and without the positions that only choose experts, plus the auxiliary losses while
    training.
    """

    config_class = SmlpConfig
    core: Decoder
    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SmlpCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Return logits (B, n, V) and, given labels, the loss.

        Args:
            input_ids: (B, n), the places after those of the cache.
            attention_mask: 1 at tokens and 0 at padding, (B, places of the cache + n). Padding may stand before and
                after a sequence, which always begins at position 0.
            past_key_values: what was read before.
            labels: ids (B, n), shifted here; -100 does not count.
            use_cache: whether to return a cache; by default, in evaluation without labels.
            logits_to_keep: number of last places to compute logits for, 0 for all; or their indices.
            **kwargs: options of transformers' loss, such as ``num_items_in_batch``.

        Raises:
            ValueError: an option or a mask is not supported.
            UserError: sequences longer than the model's context.
        """
        self._check_options(input_ids, kwargs)
        if past_key_values is not None and not isinstance(past_key_values, SmlpCache):
            raise ValueError(f"past_key_values must be a SmlpCache, got {type(past_key_values).__name__}")
        if past_key_values is not None and labels is not None:
            raise ValueError("labels are for whole sequences: give no past_key_values")
        past = 0 if past_key_values is None else past_key_values.length
        alignment = alignment_of(attention_mask, len(input_ids), past + input_ids.size(1))
        wants_cache = past_key_values is not None or use_cache
        has_losses = self.training and self.core.config.num_sparse_layers > 0
        if wants_cache and labels is not None and has_losses and alignment is not None:
            raise ValueError("padded labels in training need use_cache=False: a cache has no losses of routers then")
        if alignment is not None and alignment.has_padding_after:
            if wants_cache:
                raise ValueError(
                    "a sequence that ends in padding cannot be continued: pad on the left (padding_side='left')"
                )
        elif use_cache is None and not self.training and labels is None:
            wants_cache = self.config.use_cache and not self.core.config.is_leaky
        aux_losses: dict[str, Tensor] = {}
        if wants_cache:
            if past_key_values is None:  # a cache has a length, which may be zero
                past_key_values = SmlpCache(None, self.core.config.max_tokens, input_ids.device)
            starts_B = None if alignment is None else alignment.starts_B
            past_key_values.check(len(input_ids), attention_mask is not None, starts_B)
            x_BnH, aux_losses = self._continued(input_ids, past_key_values)
        elif alignment is not None:
            tokens_Bm = alignment.read(input_ids, self.core.config.padding_idx)
            x_BmH, aux_losses = self.core.features(tokens_Bm)
            x_BnH = alignment.put_back(x_BmH)
        else:
            x_BnH, aux_losses = self.core.features(input_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.core.project(x_BnH[:, kept])
        aux_loss = torch.stack(list(aux_losses.values())).sum() if self.training and aux_losses else None
        loss = None if labels is None else self._loss(logits, labels, alignment, aux_loss, kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=aux_loss, logits=logits, past_key_values=past_key_values if wants_cache else None
        )

    def _continued(self, input_ids: Tensor, cache: SmlpCache) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the places after those of a cache into it; return hidden states (B, n, H) and losses."""
        groups, aux_losses = cache.groups(input_ids), {}
        if cache.starts_B is None:
            x_BnH, aux_losses = self.core.features(*groups[0])
        else:
            # a sequence that begins later has no token here
            x_NH = self.core.features_of([group for group in groups if group[0].size(1)])
            x_BnH = joined(x_NH, [tokens.size(1) for tokens, _ in groups], input_ids.size(1))
        cache.length += input_ids.size(1)
        return x_BnH, aux_losses

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        alignment: Alignment | None,
        aux_loss: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        # Nothing predicts the first token, least of all padding before it, and no position within the prefix counts.
        place_n = torch.arange(labels.size(1), device=labels.device)
        starts_B1 = 0 if alignment is None else alignment.starts_B.unsqueeze(1)
        given = (labels[:, 1:] != _IGNORED).sum()
        labels = labels.masked_fill(place_n <= starts_B1 + self.core.config.prefix_tokens, _IGNORED)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        share: Tensor | float = 1.0
        if (num_items := options.get("num_items_in_batch")) is not None:
            # Trainer divides by the labels given, over all batches of an update: the mean over those that count here is
            # weighted by them, so that the weights add up to 1.
            share = given / num_items
            loss = loss * given / (labels[:, 1:] != _IGNORED).sum().clamp(min=1)
        return loss if aux_loss is None else loss + share * aux_loss

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the inputs of the next step of ``generate``.

        Raises:
            ValueError: the model cannot write, or not after so short a prompt.
        """
        config = self.core.config
        if config.is_leaky:
            raise ValueError(
                "a model with feature_routing=leaky reads the tokens that it predicts: it cannot generate text"
            )
        if config.prefix_tokens and kwargs.get("is_first_iteration"):
            mask = kwargs.get("attention_mask")
            shortest = input_ids.size(1) if mask is None else int(mask.sum(1).min())
            if shortest <= config.prefix_tokens:
                raise ValueError(
                    f"a prompt has {shortest} tokens (start symbol included) and this model needs at least "
                    f"{config.prefix_tokens + 1}: its first ones only choose experts"
                )
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        """Keep the mask of the prompts for :meth:`_prepare_generated_length`, which transformers does not give it."""
        generation_config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        generation_config._given_mask = model_kwargs.get("attention_mask")
        return generation_config, model_kwargs

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        *args: Any,
        input_ids_length: int,
        inputs_tensor: Tensor,
        **kwargs: Any,
    ) -> GenerationConfig:
        """Limit texts to the context: pipelines ask for 256 tokens by default. All end where the longest has to."""
        context, asked, mask = self.core.config.max_tokens, generation_config.max_length, generation_config._given_mask
        if mask is None:
            mask = self._prepare_attention_mask_for_generation(inputs_tensor, generation_config, {})
        num_padded = int((mask == 0).all(dim=0).cumprod(dim=0).sum())
        if input_ids_length - num_padded > context:
            raise ValueError(
                f"a prompt of {input_ids_length - num_padded} tokens (start symbol included) is longer than the "
                f"model's context of {context} tokens"
            )
        kwargs |= {"input_ids_length": input_ids_length, "inputs_tensor": inputs_tensor}
        generation_config = super()._prepare_generated_length(
            generation_config, has_default_max_length, *args, **kwargs
        )
        if has_default_max_length and generation_config.max_new_tokens is None:  # transformers counts padding
            generation_config.max_length = min(asked + input_ids_length, context + num_padded)
        most = num_padded + context + 1  # the last token is not read
        if generation_config.max_length > most:
            logger.warning_once(
                f"texts end at the end of the model's context of {context} tokens (in a batch, all with the longest)"
            )
            generation_config.max_length = most
        return generation_config

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes a SmlpCache


class SmlpForMaskedLM(_SmlpModel):
    """A masked language model, without heads for other tasks.

    Its logits are those of :class:`smlp.nn.encoder.Encoder`.
    """

    config: SmlpEncoderConfig
    config_class = SmlpEncoderConfig
    core: Encoder

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return logits (B, n, V) and, given labels, the cross-entropy of those that are not -100.

        Args:
            input_ids: (B, n).
            attention_mask: 1 at tokens and 0 at padding before or after them, (B, n).
            labels: ids (B, n) of the original tokens at masked places.
            **kwargs: options of transformers' loss.

        Raises:
            ValueError: an option or a mask is not supported.
            UserError: sequences longer than the model's context.
        """
        kwargs.pop("token_type_ids", None)  # tokenizers make them by default
        self._check_options(input_ids, kwargs)
        alignment = alignment_of(attention_mask, *input_ids.shape)
        if alignment is None:
            logits = self.core(input_ids)
        else:
            logits = alignment.put_back(self.core(alignment.read(input_ids, self.core.config.padding_idx)))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits)
