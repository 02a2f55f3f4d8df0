"""Invariant 1: no later token changes an earlier prediction; a leaky model is caught."""

import pytest
import torch
from architectures import LANGUAGE_MODELS
from sparse_references import unmasked_projection
from torch import nn

import smlp
from smlp.errors import NaNError
from smlp.evaluation import leak
from smlp.evaluation.leak import default_positions, leak_test, randomise
from smlp.nn.blocks.gmlp import GATES

pytestmark = pytest.mark.long

NARROW = {"vocab_size": 64, "max_tokens": 24, "embed_dim": 64, "ffn_dim": 64}

LAYERS = ("num_dense_layers", "num_sparse_layers")


def shallow(arch, **settings):
    """A preset with a quarter of its blocks: a stack leaks if and only if a block does."""
    quarter = {name: -(-size // 4) for name, size in smlp.PRESETS[arch].items() if name in LAYERS}
    return smlp.build(arch, **NARROW, **quarter, **settings)


HONEST = [arch for arch in LANGUAGE_MODELS if not arch.startswith("smlp_leaky")]


@pytest.mark.parametrize("arch", HONEST)
def test_no_preset_leaks(arch):
    model = randomise(shallow(arch))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reports = leak_test(model, positions=[1, 5, 6, 12, 23])  # 5 ends the prefix of sMLP-partial
    assert len(reports) == 6, "three modes in two precisions"
    for report in reports:
        assert report.passed, report
        if report.mode != "training":
            assert not report.leaks and report.rerouted == 0, report
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


TOEPLITZ = {"spatial_weights": "toeplitz"}


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        *(("gmlp_lm_tiny", {"gmlp_gate": gate, **more}) for gate in GATES for more in ({}, TOEPLITZ)),
        ("gmlp_lm_tiny", {"gmlp_attention_dim": 16, "num_heads": 4, **TOEPLITZ}),
        ("gmlp_lm_tiny", {"gmlp_attention_dim": 16, "gmlp_gate": "linear"}),
        ("gmlp_moe_tiny", {"gmlp_gate": "additive", **TOEPLITZ}),
        *(("smlp_hash_tiny", {"feature_experts": kind, **TOEPLITZ}) for kind in ("gated", "linear", "additive")),
        ("smlp_hash_tiny", {"smlp_spatial_weights": "toeplitz", "smlp_projection_dim": 8, "smlp_feature_scale": 0.1}),
        ("smlp_partial_tiny", TOEPLITZ),
        ("gmlp_lm_tiny", {"dense_block": "masked", "masked_density": 0.5}),
    ],
)
def test_no_setting_of_the_blocks_leaks(arch, settings):
    for report in leak_test(randomise(shallow(arch, **settings)), positions=[1, 5, 6, 12, 23]):
        assert report.passed, report


@pytest.mark.parametrize("arch", ["dense_lm_tiny", "smlp_tiny"])
def test_a_test_changes_neither_the_model_nor_the_random_state(arch):
    model = smlp.build(arch, **NARROW).eval()
    tokens = torch.arange(8).view(1, 8) + 2
    torch.manual_seed(5)
    before, drawn = model(tokens).logits, torch.rand(3)
    torch.manual_seed(5)
    leak_test(model, positions=[3])
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(model(tokens).logits, before) and not model.training


def test_every_precision_begins_with_the_models_own_weights():
    model = randomise(smlp.build("gmlp_lm_tiny", **NARROW))
    alone = leak_test(model, dtypes=(torch.float64,), positions=[3])
    after = leak_test(model, dtypes=(torch.bfloat16, torch.float64), positions=[3])[3:]
    assert alone == after and not any(report.leaks for report in alone)
    with pytest.raises(smlp.UserError, match=r"a leak test cannot run in torch\.int32, only in torch\.float64, "):
        leak_test(model, dtypes=(torch.int32,))


@pytest.mark.parametrize("arch", ["smlp_leaky", "smlp_leaky_tiny"])
def test_leaky_routing_leaks_in_every_mode(arch):
    reports = leak_test(randomise(shallow(arch)), dtypes=(torch.float32,))
    assert len(reports) == 3 and all(report.leaks for report in reports)
    assert not any(report.passed for report in reports if report.mode != "training")


@pytest.mark.parametrize("arch", ["smlp_tiny", "base_lm_tiny", "switch_lm_tiny", "gshard_lm_tiny", "gmlp_moe_tiny"])
def test_routing_by_batch_lets_later_tokens_act_in_training_only(arch):
    reports = {(r.mode, r.dtype): r for r in leak_test(randomise(shallow(arch)), num_seqs=8)}
    training = reports["training", torch.float32]
    assert training.expected and training.leaks and training.rerouted > 0


@pytest.mark.parametrize("arch", ["gmlp_lm_tiny", "dense_lm_tiny", "hash_lm_tiny"])
def test_where_no_token_routes_another_nothing_is_expected_to_leak(arch):
    reports = leak_test(randomise(smlp.build(arch, **NARROW)))
    assert not any(report.expected or report.leaks for report in reports)


def test_unlimited_places_do_not_look_ahead():
    reports = leak_test(randomise(smlp.build("switch_lm_tiny", capacity_factor=0.0, **NARROW)))
    assert not any(report.expected or report.leaks for report in reports)


