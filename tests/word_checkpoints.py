"""A small checkpoint of a model of words."""

from __future__ import annotations

from pathlib import Path

import torch

import smlp
from smlp.config import flatten
from smlp.evaluation.leak import randomise
from smlp.nn.decoder import Decoder

WORDS = ["the", "s1", "s2", "v1", "v2", "a", "o1", "o2", "and", "madeupword0000"]


def word_checkpoint(folder: Path) -> tuple[Path, Decoder]:
    """A checkpoint as fairseq-train writes it, with dict.txt beside it: words, a context of 12."""
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    settings = {"embed_dim": 16, "ffn_dim": 16, "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 2}
    decoder = randomise(smlp.build("smlp_tiny", vocab_size=14, max_tokens=12, **settings))
    from_task = ("vocab_size", "max_tokens", "padding_idx")
    options = {name: value for name, value in flatten(decoder.config).items() if name not in from_task}
    state = {
        "model": {f"decoder.core.{name}": value for name, value in decoder.state_dict().items()},
        "cfg": {
            "model": {**options, "_name": "smlp_tiny", "tokens_per_sample": 12, "add_bos_token": False},
            "task": {"data": str(folder / "data")},
        },
    }
    path = folder / "checkpoint_best.pt"
    torch.save(state, path)
    return path, decoder.eval()
