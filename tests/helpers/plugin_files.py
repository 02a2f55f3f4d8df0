"""The examples of examples/extend/, for the tests: where they are, and small models with them."""

from __future__ import annotations

import torch
from running import REPOSITORY

import smlp
from smlp.evaluation.leak import randomise
from smlp.nn.decoder import Decoder

ROUTER, CONV = (REPOSITORY / "examples" / "extend" / name for name in ("cosine_router.py", "conv_block.py"))
FILES = f"{ROUTER}:{CONV}"
SIZES = {"vocab_size": 30, "max_tokens": 12, "embed_dim": 16, "ffn_dim": 16, "num_experts": 4}
SIZES |= {"num_dense_layers": 1, "num_sparse_layers": 1}
ARCHS = {
    "cosine_lm_tiny": {"num_heads": 2, "cosine_temperature": 0.3},
    "conv_lm_tiny": {"num_sparse_layers": 0, "conv_width": 5},
    "conv_moe_tiny": {"conv_width": 1, "router": "cosine"},
}


def make(arch: str, **more) -> Decoder:
    """A small model of one of their architectures, with large random weights."""
    torch.manual_seed(0)
    return randomise(smlp.build(arch, **{**SIZES, **ARCHS[arch], **more}))
