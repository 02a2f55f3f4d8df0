"""Configurations check themselves; presets have the sizes of the paper's tables."""

import dataclasses

import numpy as np
import pytest
import torch

import smlp
from smlp.config import MOST_LAYERS, SETTINGS, ModelConfig, flatten, unflatten
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import PRESETS
from smlp.costs.formula import parameters

# Parameters: of one expert of every sparse layer, and all that are not experts'. docs/presets.md has the paper's.
PINNED = {
    "smlp": (113_344_512, 258_738_176),
    "smlp_tiny": (1_085_184, 4_579_072),
    "smlp_large": (276_946_944, 682_686_464),
    "smlp_hash": (113_319_936, 258_369_536),
    "smlp_hash_tiny": (1_084_160, 4_576_000),
    "smlp_switch": (113_319_936, 258_762_752),
    "smlp_switch_tiny": (1_084_160, 4_580_096),
    "smlp_partial": (108_808_272, 258_816_896),
    "smlp_partial_tiny": (1_073_172, 4_579_488),
    "smlp_leaky": (108_808_272, 259_131_392),
    "smlp_leaky_tiny": (1_073_172, 4_581_120),
    "gmlp_lm": (0, 353_875_968),
    "gmlp_lm_tiny": (0, 5_588_224),
    "gmlp_lm_large": (0, 944_476_160),
    "gmlp_moe": (88_227_840, 288_098_304),
    "gmlp_moe_tiny": (893_024, 4_780_832),
    "dense_lm": (0, 354_740_224),
    "dense_lm_tiny": (0, 5_716_352),
    "dense_lm_large": (0, 960_952_320),
    "gshard_lm": (75_543_552, 204_209_152),
    "gshard_lm_tiny": (854_144, 4_016_768),
    "gshard_lm_large": (234_952_704, 575_842_304),
    "switch_lm": (100_724_736, 254_408_704),
    "switch_lm_tiny": (1_280_960, 4_439_488),
    "switch_lm_large": (234_952_704, 575_383_552),
    "switch_lm_enlarged": (268_517_376, 642_600_960),
    "base_lm": (100_749_312, 241_787_904),
    "base_lm_tiny": (1_281_984, 4_438_464),
    "base_lm_large": (268_550_144, 642_568_192),
    "hash_lm": (100_724_736, 241_419_264),
    "hash_lm_tiny": (1_280_960, 4_435_392),
    "hash_lm_large": (268_517_376, 642_076_672),
    "gmlp_mlm": (0, 101_906_652),
    "gmlp_mlm_18": (0, 59_294_190),
    "gmlp_mlm_36": (0, 101_906_652),
    "gmlp_mlm_72": (0, 187_131_576),
    "gmlp_mlm_144": (0, 357_581_424),
    "gmlp_mlm_base": (0, 130_370_256),
    "gmlp_mlm_large": (0, 365_900_192),
    "gmlp_mlm_xlarge": (0, 941_668_464),
    "gmlp_mlm_tiny": (0, 879_159),
    "gmlp_mlm_multiplicative": (0, 92_469_468),
    "gmlp_mlm_additive": (0, 92_469_468),
    "gmlp_mlm_linear": (0, 92_469_468),
    "gmlp_mlm_multiplicative_tiny": (0, 842_295),
    "gmlp_mlm_additive_tiny": (0, 842_295),
    "gmlp_mlm_linear_tiny": (0, 842_295),
    "amlp_mlm": (0, 109_046_748),
    "amlp_mlm_base": (0, 109_088_220),
    "amlp_mlm_large": (0, 316_253_624),
    "amlp_mlm_tiny": (0, 847_817),
    "bert_mlm": (0, 110_355_968),
    "bert_mlm_base": (0, 110_650_880),
    "bert_mlm_large": (0, 336_689_408),
    "bert_mlm_tiny": (0, 1_146_176),
    "bert_mlm_rel": (0, 110_262_272),
    "bert_mlm_rel_6": (0, 67_732_736),
    "bert_mlm_rel_12": (0, 110_262_272),
    "bert_mlm_rel_24": (0, 195_321_344),
    "bert_mlm_rel_48": (0, 365_439_488),
    "bert_mlm_rel_tiny": (0, 1_140_416),
    "bert_mlm_rel_attn": (0, 96_088_064),
    "bert_mlm_rel_attn_tiny": (0, 1_084_544),
    "mixer_mlm": (0, 112_040_960),
    "mixer_mlm_tiny": (0, 1_102_784),
}


