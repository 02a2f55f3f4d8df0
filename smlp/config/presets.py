"""One table of named architectures: settings as data.

Sources: Yu et al., 2022, Tables 5 and 8 to 10. Where the paper's tables disagree with each other, the numbers here are
those that its parameter counts follow from (docs/presets.md lists them): Table 10 prints 20 dense layers for the
large sMLP, but its 682.6 M + 277.1 M parameters and Table 5 need 22, with 8 sparse ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from smlp.config import ModelConfig, all_settings, lost_settings, unflatten
from smlp.config.registry import ARCHITECTURES
from smlp.errors import UserError

# Tiny models are for a laptop and for tests. All of them have the same forward FLOPs per token within 1 %.
_TINY = {"vocab_size": 8192, "max_tokens": 128, "embed_dim": 256}
_LARGE = {"embed_dim": 2048, "ffn_dim": 8192}
_TRANSFORMER = {
    "dense_block": "transformer",
    "sparse_block": "transformer",
    "num_heads": 16,
    "positions": "sinusoidal",
}
_TINY_TRANSFORMER = {**_TRANSFORMER, **_TINY, "ffn_dim": 1248, "num_heads": 4, "num_experts": 8}
# GShard and Switch: every other layer is sparse. BASE and Hash: sparse layers spread over the depth, as in sMLP.
_GSHARD = {**_TRANSFORMER, "router": "gshard", "sparse_placement": "alternate", "num_experts": 64}
_SWITCH = {**_TRANSFORMER, "router": "switch", "sparse_placement": "alternate", "num_experts": 32}
_BASE = {**_TRANSFORMER, "router": "base", "num_experts": 32}
_HASH = {**_TRANSFORMER, "router": "hash", "num_experts": 32}
_SMLP = {"num_dense_layers": 28, "num_sparse_layers": 12, "num_experts": 32}
_SMLP_TINY = {**_TINY, "ffn_dim": 1024, "num_dense_layers": 6, "num_sparse_layers": 2, "num_experts": 8}


# Masked language models (Liu et al., 2021, Tables 3 to 6); all matrices over positions are Toeplitz matrices. Where the
# tables' captions contradict the parameter counts, sizes follow the counts: 2048 features instead of 3072 for gates
# that do not split them, and 18 Mixer layers instead of 24.
_MLM = {
    "direction": "bidirectional",
    "vocab_size": 32000,
    "max_tokens": 128,
    "dropout": 0.0,
    "embed_init_std": 0.02,
    "embedding_norm": "layer",  # as in BERT: without it, attention learns the text many times more slowly
    "num_sparse_layers": 0,
}
_GMLP_MLM = {**_MLM, "spatial_weights": "toeplitz", "embed_dim": 512, "ffn_dim": 3072}
_UNSPLIT = {**_GMLP_MLM, "ffn_dim": 2048, "num_dense_layers": 36}
_BERT = {
    **_MLM,
    "dense_block": "transformer",
    "embed_dim": 768,
    "ffn_dim": 3072,
    "num_heads": 12,
    "num_dense_layers": 12,
}
_REL = {**_BERT, "transformer_attention": "relative"}
_LONG = {"max_tokens": 512}
_WIDE = {**_LONG, "embed_dim": 768}
# for two cores: the paper's ratios of width and depth
_TINY_MLM = {"vocab_size": 8192, "max_tokens": 64, "embed_dim": 64, "ffn_dim": 384, "num_dense_layers": 9}
_TINY_BERT = {**_TINY_MLM, "embed_dim": 96, "num_dense_layers": 3, "num_heads": 4}


def _layers(num_dense: int, num_sparse: int) -> dict[str, int]:
    return {"num_dense_layers": num_dense, "num_sparse_layers": num_sparse}


_BUILT_IN: dict[str, dict[str, Any]] = {
    # sMLP with deterministic routing of features (section 3.2.1)
    "smlp": _SMLP,
    "smlp_tiny": _SMLP_TINY,
    "smlp_large": {**_LARGE, **_layers(22, 8), "num_experts": 32},
    # sMLP with other routers of tokens: Hash (Roller et al., 2021), Switch (Fedus et al., 2021)
    "smlp_hash": {**_SMLP, "router": "hash"},
    "smlp_hash_tiny": {**_SMLP_TINY, "router": "hash"},
    "smlp_switch": {**_SMLP, "router": "switch"},
    "smlp_switch_tiny": {**_SMLP_TINY, "router": "switch"},
    # sMLP whose features are routed by the first 20 % of the tokens (section 3.2.2)
    "smlp_partial": {**_SMLP, "feature_routing": "partial"},
    "smlp_partial_tiny": {**_SMLP_TINY, "feature_routing": "partial"},
    # the same, routed by all tokens: the model sees what it predicts (appendix B)
    "smlp_leaky": {**_SMLP, "feature_routing": "leaky"},
    "smlp_leaky_tiny": {**_SMLP_TINY, "feature_routing": "leaky"},
    # gMLP (Liu et al., 2021, section 2), the dense counterpart
    "gmlp_lm": _layers(41, 0),
    "gmlp_lm_tiny": {**_TINY, "ffn_dim": 960, **_layers(9, 0)},
    "gmlp_lm_large": {**_LARGE, **_layers(32, 0)},
    # gMLP layers as experts over tokens (appendix A)
    "gmlp_moe": {"sparse_block": "gmlp_moe", **_layers(32, 12), "num_experts": 32},
    "gmlp_moe_tiny": {**_TINY, "sparse_block": "gmlp_moe", "ffn_dim": 1112, **_layers(6, 2), "num_experts": 8},
    # dense Transformer
    "dense_lm": {**_TRANSFORMER, **_layers(24, 0)},
    "dense_lm_tiny": {**_TINY_TRANSFORMER, **_layers(4, 0)},
    "dense_lm_large": {**_TRANSFORMER, **_LARGE, **_layers(17, 0)},
    # sparse Transformers
    "gshard_lm": {**_GSHARD, **_layers(9, 9)},
    "gshard_lm_tiny": {**_GSHARD, **_TINY_TRANSFORMER, "ffn_dim": 832, "num_experts": 16, **_layers(2, 2)},
    "gshard_lm_large": {**_GSHARD, **_LARGE, **_layers(7, 7)},
    "switch_lm": {**_SWITCH, **_layers(12, 12)},
    "switch_lm_tiny": {**_SWITCH, **_TINY_TRANSFORMER, **_layers(2, 2)},
    "switch_lm_large": {**_SWITCH, **_LARGE, **_layers(7, 7)},
    "switch_lm_enlarged": {**_SWITCH, **_LARGE, **_layers(8, 8)},
    "base_lm": {**_BASE, **_layers(11, 12)},
    "base_lm_tiny": {**_BASE, **_TINY_TRANSFORMER, **_layers(2, 2)},
    "base_lm_large": {**_BASE, **_LARGE, **_layers(8, 8)},
    "hash_lm": {**_HASH, **_layers(11, 12)},
    "hash_lm_tiny": {**_HASH, **_TINY_TRANSFORMER, **_layers(2, 2)},
    "hash_lm_large": {**_HASH, **_LARGE, **_layers(8, 8)},
    # gMLP as a masked language model; numbers are layers
    "gmlp_mlm": {**_GMLP_MLM, "num_dense_layers": 36},
    "gmlp_mlm_18": {**_GMLP_MLM, "num_dense_layers": 18},
    "gmlp_mlm_36": {**_GMLP_MLM, "num_dense_layers": 36},
    "gmlp_mlm_72": {**_GMLP_MLM, "num_dense_layers": 72},
    "gmlp_mlm_144": {**_GMLP_MLM, "num_dense_layers": 144},
    "gmlp_mlm_base": {**_GMLP_MLM, **_LONG, "num_dense_layers": 48},
    "gmlp_mlm_large": {**_GMLP_MLM, **_WIDE, "num_dense_layers": 96},
    "gmlp_mlm_xlarge": {**_GMLP_MLM, **_LONG, "embed_dim": 1024, "ffn_dim": 4096, "num_dense_layers": 144},
    "gmlp_mlm_tiny": {**_GMLP_MLM, **_TINY_MLM},
    # other gates (section 4.1)
    "gmlp_mlm_multiplicative": {**_UNSPLIT, "gmlp_gate": "multiplicative"},
    "gmlp_mlm_additive": {**_UNSPLIT, "gmlp_gate": "additive"},
    "gmlp_mlm_linear": {**_UNSPLIT, "gmlp_gate": "linear"},
    "gmlp_mlm_multiplicative_tiny": {**_UNSPLIT, **_TINY_MLM, "ffn_dim": 256, "gmlp_gate": "multiplicative"},
    "gmlp_mlm_additive_tiny": {**_UNSPLIT, **_TINY_MLM, "ffn_dim": 256, "gmlp_gate": "additive"},
    "gmlp_mlm_linear_tiny": {**_UNSPLIT, **_TINY_MLM, "ffn_dim": 256, "gmlp_gate": "linear"},
    # gMLP with a tiny attention (section 4.3)
    "amlp_mlm": {**_GMLP_MLM, "num_dense_layers": 36, "gmlp_attention_dim": 64},
    "amlp_mlm_base": {**_GMLP_MLM, **_LONG, "num_dense_layers": 36, "gmlp_attention_dim": 64},
    "amlp_mlm_large": {**_GMLP_MLM, **_WIDE, "num_dense_layers": 72, "gmlp_attention_dim": 128},
    "amlp_mlm_tiny": {**_GMLP_MLM, **_TINY_MLM, "num_dense_layers": 7, "gmlp_attention_dim": 16},
    # BERT with learned positions; with a bias for each distance instead (+rel); with the bias alone (+rel-attn)
    "bert_mlm": {**_BERT, "positions": "learned"},
    "bert_mlm_base": {**_BERT, **_LONG, "positions": "learned"},
    "bert_mlm_large": {
        **_BERT,
        **_LONG,
        "positions": "learned",
        "embed_dim": 1024,
        "ffn_dim": 4096,
        "num_heads": 16,
        "num_dense_layers": 24,
    },
    "bert_mlm_tiny": {**_BERT, **_TINY_BERT, "positions": "learned"},
    "bert_mlm_rel": _REL,
    "bert_mlm_rel_6": {**_REL, "num_dense_layers": 6},
    "bert_mlm_rel_12": {**_REL, "num_dense_layers": 12},
    "bert_mlm_rel_24": {**_REL, "num_dense_layers": 24},
    "bert_mlm_rel_48": {**_REL, "num_dense_layers": 48},
    "bert_mlm_rel_tiny": {**_REL, **_TINY_BERT},
    "bert_mlm_rel_attn": {**_BERT, "transformer_attention": "relative_only"},
    "bert_mlm_rel_attn_tiny": {**_BERT, **_TINY_BERT, "transformer_attention": "relative_only"},
    # MLP-Mixer (section 4.1)
    "mixer_mlm": {**_BERT, "dense_block": "mixer", "num_dense_layers": 18},
    "mixer_mlm_tiny": {**_BERT, **_TINY_BERT, "dense_block": "mixer", "mixer_token_dim": 192},
}

for _name, _settings in _BUILT_IN.items():
    ARCHITECTURES.add(_name, _settings)
#: the presets above, and those that plug-ins register
PRESETS = ARCHITECTURES

# Settings that follow from the data and fairseq's task instead of model options, and the task's options.
FROM_TASK = ("vocab_size", "max_tokens", "padding_idx")
TASK_OPTIONS = ("tokens_per_sample", "max_target_positions", "max_positions", "add_bos_token")
# Other options that fairseq's models have here, which are about a run (smlp/models/options.py).
RUN_OPTIONS = (
    *("expert_parallel_size", "profile_updates", "profile_dir", "compile", "data_order_file", "update_times_file"),
    *("environment_file", "other_dictionary", "no_decay_norms", "spatial_lr_factor", "spatial_weight_decay"),
)


def preset(arch: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of a named architecture, with single settings replaced.

    Args:
        arch: a key of :data:`PRESETS`.
        **overrides: names of settings: fields of ``ModelConfig`` and ``MoEConfig``, and those of plugins.

    Raises:
        UserError: the architecture or a setting is unknown, or a value is out of range.
    """
    if not isinstance(arch, str):
        raise UserError(f"the name of the architecture must be text, got {arch!r}")
    if arch not in PRESETS:
        close = difflib.get_close_matches(arch, PRESETS, n=1)
        known = f"there are {len(PRESETS)}, such as smlp, gmlp_lm and switch_lm (docs/presets.md)"
        hint = f"did you mean {close[0]!r}?" if close else known
        raise UserError(f"unknown architecture {arch!r:.80}; {hint}{PRESETS.hint}")
    return unflatten({**PRESETS[arch], **overrides})


