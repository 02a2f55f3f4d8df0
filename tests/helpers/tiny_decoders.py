"""Small decoders of every kind, in evaluation mode, with weights that are far from symmetric."""

import torch

import smlp
from smlp.evaluation.leak import randomise

SMALL = {"vocab_size": 40, "max_tokens": 12, "embed_dim": 16, "ffn_dim": 24, "dropout": 0.0}
TWO_AND_TWO = {"num_dense_layers": 2, "num_sparse_layers": 2, "num_heads": 2, "num_experts": 4}
VARIANTS = {
    "smlp": {"num_dense_layers": 2, "num_sparse_layers": 2, "num_experts": 4},
    "smlp, one expert": {"num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 1},
    "smlp, positions": {
        "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 4, "positions": "sinusoidal",
    },
    "smlp, linear": {
        "num_dense_layers": 1, "num_sparse_layers": 2, "num_experts": 2, "feature_experts": "linear",
    },
    "smlp, scaled, projected, tokens first": {
        "num_dense_layers": 1, "num_sparse_layers": 2, "num_experts": 4, "smlp_feature_scale": 0.5,
        "smlp_projection_dim": 3, "smlp_order": "tokens_first", "router": "loss_free", "embed_scaling": "always",
    },
    "smlp, attention": {
        "num_dense_layers": 2, "num_sparse_layers": 2, "num_experts": 4, "router": "hash",
        "sparse_block": "transformer", "transformer_attention": "rotary", "spatial_weights": "toeplitz",
    },
    "smlp, offsets": {
        "num_dense_layers": 1, "num_sparse_layers": 2, "num_experts": 4, "base_offset_rate": 0.1,
    },
    "partial, toeplitz": {
        "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 4, "smlp_spatial_weights": "toeplitz",
        "smlp_projection_dim": 16, "spatial_init_average": 1.0,
    },
    "gmlp": {"num_dense_layers": 3, "num_sparse_layers": 0},
    "gmlp, 3 heads": {"num_dense_layers": 2, "num_sparse_layers": 0, "num_heads": 3},
    "partial": {"num_dense_layers": 1, "num_sparse_layers": 2, "num_experts": 4},
    "gmlp_moe": {"num_dense_layers": 1, "num_sparse_layers": 2, "num_experts": 3},
    "dense": {"num_dense_layers": 2, "num_sparse_layers": 0, "num_heads": 2},
    "dense, learned positions": {"num_dense_layers": 2, "num_heads": 4, "positions": "learned"},
    "gshard": TWO_AND_TWO,
    "switch": TWO_AND_TWO,
    "base": {**TWO_AND_TWO, "base_shuffle": True},
    "hash": TWO_AND_TWO,
}  # fmt: skip
ARCHS = {"gmlp": "gmlp_lm", "smlp": "smlp", "partial": "smlp_partial", "gmlp_moe": "gmlp_moe"}


def make(variant, **overrides):
    name = variant.split(",")[0]
    arch = ARCHS.get(name, f"{name}_lm")
    return randomise(smlp.build(arch, **{**SMALL, **VARIANTS[variant], **overrides})).eval()


def random_tokens(*shape):
    return torch.randint(2, 40, shape, generator=torch.Generator().manual_seed(0))
