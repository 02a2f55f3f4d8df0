"""Products by oneDNN against float64: outputs and every gradient, whatever lies how in memory."""

import pytest
import torch
from comparing import feed_forward_reference, spatial_reference
from torch.utils.flop_counter import FlopCounterMode

import smlp
from smlp.evaluation.leak import leak_test, randomise
from smlp.ops import causal_spatial_projection, expert_feed_forward, expert_runs, fast_paths, linear, onednn, spatial
from smlp.ops.fast_paths import reference_ops, takes_onednn
from smlp.ops.tolerances import SHARE, largest_share

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


@pytest.fixture
def every_product(monkeypatch):
    """All products in float32 are taken to oneDNN, small ones too and on any CPU; gives a list of their sizes."""
    taken = []
    mapped = onednn.mapped
    monkeypatch.setattr(onednn, "faster_than_mkl", lambda: True)
    monkeypatch.setattr(fast_paths, "ONEDNN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(onednn, "mapped", lambda x, weight, *rest: taken.append(x.shape) or mapped(x, weight, *rest))
    return taken


def layouts(rows, columns):
    """The same size in every way that a matrix may lie in memory."""
    generator = torch.Generator().manual_seed(rows + columns)
    whole = torch.randn(2 * rows, 2 * columns, generator=generator)
    return {
        "rows": whole[:rows, :columns].contiguous(),
        "columns": whole[:rows, :columns].t().contiguous().t(),
        "rows with gaps": whole[:rows, :columns],
        "columns with gaps": torch.randn(2 * columns, 2 * rows, generator=generator)[:columns, :rows].t(),
        "every second": whole[::2, ::2],
    }


def close(got, want):
    assert got.shape == want.shape
    assert largest_share(got.detach(), want.detach()) <= SHARE[torch.float32]


@pytest.mark.parametrize("left", layouts(1, 1))
@pytest.mark.parametrize("right", layouts(1, 1))
def test_products_of_any_layout(left, right):
    x, y = layouts(34, 18)[left], layouts(34, 26)[left]
    weight, bias = layouts(26, 18)[right], torch.randn(26, 2)[:, 0]
    close(onednn.mapped(x, weight, bias), x.double() @ weight.double().t() + bias.double())
    close(onednn.product(y, weight), y.double() @ weight.double())
    close(onednn.outer(y, layouts(34, 18)[right]), y.double().t() @ layouts(34, 18)[right].double())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(3, 40, 8), (3, 8, 40), (60, 8, 40), (60, 40, 8), (1, 5, 7)])
def test_outer_products_of_any_size(rows, inputs, outputs):
    x, y = torch.randn(rows, inputs), torch.randn(rows, outputs)
    close(onednn.outer(y, x), y.double().t() @ x.double())


@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_map(with_bias, every_product):
    whole = torch.randn(2, 5, 24)
    given = [whole[..., ::2], torch.randn(8, 12)] + ([torch.randn(8)] if with_bias else [])
    compare(lambda x, weight, bias=None: linear(x, weight, bias), lambda *given: reference_linear(*given), given)
    assert len(every_product) == 3
    assert linear(torch.zeros(0, 12), given[1]).shape == (0, 8)


def reference_linear(x, weight, bias=None):
    out = torch.einsum("...i,oi->...o", x, weight)
    return out if bias is None else out + bias


