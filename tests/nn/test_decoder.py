"""The whole decoder: reference forward, padding, short inputs, incremental decoding, recomputation."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from architectures import LANGUAGE_MODELS
from tiny_decoders import VARIANTS, make, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

import smlp
from smlp.config.presets import PRESETS, preset
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.nn.build import model_of, without_weights
from smlp.nn.state import DecodingState, ForwardContext


def gated_mlp_reference(block, x):
    """Liu et al., 2021, equations 1 and 4, with a masked matrix (one head) and plain tensor algebra."""
    hidden = F.gelu(F.linear(block.norm(x), block.proj_in.weight, block.proj_in.bias))
    z1, z2 = hidden.chunk(2, dim=-1)
    z2 = block.gating.norm(z2)
    num_tokens, num_heads = x.size(1), block.gating.num_heads
    gates = []
    for head, part in enumerate(z2.chunk(num_heads, dim=-1)):
        mask = torch.ones(num_tokens, num_tokens, dtype=x.dtype).tril()
        matrix = block.gating.heads.weight[head, :num_tokens, :num_tokens] * mask
        bias = block.gating.heads.bias[head, :num_tokens, None]
        gates.append(torch.einsum("ts,bsc->btc", matrix, part) + bias)
    return x + F.linear(z1 * torch.cat(gates, dim=-1), block.proj_out.weight, block.proj_out.bias)


@pytest.mark.parametrize("variant", ["gmlp", "gmlp, 3 heads"])
@pytest.mark.parametrize("num_tokens", [1, 7, 12])
def test_gmlp_against_the_reference(variant, num_tokens):
    model = make(variant).double()
    tokens = random_tokens(3, num_tokens)
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        x = gated_mlp_reference(block, x)
    expected = model.norm(x) @ model.embedding.weight.t()
    logits = model(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    coefficients = torch.randn_like(logits)
    ours = torch.autograd.grad((logits * coefficients).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((expected * coefficients).sum(), list(model.parameters()))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_on_the_right_changes_no_real_token(variant):
    model = make(variant).double()
    tokens = random_tokens(4, 10)
    full = model(tokens).logits
    padded = torch.full((4, 12), model.config.padding_idx)
    padded[:, :10] = tokens
    torch.testing.assert_close(model(padded).logits[:, :10], full, rtol=1e-10, atol=1e-10)
    ragged = tokens.clone()
    ragged[1, 4:], ragged[2, 1:], ragged[3, :] = 1, 1, 1  # the last row is padding only
    logits = model(ragged).logits
    torch.testing.assert_close(logits[0], full[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits[1, :4], full[1, :4], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits[2, :1], full[2, :1], rtol=1e-10, atol=1e-10)
    assert logits.isfinite().all()


def test_in_training_padding_takes_no_place_at_an_expert():
    model = make("smlp").train()
    tokens = random_tokens(2, 12)
    tokens[1, 4:] = 1
    context = ForwardContext()
    model(tokens, context=context)
    for plan in context.plans.values():
        assert plan.num_tokens == 16 and plan.counts_E.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first", [1, 5])
def test_step_by_step_equals_the_full_forward(variant, first):
    model = make(variant)
    tokens = random_tokens(3, 12)
    with torch.no_grad():
        full = model(tokens).logits
        state = DecodingState()
        steps = [model(tokens[:, :first], state).logits]
        steps += [model(tokens[:, t : t + 1], state).logits for t in range(first, 12)]
    scale = full.abs().max()
    assert (torch.cat(steps, dim=1) - full).abs().max() <= 1e-5 * scale
    assert state.length == 12


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_can_be_copied_and_belongs_to_one_model(variant):
    model = make(variant).eval()
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        full, state = model(tokens).logits, DecodingState()
        model(tokens[:, :8], state)
        for _ in range(2):  # one prompt, continued twice
            found = model(tokens[:, 8:], copy.deepcopy(state)).logits
            torch.testing.assert_close(found, full[:, 8:], rtol=1e-4, atol=1e-5)
        with pytest.raises(UserError, match="a decoding state of 8 positions belongs to the model that read them"):
            copy.deepcopy(model)(tokens[:, 8:], state)


@pytest.mark.parametrize("arch", [arch for arch in LANGUAGE_MODELS if "leaky" not in arch])
def test_step_by_step_equals_the_full_forward_for_every_preset(arch):
    # every preset's own layer pattern and expert count, narrowed so that it runs in a moment
    narrow = {"vocab_size": 64, "max_tokens": 20, "embed_dim": 64, "ffn_dim": 64}
    model = randomise(smlp.build(arch, **narrow)).eval()
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        full = model(tokens).logits
        state = DecodingState()
        steps = torch.cat([model(tokens[:, t : t + 1], state).logits for t in range(20)], dim=1)
        assert model(tokens[:, :0], state).logits.shape == (2, 0, 64)  # nothing more fits
    assert (steps - full).abs().max() <= 1e-5 * full.abs().max()


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_without_values_is_completed_by_a_checkpoint(variant, positions):
    """A build on the meta device, as FSDP2's users have it, lacks nothing that no state dict holds."""
    usual = make(variant, positions=positions)
    assert ("positions" in usual.state_dict()) == (positions == "learned")
    with torch.device("meta"):
        on_meta = make(variant, positions=positions)
    cases = {
        "memory": (copy.deepcopy(on_meta).to_empty(device="cpu"), False),
        "new memory": (make(variant, positions=positions).to_empty(device="cpu"), False),
        "bfloat16": (copy.deepcopy(on_meta).bfloat16().to_empty(device="cpu"), False),
        "values instead": (on_meta, True),
    }
    for name, (model, assign) in cases.items():
        want = copy.deepcopy(usual).bfloat16() if name == "bfloat16" else usual
        model.load_state_dict(want.state_dict(), assign=assign)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), want.buffers(), strict=True)), name
        assert torch.equal(model(random_tokens(2, 12)).logits, want(random_tokens(2, 12)).logits), name


