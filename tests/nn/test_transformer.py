"""Attention against an explicit masked softmax, a block against torch's own, positions, decoding, padding."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from comparing import EXACT, assert_same
from sparse_references import randomised
from torch import nn

import smlp
from smlp.evaluation.leak import randomise
from smlp.nn.attention import SelfAttention, relative_buckets
from smlp.nn.blocks import AttentionSublayer, DenseBlock
from smlp.nn.stack import sinusoidal_positions
from smlp.nn.state import DecodingState, ForwardContext

WIDTH, MAX_TOKENS = 12, 10
SCORES = ("content", "rotary", "relative", "relative_only")
SMALL = {"vocab_size": 30, "max_tokens": MAX_TOKENS, "embed_dim": WIDTH, "ffn_dim": 20, "dropout": 0.0}
SMALL |= {"num_dense_layers": 2, "num_heads": 3}
POSITIONS = ("none", "sinusoidal", "learned")


def inputs(num_seqs, num_tokens):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_seqs, num_tokens, WIDTH, dtype=torch.double, generator=generator, requires_grad=True)


def attention(num_heads, scores="content", direction="causal"):
    return randomised(
        SelfAttention(
            smlp.preset("dense_lm", **SMALL | {"num_heads": num_heads, "direction": direction}), scores=scores
        )
    )


def bucket_of(distance, is_causal):
    """T5's buckets (Raffel et al., 2020, section 2.1), key minus query, one by one."""
    if is_causal:
        return slow_bucket(max(-distance, 0), 32)
    return slow_bucket(abs(distance), 16) + 16 * (distance > 0)


def slow_bucket(far, buckets):
    exact = buckets // 2
    if far < exact:
        return far
    return min(exact + int(math.log(far / exact) / math.log(128 / exact) * (buckets - exact)), buckets - 1)


def as_complex(vector_d, turns):
    """Su et al., 2021, section 3.2.1: pairs of features as complex numbers, pair i times e^(i t / 10000^(2i/d))."""
    half = len(vector_d) // 2
    factors = [cmath.exp(1j * turns / 10000 ** (2 * i / len(vector_d))) for i in range(half)]
    return torch.complex(vector_d[:half], vector_d[half:]) * torch.tensor(factors, dtype=torch.cdouble)


def slow_attention(module, x_BnH, num_heads, seen=None):
    """Vaswani et al., 2017, section 3.2, for each sequence, head and position by itself; by distance, too."""
    parts = 3 if module.has_content else 1
    weights = [*module.proj_in.weight.chunk(parts), *module.proj_in.bias.chunk(parts)]
    projected = [x_BnH @ w.t() + b for w, b in zip(weights[:parts], weights[parts:], strict=True)]
    query, key, value = projected if module.has_content else (None, None, *projected)
    depth, rows = WIDTH // num_heads, []
    n = x_BnH.size(1)

    def score(b, h, t, s):
        part, total = slice(h * depth, (h + 1) * depth), torch.zeros((), dtype=x_BnH.dtype)
        if module.is_rotary:
            turned_query, turned_key = as_complex(query[b, t, part], t), as_complex(key[b, s, part], s)
            total = total + (turned_query * turned_key.conj()).real.sum() / math.sqrt(depth)
        elif module.has_content:
            total = total + query[b, t, part] @ key[b, s, part] / math.sqrt(depth)
        if module.relative is not None:
            total = total + module.relative.weight[h, bucket_of(s - t, module.is_causal)]
        return total

    for b in range(x_BnH.size(0)):
        for t in range(x_BnH.size(1)):
            heads = []
            visible = range(t + 1) if module.is_causal else range(n if seen is None else seen[b])
            for h in range(num_heads):
                scores = torch.stack([score(b, h, t, s) for s in visible])
                share = scores.exp() / scores.exp().sum()
                part = slice(h * depth, (h + 1) * depth)
                heads.append(sum(share[s] * value[b, s, part] for s in visible))
            rows.append(module.proj_out.weight @ torch.cat(heads) + module.proj_out.bias)
    return torch.stack(rows).view(x_BnH.shape)


@pytest.mark.parametrize(
    ("num_heads", "scores", "direction"),
    [(h, "content", "causal") for h in (1, 3, 12)]
    + [(3, scores, "causal") for scores in SCORES[1:]]
    + [(3, scores, "bidirectional") for scores in SCORES],
)
@pytest.mark.parametrize("num_tokens", [1, 6, MAX_TOKENS])
def test_attention_against_a_masked_softmax(num_heads, scores, direction, num_tokens):
    module, x = attention(num_heads, scores, direction), inputs(2, num_tokens)
    with torch.no_grad():
        module.proj_in.weight.mul_(0.3)  # softmax neither flat nor one-hot
    want = slow_attention(module, x, num_heads)
    assert_same(module(x, ForwardContext()), want, [x, *module.parameters()], 1e-9)


@pytest.mark.parametrize("scores", SCORES)
def test_no_token_sees_padding(scores):
    module, x = attention(3, scores, "bidirectional"), inputs(2, 6)
    valid = torch.arange(6) < torch.tensor([[6], [4]])
    got, want = module(x, ForwardContext(valid_Bn=valid)), slow_attention(module, x, 3, seen=(6, 4))
    assert_same(got[valid], want[valid], [x, *module.parameters()], 1e-9)


