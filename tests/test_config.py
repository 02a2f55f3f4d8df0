"""Configurations check themselves; presets have the sizes of the paper's tables."""

import dataclasses

import pytest
import torch

import smlp
from smlp.config import SETTINGS, ModelConfig, MoEConfig, flatten, unflatten
from smlp.presets import PRESETS

# Parameters (expert per rank at E ranks, other), by formula; see test_parameter_counts_follow_the_formula.
# And, where the paper prints them, in millions: smlp.txt, Tables 8, 9 and 10 (9 and 10 swap the labels).
PAPER_MILLIONS = {
    "smlp": (113.44, 258.73),
    "smlp_large": (277.1, 682.6),
    "gmlp_lm": (0.0, 353.87),
}


def formula(config: ModelConfig) -> tuple[int, int]:
    """(parameters of one expert of every sparse layer, all other parameters)."""
    T, H, F, V = config.max_tokens, config.embed_dim, config.ffn_dim, config.vocab_size
    layer_norm = 2 * H
    gating = config.num_heads * (T * T + T) + 2 * (F // 2)
    dense = layer_norm + (H * F + F) + gating + (F // 2 * H + H)
    feed_forward_expert = layer_norm + (H * F + F) + (F * H + H)
    spatial_expert = T * T + T
    centroids_and_norms = config.moe.num_experts * H + 2 * layer_norm
    expert = config.num_sparse_layers * (feed_forward_expert + spatial_expert)
    other = V * H + layer_norm + config.num_dense_layers * dense + config.num_sparse_layers * centroids_and_norms
    return expert, other


def count(arch: str) -> tuple[int, int, ModelConfig]:
    with torch.device("meta"):
        model = smlp.build(arch)
    num_experts = model.config.moe.num_experts
    expert = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(p.numel() for p in model.parameters())
    assert expert % num_experts == 0
    return expert // num_experts, total - expert, model.config


@pytest.mark.parametrize("arch", PRESETS)
def test_parameter_counts_follow_the_formula(arch):
    expert, other, config = count(arch)
    assert (expert, other) == formula(config)


@pytest.mark.parametrize("arch", PAPER_MILLIONS)
def test_parameter_counts_are_the_papers(arch):
    expert, other, _ = count(arch)
    paper_expert, paper_other = PAPER_MILLIONS[arch]
    assert expert / 1e6 == pytest.approx(paper_expert, rel=1e-3)
    assert other / 1e6 == pytest.approx(paper_other, rel=1e-3)


def test_every_preset_has_a_pinned_count():
    pinned = {
        "smlp": (113_344_512, 258_738_176),
        "smlp_tiny": (1_085_184, 4_579_072),
        "smlp_large": (276_946_944, 682_686_464),
        "gmlp_lm": (0, 353_875_968),
        "gmlp_lm_tiny": (0, 5_588_224),
        "gmlp_lm_large": (0, 944_476_160),
    }
    assert {arch: count(arch)[:2] for arch in PRESETS} == pinned


@pytest.mark.parametrize("pair", [("smlp", "gmlp_lm"), ("smlp_tiny", "gmlp_lm_tiny"), ("smlp_large", "gmlp_lm_large")])
def test_sizes_of_a_kind_have_the_same_flops(pair):
    def multiply_adds_per_token(config):
        T, H, F, V = config.max_tokens, config.embed_dim, config.ffn_dim, config.vocab_size
        dense = H * F + F // 2 * H + T * F // 2
        sparse = 2 * H * F + T * H + config.moe.num_experts * H
        return V * H + config.num_dense_layers * dense + config.num_sparse_layers * sparse

    sparse_mlp, dense_mlp = (multiply_adds_per_token(smlp.preset(arch)) for arch in pair)
    # the paper's own small pair (28 + 12 against 41 layers) differs by 1.2 %
    assert sparse_mlp == pytest.approx(dense_mlp, rel=0.012 if pair[0] == "smlp" else 0.01)


def test_sparse_layers_stand_where_the_paper_says():
    assert smlp.preset("smlp").sparse_layer_indices() == (3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36)
    assert smlp.preset("smlp_large").sparse_layer_indices() == (3, 6, 10, 13, 16, 20, 23, 26)
    assert smlp.preset("smlp_tiny").sparse_layer_indices() == (2, 5)
    assert smlp.preset("gmlp_lm").sparse_layer_indices() == ()


@pytest.mark.parametrize("num_dense", range(6))
@pytest.mark.parametrize("num_sparse", range(1, 6))
def test_sparse_positions_are_distinct_layers(num_dense, num_sparse):
    config = ModelConfig(num_dense_layers=num_dense, num_sparse_layers=num_sparse)
    indices = config.sparse_layer_indices()
    assert len(set(indices)) == num_sparse and max(indices) < num_dense + num_sparse


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_experts": 7}, ["num_experts=7", "embed_dim=1024"]),
        ({"num_experts": 0}, ["num_experts", "0"]),
        ({"num_heads": 3}, ["num_heads=3", "4096"]),
        ({"ffn_dim": 4095}, ["ffn_dim", "4095"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"num_dense_layers": 0, "num_sparse_layers": 0}, ["num_dense_layers", "num_sparse_layers"]),
        ({"activation": "tanh"}, ["activation", "tanh", "gelu"]),
        ({"padding_idx": 60000}, ["padding_idx", "60000", "51200"]),
        ({"num_expert": 4}, ["num_expert", "num_experts"]),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(smlp.UserError) as error:
        unflatten(settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_unknown_architecture_names_the_closest():
    with pytest.raises(smlp.UserError, match=r"'smlp_tinny'.*did you mean 'smlp_tiny'"):
        smlp.preset("smlp_tinny")


def test_flat_settings_are_the_inverse_of_the_nested_ones():
    config = smlp.preset("smlp_tiny", num_experts=4, dropout=0.3)
    assert config.moe == MoEConfig(num_experts=4) and config.dropout == 0.3
    assert unflatten(flatten(config)) == config
    assert set(flatten(config)) == set(SETTINGS)
    assert all(field.metadata["help"] for field in SETTINGS.values())


def test_configurations_cannot_be_changed_behind_a_model():
    with pytest.raises(dataclasses.FrozenInstanceError):
        smlp.preset("smlp_tiny").dropout = 0.5