class Draws(TorchDispatchMode):
    """Counts draws from the normal distribution."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.normal_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", [arch for arch in PRESETS if arch.endswith("_tiny")])
def test_nothing_is_drawn_for_a_model_without_weights(arch):
    """To draw values on the meta device, torch imports its compiler, which takes a second."""
    config = preset(arch)
    with Draws() as usual, torch.device("meta"):
        want = {name: tensor.shape for name, tensor in model_of(config).state_dict().items()}
    with Draws() as ours, without_weights():
        got = model_of(config).state_dict()
    assert usual.count and not ours.count
    assert all(tensor.is_meta for tensor in got.values())
    assert {name: tensor.shape for name, tensor in got.items()} == want


def test_the_table_of_positions_is_one_of_the_model_not_of_how_it_was_moved():
    model = make("dense")
    table = model.positions
    moved = copy.deepcopy(model).half().double()
    assert torch.equal(moved.positions, table.double())
    assert pickle.loads(pickle.dumps(model)).positions.equal(table)
    model.share_memory()
    assert model.positions is table and table.is_shared()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_drawn_or_counted_is_on_a_device_of_its_own_choice(variant):
    """Whatever torch's default device is. Here it is one on which nothing has a value."""
    model, ids = make(variant), random_tokens(2, 12)
    with torch.no_grad():
        want = [model.train()(ids).logits, model.eval()(ids).logits]
        with torch.device("meta"):
            got = [model.train()(ids).logits, model.eval()(ids).logits]
    if "gshard" in variant or variant == "base":  # in training these draw numbers
        want, got = want[1:], got[1:]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("variant", ["smlp, positions", "base"])
def test_a_model_is_built_where_half_precision_is_the_default(variant):
    usual = make(variant).positions.bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make(variant)
        logits = model(random_tokens(2, 12)).logits
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert torch.equal(model.positions, usual)


def test_no_earlier_token_is_computed_again(monkeypatch):
    model = make("smlp")
    rows = []
    original = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *rest: rows.append(x.numel() // x.size(-1)) or original(x, *rest)
    )
    state = DecodingState()
    tokens = random_tokens(1, 12)
    model(tokens[:, :11], state)
    rows.clear()
    model(tokens[:, 11:], state)
    assert rows and max(rows) == 1, "a step must run one token through every channel projection"


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if not variant.startswith("partial")])
def test_sequences_of_no_tokens(variant):
    model = make(variant).train()
    assert model(random_tokens(3, 12)[:, :0]).logits.shape == (3, 0, model.config.vocab_size)


