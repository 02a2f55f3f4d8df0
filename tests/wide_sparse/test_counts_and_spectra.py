"""Widths, connections, reuse, edges of spectra and CKA: formulas, real weights, random matrices, a library."""

import math
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from smlp.errors import UserError
from smlp.vision.model import ImageModel
from smlp.vision.presets import preset as image_preset
from smlp.wide_sparse import counts
from smlp.wide_sparse.cka import MiniBatchCKA, gram, hsic, recorded
from smlp.wide_sparse.features import branches
from smlp.wide_sparse.spectrum import (
    CAUSAL_EDGE,
    dense_edge,
    largest_singular_value,
    masked_sample,
    scaled_largest,
    sparse_edge,
)
from smlp.wide_sparse.table import paper_rows, table_text

#: Omega of an S-Mixer, and pairs (C, S) of sections C.2 and C.4
PAIRS = {
    2**18: [
        *((4, 360), (8, 252), (12, 203), (16, 173), (20, 152), (24, 136), (28, 124), (32, 113), (36, 104)),
        *((40, 96), (44, 89), (48, 83), (64, 64), (83, 48), (113, 32), (173, 16)),
    ],
    2**21: [(16, 504), (32, 346), (64, 226), (226, 64), (346, 32), (504, 16)],
    2**27: [(128, 1386), (256, 904), (904, 256), (1386, 128)],
}


@pytest.mark.parametrize("omega", PAIRS)
def test_equation_14_gives_the_sizes_of_the_paper(omega):
    for channels, tokens in PAIRS[omega]:
        assert abs(counts.mixer_tokens(omega, channels) - tokens) < 1, (channels, tokens)
        assert counts.mixer_connections(counts.mixer_tokens(omega, channels), channels) == pytest.approx(omega)
        assert counts.mixer_tokens(2 * omega, channels, 2) == pytest.approx(counts.mixer_tokens(omega, channels))


def test_widths():
    widths = {0.1: 540, 0.3: 612, 0.5: 724, 0.7: 935, 0.9: 1619}  # section C.4, by the share of masked weights
    for masked, width in widths.items():
        below, above = (counts.masked_connections(width + step, 1 - masked) for step in (-1, 1))
        assert below < 2**18 < above, "within 1 of the paper's width"
    sides, width = counts.widest(2**19, 2)
    assert (sides, width) == pytest.approx((64, 4096))
    assert counts.mixer_connections(sides, sides, 2) == pytest.approx(2**19)
    all_widths = [c * counts.mixer_tokens(2**18, c) for c in range(1, 400)]
    assert all_widths.index(max(all_widths)) + 1 == 64
    assert max(all_widths) == pytest.approx(counts.widest(2**18)[1])


def test_the_papers_tables():
    off = {(row.model, row.quantity, row.settings) for row in paper_rows() if abs(row.ours / row.paper - 1) > 0.05}
    assert off == {
        ("Mixer-SS-W", "connections", "S=64 C=487 g=4 L=2"),
        ("Mixer-B/16", "Omega", "S=196 C=768 g=4"),
        ("Mixer-B-W", "largest width", "S=256 C=588 g=4.57"),
        ("Mixer-B-W", "Omega", "S=256 C=588 g=4.57"),
        ("MLP-Mixer, CIFAR", "bytes", "S=C=64 L=12"),
        ("MLP-Mixer, ImageNet", "FLOPs", "S=196 C=768 g=4 L=8"),
    }


def test_counts_are_those_of_the_matrices():
    """Non-zero entries of the Jacobian of a Mixer's layers, and of its masked matrices."""
    row = {row.work: row for row in counts.image_rows("smlp_s_mixer", image_preset("smlp_s_mixer", mixed_tokens=0))}
    s, c = 64, 64
    assert row["spatial"].connections == s * s * c and row["spatial"].density == 1 / c
    assert row["dense projections"].connections == c * c * s and row["dense projections"].density == 1 / s
    mean = (row["spatial"].connections + row["dense projections"].connections) / 2
    assert mean == counts.mixer_connections(s, c) and row["spatial"].width == s * c
    first, rest = counts.image_rows("smlp_sparse_mlp")
    assert rest.layers == 7 and rest.executed == 1619**2 and rest.uses == 1
    assert rest.connections == pytest.approx(counts.masked_connections(1619, 0.1), abs=1)
    assert first.executed == 64 * 48 * 1619