def from_training_options(arch: str, options: Mapping[str, Any], vocab_size: int, padding_idx: int) -> ModelConfig:
    """Return the configuration that these options of ``fairseq-train`` select, in training or in a checkpoint.

    Args:
        arch: architecture whose preset fills what ``options`` leave out or have as None; another name fills nothing.
        options: settings by name and :data:`TASK_OPTIONS`; other names are ignored.
        vocab_size, padding_idx: of the dictionary.

    Raises:
        UserError: a value is out of range.
    """
    if not isinstance(arch, str | None):
        raise UserError(f"the name of the architecture must be text, got {arch!r}")
    settings = dict(PRESETS.get(arch, {}))
    given = {name: options[name] for name in all_settings() if options.get(name) is not None}
    settings |= {name: value for name, value in given.items() if name not in FROM_TASK}
    for name in lost_settings({**options, **settings}):
        raise UserError(f"unknown setting {name!r}: it is of another version of a router or block")
    own = {"vocab_size": vocab_size, "max_tokens": _context(options), "padding_idx": padding_idx}
    return unflatten(settings | own)


def _context(options: Mapping[str, Any]) -> int:
    """Return T, from :data:`TASK_OPTIONS`."""
    has_start = options.get("add_bos_token")
    if has_start not in (None, False, True):
        raise UserError(f"--add-bos-token must be true or false, got {has_start!r}")
    # max_positions is an option of the encoder model, the others belong to the language modelling task
    names = ("max_positions", "max_target_positions")
    name = next((name for name in names if options.get(name)), "tokens_per_sample")
    value = options.get(name)
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UserError(f"--{name.replace('_', '-')} must be a whole number of at least 1, got {value!r}")
    # With --add-bos-token, fairseq prepends a token to each sample.
    return int(value) + int(bool(has_start) and name == "tokens_per_sample")


def config_of(options: Any, vocab_size: int) -> ModelConfig | None:
    """Return the configuration that fairseq's options (``cfg.model``) select; None for a model of another package."""
    if not hasattr(options, "num_sparse_layers"):
        return None
    settings = {name: getattr(options, name, None) for name in (*all_settings(), *TASK_OPTIONS)}
    return from_training_options(options._name, settings, vocab_size, padding_idx=1)


def num_experts_of(options: Any) -> int:
    """Return E of the model that fairseq's options (``cfg.model``) select; 0 if it is dense or of another package."""
    config = config_of(options, vocab_size=2**16)  # any size: experts do not depend on it
    return config.num_experts if config is not None and config.num_sparse_layers else 0
