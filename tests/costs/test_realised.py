"""Realised work compared with the nominal work of the same tokens."""

import pytest
import torch

import smlp
from smlp.costs.component import ROUTER
from smlp.costs.formula import components, flops_per_token
from smlp.costs.realised import Work, num_pairs, realised_work
from smlp.moe.balance import layer_record, routing_sums
from smlp.moe.plan import RoutingPlan
from smlp.nn.blocks.sparse import TOKEN_EXPERTS
from smlp.nn.state import ForwardContext

B, T, E, V = 4, 20, 4, 60
NARROW = {
    **{"vocab_size": V, "max_tokens": T, "embed_dim": 16, "ffn_dim": 16, "num_heads": 2, "num_experts": E},
    **{"num_dense_layers": 1, "num_sparse_layers": 1, "dropout": 0.0},
}
ARCHS = ("dense_lm", "gmlp_lm", "smlp", "smlp_partial", "smlp_leaky", "gmlp_moe", "gshard_lm", "switch_lm", "base_lm")


def model(arch, **overrides):
    torch.manual_seed(1)
    dense = {"num_sparse_layers": 0} if arch in ("dense_lm", "gmlp_lm") else {}
    return smlp.build(f"{arch}_tiny", **{**NARROW, **dense, **overrides})


def tokens(num_padded=0, num_tokens=T):
    ids = torch.randint(2, V, (B, num_tokens), generator=torch.Generator().manual_seed(0))
    ids[-1, num_tokens - num_padded :] = 1
    return ids


def run(decoder, ids):
    context = ForwardContext(observe=True)
    decoder(ids, context=context)
    return realised_work(decoder, context), context


@pytest.mark.parametrize("arch", [*ARCHS, "hash_lm"])
@pytest.mark.parametrize("num_tokens", [T, 13])
def test_without_padding_and_drops_it_is_the_nominal_work(arch, num_tokens):
    decoder = model(arch).eval()
    work, context = run(decoder, tokens(num_tokens=num_tokens))
    assert (work.tokens, work.positions, work.padded_share) == (B * num_tokens, B * num_tokens, 0)
    assert work.nominal_flops == pytest.approx(B * num_tokens * flops_per_token(decoder.config, num_tokens))
    assert work.recomputed_flops == 0
    if arch == "gmlp_moe":  # pairs at equal loads are the fewest there can be
        (part,) = [part for part in components(decoder.config, num_tokens) if part.flops_per_pair]
        pairs = num_pairs(context.plans[decoder.blocks[part.layer].token_moe], context)
        each, more = divmod(num_tokens, E)
        missing = part.flops_per_pair * (pairs - B * ((E - more) * each**2 + more * (each + 1) ** 2))
        assert missing > 0 and work.realised_flops - work.nominal_flops == pytest.approx(missing)
    else:
        assert work.ratio == pytest.approx(1)
        assert work.realised_expert_flops == work.nominal_expert_flops


@pytest.mark.parametrize(("arch", "kept"), [("switch_lm", 20), ("gshard_lm", 80)])
def test_all_tokens_to_one_expert_shows_the_share_that_was_dropped(arch, kept):
    """Every token likes expert 2 best and expert 0 second. Switch has 20 places at each expert, GShard 40."""
    decoder = model(arch, capacity_factor=1.0, second_expert="all").train()
    block = next(block for block in decoder.blocks if hasattr(block, "token_moe"))
    with torch.no_grad():
        block.norm.weight.zero_()
        block.norm.bias.fill_(1.0)
        block.token_moe.router.weight.zero_()
        block.token_moe.router.weight[2] = 1.0
        block.token_moe.router.weight[0] = 0.5
    work, context = run(decoder, tokens())
    record = layer_record(routing_sums(context.observations[block.token_moe]))
    dropped = 1 - kept / (B * T * decoder.config.experts_per_token)
    assert record["num_assignments"] == kept and record["drop_share"] == pytest.approx(dropped)
    missing = work.nominal_expert_flops - work.realised_expert_flops
    assert missing / work.nominal_expert_flops == pytest.approx(dropped, rel=1e-12)
    assert work.nominal_flops - work.realised_flops == pytest.approx(missing, rel=1e-12), "nothing else is missing"


@pytest.mark.parametrize("arch", ["switch_lm", "smlp"])
def test_padding_is_worked_on_but_not_routed(arch):
    decoder = model(arch).eval()
    work, _ = run(decoder, tokens(num_padded=8))
    assert (work.tokens, work.positions) == (B * T - 8, B * T)
    assert work.padded_share == pytest.approx(8 / (B * T))
    assert work.realised_expert_flops == work.nominal_expert_flops
    wasted = sum(part.flops_per_position for part in components(decoder.config) if part.kind != ROUTER)
    assert work.realised_flops - work.nominal_flops == pytest.approx(8 * wasted)


@pytest.mark.parametrize("arch", ["gmlp_lm", "switch_lm"])
def test_recomputation_does_the_blocks_once_more(arch):
    plain, _ = run(model(arch, capacity_factor=0.0).train(), tokens())
    decoder = model(arch, capacity_factor=0.0, checkpoint_activations=True)
    work, _ = run(decoder.train(), tokens())
    head = sum(part.flops_per_position for part in components(decoder.config) if part.layer is None)
    assert work.recomputed_flops == pytest.approx(plain.realised_flops - B * T * head)
    assert work.realised_flops == pytest.approx(plain.realised_flops + work.recomputed_flops)
    assert work.nominal_flops == plain.nominal_flops
    assert run(decoder.eval(), tokens())[0].recomputed_flops == 0


def test_pairs_by_hand():
    """Two sequences of three positions, the last one padding. Expert 0: positions 0 and 2 of the first sequence and
    position 0 of the second: 2*2 + 1 pairs; expert 1: one position of each: 1 + 1 pairs."""
    context = ForwardContext(tokens_Bn=torch.zeros(2, 3), valid_Bn=torch.tensor([[True] * 3, [True, True, False]]))
    plan = RoutingPlan.from_experts(torch.tensor([0, 1, 0, 0, 1]), 2)
    assert num_pairs(plan, context) == 7


def test_work_adds_up_as_a_vector():
    works = [Work(*map(float, range(start, start + 7))) for start in (0, 10)]
    total = Work.from_tensor(works[0].to_tensor() + works[1].to_tensor())
    assert total == Work(10, 12, 14, 16, 18, 20, 22) and Work.size() == works[0].to_tensor().numel()
    assert Work().ratio is None and Work().padded_share is None


def test_expert_work_is_that_of_the_assignments():
    decoder = model("gshard_lm", capacity_factor=0.5).train()
    work, context = run(decoder, tokens())
    (part,) = [part for part in components(decoder.config) if part.kind == TOKEN_EXPERTS]
    plan = context.plans[decoder.blocks[part.layer].token_moe]
    assert work.realised_expert_flops == part.flops_per_assignment * plan.token_A.numel()
    assert 0 < plan.token_A.numel() < 2 * B * T