def test_counts_after_a_change_of_tokens():
    """Density is the share of entries, and the width is that of the layer's own input."""
    config = image_preset("smlp_s_mixer", num_layers=2, embed_dim=32, mixed_tokens=113)
    rows = {(row.kind, row.layers, row.width): row for row in counts.image_rows("smlp_s_mixer", config)}
    patches, tokens, channels = 64, 113, 32
    first = rows["token layer", 1, patches * channels]
    skip = rows["skip over tokens", 1, patches * channels]
    assert (first.connections, first.weights) == (channels * patches * tokens, patches * tokens)
    assert (skip.connections, skip.weights, skip.density) == (first.connections, first.weights, first.density)
    mixing = rows["channel layer and norms", 2, tokens * channels]
    assert mixing.density == 1 / tokens and mixing.uses == tokens and mixing.weights == channels**2
    for row in (first, skip, rows["token layer", 1, tokens * channels]):
        assert row.density == 1 / channels and row.uses == channels


def test_connections_of_a_layer():
    assert counts.layer_connections(image_preset("smlp_s_mixer", embed_dim=32, mixed_tokens=113)) == 262_160
    assert counts.layer_connections(image_preset("smlp_sparse_mlp")) == pytest.approx(2**18, rel=0.001)
    wide = {"embed_dim": 12, "mixed_tokens": 203, "token_dim": 2 * 203, "ffn_dim": 2 * 12}
    assert counts.layer_connections(image_preset("smlp_mixer_tiny", **wide)) == 2 * (12 * 203**2 + 203 * 12**2) / 2
    hidden = image_preset("smlp_sparse_mlp", mlp_width=100, mlp_hidden=200, mask_density=0.5)
    assert counts.layer_connections(hidden) == 100 * 200 * 0.5
    rows = counts.image_rows("smlp_sparse_mlp", hidden)
    assert rows[-1].executed == 2 * 100 * 200 and rows[-1].connections == 100 * 200
    with pytest.raises(UserError, match="defined for Mixers and sparse MLPs, not gmlp"):
        counts.layer_connections(image_preset("smlp_gmlp_tiny"))


def test_reuse_of_the_papers_smlp():
    """HT(T+1)/2 connections whatever E, E T(T+1)/2 distinct weights."""
    rows = {row.kind: row for row in counts.text_rows("smlp")}
    t, h, e = 1024, 1024, 32
    assert rows["sMoE"].connections == h * t * (t + 1) / 2 and rows["sMoE"].weights == e * t * (t + 1) / 2
    assert rows["sMoE"].executed == h * t * t
    assert (rows["sMoE"].uses, rows["tMoE experts"].uses, rows["spatial gating"].uses) == (32, 32, 2048)
    assert rows["sMoE"].width == 2**20
    dense = (h * t) ** 2
    assert rows["sMoE"].density == pytest.approx(rows["sMoE"].connections / dense)


def test_every_preset_has_rows():
    rows = counts.preset_rows()
    assert {row.model for row in rows} == {*counts.PRESETS, *counts.IMAGE_PRESETS}
    for row in rows:
        assert 0 < row.connections <= row.executed and row.uses >= 1 and (row.density is None or 0 < row.density < 1)
    text = table_text(rows, with_paper=True)
    assert "smlp_mixer_b16" in text and "Mixer-B-W" in text
    with pytest.raises(UserError, match="unknown architecture"):
        counts.preset_rows(["nothing"])


@pytest.mark.parametrize("expansion", [0.5, 4])
def test_the_edge_of_masked_matrices(expansion):
    """Equation 17 holds with q^2 = p g m; as printed, with p m, it is refuted where g is 4."""
    width, density = 1024, 0.05
    generator = torch.Generator().manual_seed(3)
    squares = [largest_singular_value(masked_sample(width, density, expansion, generator)) ** 2 for _ in range(3)]
    found = sum(squares) / len(squares)
    assert found == pytest.approx(sparse_edge(width, density, expansion) ** 2, rel=0.03)
    if expansion == 4:
        assert abs(sparse_edge(width, density, expansion, as_printed=True) ** 2 / found - 1) > 0.06
    assert sparse_edge(width, 1.0, expansion) == dense_edge(expansion) == 1 + math.sqrt(expansion)