def test_dropping_in_evaluation_is_a_leak_that_nobody_expects():
    narrow = randomise(smlp.build("switch_lm_tiny", eval_capacity_factor=0.5, drop_order="gate", **NARROW))
    report = leak_test(narrow, dtypes=(torch.float32,))[0]
    assert report.mode == "evaluation" and report.leaks and not report.passed


class LeakyBlock(nn.Module):
    """Adds the mean over all positions, later ones too."""

    def __init__(self, inner, only_in_training=False):
        super().__init__()
        self.inner, self.only_in_training = inner, only_in_training

    def forward(self, x, context):
        x, aux_losses = self.inner(x, context)
        if self.training or not self.only_in_training:
            x = x + 1e-3 * x.mean(dim=1, keepdim=True)
        return x, aux_losses


@pytest.mark.parametrize("arch", ["gmlp_lm_tiny", "smlp_tiny"])
def test_a_leaky_model_is_caught(arch):
    model = randomise(smlp.build(arch, **NARROW))
    model.blocks[1] = LeakyBlock(model.blocks[1])
    failed = {(report.mode, report.dtype) for report in leak_test(model) if not report.passed}
    assert ("evaluation", torch.float32) in failed
    assert ("training, routing fixed", torch.float32) in failed


def test_a_leak_in_training_alone_is_caught():
    model = randomise(smlp.build("smlp_tiny", **NARROW))
    model.blocks[1] = LeakyBlock(model.blocks[1], only_in_training=True)
    reports = {(r.mode, r.dtype): r for r in leak_test(model, dtypes=(torch.float32,))}
    assert reports["evaluation", torch.float32].passed
    assert not reports["training, routing fixed", torch.float32].passed


class Neighbour(nn.Module):
    """Adds a part of one sequence of the batch to another."""

    def __init__(self, inner, source, target):
        super().__init__()
        self.inner, self.source, self.target = inner, source, target

    def forward(self, x, context):
        x, aux_losses = self.inner(x, context)
        x = x.clone()
        x[self.target] = x[self.target] + 0.1 * x[self.source]
        return x, aux_losses


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_sequences_that_see_each_other_are_caught(source, target):
    model = randomise(smlp.build("gmlp_lm_tiny", **NARROW))
    model.blocks[1] = Neighbour(model.blocks[1], source, target)
    for report in leak_test(model):
        assert not report.passed and (report.position == 0) == (target == 0)


def test_an_unmasked_spatial_projection_is_caught(monkeypatch):
    from smlp.nn import layers

    monkeypatch.setattr(layers, "causal_spatial_projection", unmasked_projection)
    reports = leak_test(randomise(smlp.build("gmlp_lm_tiny", **NARROW)))
    assert not any(report.passed for report in reports)


def test_where_every_logit_is_nan_no_leak_can_be_seen():
    model = randomise(smlp.build("gmlp_lm_tiny", **NARROW))
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with pytest.raises(NaNError, match="logits are not finite in float32: no leak can be seen"):
        leak_test(model)


def test_positions_may_come_from_a_generator():
    model = randomise(smlp.build("smlp_leaky_tiny", **NARROW))
    reports = leak_test(model, (dtype for dtype in (torch.float32,)), (position for position in (12, 23)))
    assert len(reports) == 3 and all(report.leaks for report in reports)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": iter(())}, r"needs positions between 1 and 23 in a context of 24 tokens, got \[\]"),
        ({"positions": [1.5]}, "must be whole numbers"),
        ({"positions": 5}, "must be whole numbers"),
        ({"num_seqs": 1.5}, "must be whole numbers"),
        ({"num_seqs": 0}, "num_seqs of at least 1, got 0"),
        ({"seed": 2**70}, r"below 2\*\*64, got 1180591620717411303424"),
        ({"dtypes": []}, "needs at least one type of torch.float64, "),
    ],
)
def test_what_a_leak_test_cannot_use_is_named(options, words):
    with pytest.raises(smlp.UserError, match=words):
        leak_test(smlp.build("gmlp_lm_tiny", **NARROW), **options)


def test_only_decoders_can_leak():
    with pytest.raises(smlp.UserError, match=r"a leak test takes a decoder, such as .*, got None"):
        leak_test(None)


def test_every_replaced_token_is_another_one(monkeypatch):
    """Else a leak from the last position alone is missed with one seed of seven."""
    seen, narrow, logits = [], {**NARROW, "vocab_size": 8, "max_tokens": 16}, leak._logits
    monkeypatch.setattr(leak, "_logits", lambda model, ids, context: seen.append(ids) or logits(model, ids, context))
    for seed in range(8):
        seen.clear()
        leak_test(smlp.build("gmlp_lm_tiny", **narrow), dtypes=(torch.float32,), positions=[1, 15], seed=seed)
        before, from_1, from_15, others = seen[:4]
        assert (before[0, 1:] != from_1[0, 1:]).all() and before[0, 15] != from_15[0, 15]
        assert (before[1:] != others[1:]).all() and torch.equal(before[0], others[0])


def test_positions_reach_both_ends():
    assert default_positions(128)[0] == 1 and default_positions(128)[-1] == 127
    assert default_positions(2) == [1] and default_positions(1) == [] and default_positions(128, 1) == [64]
    assert len(default_positions(1024, 5)) == 5
