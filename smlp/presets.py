"""One table of named architectures: settings as data.

Sources: smlp.txt, Tables 5 and 8 to 10. Where the paper's tables disagree with each other, the numbers here are
those that its parameter counts follow from (docs/models.md lists them): Table 10 prints 20 dense layers for the
large sMLP, but its 682.6 M + 277.1 M parameters and Table 5 need 22, with 8 sparse ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from smlp.config import SETTINGS, ModelConfig, unflatten
from smlp.errors import UserError

# Tiny models are for a laptop and for tests. The two have the same forward FLOPs per token within 1 %.
_TINY = {"vocab_size": 8192, "max_tokens": 128, "embed_dim": 256}
_LARGE = {"embed_dim": 2048, "ffn_dim": 8192}

PRESETS: dict[str, dict[str, Any]] = {
    # sMLP with deterministic routing of features (section 3.2.1)
    "smlp": {"num_dense_layers": 28, "num_sparse_layers": 12, "num_experts": 32},
    "smlp_tiny": {**_TINY, "ffn_dim": 1024, "num_dense_layers": 6, "num_sparse_layers": 2, "num_experts": 8},
    "smlp_large": {**_LARGE, "num_dense_layers": 22, "num_sparse_layers": 8, "num_experts": 32},
    # gMLP (gmlp.txt, section 2), the dense counterpart
    "gmlp_lm": {"num_dense_layers": 41, "num_sparse_layers": 0},
    "gmlp_lm_tiny": {**_TINY, "ffn_dim": 960, "num_dense_layers": 9, "num_sparse_layers": 0},
    "gmlp_lm_large": {**_LARGE, "num_dense_layers": 32, "num_sparse_layers": 0},
}


# Settings that follow from the data and from fairseq's task, not from options of the model; and the task's options.
FROM_TASK = ("vocab_size", "max_tokens", "padding_idx")
TASK_OPTIONS = ("tokens_per_sample", "max_target_positions", "add_bos_token")


def preset(arch: str, **overrides: Any) -> ModelConfig:
    """The configuration of a named architecture, with single settings replaced.

    Args:
        arch: a key of :data:`PRESETS`.
        **overrides: field names of ``ModelConfig`` and ``MoEConfig``.

    Raises:
        UserError: the architecture or a setting is unknown, or a value is out of range.
    """
    if arch not in PRESETS:
        close = difflib.get_close_matches(arch, PRESETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"unknown architecture {arch!r}{hint} (known: {', '.join(sorted(PRESETS))})")
    return unflatten({**PRESETS[arch], **overrides})


def from_training_options(arch: str, options: Mapping[str, Any], vocab_size: int, padding_idx: int) -> ModelConfig:
    """The configuration that options of ``fairseq-train`` mean, in training and when a checkpoint is read.

    Args:
        arch: architecture whose preset fills what ``options`` leave out or have as None; another name fills nothing.
        options: settings by name and :data:`TASK_OPTIONS`; names beside these are ignored.
        vocab_size, padding_idx: of the dictionary.

    Raises:
        UserError: a value is out of range.
    """
    settings = dict(PRESETS.get(arch, {}))
    settings |= {name: options[name] for name in SETTINGS if name not in FROM_TASK and options.get(name) is not None}
    # With --add-bos-token fairseq puts one token more in front of each sample.
    context = options["tokens_per_sample"] + int(bool(options.get("add_bos_token")))
    max_tokens = options.get("max_target_positions") or context
    return unflatten(settings | {"vocab_size": vocab_size, "max_tokens": max_tokens, "padding_idx": padding_idx})
