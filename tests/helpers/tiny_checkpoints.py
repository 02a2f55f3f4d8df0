"""Checkpoints of tiny models with random weights, as fairseq-train writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import smlp
from smlp.checkpoint.export import prefix_of
from smlp.config import flatten
from smlp.config.presets import preset
from smlp.evaluation.leak import randomise

WORDS = ["the", "s1", "s2", "v1", "v2", "a", "o1", "o2", "and", "madeupword0000"]
SMALL = {"embed_dim": 16, "ffn_dim": 16, "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 2}


def write_checkpoint(folder: Path, words: Sequence[str], arch: str = "smlp_tiny", max_tokens: int = 12, **over: Any):
    """A checkpoint with its dict.txt next to it; its path and its decoder or encoder, in evaluation mode."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")
    num_symbols = 4 + len(words) + preset(arch).is_bidirectional  # an encoder has <mask> besides
    decoder = randomise(smlp.build(arch, vocab_size=num_symbols, max_tokens=max_tokens, **{**SMALL, **over}))
    from_task = ("vocab_size", "max_tokens", "padding_idx")
    options = {name: value for name, value in flatten(decoder.config).items() if name not in from_task}
    state = {
        "model": {f"{prefix_of(decoder.config)}{name}": value for name, value in decoder.state_dict().items()},
        "cfg": {
            "model": {**options, "_name": arch, "tokens_per_sample": max_tokens, "add_bos_token": False},
            "task": {"data": str(folder / "data")},
        },
    }
    path = folder / "checkpoint_best.pt"
    torch.save(state, path)
    return path, decoder.eval()