def test_buckets_of_distances():
    for is_causal in (True, False):
        got = relative_buckets(200, is_causal).tolist()
        assert got == [bucket_of(distance, is_causal) for distance in range(-199, 200)]
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert relative_buckets(200, is_causal).tolist() == got
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("chunks", [[1] * 10, [4, 1, 5], [1, 9], [3, 3, 4], [10]])
def test_attention_in_chunks(chunks, scores):
    module, x = attention(3, scores), inputs(2, MAX_TOKENS).detach()
    state, steps = DecodingState(), []
    with torch.no_grad():
        for part in x.split(chunks, dim=1):
            steps.append(module(part, ForwardContext(state=state)))
            state.length += part.size(1)
        full = module(x, ForwardContext())
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("layer_norm", ["before", "after"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_block_is_torchs_encoder_layer(activation, layer_norm, direction):
    config = smlp.preset("dense_lm", activation=activation, layer_norm=layer_norm, direction=direction, **SMALL)
    block = randomised(DenseBlock(config, AttentionSublayer(config)))
    settings = {"dropout": 0.0, "activation": activation, "batch_first": True}
    settings["norm_first"] = layer_norm == "before"
    theirs = nn.TransformerEncoderLayer(WIDTH, 3, 20, dtype=torch.double, **settings)
    pairs = {
        "self_attn.in_proj": block.mixing.attention.proj_in, "self_attn.out_proj.": block.mixing.attention.proj_out,
        "norm1.": block.mixing.norm, "norm2.": block.norm,
        "linear1.": block.feed_forward.fc1, "linear2.": block.feed_forward.fc2,
    }  # fmt: skip
    weights = {}
    for name, module in pairs.items():
        joint = "" if name.endswith(".") else "_"
        weights |= {f"{name}{joint}weight": module.weight, f"{name}{joint}bias": module.bias}
    theirs.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    x = inputs(3, 7)
    got, aux_losses = block(x, ForwardContext())
    is_causal = direction == "causal"
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.double) if is_causal else None
    want = theirs(x, src_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    named = dict(theirs.named_parameters())
    ours = torch.autograd.grad(got.square().sum(), [x, *weights.values()])
    other = torch.autograd.grad(want.square().sum(), [x, *(named[name] for name in weights)])
    for our, their in zip(ours, other, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-9, atol=1e-9)
    assert aux_losses == {} and len(list(block.parameters())) == len(weights) == len(named)


def test_sinusoidal_positions_by_hand():
    table = sinusoidal_positions(50, 6)  # wavelengths 2*pi, 200*pi and 20000*pi
    for position in (0, 1, 7, 49):
        angles = [position, position / 100, position / 10000]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        torch.testing.assert_close(table[position], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert sinusoidal_positions(3, 2).shape == (3, 2)


def tokens(*shape):
    return torch.randint(2, 30, shape, generator=torch.Generator().manual_seed(0))


def make(positions, **overrides):
    return randomise(smlp.build("dense_lm", **{**SMALL, "positions": positions, **overrides})).double().eval()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("num_tokens", [1, 7, MAX_TOKENS])
def test_the_decoder_against_the_reference(positions, num_tokens):
    model, ids = make(positions), tokens(2, num_tokens)
    x = model.embedding.weight[ids]
    if positions != "none":
        x = x * math.sqrt(WIDTH) + model.positions[:num_tokens]
    for block in model.blocks:
        x = x + slow_attention(block.mixing.attention, block.mixing.norm(x), 3)
        hidden = F.gelu(block.norm(x) @ block.feed_forward.fc1.weight.t() + block.feed_forward.fc1.bias)
        x = x + hidden @ block.feed_forward.fc2.weight.t() + block.feed_forward.fc2.bias
    expected = model.norm(x) @ model.embedding.weight.t()
    gradients = assert_same(model(ids).logits, expected, list(model.parameters()), 1e-9)
    names = [name for name, _ in model.named_parameters()]
    assert ("positions" in names) == (positions == "learned")
    if positions == "learned":
        (gradient,) = (g for g, name in zip(gradients, names, strict=True) if name == "positions")
        assert gradient[:num_tokens].any(dim=1).all() and not gradient[num_tokens:].any()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("chunks", [[1] * 10, [4, 1, 5], [3, 7]])
def test_decoding_in_chunks_equals_the_full_forward(positions, chunks):
    model, ids, order = make(positions), tokens(3, MAX_TOKENS), torch.tensor([1, 1, 0, 2])
    with torch.no_grad():
        full, state = model(ids).logits, DecodingState()
        first, *rest = ids.split(chunks, dim=1)
        assert torch.allclose(model(first, state).logits, full[:, : chunks[0]], rtol=EXACT, atol=EXACT)
        copy = state.clone()
        state.reorder(order)
        for again, want, rows in ((state, full[order], order), (copy, full, slice(None))):
            steps = torch.cat([model(part[rows], again).logits for part in rest], dim=1)
            torch.testing.assert_close(steps, want[:, chunks[0] :], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_on_the_right_changes_no_real_token(positions):
    model, ids = make(positions), tokens(4, MAX_TOKENS)
    full = model(ids).logits
    for row, length in enumerate((10, 6, 1, 0)):
        ids[row, length:] = model.config.padding_idx
    logits = model(ids).logits
    assert logits.isfinite().all()
    real = ids != model.config.padding_idx
    torch.testing.assert_close(logits[real], full[real], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_positions_tell_places_apart(positions):
    same = torch.full((1, 5), 7)
    assert torch.allclose(make("none")(same).logits[:, 0], make("none")(same).logits[:, 4])
    assert not torch.allclose(make(positions)(same).logits[:, 0], make(positions)(same).logits[:, 4])


@pytest.mark.parametrize("scores", SCORES)
def test_each_sequence_loses_attention_of_its_own(scores):
    model = smlp.build("dense_lm", transformer_attention=scores, attention_dropout=0.5, **SMALL).train()
    torch.manual_seed(1)
    first, second = model(torch.arange(4, 12).repeat(2, 1)).logits
    assert not torch.allclose(first, second)