@pytest.mark.parametrize("variant", ["smlp", "gshard", "gmlp_moe"])
def test_what_does_not_continue_a_state_is_refused(variant):
    model, tokens = make(variant), random_tokens(3, 8)
    with torch.no_grad():
        state = DecodingState(capacity=6)
        model(tokens[:, :4], state)
        with pytest.raises(smlp.UserError, match="a decoding state of 3 sequences cannot be continued with 2"):
            model(tokens[:2, 4:6], state)
        with pytest.raises(smlp.UserError, match="room for 6 positions cannot take 3 tokens after 4: give a larger"):
            model(tokens[:, 4:7], state)
        with pytest.raises(smlp.UserError, match="room for 6 positions cannot take 7 tokens after 0"):
            model(tokens[:, :7], DecodingState(capacity=6))
        continued = model(tokens[:, 4:6], state).logits  # it is what it was
        torch.testing.assert_close(continued, model(tokens[:, :6]).logits[:, 4:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["smlp", "partial", "gmlp_moe", "gshard"])
def test_states_can_be_reordered_and_copied(variant):
    model = make(variant)
    tokens = random_tokens(3, 8)
    with torch.no_grad():
        state = DecodingState()
        model(tokens[:, :7], state)
        copy = state.clone()
        order = torch.tensor([2, 2, 0, 1])
        state.reorder(order)
        got = model(tokens[order, 7:], state).logits
        want = model(tokens).logits[order, 7:]
        again = model(tokens[:, 7:], copy).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, model(tokens).logits[:, 7:], rtol=1e-4, atol=1e-4)


def test_too_long_an_input_is_refused_with_both_numbers():
    model = make("smlp")
    with pytest.raises(smlp.UserError, match=r"13 tokens.*max_tokens=12"):
        model(random_tokens(1, 13))
    with pytest.raises(smlp.UserError, match=r"ids must have the shape \(batch, length\), got \(12,\)"):
        model(random_tokens(1, 12)[0])
    for tokens, found in ((random_tokens(1, 12).float(), "one of torch.float32"), ([[1, 2]], r"\[\[1, 2\]\]")):
        with pytest.raises(smlp.UserError, match=f"ids must be a tensor of int64 or int32, got {found}"):
            model(tokens)
    with pytest.raises(smlp.UserError, match="ids are on the device meta, the model is on cpu"):
        model(random_tokens(1, 12).to("meta"))
    size = model.config.vocab_size
    with pytest.raises(smlp.UserError, match=f"ids must be from 0 to {size - 1}, got 5 to {size}"):
        model(torch.tensor([[5, size]]))
    state = DecodingState()
    model(random_tokens(1, 12), state)
    with pytest.raises(smlp.UserError, match=r"13 tokens.*max_tokens=12"):
        model(random_tokens(1, 1), state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputing_activations_changes_nothing(variant):
    tokens = random_tokens(3, 12)
    gradients = []
    for recompute in (False, True):
        model = make(variant, dropout=0.2, checkpoint_activations=recompute).train()
        torch.manual_seed(5)
        loss = model(tokens).logits.logsumexp(-1).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_recomputation_routes_once(monkeypatch):
    calls = []
    from smlp.moe.routers import balanced

    original = balanced.balanced_assignment
    monkeypatch.setattr(balanced, "balanced_assignment", lambda scores: calls.append(1) or original(scores))
    model = make("smlp", checkpoint_activations=True).train()
    model(random_tokens(2, 12)).logits.sum().backward()
    assert len(calls) == 2, "one decision for each of the two sparse layers"


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_close(variant):
    model = make(variant)
    tokens = random_tokens(2, 12)
    context = ForwardContext()
    with torch.no_grad():
        exact = model(tokens, context=context).logits
        low = model.bfloat16()(tokens, context=ForwardContext(plans=dict(context.plans))).logits
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_a_fresh_model_starts_as_the_papers_say():
    model = smlp.build("smlp_tiny", vocab_size=40)
    gated, sparse = model.blocks[0], model.blocks[2]
    max_tokens = model.config.max_tokens
    assert gated.gating.heads.weight.abs().max() <= 1e-3 / max_tokens
    assert torch.equal(gated.gating.heads.bias, torch.ones(1, max_tokens))
    assert torch.equal(sparse.mixing.feature_moe.experts.bias, torch.zeros(8, max_tokens))
    assert not sparse.token_moe.experts.w2.any()
    x = torch.randn(2, 5, 256)
    routed, _ = sparse.token_moe(x, ForwardContext())
    assert not routed.any(), "ff2 starts at zero, so the tMoE starts as the identity"
    assert not model.embedding.weight[model.config.padding_idx].any()


@pytest.mark.parametrize("arch", ["gmlp_lm_tiny", "dense_lm_tiny"])
def test_a_forward_pass_without_values_gives_shapes(arch):
    """Where no router needs values."""
    model = smlp.build(arch, vocab_size=40, max_tokens=12, embed_dim=32, ffn_dim=32).to("meta")
    assert model(torch.zeros(2, 12, dtype=torch.long, device="meta")).logits.shape == (2, 12, 40)
