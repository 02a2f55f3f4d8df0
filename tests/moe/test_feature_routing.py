"""sMoE with routed features, partial and leaky: one feature at a time, prefixes, decoding, padding."""

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same
from sparse_references import randomised

import smlp
from smlp.config import unflatten
from smlp.evaluation.leak import randomise
from smlp.moe.routers import FeatureRouter
from smlp.nn.blocks.smlp import feature_moe
from smlp.nn.state import DecodingState, ForwardContext
from smlp.ops import balanced_assignments

WIDTH, MAX_TOKENS, PREFIX = 8, 10, 2
KINDS = ("partial", "leaky")
# of whole models; their prefix is three tokens long
SMALL = {"vocab_size": 40, "max_tokens": 14, "embed_dim": 16, "ffn_dim": 16, "num_experts": 4, "dropout": 0.0}


def tokens(*shape):
    return torch.randint(2, 40, shape, generator=torch.Generator().manual_seed(0))


def make(kind, num_experts=4, feature_experts="gated"):
    settings = {"vocab_size": 30, "max_tokens": MAX_TOKENS, "embed_dim": WIDTH, "ffn_dim": 8}
    settings |= {"num_dense_layers": 1, "num_sparse_layers": 1, "feature_routing": kind, "num_experts": num_experts}
    settings["feature_experts"] = feature_experts
    layer = feature_moe(unflatten(settings), layer_index=1)
    assert layer.prefix_tokens == PREFIX and layer.experts.weight.shape == (num_experts, 8, 8)
    return randomised(layer)


def inputs(num_seqs, num_tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_seqs, num_tokens, WIDTH, dtype=torch.double, generator=generator, requires_grad=True)


def context_of(x, **settings):
    return ForwardContext(tokens_Bn=torch.full(x.shape[:2], 5), **settings)


