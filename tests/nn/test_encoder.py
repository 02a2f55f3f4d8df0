"""Encoders, gates and Toeplitz weights against slow references; what padding, cutting and starting values change."""

import math

import pytest
import torch
import torch.nn.functional as F
from architectures import ENCODERS
from comparing import assert_same

import smlp
from smlp.config.presets import preset
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.nn.attention import SelfAttention
from smlp.nn.blocks import GatedMLPBlock, TokenMixing
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder, cut_context
from smlp.nn.layers import SpatialWeights
from smlp.nn.state import DecodingState, ForwardContext
from smlp.ops import toeplitz_matrices
from smlp.ops.spatial import _by_shearing

TINY = [arch for arch in ENCODERS if arch.endswith("_tiny")]
SMALL = {"vocab_size": 30, "max_tokens": 12, "embed_dim": 8, "ffn_dim": 12, "num_dense_layers": 2}
GATES = ("split", "multiplicative", "additive", "linear")


def make(arch, **overrides):
    torch.manual_seed(0)
    return randomise(smlp.build(arch, **SMALL | overrides)).double().eval()


def tokens(*shape, seed=0):
    return torch.randint(2, 30, shape, generator=torch.Generator().manual_seed(seed))


def printed_toeplitz(w, n):
    """Liu et al., 2021, appendix C, with the line ``t = t[:-n]`` that its listing lacks before the reshape."""
    t = F.pad(w, (0, n)).repeat(n)[:-n]
    return t.reshape(n, -1)[:, n - 1 : 2 * n - 1]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_toeplitz_matrices(n):
    w = torch.randn(3, 2 * n - 1, dtype=torch.double, requires_grad=True)
    want = torch.stack([printed_toeplitz(row, n) for row in w])
    assert_same(toeplitz_matrices(w, n), want, [w], 1e-12)
    if n > 1:
        sheared = _by_shearing(w, n)  # as on a GPU
        assert_same(sheared, want, [w], 1e-12)
        assert sheared.is_contiguous()
    for a in range(n):
        for b in range(n):
            assert torch.equal(want[:, a, b], w[:, n - 1 + b - a])


def test_no_tokens():
    assert toeplitz_matrices(torch.randn(3, 9), 0).shape == (3, 0, 0)
    for arch in ("gmlp_mlm_tiny", "bert_mlm_tiny", "bert_mlm_rel_tiny", "bert_mlm_rel_attn_tiny"):
        assert smlp.build(arch, vocab_size=30, max_tokens=12)(tokens(2, 0)).shape == (2, 0, 30), arch


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n", [1, 4, 7])
def test_matrices_of_shorter_texts(is_causal, n):
    weights = SpatialWeights(7, range(2), 1.0, 0.0, is_causal, is_toeplitz=True)
    for a in range(n):
        for b in range(n):
            distance = b - a
            wanted = 0.0 if is_causal and distance > 0 else weights.weight[:, 6 + distance]
            assert (weights.matrices(n)[:, a, b] == wanted).all()


def slow_block(block, x_BnH, matrix_TT, is_causal, gate):
    """Liu et al., 2021, equations 1 to 4 and section 4.3, position by position."""
    y = block.norm(x_BnH)
    z = F.gelu(block.proj_in(y))
    z1, z2 = z.chunk(2, dim=2) if gate == "split" else (z, z)
    normed, n = block.gating.norm(z2), x_BnH.size(1)
    rows = []
    for t in range(n):
        seen = range(t + 1) if is_causal else range(n)
        rows.append(block.gating.heads.bias[0, t] + sum(matrix_TT[t, s] * normed[:, s] for s in seen))
    mixed = torch.stack(rows, dim=1)
    if block.attention is not None:
        q, k, v = block.attention.proj_in(y).chunk(3, dim=2)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.size(2))
        if is_causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        mixed = mixed + block.attention.proj_out(scores.softmax(-1) @ v)
    if gate in ("split", "multiplicative"):
        mixed = z1 * mixed
    return x_BnH + block.proj_out(z1 + mixed if gate == "additive" else mixed)


