"""Fast paths against slow and obvious references: outputs and every gradient, in float64."""

from types import SimpleNamespace

import pytest
import torch
from comparing import EXACT, assert_same, feed_forward_reference, spatial_reference
from torch.utils._python_dispatch import TorchDispatchMode

from smlp.errors import UserError
from smlp.nn.layers import SpatialWeights
from smlp.ops import (
    ACTIVATION_FUNCTIONS,
    activated_halves,
    causal_spatial_projection,
    expert_feed_forward,
    expert_runs,
    fast_paths,
    linear,
    permuted_columns,
    permuted_rows,
    spatial,
    spatial_projection,
    summed_rows,
    toeplitz_matrices,
    token_losses,
)
from smlp.ops.expert_runs import EqualExperts, OneExpert, SmallExperts, UnequalExperts, runs
from smlp.ops.fast_paths import reference_ops, takes_bands
from smlp.ops.rows import occurrences
from smlp.ops.tolerances import SHARE, largest_share


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_spatial_projection(num_heads, num_tokens):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_tokens, num_heads, 5, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(num_heads, 7, 7, generator=generator, dtype=torch.double, requires_grad=True)
    bias = torch.randn(num_heads, 7, generator=generator, dtype=torch.double, requires_grad=True)
    out, expected = causal_spatial_projection(x, weight, bias), spatial_reference(x, weight, bias)
    ours = assert_same(out, expected, (x, weight, bias), tolerance=EXACT)
    above = ours[1].triu(1)
    assert torch.equal(above, torch.zeros_like(above)), "weights above the diagonal must get no gradient"
    gate = torch.randn(*out.shape, generator=generator, dtype=torch.double, requires_grad=True)
    out = causal_spatial_projection(x, weight, bias, gate_Bmhc=gate)
    assert_same(out, spatial_reference(x, weight, bias, gate), (x, weight, bias, gate), tolerance=EXACT)


@pytest.mark.parametrize("num_heads", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_spatial_projection_over_all_positions(num_heads, num_tokens):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_tokens, num_heads, 5, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(num_heads, 7, 7, generator=generator, dtype=torch.double, requires_grad=True)
    bias = torch.randn(num_heads, 7, generator=generator, dtype=torch.double, requires_grad=True)
    gate = torch.randn(x.shape, generator=generator, dtype=torch.double, requires_grad=True)

    def reference():
        rows = [
            bias[:, t].view(1, -1, 1) + sum(weight[:, t, s].view(1, -1, 1) * x[:, s] for s in range(num_tokens))
            for t in range(num_tokens)
        ]
        return torch.stack(rows, dim=1)

    assert_same(spatial_projection(x, weight, bias), reference(), (x, weight, bias), tolerance=EXACT)
    gated = spatial_projection(x, weight, bias, gate)
    assert_same(gated, gate * reference(), (x, weight, bias, gate), tolerance=EXACT)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("num_tokens", [255, 256, 257, 300])
def test_toeplitz_matrices_of_any_part_of_the_context(num_heads, num_tokens):
    """They are made for the positions that there are, and the bias is of all."""
    generator = torch.Generator().manual_seed(0)
    weights = SpatialWeights(300, range(num_heads), 0.1, 1.0, is_toeplitz=True).double()
    x = torch.randn(2, num_tokens, num_heads, 3, generator=generator, dtype=torch.double, requires_grad=True)
    inputs = x, *weights.parameters()
    out = weights.project(x)
    with reference_ops():
        expected = weights.project(x)
    assert_same(out, expected, inputs, tolerance=EXACT)


@pytest.mark.parametrize("num_seqs", [0, 1, 2])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize(("num_tokens", "strip"), [(7, 2), (8, 2), (8, 4), (5, 8), (9, 1), (6, 4)])
def test_spatial_projection_without_the_empty_half(num_seqs, num_heads, num_tokens, strip, monkeypatch):
    """What is above the diagonal must not take part, be it as large as it may."""
    monkeypatch.setattr(spatial, "triangle_strip", lambda num_tokens: strip)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(num_seqs, num_tokens + 1, num_heads, 6, generator=generator, dtype=torch.double)
    x = whole[:, :-1, :, ::2].detach().requires_grad_()  # not contiguous
    weight = torch.randn(num_heads, 9, 9, generator=generator, dtype=torch.double)
    weight += torch.full((9, 9), 1e300, dtype=torch.double).triu(1)
    weight.requires_grad_()
    bias = torch.randn(num_heads, 9, generator=generator, dtype=torch.double, requires_grad=True)
    out, expected = causal_spatial_projection(x, weight, bias), spatial_reference(x, weight, bias)
    assert "TriangularProjection" in str(out.grad_fn) + str(out.grad_fn.next_functions)
    ours = assert_same(out, expected, (x, weight, bias), tolerance=EXACT)
    above = ours[1].triu(1)
    assert torch.equal(above, torch.zeros_like(above)), "weights above the diagonal must get no gradient"


@pytest.mark.parametrize("num_heads", [1, 3])
def test_strips_are_few_and_large_products(num_heads, monkeypatch):
    """Into a result with gaps, torch multiplies matrix by matrix; each product starts and joins all threads."""
    monkeypatch.setattr(spatial, "triangle_strip", lambda num_tokens: 2)
    x, weight, bias = torch.randn(4, 8, num_heads, 5), torch.randn(num_heads, 8, 8), torch.randn(num_heads, 8)
    with ProductSizes() as products:
        causal_spatial_projection(x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()).sum().backward()
    strips = 4
    gradients_of_weights = strips * (4 if num_heads == 1 else 1)  # one matrix for all sequences sums their products
    assert len(products.sizes) == 2 * strips + gradients_of_weights
    assert all(contiguous for _, contiguous in products.sizes)
    multiplied = sum(size for size, _ in products.sizes)
    assert multiplied == 3 * 4 * num_heads * 5 * (8 * 8 + 2 * 8) // 2, (
        "half of the square, and half of the diagonal blocks"
    )