def layer_norm(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def slow_update(layer, x_BnH, expert_BH, gated=True):
    """Equation 5 of Yu et al., 2022 for each sequence, feature and position by itself, the experts being given."""
    num_seqs, num_tokens, width = x_BnH.shape
    num_read = min(num_tokens, layer.router.weight.size(1))
    sequences = []
    for b in range(num_seqs):
        z_nH = layer_norm(layer.norm, x_BnH[b])
        u_nH = layer_norm(layer.spatial_norm, z_nH)
        columns = []
        for j in range(width):
            scores = [sum(w[t] * u_nH[t, j] for t in range(num_read)) for w in layer.router.weight]
            expert = expert_BH[b, j].item()
            probability = scores[expert].exp() / sum(score.exp() for score in scores)
            weight, bias = layer.experts.weight[expert], layer.experts.bias[expert]
            column = [x_BnH.new_zeros(())] * min(PREFIX, num_tokens)
            for t in range(PREFIX, num_tokens):
                mixed = sum(weight[t - PREFIX, s - PREFIX] * u_nH[s, j] for s in range(PREFIX, t + 1))
                column.append(probability * (z_nH[t, j] if gated else 1) * (mixed + bias[t - PREFIX]))
            columns.append(torch.stack(column))
        sequences.append(torch.stack(columns, dim=1))
    return torch.stack(sequences)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_experts", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [PREFIX + 1, 7, MAX_TOKENS])
def test_against_one_feature_at_a_time(kind, num_experts, num_tokens):
    layer = make(kind, num_experts).train()
    x = inputs(3, num_tokens)
    context = context_of(x)
    update = layer(x, context)
    expert_BH = context.plans[layer]
    for row in expert_BH:
        assert row.bincount(minlength=num_experts).tolist() == [WIDTH // num_experts] * num_experts
    assert not update[:, :PREFIX].any(), "the prefix passes through"
    assert_same(update, slow_update(layer, x, expert_BH), [x, *layer.parameters()], 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_experts_against_one_feature_at_a_time(kind):
    layer, x = make(kind, feature_experts="linear").train(), inputs(3, 7)
    context = context_of(x)
    update = layer(x, context)
    expected = slow_update(layer, x, context.plans[layer], gated=False)
    assert_same(update, expected, [x, *layer.parameters()], 1e-9)


def test_the_best_balanced_choice_by_hand():
    # sequence 0: every feature has its favourite. Sequence 1: all four want expert 0; those that gain least give way.
    scores = torch.tensor([
        [[4.0, 0.0], [0.0, 4.0], [0.0, 4.0], [4.0, 0.0]],
        [[9.0, 0.0], [2.0, 1.0], [8.0, 1.0], [3.0, 1.0]],
    ])  # fmt: skip
    assert balanced_assignments(scores).tolist() == [[0, 1, 1, 0], [0, 1, 0, 1]]
    assert balanced_assignments(scores.flip(0)).tolist() == [[0, 1, 0, 1], [0, 1, 1, 0]]
    assert balanced_assignments(scores[:0]).shape == (0, 4)


def test_a_router_scores_what_it_reads_and_keeps_to_a_decision():
    router = FeatureRouter(num_positions=3, num_experts=2)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 2.0, 5.0], [3.0, -1.0, 7.0]]))
    v = torch.tensor([[[1.0, 1.0], [0.0, 2.0]]])  # two features over two positions: the third column is not used
    experts, probability, scores = router(v)
    assert scores.tolist() == [[[3.0, 2.0], [4.0, -2.0]]] and experts.tolist() == [[1, 0]]
    # the chosen scores are 2 and 4, the others one higher and six lower
    torch.testing.assert_close(probability, torch.tensor([[-1.0, 6.0]]).sigmoid())
    given, probability, _ = router(v, torch.tensor([[0, 0]]))
    assert given.tolist() == [[0, 0]] and probability[0, 0] > 0.7
    assert router.bfloat16()(v.bfloat16())[2].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_do_not_see_each_other(kind):
    layer, x = make(kind), inputs(4, 9)
    together = layer(x, context_of(x))
    alone = torch.cat([layer(row.unsqueeze(0), context_of(row.unsqueeze(0))) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_partial_routing_reads_the_prefix_only_and_leaky_all():
    x = inputs(2, MAX_TOKENS).detach()
    changed = x.clone()
    changed[:, PREFIX:] = inputs(2, MAX_TOKENS, seed=2)[:, PREFIX:].detach()
    for kind, same in (("partial", True), ("leaky", False)):
        layer, contexts = make(kind), (context_of(x), context_of(x))
        for values, context in zip((x, changed), contexts, strict=True):
            layer(values, context)
        assert torch.equal(contexts[0].plans[layer], contexts[1].plans[layer]) == same
        # the last token acts on no earlier position where routing reads the prefix
        before, after = x.clone(), x.clone()
        after[:, -1] += 1
        updates = [layer(values, context_of(x))[:, :-1] for values in (before, after)]
        assert torch.equal(*updates) == same
    moved = x.clone()
    moved[:, 0] = -moved[:, 0]
    layer, contexts = make("partial"), (context_of(x), context_of(x))
    updates = [layer(values, context) for values, context in zip((x, moved), contexts, strict=True)]
    assert not torch.equal(contexts[0].plans[layer], contexts[1].plans[layer])
    assert not torch.allclose(updates[0][:, PREFIX:], updates[1][:, PREFIX:])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    layer, x = make(kind).train(), inputs(4, MAX_TOKENS)
    lengths = torch.tensor([MAX_TOKENS, 6, PREFIX - 1, 0])
    valid = torch.arange(MAX_TOKENS) < lengths.unsqueeze(1)
    padded = layer(x, context_of(x, valid_Bn=valid))
    rows = [x[b : b + 1, :n] for b, n in enumerate(lengths.tolist())]
    alone = torch.cat([layer(row, context_of(row)).flatten() for row in rows[:2]])
    gradient, *_ = assert_same(padded[:2][valid[:2]].flatten(), alone, [x, *layer.parameters()], 1e-12)
    assert not gradient[~valid].any()
    assert not padded[2:][valid[2:]].any() and padded.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, PREFIX])