def test_the_edge_of_causal_matrices():
    torch.manual_seed(4)
    weight = torch.randn(1024, 1024)
    assert scaled_largest(3 * weight, is_causal=True) == pytest.approx(CAUSAL_EDGE, rel=0.02)
    assert scaled_largest(weight, is_causal=False) == pytest.approx(2, rel=0.02)
    assert scaled_largest(torch.zeros(4, 4), is_causal=True) is None


def slow_hsic(k, other):
    """Equation 3 of Nguyen et al., as printed."""
    n, one = len(k), torch.ones(len(k), 1, dtype=k.dtype)
    total = torch.trace(k @ other) + (one.t() @ k @ one) * (one.t() @ other @ one) / ((n - 1) * (n - 2))
    return ((total - 2 / (n - 2) * (one.t() @ k @ other @ one)) / (n * (n - 3))).item()


def test_cka_is_that_of_torch_cka():
    import matplotlib

    matplotlib.use("Agg")
    from torch_cka import CKA

    torch.manual_seed(5)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5)) for _ in range(2)]
    loader = DataLoader(TensorDataset(torch.randn(48, 6)), batch_size=16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = CKA(*models, "one", "two", ["0", "2"], ["0", "1", "2"])
        theirs.compare(loader)
    ours = MiniBatchCKA()
    for (batch,) in loader:
        ours.add(
            *[
                [model[: i + 1](batch) for i in layers]
                for model, layers in zip(models, [(0, 2), (0, 1, 2)], strict=True)
            ]
        )
    torch.testing.assert_close(ours.matrix().float(), theirs.export()["CKA"], rtol=0, atol=1e-5)


def test_cka():
    torch.manual_seed(6)
    x, y = torch.randn(40, 7).double(), torch.randn(40, 30).double()
    assert hsic(gram(x), gram(y)).item() == pytest.approx(slow_hsic(gram(x), gram(y)), abs=1e-12)
    rotation = torch.linalg.qr(torch.randn(7, 7).double())[0]
    cka = MiniBatchCKA()
    cka.add([x], [x, 3 * x @ rotation + 2])
    torch.testing.assert_close(cka.matrix(), torch.ones(1, 2).double(), rtol=0, atol=1e-9)
    values = torch.tensor([hsic(gram(torch.randn(16, 5)), gram(torch.randn(16, 5))).item() for _ in range(200)])
    assert abs(values.mean()) < 3 * values.std() / 200**0.5  # unbiased
    for size in (24, 128):  # what rounding leaves of features without variance is no similarity
        constant = MiniBatchCKA()
        constant.add([torch.full((size, 48), 0.1)], [torch.randn(size, 5), torch.full((size, 7), 0.3)])
        assert constant.matrix().isnan().all()
    with pytest.raises(UserError, match="at least 4 inputs, got 3"):
        cka.add([x[:3]], [x[:3]])
    with pytest.raises(UserError, match="features of the same inputs"):
        cka.add([x], [y[:20]])
    with pytest.raises(UserError, match="at least one whole batch"):
        MiniBatchCKA().matrix()


@pytest.mark.parametrize(
    ("name", "count", "small"),
    [
        ("smlp_rp_mixer_tiny", 4, {}),
        ("smlp_s_mixer", 4, {}),
        ("smlp_sparse_mlp", 2, {"mlp_width": 64 * 48}),
        ("smlp_sparse_mlp", 2, {"mlp_width": 64 * 48, "mlp_hidden": 20}),
        ("smlp_gmlp_tiny", 2, {}),
    ],
)
def test_recorded_features_add_up_to_the_block(name, count, small):
    """What is recorded is what the last skip connection adds, up to an RP-Mixer's order."""
    torch.manual_seed(7)
    model = ImageModel(image_preset(name, num_layers=2, **small)).eval()
    seen = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: seen.append(output - inputs[0]))
    with torch.no_grad(), recorded(branches(model)) as features:
        model(torch.randn(4, 3, 32, 32))
    assert len(features) == len(branches(model)) == count
    if count == 2:
        torch.testing.assert_close(features[-1], seen[0], rtol=0, atol=1e-5)