class ProductSizes(TorchDispatchMode):
    """Multiplications of each batched product, and whether its result lies without gaps."""

    #: fast paths are taken as they are without it (smlp/ops/fast_paths.py)
    any_operator = True

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            left, right = args[-2:]
            self.sizes.append((left.numel() * right.size(2), result.is_contiguous()))
        return result


@pytest.mark.parametrize("start", [0, 1, 5, 6])
def test_spatial_projection_of_the_last_positions(start):
    x, weight, bias = torch.randn(2, 7, 2, 3), torch.randn(2, 9, 9), torch.randn(2, 9)
    whole = causal_spatial_projection(x, weight, bias)
    torch.testing.assert_close(causal_spatial_projection(x, weight, bias, start), whole[:, start:])
    gate = torch.randn(whole[:, start:].shape)
    gated = causal_spatial_projection(x, weight, bias, start, gate)
    torch.testing.assert_close(gated, gate * whole[:, start:])


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 40])
def test_spatial_projection_of_the_last_of_many_positions(num_tokens, num_heads):
    """With one head the product is cut into bands, which need not come out even."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, num_tokens, num_heads, 5, generator=generator, dtype=torch.double, requires_grad=True)
    weight = torch.randn(num_heads, 50, 50, generator=generator, dtype=torch.double, requires_grad=True)
    bias = torch.randn(num_heads, 50, generator=generator, dtype=torch.double, requires_grad=True)
    out = causal_spatial_projection(x, weight, bias, start=num_tokens - 1)
    assert_same(out, spatial_reference(x, weight, bias)[:, -1:], (x, weight, bias), tolerance=EXACT)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_outputs", [6, 48, 7])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 3), (2, 2), (5, 1), (0, 1)])
def test_linear_map_of_few_rows(shape, num_outputs, with_bias):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(*shape, 64, generator=generator, dtype=torch.double)
    x = whole[..., ::2].detach().requires_grad_()  # not contiguous
    weight = torch.randn(num_outputs, 32, generator=generator, dtype=torch.double, requires_grad=True)
    bias = torch.randn(num_outputs, generator=generator, dtype=torch.double, requires_grad=True) if with_bias else None
    given = (x, weight, bias) if with_bias else (x, weight)
    expected = torch.einsum("...i,oi->...o", x, weight) + (bias if with_bias else 0)
    assert not takes_bands(x, weight, bias)
    assert_same(linear(x, weight, bias), expected, given, tolerance=EXACT)
    with torch.no_grad():
        assert takes_bands(x, weight, bias) == (0 < x.numel() <= 4 * 32 and num_outputs % 2 == 0)
        out = linear(x, weight, bias)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected.detach(), rtol=EXACT, atol=EXACT)


def test_spatial_projection_in_bfloat16():
    x, weight, bias = torch.randn(2, 7, 2, 3), torch.randn(2, 7, 7), torch.randn(2, 7)
    low = causal_spatial_projection(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert low.dtype == torch.bfloat16
    want = causal_spatial_projection(x.double(), weight.double(), bias.double())
    assert largest_share(low, want) <= SHARE[torch.bfloat16]


def test_gradients_in_bfloat16_are_summed_in_float32():
    """Over 64 sequences, and over the entries of one distance."""
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 64, 256, 1, 2, generator=generator)
    weight, bias = torch.randn(1, 256, 256, generator=generator), torch.zeros(1, 256)
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (x, weight, bias)]
        causal_spatial_projection(*inputs).backward(grad.bfloat16().to(dtype))
        w = torch.zeros(1, 511, dtype=dtype, requires_grad=True)
        toeplitz_matrices(w, 256).backward(weight.bfloat16().to(dtype))
        found[dtype] = inputs[1].grad.double(), w.grad.double()
    for low, want in zip(*found.values(), strict=True):
        assert (low - want).norm() < 4e-3 * want.norm()


@pytest.mark.parametrize("counts", [[3, 3, 3], [4, 0, 5], [0, 9, 0], [9], [1] * 9, [2, 0, 3, 1, 3, 0]])
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize("with_norm", [True, False])
def test_expert_feed_forward(counts, activation, with_norm):
    generator = torch.Generator().manual_seed(0)
    num_experts, width, hidden = len(counts), 4, 6

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double, requires_grad=True)

    inputs = (
        tensor(9, width), tensor(num_experts, width), tensor(num_experts, width),
        tensor(num_experts, hidden, width), tensor(num_experts, hidden),
        tensor(num_experts, width, hidden), tensor(num_experts, width),
    )  # fmt: skip
    x, gain, offset, *weights = inputs
    norm = (gain, offset) if with_norm else None
    for given in (counts, torch.tensor(counts)):  # a tensor in graphs
        out = expert_feed_forward(x, given, norm, *weights, activation)
        expected = feed_forward_reference(x, counts, norm, *weights, activation)
        assert_same(out, expected, [x, *(norm or ()), *weights], tolerance=EXACT)


@pytest.mark.parametrize("with_norm", [True, False])
def test_operator_of_experts_fits_graphs(with_norm):
    shapes = ((3, 4), (3, 4), (3, 6, 4), (3, 6), (3, 4, 6), (3, 4))
    gain, offset, *weights = (torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes)
    norm = (gain, offset) if with_norm else (None, None)
    x = torch.randn(9, 4, dtype=torch.double, requires_grad=True)
    given = (x, torch.tensor([4, 0, 5]), *norm, *weights, "gelu")
    torch.library.opcheck(torch.ops.smlp.expert_feed_forward.default, given)


@pytest.mark.parametrize("at_a_time", [1, 2, 5])
@pytest.mark.parametrize("counts", [[3, 3, 3], [4, 0, 5], [0, 9, 0]])
def test_some_tokens_of_an_expert_at_a_time(counts, at_a_time, monkeypatch):
    monkeypatch.setattr(expert_runs, "TOKENS_AT_A_TIME", at_a_time)
    test_expert_feed_forward(counts, "gelu", with_norm=True)


@pytest.mark.parametrize("counts", [[3, 3, 3], [4, 0, 5], [0, 9, 0], [2, 2, 2, 3]])
@pytest.mark.parametrize("with_norm", [True, False])
def test_experts_in_batches_as_on_a_gpu(counts, with_norm, monkeypatch):
    """Batched and grouped products, which a CPU does not choose by itself, give what single experts give."""

    def batched(counts, x, num_hidden):
        equal = counts == counts[:1] * len(counts)
        return [EqualExperts(len(counts), counts[0]) if equal else UnequalExperts(counts, x.device)]

    generator, shapes = torch.Generator().manual_seed(0), ((8,), (8,), (16, 8), (16,), (8, 16), (8,))
    x = torch.randn(9, 8, generator=generator, requires_grad=True)
    gain, offset, *weights = (
        torch.randn(len(counts), *shape, generator=generator, requires_grad=True) for shape in shapes
    )
    norm = (gain, offset) if with_norm else None
    with reference_ops():
        expected = expert_feed_forward(x, counts, norm, *weights)
    monkeypatch.setattr("smlp.ops.feed_forward.runs", batched)
    out = expert_feed_forward(x, counts, norm, *weights)
    assert_same(out, expected, [x, *(norm or ()), *weights], tolerance=SHARE[torch.float32])


@pytest.mark.parametrize("with_norm", [True, False])
def test_experts_with_rows_of_zeros_as_on_a_gpu(with_norm, monkeypatch):
    run_with = []
    monkeypatch.setattr(expert_runs, "pads_experts", lambda *given: True)
    monkeypatch.setattr(
        "smlp.ops.feed_forward.runs", lambda counts, *given: run_with.append(counts) or runs(counts, *given)
    )
    for counts in ([4, 0, 5], [0, 9, 0]):
        test_expert_feed_forward(counts, "gelu", with_norm)
    assert [5] * 3 in run_with and [9] * 3 in run_with


def test_where_a_gpu_pads_experts():
    def pads(counts, dtype=torch.float32, width=8, num_hidden=16):
        x = SimpleNamespace(is_cuda=True, dtype=dtype, size=lambda axis: width, numel=lambda: sum(counts) * width)
        return fast_paths.pads_experts(counts, x, num_hidden)

    assert pads([3, 0, 1]) and pads([3, 0, 1], torch.float16)
    assert not pads([3, 3, 3]), "nothing to pad"
    assert not pads([9, 0, 0, 0, 0]), "five times the rows"
    assert not pads([3, 0, 1], torch.bfloat16), "there is a grouped product"
    assert not pads([300, 0, 100], width=2**12, num_hidden=2**13), "large products"
    assert not pads([]) and not pads([0, 0])


def test_small_experts_share_a_run_on_a_cpu():
    """Many small experts are one run, few or large ones a run each, and so are all in 16 bits."""

    def chosen(counts, dtype=torch.float, num_hidden=8):
        return {type(run) for run in runs(counts, torch.zeros(sum(counts), 8, dtype=dtype), num_hidden)}

    assert chosen([2, 0, 1, 3, 1]) == {SmallExperts}
    for others in (chosen([3, 0, 1, 3]), chosen([2, 1, 1, 3], torch.bfloat16), chosen([1] * 4, num_hidden=2**18)):
        assert others == {OneExpert}


@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_activated_halves(activation):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 3, 12, generator=generator, dtype=torch.double, requires_grad=True)
    for x in (wide, wide.transpose(0, 1)):
        halves = activated_halves(x, activation)
        assert all(half.is_contiguous() for half in halves)
        expected = ACTIVATION_FUNCTIONS[activation](x)
        assert_same(torch.cat([*halves], dim=2), expected, [wide], tolerance=EXACT)
        (only_first,) = torch.autograd.grad(activated_halves(x, activation)[0].sum(), wide)
        (expected,) = torch.autograd.grad(ACTIVATION_FUNCTIONS[activation](x)[..., :6].sum(), wide)
        torch.testing.assert_close(only_first, expected, rtol=EXACT, atol=EXACT)


def test_occurrences():
    numbers = torch.tensor([2, 0, 2, 3, 2])
    assert occurrences(numbers, 5).tolist() == [1, 0, 3, 1, 0]
    assert occurrences(numbers[:0], 2).tolist() == [0, 0]


def test_permuted_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, generator=generator, dtype=torch.double, requires_grad=True)
    order = torch.randperm(7, generator=generator)
    out = permuted_rows(x, order, order.argsort())
    assert_same(out, x[order], [x], tolerance=0)
    assert torch.autograd.gradgradcheck(lambda x: permuted_rows(x, order, order.argsort()) ** 2, (x,))


def test_permuted_columns():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 5, generator=generator, dtype=torch.double, requires_grad=True)
    order = torch.stack([torch.randperm(5, generator=generator) for _ in range(2)])

    def expected():
        return torch.stack([x[0][:, order[0]], x[1][:, order[1]]])

    assert_same(permuted_columns(x, order, order.argsort(dim=1)), expected(), [x], tolerance=0)
    with reference_ops():
        assert_same(permuted_columns(x, order, order.argsort(dim=1)), expected(), [x], tolerance=0)


def test_summed_rows():
    y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double, requires_grad=True)
    index = torch.tensor([2, 0, 2, 3, 2])

    def expected():
        return torch.stack([y[1], torch.zeros(3).double(), y[0] + y[2] + y[4], y[3]])

    assert_same(summed_rows(y, index, 4), expected(), [y], tolerance=EXACT)
    with reference_ops():
        assert_same(summed_rows(y, index, 4), expected(), [y], tolerance=EXACT)
    assert summed_rows(y[:0], index[:0], 2).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_counts_that_are_not_those_of_the_tokens_are_refused(kind):
    """Else the rows of no expert would be whatever the memory holds."""
    weights = [torch.randn(*shape) for shape in ((2, 6, 4), (2, 6), (2, 4, 6), (2, 4))]
    for counts in ([64], [32, 32, 0]):
        with pytest.raises(UserError, match=f"counts are of {len(counts)} experts, but the weights of 2"):
            expert_feed_forward(torch.randn(64, 4), kind(counts), None, *weights)
    for counts in ([20, 20], [40, 40]):
        with pytest.raises(UserError, match=f"counts are {sum(counts)} tokens together, but x_AH has 64"):
            expert_feed_forward(torch.randn(64, 4), kind(counts), None, *weights)
    with pytest.raises(UserError, match="counts hold -6, which is no number of tokens"):
        expert_feed_forward(torch.randn(64, 4), kind([70, -6]), None, *weights)


def test_shapes_that_do_not_belong_together_are_refused():
    """Each gave a result."""
    with pytest.raises(UserError, match="logits have 10 rows, but there are 6 targets"):
        token_losses(torch.randn(2, 5, 7), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(UserError, match="x_Bnhc has 1 heads, but weight_hTT has 2"):
        spatial_projection(torch.randn(2, 5, 1, 3), torch.randn(2, 6, 6), torch.randn(2, 6))
    with pytest.raises(UserError, match="x_Bnhc has 1 heads, but weight_hTT has 2"):  # long enough for strips
        causal_spatial_projection(torch.randn(2, 256, 1, 3), torch.randn(2, 256, 256), torch.randn(2, 256))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UserError, match="w_hL has the distances of 3 positions, but 5 are wanted"):
            toeplitz_matrices(torch.randn(2, 5, dtype=dtype), 5)
        with pytest.raises(UserError, match="w_hL must have 2T - 1 numbers for each head, got 4"):
            toeplitz_matrices(torch.randn(2, 4, dtype=dtype), 2)
    with torch.no_grad():
        assert linear(torch.randn(3, 0), torch.randn(6, 0), torch.ones(6)).tolist() == [[1.0] * 6] * 3


def test_no_token_at_all_gives_zero_gradients_not_none():
    shapes = ((2, 4), (2, 4), (2, 6, 4), (2, 6), (2, 4, 6), (2, 4))
    weights = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    x = torch.randn(0, 4, requires_grad=True)
    out = expert_feed_forward(x, [0, 0], tuple(weights[:2]), *weights[2:])
    assert out.shape == (0, 4)
    for gradient in torch.autograd.grad(out.sum(), [x, *weights]):
        assert torch.equal(gradient, torch.zeros_like(gradient))
