"""The sMoE's own settings: what it adds to the residual stream, where it stands, its matrices and their start."""

import pytest
import torch
from comparing import assert_same
from sparse_references import randomised

import smlp
from smlp.config import unflatten
from smlp.costs.counted import build_without_weights, counted_flops
from smlp.costs.formula import forward_flops, parameters
from smlp.moe.experts import SpatialExperts
from smlp.nn.blocks import sparse_block
from smlp.nn.layers import SpatialWeights, decaying_average
from smlp.nn.state import ForwardContext

SMALL = {"vocab_size": 30, "max_tokens": 8, "embed_dim": 8, "ffn_dim": 10, "num_experts": 2, "dropout": 0.0}
SMALL |= {"num_dense_layers": 1, "num_sparse_layers": 1, "router": "hash"}
IDS = torch.randint(2, 30, (2, 7), generator=torch.Generator().manual_seed(1))


def block_of(**settings):
    return randomised(sparse_block(unflatten({**SMALL, **settings}), layer_index=1)).train()


def hidden():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 7, 8, dtype=torch.double, generator=generator, requires_grad=True)


@pytest.mark.parametrize("routing", ["deterministic", "partial"])
@pytest.mark.parametrize("inner", [0, 3, 8])
@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_scale_and_projection_feature_by_feature(scale, inner, routing):
    own = {"smlp_feature_scale": scale, "smlp_projection_dim": inner, "feature_routing": routing}
    sublayer, x = block_of(**own).mixing, hidden()
    context = ForwardContext(tokens_Bn=IDS)
    update = sublayer.feature_moe(x, context)
    matrices = [layer.weight for layer in sublayer.projection]
    assert [tuple(matrix.shape) for matrix in matrices] == {0: [], 3: [(3, 8), (8, 3)], 8: [(8, 8)]}[inner]
    for matrix in matrices:
        update = sum(update[..., j, None] * matrix[:, j] for j in range(matrix.size(1)))
    if scale:
        update = torch.stack([sublayer.scale[j] * update[..., j] for j in range(8)], dim=2)
    else:
        assert sublayer.scale is None
    got = sublayer(x, ForwardContext(tokens_Bn=IDS, plans=dict(context.plans)))
    assert_same(got, x + update, [x, *sublayer.parameters()], 1e-10)


def test_a_scale_starts_with_its_value():
    sublayer = sparse_block(unflatten({**SMALL, "smlp_feature_scale": 0.25}), 1).mixing
    assert sublayer.scale.tolist() == [0.25] * 8


def test_tokens_first():
    block, x = block_of(smlp_order="tokens_first"), hidden()
    got, _ = block(x, ForwardContext(tokens_Bn=IDS))
    update, _ = block.token_moe(block.norm(x), ForwardContext(tokens_Bn=IDS))
    want = block.mixing(x + update, ForwardContext(tokens_Bn=IDS))
    assert_same(got, want, [x, *block.parameters()], 1e-12)
    usual = block_of()
    usual.load_state_dict(block.state_dict())
    assert not torch.allclose(usual(x, ForwardContext(tokens_Bn=IDS))[0], got)


