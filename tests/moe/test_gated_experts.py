"""gMLP-MoE: one sequence, expert and token at a time; who sees whom; decoding; a gMLP block in disguise."""

import pytest
import torch
import torch.nn.functional as F
from comparing import EXACT, assert_same
from sparse_references import randomised

import smlp
from smlp.config import unflatten
from smlp.evaluation.leak import randomise
from smlp.moe.routers import HashRouter
from smlp.nn.blocks import GatedMLPBlock, GatedMLPExperts, sparse_block
from smlp.nn.blocks.gmlp_moe import PlacedTokenMoE, gated_mlp_moe
from smlp.nn.state import DecodingState, ForwardContext

ROUTERS = {
    "base": {"router": "base"},
    "hash": {"router": "hash"},
    "switch": {"router": "switch", "capacity_factor": 0.7},
    "gshard": {"router": "gshard", "second_expert": "all", "capacity_factor": 0.8},
}
SMALL = {"vocab_size": 30, "max_tokens": 8, "embed_dim": 6, "ffn_dim": 10, "dropout": 0.0, "sparse_block": "gmlp_moe"}
SMALL |= {"num_dense_layers": 1, "num_sparse_layers": 1}


def make_layer(router, num_experts):
    return randomised(gated_mlp_moe(unflatten({**SMALL, **ROUTERS[router], "num_experts": num_experts}), 1)).train()


def batch(num_seqs=3, num_tokens=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_seqs, num_tokens, 6, dtype=torch.double, generator=generator, requires_grad=True)
    return x, torch.randint(2, 30, (num_seqs, num_tokens), generator=generator)


def slow_update(experts, x_BnH, assignments, weights):
    """Appendix A of Yu et al., 2022: one expert, sequence and token after the other.

    Args:
        assignments: (sequence, position, expert) of every routed token.
        weights: of the assignments.
    """

    def halves(e, x_H):
        x_H = F.layer_norm(x_H, x_H.shape, experts.norm_weight[e], experts.norm_bias[e])
        z1, z2 = F.gelu(experts.w_in[e] @ x_H + experts.b_in[e]).chunk(2)
        return z1, F.layer_norm(z2, z2.shape, experts.gate_norm_weight[e], experts.gate_norm_bias[e])

    rows = {(b, t): x_BnH.new_zeros(x_BnH.size(2)) for b in range(x_BnH.size(0)) for t in range(x_BnH.size(1))}
    for (b, t, e), weight in zip(assignments, weights, strict=True):
        gate = experts.gating.bias[e, t]
        for other, s, other_expert in assignments:
            if (other, other_expert) == (b, e) and s <= t:
                gate = gate + experts.gating.weight[e, t, s] * halves(e, x_BnH[b, s])[1]
        rows[b, t] = rows[b, t] + weight * (experts.w_out[e] @ (halves(e, x_BnH[b, t])[0] * gate) + experts.b_out[e])
    return torch.stack(list(rows.values())).view(x_BnH.shape)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("num_experts", [1, 4, 40])
def test_against_one_token_at_a_time(router, num_experts):
    layer, (x, ids) = make_layer(router, num_experts), batch()
    valid = torch.arange(7) < torch.tensor([7, 4, 0]).unsqueeze(1)
    context = ForwardContext(tokens_Bn=ids, valid_Bn=valid)
    update, _ = layer(x, context)
    plan = context.plans[layer]
    places = valid.nonzero().tolist()
    assignments = [
        (*places[i], e) for i, e in zip(plan.token_A.tolist(), plan.expert_A.tolist(), strict=True)
    ]  # fmt: skip
    # the weights are the router's own, tested elsewhere
    weights = layer.router(x[valid], ids[valid], plan).weight_A
    weights = torch.ones(len(assignments), dtype=torch.double) if weights is None else weights
    parameters = [x, *layer.experts.parameters()]
    assert_same(update, slow_update(layer.experts, x, assignments, weights), parameters, 1e-9)
    if num_experts == 4:
        assert len(assignments) < 11 * layer.experts.experts_per_token or router in ("base", "hash")


# weights of an expert and of a gMLP block
SAME = {
    "norm_weight": "norm.weight", "norm_bias": "norm.bias", "w_in": "proj_in.weight", "b_in": "proj_in.bias",
    "gate_norm_weight": "gating.norm.weight", "gate_norm_bias": "gating.norm.bias",
    "gating.weight": "gating.heads.weight", "gating.bias": "gating.heads.bias",
    "w_out": "proj_out.weight", "b_out": "proj_out.bias",
}  # fmt: skip