@pytest.mark.parametrize("attention_dim", [0, 4])
@pytest.mark.parametrize("spatial_weights", ["full", "toeplitz"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("gate", GATES)
def test_gmlp_blocks_against_the_reference(gate, direction, spatial_weights, attention_dim):
    own = {"gmlp_gate": gate, "gmlp_attention_dim": attention_dim, "spatial_weights": spatial_weights}
    config = preset("gmlp_lm", direction=direction, dropout=0.0, **SMALL | own)
    block = randomise(GatedMLPBlock(config)).double()
    x = torch.randn(2, 9, 8, dtype=torch.double, requires_grad=True)
    want = slow_block(block, x, block.gating.heads.matrices()[0], direction == "causal", gate)
    got, _ = block(x, ForwardContext())
    assert_same(got, want, [x, *block.parameters()], 1e-10)


@pytest.mark.parametrize("scores", ["content", "rotary", "relative", "relative_only"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_attention_weights_are_those_of_the_output(direction, scores):
    config = preset("dense_lm", direction=direction, num_heads=2, **SMALL)
    attention = randomise(SelfAttention(config, scores=scores)).double().eval()
    x, valid = torch.randn(3, 7, 8, dtype=torch.double), torch.arange(7) < torch.tensor([[7], [4], [6]])
    for valid_Bn in (None, valid):
        context = ForwardContext(torch.zeros(3, 7, dtype=torch.long), valid_Bn)
        weights = attention.weights(x, context)
        assert weights.shape == (3, 2, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 7, dtype=torch.double))
        values = attention.proj_in(x)[..., -8:].unflatten(2, (2, 4)).transpose(1, 2)
        want = attention.proj_out((weights @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attention(x, context), want, rtol=1e-9, atol=1e-9)


def test_a_mixer_block_against_the_reference():
    config = preset("mixer_mlm", **SMALL | {"mixer_token_dim": 5})
    module = randomise(TokenMixing(config)).double()
    x = torch.randn(2, 9, 8, dtype=torch.double, requires_grad=True)
    columns = []
    for feature in module.norm(x).unbind(2):
        hidden = F.gelu(feature @ module.tokens_in.weight[:, :9].t() + module.tokens_in.bias)
        columns.append(hidden @ module.tokens_out.weight[:9].t() + module.tokens_out.bias[:9])
    assert_same(module(x, ForwardContext()), x + torch.stack(columns, dim=2), [x, *module.parameters()], 1e-10)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_full_weights_made_of_toeplitz_weights_give_equal_logits(direction, num_heads):
    own = {"direction": direction, "num_heads": num_heads}
    short, full = (make("gmlp_lm", spatial_weights=kind, **own) for kind in ("toeplitz", "full"))
    state = short.state_dict()
    for layer, block in enumerate(short.blocks):
        state[f"blocks.{layer}.gating.heads.weight"] = block.gating.heads.matrices().detach()
    full.load_state_dict(state)
    for n in (1, 5, 12):
        ids = tokens(2, n)
        logits = [model(ids) if direction == "bidirectional" else model(ids).logits for model in (short, full)]
        torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_gates_at_the_start(gate):
    config = preset("gmlp_mlm", **SMALL | {"gmlp_gate": gate, "max_tokens": 64})
    torch.manual_seed(0)
    unit, z = GatedMLPBlock(config).gating, torch.randn(2, 64, 6 if gate == "split" else 12)
    out = unit(z, torch.randn(z.shape), ForwardContext())
    if gate == "linear":
        assert 0.8 < out.std() < 1.2 and unit.heads.bias.abs().max() == 0  # as large as what it mixes
    else:
        assert (out - z).abs().max() < 1e-3 * z.abs().max()


@pytest.mark.parametrize("arch", TINY)
def test_an_encoder_sees_everything_but_padding(arch):
    model, ids = make(arch), tokens(1, 7)
    alone = model(ids)
    for position in range(1, 7):
        other = ids.clone()
        other[0, position] = ids[0, position] % 28 + 2
        assert (model(other)[0, 0] - alone[0, 0]).abs().max() > 1e-9, position
    batch = torch.full((2, 12), model.config.padding_idx)
    batch[0, :7], batch[1] = ids[0], tokens(12, seed=1)
    torch.testing.assert_close(model(batch)[0, :7], alone[0], rtol=1e-9, atol=1e-9)
    masked = torch.zeros(2, 12, dtype=torch.bool)
    masked[0, 3] = masked[1, 11] = True
    want = model(batch)[masked]
    torch.testing.assert_close(model(batch, masked), want)
    torch.testing.assert_close(model(batch, torch.tensor([3, 23])), want)
    batch[0] = model.config.padding_idx  # a row of nothing else harms no gradient
    gradients = torch.autograd.grad(model(batch)[1].sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("arch", ["gmlp_mlm_tiny", "bert_mlm_tiny", "mixer_mlm_tiny", "amlp_mlm_tiny"])
@pytest.mark.parametrize("spatial_weights", ["full", "toeplitz"])
@pytest.mark.parametrize("shorter", [8, 1])
def test_a_shorter_model_is_cut_from_a_longer_one(arch, spatial_weights, shorter):
    long, short = (make(arch, spatial_weights=spatial_weights, max_tokens=T) for T in (12, shorter))
    shapes = {name: tensor.shape for name, tensor in short.state_dict().items()}
    short.load_state_dict(cut_context(long.state_dict(), shapes, shorter))
    ids = tokens(2, shorter)
    torch.testing.assert_close(short(ids), long(ids), rtol=1e-12, atol=1e-12)


def test_nothing_but_positions_is_cut():
    long, short = make("gmlp_mlm_tiny", embed_dim=16), make("gmlp_mlm_tiny", max_tokens=8, embed_dim=8)
    shapes = {name: tensor.shape for name, tensor in short.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        short.load_state_dict(cut_context(long.state_dict(), shapes, 8))


def test_amlp_without_its_attention_is_gmlp():
    gmlp, amlp = make("gmlp_mlm_tiny"), make("gmlp_mlm_tiny", gmlp_attention_dim=4)
    state = amlp.state_dict() | gmlp.state_dict()
    amlp.load_state_dict({name: tensor * (".attention.proj_out" not in name) for name, tensor in state.items()})
    torch.testing.assert_close(amlp(tokens(2, 12)), gmlp(tokens(2, 12)), rtol=1e-12, atol=1e-12)


CAUSAL = [
    *(("gmlp_lm", {"gmlp_gate": gate, "gmlp_attention_dim": 4, "spatial_weights": "toeplitz"}) for gate in GATES),
    *(("smlp", {"feature_experts": kind, "spatial_weights": "toeplitz"}) for kind in ("gated", "linear", "additive")),
    ("smlp_partial", {"feature_experts": "additive", "spatial_weights": "toeplitz"}),
    ("gmlp_moe", {"spatial_weights": "toeplitz", "gmlp_attention_dim": 4}),
    *(("dense_lm", {"transformer_attention": kind}) for kind in ("rotary", "relative", "relative_only")),
    ("dense_lm", {"layer_norm": "after"}),
]


@pytest.mark.parametrize(("arch", "own"), CAUSAL)
def test_causal_models_write_as_they_read(arch, own):
    """No token sees a later one, and tokens that come one by one give the same logits."""
    sparse = arch in ("smlp", "smlp_partial", "gmlp_moe")
    sizes = {"num_heads": 2, "num_experts": 4, "num_sparse_layers": int(sparse)}
    model, ids = make(arch, **own | sizes), tokens(2, 12)
    whole = model(ids).logits
    other = ids.clone()
    other[:, 8:] = tokens(2, 4, seed=5)
    torch.testing.assert_close(model(other).logits[:, :8], whole[:, :8], rtol=1e-9, atol=1e-9)
    state = DecodingState()
    parts = [model(part, state).logits for part in ids.split([5, 1, 1, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_heads():
    model = make("gmlp_mlm_tiny")
    model.add_sentence_head("nli", 3)
    model.add_span_head()
    x = model.features(tokens(2, 6))
    head = model.sentence_heads["nli"]
    want = head.proj(torch.tanh(x[:, 0] @ head.pooler.weight.t() + head.pooler.bias))
    torch.testing.assert_close(head(x), want)
    assert model.span_head(x).shape == (2, 6, 2) and head.proj.weight.dtype == torch.double
    for name in ("", "a.b", "keys", "training"):
        with pytest.raises(UserError, match="cannot be the name of a part"):
            model.add_sentence_head(name, 3)


def test_what_each_model_refuses():
    encoder, decoder = preset("gmlp_mlm_tiny"), preset("gmlp_lm_tiny")
    with pytest.raises(UserError, match="direction=bidirectional makes an encoder"):
        Decoder(encoder)
    with pytest.raises(UserError, match="direction=causal makes a language model"):
        Encoder(decoder)
    for arch, own, sentence in (
        ("smlp_tiny", {"direction": "bidirectional"}, "direction=bidirectional is for dense models, but num_sparse"),
        ("gmlp_lm_tiny", {"layer_norm": "after"}, "is for dense transformer blocks, not for gmlp blocks"),
        ("switch_lm_tiny", {"layer_norm": "after"}, "is for dense transformer blocks, not for sparse transformer"),
        ("dense_lm_tiny", {"dense_block": "mixer"}, "they need direction=bidirectional"),
        ("gmlp_lm_tiny", {"gmlp_attention_dim": -1}, "gmlp_attention_dim must not be negative, got -1"),
        ("mixer_mlm_tiny", {"mixer_token_dim": 0}, "mixer_token_dim must be at least 1, got 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            preset(arch, **own)