@pytest.mark.parametrize("routing", ["deterministic", "partial"])
def test_toeplitz_experts_are_full_ones_with_constant_diagonals(routing):
    toeplitz = block_of(feature_routing=routing, smlp_spatial_weights="toeplitz").mixing
    full = block_of(feature_routing=routing).mixing
    w_ET = toeplitz.feature_moe.experts.weight
    size = w_ET.size(1)
    state = {**toeplitz.state_dict(), "feature_moe.experts.weight": torch.zeros(2, size, size, dtype=torch.double)}
    for row in range(size):
        for column in range(row + 1):  # the last number is that of the position itself
            state["feature_moe.experts.weight"][:, row, column] = w_ET[:, size - 1 - (row - column)].detach()
    full.load_state_dict(state)
    x = hidden()
    got, want = (layer(x, ForwardContext(tokens_Bn=IDS)) for layer in (toeplitz, full))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = torch.randn(got.shape, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    (ours,) = torch.autograd.grad((got * weights).sum(), [w_ET])
    (theirs,) = torch.autograd.grad((want * weights).sum(), [full.feature_moe.experts.weight])
    for distance in range(size):
        summed = theirs.diagonal(-distance, dim1=1, dim2=2).sum(dim=1)
        torch.testing.assert_close(ours[:, size - 1 - distance], summed, rtol=1e-10, atol=1e-10)


def test_matrices_of_the_smoe_and_of_the_gates_are_chosen_apart():
    for own, of_all, want in (
        ("as_model", "toeplitz", (True, True)),
        ("full", "toeplitz", (False, True)),
        ("toeplitz", "full", (True, False)),
    ):
        model = smlp.build("smlp_tiny", **SMALL, smlp_spatial_weights=own, spatial_weights=of_all)
        kinds = {isinstance(m, SpatialExperts): m.is_toeplitz for m in model.modules() if isinstance(m, SpatialWeights)}
        assert (kinds[True], kinds[False]) == want


@pytest.mark.parametrize("is_toeplitz", [False, True])
def test_a_start_as_a_decaying_average(is_toeplitz):
    size, heads = 16, 4
    torch.manual_seed(0)
    near_zero = SpatialWeights(size, range(heads), 1e-3, 0.0, is_toeplitz=is_toeplitz)
    torch.manual_seed(0)
    weights = SpatialWeights(size, range(heads), 1e-3, 0.0, is_toeplitz=is_toeplitz, average=0.5)
    added_hTT = (weights.matrices() - near_zero.matrices()).tril().detach()
    for head in range(heads):
        decay = 0.5 ** (1 / size ** ((head + 0.5) / heads))
        for row in range(size):
            want = [0.5 * (1 - decay) * decay ** (row - column) if column <= row else 0 for column in range(size)]
            assert added_hTT[head, row].tolist() == pytest.approx(want, abs=1e-6)
    part = decaying_average(size, [2, 3], num_all=heads)
    assert torch.equal(part, decaying_average(size, range(heads), heads)[2:]), "whatever rank they are on"


@pytest.mark.parametrize("arch", ["smlp_tiny", "smlp_partial_tiny", "gmlp_lm_tiny", "gmlp_moe_tiny"])
def test_the_start_reaches_every_block(arch):
    size = {name: value for name, value in SMALL.items() if name != "router"}
    size |= {"num_sparse_layers": 0} if arch == "gmlp_lm_tiny" else {}
    model = smlp.build(arch, **size, spatial_init_average=1.0)
    found = [module for module in model.modules() if isinstance(module, SpatialWeights)]
    assert found and all(module.weight.diagonal(dim1=1, dim2=2).min().item() > 0.05 for module in found)


SETTINGS = [
    {"smlp_feature_scale": 0.1},
    {"smlp_projection_dim": 3},
    {"smlp_projection_dim": 8, "feature_routing": "partial"},
    {"smlp_spatial_weights": "toeplitz", "feature_routing": "partial"},
    {"smlp_order": "tokens_first", "router": "loss_free"},
    {"router": "base", "base_warmup": 0.1, "base_offset_rate": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(map(str, settings)))
def test_costs_by_formula_are_those_counted(settings):
    config = unflatten({**SMALL, **settings})
    model = build_without_weights(config)
    assert sum(counted_flops(model, 2, 8).values()) == forward_flops(config, 2, 8)
    assert sum(p.numel() for p in model.parameters()) == parameters(config).total


@pytest.mark.parametrize(
    ("arch", "scaling", "factor"),
    [
        *(("dense_lm_tiny", scaling, factor) for scaling, factor in (("with_positions", 4), ("never", 1))),
        *(("smlp_tiny", scaling, factor) for scaling, factor in (("with_positions", 1), ("always", 4))),
        ("bert_mlm_tiny", "with_positions", 1),
        ("bert_mlm_tiny", "always", 4),
    ],
)
def test_the_embedding_is_scaled_alike_where_asked(arch, scaling, factor):
    sizes = {"embed_dim": 16, "ffn_dim": 16, "vocab_size": 30, "max_tokens": 8, "num_heads": 2, "dropout": 0.0}
    sizes |= {"num_dense_layers": 1, "num_experts": 2}
    model = smlp.build(arch, **sizes, embed_scaling=scaling).eval()
    assert model.config.embed_scale == factor
    if getattr(model, "embedding_norm", None) is not None:  # that of encoders comes after
        model.embedding_norm = torch.nn.Identity()
    x = model._embedded(IDS, ForwardContext())
    positions = 0 if model.config.positions == "none" else model.positions[:7]
    torch.testing.assert_close(x, factor * model.embedding(IDS) + positions)


def test_dropout_after_the_experts_of_tokens():
    for arch in ("smlp_tiny", "gmlp_moe_tiny"):
        for given, want in ((None, 0.3), (0.0, 0.0), (0.2, 0.2)):
            model = smlp.build(arch, **{**SMALL, "dropout": 0.3}, expert_dropout=given)
            (probability,) = {m.dropout.probability for m in model.blocks if hasattr(m, "token_moe")}
            assert probability == want
            assert model.dropout.probability == 0.3