@pytest.mark.parametrize("router", ["hash", "switch", "gshard"])
def test_one_expert_is_a_gmlp_block(router):
    config = unflatten({**SMALL, "router": router, "num_experts": 1, "capacity_factor": 0.0})
    dense, sparse, (x, ids) = randomised(GatedMLPBlock(config)), sparse_block(config, 1).double(), batch()
    theirs, ours = dict(dense.named_parameters()), dict(sparse.token_moe.experts.named_parameters())
    assert set(SAME) == set(ours) and set(SAME.values()) == set(theirs)
    gradients = []
    for block, weights in ((dense, [theirs[name] for name in SAME.values()]), (sparse, [ours[name] for name in SAME])):
        with torch.no_grad():
            for weight, name in zip(weights, SAME.values(), strict=True):
                weight.copy_(theirs[name].view(weight.shape))
        outputs, _ = block(x, ForwardContext(tokens_Bn=ids))
        gradients.append([outputs, *torch.autograd.grad(outputs.square().sum(), [x, *weights])])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got.view(want.shape), want, rtol=EXACT, atol=EXACT)


def test_a_token_sees_earlier_tokens_of_its_sequence_at_its_expert_and_no_others():
    layer, (x, ids) = make_layer("hash", 3), batch()
    expert_Bn = layer.router.table[ids]
    x = x.detach()
    before, _ = layer(x, ForwardContext(tokens_Bn=ids))
    for b, t in ((0, 0), (1, 2), (2, 5)):
        moved = x.clone()
        moved[b, t] = torch.randn(6, dtype=torch.double)
        after, _ = layer(moved, ForwardContext(tokens_Bn=ids))
        changed = ((after - before).abs() > 1e-9).any(dim=2)
        expected = torch.zeros_like(changed)
        expected[b, t:] = expert_Bn[b, t:] == expert_Bn[b, t]
        assert torch.equal(changed, expected)
    assert expert_Bn[0].bincount(minlength=3).min() > 0, "the sequence is spread over all experts"


WHOLE = {"vocab_size": 40, "max_tokens": 12, "embed_dim": 16, "ffn_dim": 16, "dropout": 0.0}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 6], [1, 4, 4, 3]])
def test_decoding_in_chunks_equals_the_full_forward(router, chunks):
    model = randomise(smlp.build("gmlp_moe_tiny", num_experts=3, **WHOLE, **ROUTERS[router])).double().eval()
    ids = torch.randint(2, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        full, state = model(ids).logits, DecodingState()
        first, *rest = ids.split(chunks, dim=1)
        torch.testing.assert_close(model(first, state).logits, full[:, : chunks[0]], rtol=EXACT, atol=EXACT)
        copy = state.clone()
        steps = torch.cat([model(part, copy).logits for part in rest], dim=1)
        torch.testing.assert_close(steps, full[:, chunks[0] :], rtol=EXACT, atol=EXACT)
        state.reorder(order)
        steps = torch.cat([model(part[order], state).logits for part in rest], dim=1)
        torch.testing.assert_close(steps, full[order, chunks[0] :], rtol=EXACT, atol=EXACT)


def test_decoding_tells_many_experts_apart_in_bfloat16():
    # bfloat16 holds whole numbers up to 256 only
    layer = PlacedTokenMoE(HashRouter(4, 258, seed=1), GatedMLPExperts(4, 8, 4, range(258), "gelu", 1e-3), "layer 0")
    layer = randomised(layer).bfloat16()
    layer.router.table.copy_(torch.tensor([255, 256, 257, 256]))
    ids, x = torch.tensor([[0, 1, 2, 3]]), torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    state, steps = DecodingState(), []
    with torch.no_grad():
        full, _ = layer(x, ForwardContext(tokens_Bn=ids))
        for t in range(4):
            steps.append(layer(x[:, t : t + 1], ForwardContext(tokens_Bn=ids[:, t : t + 1], state=state))[0])
            state.length += 1
    torch.testing.assert_close(torch.cat(steps, dim=1), full)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("num_experts", [1, 8])
def test_bfloat16_stays_close(router, num_experts):
    model = randomise(smlp.build("gmlp_moe_tiny", num_experts=num_experts, **WHOLE, **ROUTERS[router])).eval()
    ids, context = torch.randint(2, 40, (2, 3), generator=torch.Generator().manual_seed(0)), ForwardContext()
    with torch.no_grad():
        exact = model(ids, context=context).logits
        low = model.bfloat16()(ids, context=ForwardContext(plans=dict(context.plans))).logits
    assert low.dtype == torch.bfloat16 and (low.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    model.train()(ids).logits.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