@pytest.mark.parametrize("learnt", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_wanted(learnt, every_product):
    x, weight, bias = (
        torch.randn(shape, requires_grad=wanted) for shape, wanted in zip([(5, 12), (8, 12), (8,)], learnt, strict=True)
    )
    linear(x, weight, bias).sum().backward()
    assert [value.grad is not None for value in (x, weight, bias)] == list(learnt)
    assert len(every_product) == 2 - learnt[2]


@pytest.mark.parametrize("num_seqs", [0, 1, 2])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_spatial_projection(num_seqs, num_heads, every_product, monkeypatch):
    monkeypatch.setattr(spatial, "triangle_strip", lambda num_tokens: 2)
    x, weight, bias = torch.randn(num_seqs, 7, num_heads, 5), torch.randn(num_heads, 9, 9), torch.randn(num_heads, 9)
    weight += torch.full((9, 9), 1e30).triu(1)
    compare(causal_spatial_projection, spatial_reference, [x, weight, bias])
    assert bool(every_product) == (num_seqs > 0)


@pytest.mark.parametrize("counts", [[8, 8, 8], [10, 0, 14], [0, 24, 0], [24]])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_experts(counts, activation, every_product, monkeypatch):
    experts, width, hidden = len(counts), 4, 6
    shapes = [
        (24, width), (experts, width), (experts, width),
        (experts, hidden, width), (experts, hidden), (experts, width, hidden), (experts, width),
    ]  # fmt: skip

    def ours(x, gain, offset, *weights):
        return expert_feed_forward(x, counts, (gain, offset), *weights, activation)

    def reference(x, gain, offset, *weights):
        return feed_forward_reference(x, counts, (gain, offset), *weights, activation)

    given = [torch.randn(shape) for shape in shapes]
    compare(ours, reference, given)
    assert len(every_product) == 6 * sum(count > 0 for count in counts)
    monkeypatch.setattr(expert_runs, "TOKENS_AT_A_TIME", 7)
    compare(ours, reference, given)


def compare(ours, reference, given):
    """Values and every gradient, float32 against float64."""
    single, double = (
        [value.detach().to(dtype).requires_grad_() for value in given] for dtype in (torch.float32, torch.float64)
    )
    got, want = ours(*single), reference(*double)
    close(got, want)
    grad = torch.randn(want.shape)
    gradients = torch.autograd.grad(got, single, grad), torch.autograd.grad(want, double, grad.double())
    for got, want in zip(*gradients, strict=True):
        close(got, want)


@pytest.mark.parametrize("arch", ["smlp_tiny", "smlp_partial_tiny", "switch_lm_tiny"])
def test_models(arch, every_product):
    """A model's logits and gradients do not depend on the library, and nothing leaks."""
    torch.manual_seed(0)
    model = randomise(smlp.build(arch, vocab_size=40, max_tokens=256, embed_dim=32, ffn_dim=64, dropout=0.0))
    tokens = torch.randint(4, 40, (2, 256))

    def outputs():
        model.zero_grad()
        logits = model(tokens).logits
        logits.logsumexp(dim=2).sum().backward()
        return [logits.detach(), *(value.grad.clone() for value in model.parameters() if value.grad is not None)]

    found = outputs()
    assert len(every_product) > 20
    with reference_ops():
        expected = outputs()
    for got, want in zip(found, expected, strict=True):
        assert largest_share(got, want) <= 1e-4
    assert all(report.passed for report in leak_test(model, dtypes=[torch.float32]))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_where_it_is_taken(monkeypatch):
    x, large = torch.randn(4, 4), fast_paths.ONEDNN_MULTIPLICATIONS
    monkeypatch.setattr(onednn, "faster_than_mkl", lambda: True)
    assert takes_onednn(large, x, x)
    assert not takes_onednn(large - 1, x, x)
    assert not takes_onednn(large, x.double(), x.double())
    assert not takes_onednn(large, x.bfloat16(), x.bfloat16())
    assert not takes_onednn(large, x, x.double())
    with reference_ops():
        assert not takes_onednn(large, x, x)
    with torch.autocast("cpu"):
        assert not takes_onednn(large, x, x)
    with FlopCounterMode(display=False):
        assert not takes_onednn(large, x, x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not takes_onednn(large, x, x)
    monkeypatch.setattr(onednn, "faster_than_mkl", lambda: False)
    assert not takes_onednn(large, x, x)


def test_where_it_is_faster(monkeypatch):
    on = {"vendor": "AuthenticAMD", "capability": "AVX512", "mkl": True}

    class File:
        def __init__(self, path):
            assert path == "/proc/cpuinfo"

        def read_text(self):
            return f"processor : 0\nvendor_id : {on['vendor']}\n"

    monkeypatch.setattr(onednn, "Path", File)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: on["mkl"])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: on["capability"])
    faster = onednn.faster_than_mkl.__wrapped__
    assert faster()
    for name, value in {"vendor": "GenuineIntel", "capability": "AVX2", "mkl": False}.items():
        kept, on[name] = on[name], value
        assert not faster()
        on[name] = kept
    monkeypatch.setattr(File, "read_text", lambda file: "processor : 0\n")
    monkeypatch.setattr(onednn.platform, "processor", lambda: "AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD")
    assert faster()
    monkeypatch.setattr(onednn.platform, "processor", lambda: "")
    assert not faster()


def test_wrong_values_are_found(monkeypatch):
    assert onednn.right()
    mapped = onednn.mapped
    monkeypatch.setattr(onednn, "mapped", lambda *given: mapped(*given) * 1.001)
    with pytest.warns(RuntimeWarning, match=r"oneDNN are off by 0\.001 of their largest value"):
        assert not onednn.right()

    def missing(*given):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(onednn, "mapped", missing)
    assert not onednn.right()