def test_an_input_no_longer_than_the_prefix(kind, num_tokens):
    layer, x = make(kind).eval(), inputs(2, num_tokens)
    assert not layer(x, context_of(x)).any()
    model = randomise(smlp.build(f"smlp_{kind}_tiny", **SMALL))
    short = tokens(2, 2 + num_tokens)[:, : model.config.prefix_tokens]
    assert model.eval()(short).logits.isfinite().all()
    with pytest.raises(smlp.UserError, match=r"3 tokens.*first 3"):
        model.train()(short)
    model(tokens(2, 4)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("chunks", [[14], [1] * 14, [2, 2, 10], [3, 11], [4, 1, 9], [1, 7, 6], [2, 1, 1, 4, 6]])
def test_decoding_in_chunks_equals_the_full_forward(chunks):
    model, ids = randomise(smlp.build("smlp_partial_tiny", **SMALL)).double().eval(), tokens(3, 14)
    assert model.config.prefix_tokens == 3
    with torch.no_grad():
        full, state = model(ids).logits, DecodingState()
        steps = torch.cat([model(part, state).logits for part in ids.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(steps, full, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [2, 3, 7])
def test_sequences_keep_their_routing_when_reordered_and_copied(first):
    model, ids = randomise(smlp.build("smlp_partial_tiny", **SMALL)).double().eval(), tokens(3, 14)
    others = torch.cat([ids[:, :first], ids.flip(0)[:, first:]], dim=1)  # the same prompts, continued in another way
    order = torch.tensor([2, 2, 0, 1])
    with torch.no_grad():
        state = DecodingState()
        model(ids[:, :first], state)
        copy = state.clone()
        full, full_copy = model(ids[order]).logits, model(others).logits
        state.reorder(order)
        reordered_copy = state.clone()
        for part in (slice(first, first + 2), slice(first + 2, 14)):  # in turn: none may write over another
            got = model(ids[order, part], state).logits
            torch.testing.assert_close(got, full[:, part], rtol=1e-10, atol=1e-10)
            got = model(others[:, part], copy).logits
            torch.testing.assert_close(got, full_copy[:, part], rtol=1e-10, atol=1e-10)
            got = model(others[order, part], reordered_copy).logits
            torch.testing.assert_close(got, full_copy[order, part], rtol=1e-10, atol=1e-10)


def test_leaky_routing_cannot_write_text():
    model = smlp.build("smlp_leaky_tiny", **SMALL).eval()
    for num_tokens in (1, 5):
        with pytest.raises(smlp.UserError, match=r"layer 2 \(sMoE\).*whole sequence"):
            model(tokens(1, num_tokens), DecodingState())


@pytest.mark.parametrize("kind", KINDS)
def test_nan_names_the_layer(kind):
    layer, x = make(kind), inputs(2, 6).detach()
    x[1, 0, 3] = float("nan")  # the layer norm spreads it over its position
    with pytest.raises(smlp.errors.NaNError, match=r"layer 1 \(sMoE\)"):
        layer(x, context_of(x))


def test_observations_count_features():
    layer, x = make("partial"), inputs(3, 6)
    context = context_of(x, observe=True)
    layer(x, context)
    observation = context.observations[layer]
    assert observation.plan.counts_E.tolist() == [6] * 4 and observation.plan.num_tokens == 3 * WIDTH
    assert observation.logits_NE.shape == (3 * WIDTH, 4) and not observation.logits_NE.requires_grad
    expert_N = torch.empty(3 * WIDTH, dtype=torch.long)
    expert_N[observation.plan.token_A] = observation.plan.expert_A
    assert torch.equal(expert_N.view(3, WIDTH), context.plans[layer])