@pytest.mark.parametrize("arch", PRESETS)
def test_modules_have_as_many_parameters_as_the_formula_says(arch):
    with torch.device("meta"):
        model = smlp.build(arch)
    num_experts = model.config.num_experts
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    other = sum(p.numel() for p in model.parameters()) - experts
    counts = parameters(model.config, world_size=num_experts)
    assert (counts.expert_per_rank * num_experts, counts.other) == (experts, other)
    assert counts.total == experts + other
    assert (counts.expert_per_rank, counts.other) == PINNED[arch]


def test_every_preset_has_a_pinned_count():
    assert list(PINNED) == list(PRESETS)


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
        ({"num_experts": "4"}, ["num_experts must be of type int", "'4'"]),
        ({"num_experts": 4.0}, ["num_experts must be of type int", "4.0"]),
        ({"embed_dim": True}, ["embed_dim must be of type int", "True"]),
        ({"dropout": None}, ["dropout must be of type float", "None"]),
        ({"embed_init_std": "0.1"}, ["embed_init_std must be of type float | None", "'0.1'"]),
        ({"base_shuffle": 1}, ["base_shuffle must be of type bool", "1"]),
        ({"num_heads": 3}, ["num_heads=3", "4096"]),
        ({"ffn_dim": 4095}, ["ffn_dim", "4095"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"num_dense_layers": 0, "num_sparse_layers": 0}, ["num_dense_layers", "num_sparse_layers"]),
        ({"activation": "tanh"}, ["activation", "tanh", "gelu"]),
        ({"padding_idx": 60000}, ["padding_idx", "60000", "51200"]),
        ({"base_warmup": 1.0}, ["base_warmup", "1.0"]),
        ({"base_warmup": 0.1, "base_shuffle": True}, ["base_warmup=0.1", "base_shuffle"]),
        ({"base_gate": "softmax"}, ["base_gate must be one of sigmoid, one", "softmax"]),
        ({"base_offset_rate": -0.1}, ["base_offset_rate", "-0.1"]),
        ({"loss_free_rate": 2.0}, ["loss_free_rate", "2.0"]),
        ({"router_freeze": 1.5}, ["router_freeze", "1.5"]),
        ({"expert_dropout": 1.0}, ["expert_dropout", "1.0"]),
        ({"smlp_feature_scale": -1.0}, ["smlp_feature_scale", "-1.0"]),
        ({"smlp_feature_scale": 1e300}, ["smlp_feature_scale", "below 1e+06", "1e+300"]),
        ({"smlp_projection_dim": 2048}, ["smlp_projection_dim=2048", "embed_dim=1024"]),
        ({"smlp_projection_dim": None}, ["smlp_projection_dim must be of type int", "None"]),
        ({"smlp_feature_scale": "0.1"}, ["smlp_feature_scale must be of type float", "'0.1'"]),
        ({"spatial_bias_init": 1e99}, ["spatial_bias_init", "1e+06", "1e+99"]),
        ({"smlp_order": "both"}, ["smlp_order must be one of features_first, tokens_first", "both"]),
        ({"spatial_init_average": -1.0}, ["spatial_init_average", "-1.0"]),
        (
            {"spatial_init_average": 1.0, "direction": "bidirectional", "num_sparse_layers": 0},
            ["spatial_init_average=1.0", "causal"],
        ),
        ({"num_expert": 4}, ["num_expert", "num_experts"]),
        ({"capacity_factor": -1.0}, ["capacity_factor", "-1.0"]),
        ({"eval_capacity_factor": float("nan")}, ["eval_capacity_factor", "nan"]),
        ({"capacity_factor": 1e17}, ["capacity_factor must be at least 0 and at most 1,000,000,000, got 1e+17"]),
        ({"load_balance_weight": float("inf")}, ["load_balance_weight must be at least 0 and finite, got inf"]),
        ({"load_balance_weight": -0.1}, ["load_balance_weight", "-0.1"]),
        ({"router_jitter": 1.0}, ["router_jitter", "1.0"]),
        ({"prefix_fraction": 1.0}, ["prefix_fraction", "1.0"]),
        ({"feature_routing": "partial", "max_tokens": 1}, ["prefix_fraction=0.2", "max_tokens=1"]),
        ({"hash_seed": -1}, ["hash_seed", "-1"]),
        ({"centroid_init_gain": 0.0}, ["centroid_init_gain", "0.0"]),
        ({"router": "top1"}, ["router", "top1", "base, switch, gshard, hash, loss_free"]),
        ({"feature_routing": "learned"}, ["feature_routing", "learned", "partial"]),
        ({"sparse_placement": "alternate", "num_dense_layers": 1}, ["num_sparse_layers=12", "num_dense_layers=1"]),
        ({"positions": "sinusoidal", "embed_dim": 33, "num_experts": 3}, ["sinusoidal", "33"]),
        ({"dense_block": "transformer", "num_heads": 5}, ["num_heads=5", "embed_dim=1024"]),
        ({"dense_block": "transformer", "num_heads": 1024, "transformer_attention": "rotary"}, ["even width, got 1"]),
        ({"ffn_dim": 2**63}, ["ffn_dim must be at most 2,147,483,647, got 9223372036854775808"]),
        ({"num_experts": 2**70}, ["num_experts must be at most 2,147,483,647"]),
        ({"num_dense_layers": 2**40}, [f"num_dense_layers={2**40}", "more than 10000 layers"]),
        ({"embed_init_std": -1.0}, ["embed_init_std must be from 0 to below 1e+06", "-1.0"]),
        ({"spatial_init_scale": float("inf")}, ["spatial_init_scale must be from 0 to below 1e+06", "inf"]),
        ({"centroid_init_gain": 1e39}, ["centroid_init_gain must be positive and below 1e+06", "1e+39"]),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(smlp.UserError) as error:
        unflatten(settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_model_that_no_memory_holds_is_not_built():
    with pytest.raises(smlp.UserError, match=r"weights of this model take [\d,]+ GiB"):
        smlp.build("gmlp_lm_tiny", embed_dim=10**9)
    with torch.device("meta"):
        assert smlp.build("smlp_large").embedding.weight.is_meta


@pytest.mark.parametrize(
    ("arch", "changed", "ignored"),
    [
        ("dense_lm_tiny", {"num_experts": 9}, {"num_experts": "the model has no sparse layers"}),
        ("gmlp_lm_tiny", {"router": "switch"}, {"router": "the model has no sparse layers"}),
        ("gmlp_lm_tiny", {"base_gate": "one"}, {"base_gate": "the model has no sparse layers"}),
        (
            "gmlp_lm_tiny",
            {"router": "hash", "hash_kind": "balanced", "hash_seed": 3},
            dict.fromkeys(("router", "hash_kind", "hash_seed"), "the model has no sparse layers"),
        ),
        ("base_lm_tiny", {"feature_routing": "leaky"}, {"feature_routing": "the model has no sMoE"}),
        ("hash_lm_tiny", {"capacity_factor": 2.0}, {"capacity_factor": "the router is neither switch nor gshard"}),
        ("switch_lm_tiny", {"second_expert": "all"}, {"second_expert": "the router is not gshard"}),
        ("smlp_tiny", {"hash_kind": "balanced"}, {"hash_kind": "the router is not hash"}),
        ("smlp_tiny", {"prefix_fraction": 0.3}, {"prefix_fraction": "no features are routed by a prefix"}),
        ("smlp_tiny", {"hash_seed": 3}, {"hash_seed": "the router has no table of ids without base_warmup"}),
        ("smlp_tiny", {"hash_seed": 3, "base_warmup": 0.1}, {}),
        (
            "hash_lm_tiny",
            {"hash_seed": 3, "hash_kind": "balanced"},
            {"hash_seed": "the frequencies of tokens decide the table of hash_kind=balanced"},
        ),
        ("mixer_mlm_tiny", {"num_heads": 2}, {"num_heads": "the model has no heads"}),
        (
            "gmlp_moe_tiny",
            {"base_shuffle": True},
            {"base_shuffle": "experts of whole sequences do not take tokens of other ranks"},
        ),
        ("switch_lm_tiny", {"base_shuffle": True}, {"base_shuffle": "the router is not base"}),
        ("dense_lm_tiny", {"spatial_init_scale": 1.0}, {"spatial_init_scale": "the model has no spatial weights"}),
        ("dense_lm_tiny", {"spatial_weights": "toeplitz"}, {"spatial_weights": "the model has no spatial weights"}),
        ("smlp_tiny", {"attention_dropout": 0.1}, {"attention_dropout": "the model has no attention"}),
        ("gmlp_lm_tiny", {"attention_dropout": 0.1, "gmlp_attention_dim": 8}, {}),
        ("dense_lm_tiny", {"attention_dropout": 0.1}, {}),
        ("gshard_lm_tiny", {"capacity_factor": 2.0, "second_expert": "all", "num_experts": 4}, {}),
        ("smlp_partial_tiny", {"prefix_fraction": 0.3, "base_shuffle": True}, {}),
    ],
)
def test_settings_without_effect_are_found(arch, changed, ignored):
    assert ignored_settings(smlp.preset(arch, **changed), PRESETS[arch]) == ignored


def test_building_a_model_warns_of_settings_without_effect():
    with pytest.warns(UserWarning, match="num_experts has no effect: the model has no sparse layers"):
        smlp.build("gmlp_lm_tiny", vocab_size=np.int64(50), num_experts=16)


def test_numbers_of_numpy_are_pythons_own():
    """Sizes of 8 bits overflowed in the count of parameters."""
    config = smlp.preset("smlp_tiny", num_experts=np.uint8(4), embed_dim=np.int32(1024), dropout=np.float32(0.5))
    assert {type(config.num_experts), type(config.embed_dim), type(config.dropout)} == {int, float}
    assert config == smlp.preset("smlp_tiny", num_experts=4, embed_dim=1024, dropout=0.5)
    own = dataclasses.replace(config, extra=(("gmlp_attention_dim", np.int8(4)),)).extra
    assert own == (("gmlp_attention_dim", 4),) and type(own[0][1]) is int


@pytest.mark.parametrize("arch", PRESETS)
def test_no_preset_has_a_setting_without_effect_beyond_its_own(arch):
    assert ignored_settings(smlp.preset(arch), PRESETS[arch]) == {}


@pytest.mark.parametrize("extra", [{"smlp_order": "tokens_first"}, (("smlp_order",),), 5, ((["smlp_order"], 1),)])
def test_extra_settings_are_pairs(extra):
    with pytest.raises(smlp.UserError, match=r"extra must be a tuple of pairs \(name, value\), got"):
        ModelConfig(extra=extra)


def test_unknown_architecture_names_the_closest():
    with pytest.raises(smlp.UserError, match=r"'smlp_tinny'.*did you mean 'smlp_tiny'"):
        smlp.preset("smlp_tinny")


OF_SMLP_BLOCKS = {f"smlp_{name}" for name in ("feature_scale", "projection_dim", "order", "spatial_weights")}


def test_flat_settings_are_the_inverse_of_the_nested_ones():
    config = smlp.preset("smlp_tiny", num_experts=4, dropout=0.3)
    assert config.num_experts == 4 and config.dropout == 0.3
    assert unflatten(flatten(config)) == config
    assert set(flatten(config)) == {*SETTINGS, "gmlp_gate", "gmlp_attention_dim", *OF_SMLP_BLOCKS}
    assert all(field.metadata["help"] for field in SETTINGS.values())


def test_a_model_has_no_more_layers_than_can_be_built():
    smlp.preset("smlp_tiny", num_dense_layers=MOST_LAYERS - 2)
    with pytest.raises(smlp.UserError, match="num_dense_layers=1000000 and num_sparse_layers=2 are more than 10000"):
        smlp.preset("smlp_tiny", num_dense_layers=10**6)


@pytest.mark.parametrize("name", ["spatial_init_scale", "embed_init_std", "centroid_init_gain"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_initial_weights_are_finite(name, value):
    with pytest.raises(smlp.UserError, match=rf"^{name} must be .*, got {value}"):
        smlp.preset("smlp_tiny", **{name: value})


def test_settings_of_older_records_that_are_gone_change_nothing():
    config = smlp.preset("smlp_tiny")
    assert unflatten({**flatten(config), "overlap_chunks": 2}) == config


def test_configurations_cannot_be_changed_behind_a_model():
    with pytest.raises(dataclasses.FrozenInstanceError):
        smlp.preset("smlp_tiny").dropout = 0.5
