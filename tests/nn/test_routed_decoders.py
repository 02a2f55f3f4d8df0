"""Routing in whole decoders: decided once under recomputation, and by each token alone in evaluation."""

import pytest
import torch
from architectures import LANGUAGE_MODELS

import smlp
from smlp.evaluation.leak import randomise
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import HashRouter, TopKRouter, balanced, features
from smlp.nn.state import ForwardContext


def decoders():
    """Every tiny architecture, and routers in blocks that no architecture combines, narrowed."""
    noise = {"router_jitter": 0.1, "base_shuffle": True, "second_expert": "random"}
    cases = {arch: (arch, noise) for arch in LANGUAGE_MODELS if arch.endswith("_tiny")}
    cases["gshard_lm_tiny, sampled"] = ("gshard_lm_tiny", {**noise, "second_expert": "sampled"})
    cases["switch_lm_tiny, by gate"] = ("switch_lm_tiny", {**noise, "drop_order": "gate"})
    for router in ("switch", "gshard", "hash"):
        cases[f"gmlp_moe_tiny, {router}"] = ("gmlp_moe_tiny", {**noise, "router": router})
        cases[f"smlp_partial_tiny, {router}"] = ("smlp_partial_tiny", {**noise, "router": router})
    return cases


DECODERS = decoders()
NARROW = {"vocab_size": 64, "max_tokens": 20, "embed_dim": 64, "ffn_dim": 64}


def make_decoder(name, **overrides):
    arch, settings = DECODERS[name]
    return randomise(smlp.build(arch, **{**NARROW, **settings, **overrides}))


def random_tokens(*shape):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", DECODERS)
def test_recomputation_draws_and_decides_as_the_first_time(name, monkeypatch):
    decisions = []

    def count(owner, function):
        original = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *args: decisions.append(1) or original(*args))

    count(TopKRouter, "_decide")
    count(balanced, "balanced_plan")
    count(features, "balanced_assignments")
    losses, gradients, numbers = [], [], []
    for recompute in (False, True):
        decisions.clear()
        model = make_decoder(name, dropout=0.3, checkpoint_activations=recompute).train()
        torch.manual_seed(5)
        output = model(random_tokens(3, 20))
        loss = output.logits.logsumexp(-1).sum() + 100 * sum(output.aux_losses.values())
        numbers.append(torch.rand(()))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        losses.append(loss.detach())
        routed = [m for m in model.modules() if hasattr(m, "router") and not isinstance(m.router, HashRouter)]
        assert len(decisions) == len(routed), "one decision for each layer"
    assert torch.equal(*losses) and torch.equal(*numbers)
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("name", DECODERS)
def test_in_evaluation_nothing_is_dropped_and_batch_mates_do_not_matter(name):
    model = make_decoder(name).double().eval()
    tokens = random_tokens(3, 20)
    tokens[1:] = tokens[1, 0]  # all of them want the same experts
    context = ForwardContext()
    with torch.no_grad():
        together = model(tokens, context=context).logits
        alone = torch.cat([model(row.unsqueeze(0)).logits for row in tokens])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    for plan in context.plans.values():
        if isinstance(plan, RoutingPlan):
            assert plan.token_A.numel() == 60 * model.config.experts_per_token
            assert plan.dropped.get("capacity", 0) == plan.dropped.get("second_expert", 0) == 0


@pytest.mark.parametrize("name", ["switch_lm_tiny", "gshard_lm_tiny", "gmlp_moe_tiny, switch"])
def test_in_evaluation_a_limit_can_be_asked_for(name):
    tokens = random_tokens(3, 20)
    tokens[1:] = tokens[1, 0]
    results = []
    for factor in (0.0, 0.5, 64.0):
        model = make_decoder(name, eval_capacity_factor=factor).eval()
        context = ForwardContext()
        with torch.no_grad():
            results.append(model(tokens, context=context).logits)
        dropped = [plan.dropped["capacity"] for plan in context.plans.values()]
        assert all(count > 0 for count in dropped) == (factor == 0.5) == any(dropped)
    assert torch.equal(results[0], results[2]) and not torch.allclose(results[0], results[1])


@pytest.mark.parametrize("arch", ["switch_lm_tiny", "gshard_lm_tiny"])
def test_losses_of_all_layers_are_summed(arch):
    model, losses = make_decoder(arch, router_z_weight=0.1).train(), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, outputs: losses.append(outputs[1]))
    total = model(random_tokens(3, 20)).aux_losses
    assert [sorted(loss) for loss in losses] == [[], ["load_balance", "router_z"]] * 2 and len(total) == 2
    for name, value in total.items():
        torch.testing.assert_close(value, losses[1][name] + losses[3][name])
        assert losses[1][name] > 0 and losses[3][name] > 0
