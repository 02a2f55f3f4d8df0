"""The numbers behind the pictures: Toeplitz shares, orders, and what is counted about routing."""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
from checkpoint_states import small
from running import run_python

import smlp
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.evaluation.samples import Cutting, Samples, cut
from smlp.moe.feature_layer import RoutedFeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.nn import layers
from smlp.nn.decoder import Decoder
from smlp.nn.stack import Stack
from smlp.plots.attention import AttentionMap, Pair, SeenText, attention_map, draw_attention, tiny_attention
from smlp.plots.draw_filters import block_means, draw_filters, draw_layers, draw_toeplitz
from smlp.plots.draw_routing import draw_features, draw_tokens, evenly, like_beside_like, orders
from smlp.plots.drawing import broken, new_figure, save
from smlp.plots.filters import (
    ahead_share,
    filter_numbers,
    fixed_chunks,
    half_energy_distance,
    middle_row,
    random_toeplitz_share,
    spatial_layers,
    toeplitz_share,
)
from smlp.plots.routing import FeatureCounts, RoutingCounts, TokenCounts, count_routing
from smlp.plots.weights import Choice, WeightPlots

pytestmark = pytest.mark.timeout(60)


def test_a_toeplitz_matrix_has_share_one_whatever_stands_above_its_diagonal():
    kernel = np.random.default_rng(0).normal(size=9)
    distance = np.subtract.outer(np.arange(9), np.arange(9))
    weight = kernel[np.abs(distance)]
    assert toeplitz_share(weight) == pytest.approx(1.0, abs=1e-12)
    assert toeplitz_share(np.where(distance < 0, 1e6, weight)) == pytest.approx(1.0, abs=1e-12)


def test_toeplitz_shares_worked_by_hand():
    # diagonals (1, 2) and (3): 2 * 1.5**2 + 3**2 of 1 + 4 + 9
    assert toeplitz_share(np.array([[1.0, 7.0], [3.0, 2.0]])) == pytest.approx(13.5 / 14)
    # diagonals (1, -1, 0), (2, 4) and (5): 0 + 2 * 3**2 + 25 of 2 + 20 + 25
    assert toeplitz_share(np.array([[1.0, 0, 0], [2, -1, 0], [5, 4, 0]])) == pytest.approx(43 / 47)
    assert toeplitz_share(np.diag([1.0, -1.0])) == 0.0
    assert math.isnan(toeplitz_share(np.zeros((3, 3))))


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_share_is_that_of_the_orthogonal_projection(is_causal):
    weight = np.random.default_rng(1).normal(size=(7, 7)) + 0.5
    seen = np.tril(weight) if is_causal else weight
    distances = range(0 if is_causal else -6, 7)
    nearest = sum(np.diag(np.full(7 - abs(d), np.diagonal(seen, -d).mean()), -d) for d in distances)
    rest = np.square(seen - nearest).sum() / np.square(seen).sum()
    assert toeplitz_share(weight, is_causal) == pytest.approx(1 - rest)
    assert toeplitz_share(nearest, is_causal) == pytest.approx(1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("draw", ["normal", "uniform"])
def test_random_matrices_have_the_expected_share(draw, is_causal):
    generator, size, count = np.random.default_rng(2), 6, 4000
    draws = getattr(generator, draw)(*((-1.0, 1.0) if draw == "uniform" else (0.0, 1.0)), (count, size, size))
    shares = np.array([toeplitz_share(weight, is_causal) for weight in draws])
    mean, std = random_toeplitz_share(size, is_causal)
    assert mean == pytest.approx(2 / 7 if is_causal else 11 / 36)
    assert shares.mean() == pytest.approx(mean, abs=4 * std / math.sqrt(count))
    if draw == "normal":
        assert shares.std() == pytest.approx(std, rel=0.05)


def test_half_of_the_energy_is_within_a_distance():
    assert half_energy_distance(np.eye(5)) == 0
    far = np.eye(5)
    far[4, 0] = 10
    assert half_energy_distance(far) == 4
    assert half_energy_distance(np.triu(np.ones((5, 5)), 1)) is None
    assert half_energy_distance(np.ones((400, 400))) == pytest.approx((1 - 0.5**0.5) * 400, abs=1)


def test_whole_matrices_have_weights_on_both_sides():
    # distances to both sides count, and the share above the diagonal is of squares
    assert half_energy_distance(np.array([[1.0, 0, 3], [0, 1, 0], [0, 0, 1]]), is_causal=False) == 2
    assert half_energy_distance(np.array([[2.0, 1, 0], [1, 2, 1], [0, 1, 2]]), is_causal=False) == 0
    assert half_energy_distance(np.array([[1.0, 2, 1], [2, 1, 2], [0, 2, 1]]), is_causal=False) == 1
    assert half_energy_distance(np.zeros((2, 2)), is_causal=False) is None
    assert half_energy_distance(np.ones((400, 400)), is_causal=False) == pytest.approx((1 - 0.5**0.5) * 400, abs=1)
    assert ahead_share(np.array([[1.0, 3], [2, 1]])) == pytest.approx(9 / 15)
    assert math.isnan(ahead_share(np.zeros((2, 2))))
    assert block_means(np.arange(9.0).reshape(3, 3), 2, is_causal=False).tolist() == [[2, 3.5], [6.5, 8]]


def test_large_matrices_are_averaged_in_blocks():
    weight = np.arange(1.0, 10).reshape(3, 3)
    # 1, 4, 5 of the first block; 7, 8 left in the second row of blocks; 9
    assert block_means(weight, 2)[0, 0] == 10 / 3 and block_means(weight, 2)[1].tolist() == [7.5, 9]
    assert np.isnan(block_means(weight, 2)[0, 1])
    assert np.array_equal(block_means(weight, 1), np.where(np.tri(3), weight, np.nan), equal_nan=True)


def test_numbers_spread_evenly():
    assert evenly(3, 4) == [0, 1, 2]
    assert evenly(12, 4) == [0, 4, 7, 11]
    assert len(evenly(1000, 8)) == 8


def test_like_rows_stand_side_by_side():
    draw = np.random.default_rng(3)
    # row r has its counts around column 3 r: neighbours overlap, others do not
    columns = np.arange(36)
    chain = np.stack([1000 * np.exp(-((columns - 3 * row) ** 2) / 8) for row in range(12)]).astype(int)
    shuffled = draw.permutation(12)
    found = shuffled[like_beside_like(chain[shuffled])].tolist()
    assert found in (list(range(12)), list(range(11, -1, -1)))
    empty = np.insert(chain[shuffled], 4, 0, axis=0)
    assert like_beside_like(empty)[-1] == 4
    assert sorted(like_beside_like(empty)) == list(range(13))
    assert like_beside_like(np.zeros((3, 2))) == [0, 1, 2]


def test_groups_that_share_nothing_stay_together():
    for seed in range(30):
        draw = np.random.default_rng(seed)
        groups = np.kron(np.eye(4, dtype=int), np.ones((3, 5), dtype=int)) * draw.integers(1, 50, (12, 20))
        shuffled = draw.permutation(12) if seed % 2 else np.arange(12)
        found = [shuffled[row] // 3 for row in like_beside_like(groups[shuffled])]
        assert sum(one != other for one, other in itertools.pairwise(found)) == 3


def model(arch: str, **overrides: object) -> Decoder:
    """A small model with random weights, in which every token matters."""
    torch.manual_seed(0)
    return randomise(smlp.build(arch, **small(arch, **overrides))).eval()


KINDS = {
    "gmlp_lm_tiny": ["SGU", "SGU"],
    "smlp_tiny": ["SGU", "sMoE (deterministic)"],
    "smlp_partial_tiny": ["SGU", "sMoE (partial)"],
    "smlp_leaky_tiny": ["SGU", "sMoE (leaky)"],
    "gmlp_moe_tiny": ["SGU", "gMLP-MoE"],
    "base_lm_tiny": [],
    "dense_lm_tiny": [],
    "gmlp_mlm_tiny": ["SGU", "SGU"],
    "amlp_mlm_tiny": ["SGU", "SGU"],
    "bert_mlm_tiny": [],
    "mixer_mlm_tiny": [],
}


@pytest.mark.parametrize("spatial_weights", ["full", "toeplitz"])
@pytest.mark.parametrize("arch", KINDS)
def test_layers_with_spatial_filters(arch, spatial_weights):
    decoder = model(arch, spatial_weights=spatial_weights)
    layers = spatial_layers(decoder)
    assert [layer.kind for layer in layers] == KINDS[arch]
    for layer in layers:
        assert layer.num_matrices == (2 if layer.unit == "head" else 4)
        is_cut = "partial" in layer.kind or "leaky" in layer.kind
        assert layer.first_position == (3 if is_cut else 0) and layer.size == 12 - layer.first_position
        # the matrices and biases are those that the model multiplies by
        x = torch.randn(2, layer.size, layer.num_matrices, 5)
        weight = torch.from_numpy(np.stack([layer.weight(index) for index in range(layer.num_matrices)]))
        bias = torch.from_numpy(np.stack([layer.bias(index) for index in range(layer.num_matrices)]))
        expected = torch.einsum("eij,bjec->biec", weight, x) + bias.T[None, :, :, None]
        assert torch.allclose(layer.experts.project(x), expected, atol=1e-5)
        is_toeplitz = spatial_weights == "toeplitz"
        assert layer.is_causal != decoder.config.is_bidirectional and layer.is_toeplitz == is_toeplitz
        row = layer.weight(1)[layer.size // 2]
        assert middle_row(layer, 1).tolist() == (row[: layer.size // 2 + 1] if layer.is_causal else row).tolist()
        assert (row[layer.size // 2 + 1 :].any(), layer.weight(1).any()) == (not layer.is_causal, True)
        for number in filter_numbers(layer):
            weight_TT = layer.weight(number.index)
            assert number.toeplitz_share == toeplitz_share(weight_TT, layer.is_causal)
            assert (number.toeplitz_share == pytest.approx(1)) == is_toeplitz
            assert number.ahead_share == (None if layer.is_causal else ahead_share(weight_TT))
            num_weights = layer.size * (layer.size + 1) / 2 if layer.is_causal else layer.size**2
            assert number.weight_rms == pytest.approx(math.sqrt(np.square(weight_TT).sum() / num_weights), rel=1e-5)
    assert (fixed_chunks(decoder.config) is not None) == (arch == "smlp_tiny")


def test_one_toeplitz_matrix_is_made_of_its_own_weights_alone(monkeypatch):
    """With many experts and positions, making all for each takes minutes."""
    (*_, layer) = spatial_layers(model("smlp_tiny", spatial_weights="toeplitz"))
    whole, made = layers.toeplitz_matrices, []
    monkeypatch.setattr(layers, "toeplitz_matrices", lambda w_hL, n: made.append(len(w_hL)) or whole(w_hL, n))
    assert layer.weight(2).any() and made == [1]


def test_numbers_of_filters():
    decoder = model("smlp_tiny")
    layer = spatial_layers(decoder)[1]
    with torch.no_grad():
        layer.experts.weight[1] = 0
        layer.experts.weight[2] = 0.5
        layer.experts.bias[2] = torch.arange(12.0)
    numbers = filter_numbers(layer)
    assert [each.index for each in numbers] == [0, 1, 2, 3]
    assert numbers[0].toeplitz_share == pytest.approx(toeplitz_share(layer.weight(0)))
    assert numbers[1].toeplitz_share is None and numbers[1].half_energy_distance is None
    assert numbers[2].toeplitz_share == pytest.approx(1.0)
    assert numbers[2].weight_rms == pytest.approx(0.5)
    assert numbers[2].bias_mean == 5.5 and numbers[2].bias_std == pytest.approx(np.arange(12).std())
    with torch.no_grad():
        layer.experts.bias[3, 4] = math.nan
    with pytest.raises(
        UserError, match=r"layer 1 \(sMoE \(deterministic\)\): expert 3 has weights that are not finite"
    ):
        filter_numbers(layer)


def slow_attention(model: Stack, ids: list[int]) -> dict[int, list[list[float]]]:
    """Weights of every layer's tiny attention by its definition, one token after the other."""
    found, is_causal = {}, not model.config.is_bidirectional
    hooks = []
    for number, block in enumerate(model.blocks):

        def record(block, inputs, number=number):
            vectors = block.attention.proj_in(block.norm(inputs[0]))[0]
            width = vectors.size(1) // 3
            rows = []
            for query in range(len(ids)):
                scores = [
                    float(vectors[query, :width] @ vectors[key, width : 2 * width]) / math.sqrt(width)
                    for key in range(query + 1 if is_causal else len(ids))
                ]
                total = sum(map(math.exp, scores))
                rows.append([math.exp(score) / total for score in scores] + [0.0] * (len(ids) - len(scores)))
            found[number] = rows

        hooks.append(block.register_forward_pre_hook(record))
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


def attending(arch: str, num_layers: int = 3) -> Stack:
    """A small aMLP, causal or not."""
    return model(arch, num_dense_layers=num_layers, num_sparse_layers=0, gmlp_attention_dim=4)


IDS = [0, 5, 6, 7, 2, 2, 8, 5, 2]


@pytest.mark.parametrize("arch", ["amlp_mlm_tiny", "gmlp_lm_tiny"])
@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_the_largest_attention_over_the_first_half_of_the_layers(arch, num_layers):
    core = attending(arch, num_layers).train()
    symbols = [f"w{number}" for number in range(24)]
    found = attention_map(core, SeenText("a text", IDS), symbols)
    assert core.training, "the mode is as it was"
    half = {1: [0], 3: [0, 1], 4: [0, 1]}[num_layers]
    assert found.layers == half == list(tiny_attention(core))
    assert found.symbols == [symbols[token] for token in IDS]
    slow = slow_attention(core.eval(), IDS)
    for query, key in itertools.product(range(len(IDS)), repeat=2):
        values = [slow[layer][query][key] for layer in half]
        assert found.weight_nn[query, key] == pytest.approx(max(values), abs=1e-6)
        assert slow[found.layer_nn[query, key]][query][key] == pytest.approx(max(values), abs=1e-6)
    words = [1, 2, 3, 6, 7]  # neither <s> nor </s>
    pairs = [pair for pair in itertools.permutations(words, 2) if found.weight_nn[pair] > 0]
    assert len(pairs) == (20 if arch == "amlp_mlm_tiny" else 10)
    best = sorted((float(found.weight_nn[pair]) for pair in pairs), reverse=True)
    assert [pair.weight for pair in found.strongest(100)] == best
    first, *others = found.strongest()
    assert first == Pair(first.query, first.key, best[0], found.layer_nn[first.query, first.key]) and len(others) == 9
    assert found.weight_nn[first.query, first.key] == np.float32(best[0])


def test_attention_that_is_no_number_is_refused():
    core = attending("amlp_mlm_tiny")
    with torch.no_grad():
        core.blocks[1].attention.proj_in.weight[0] = math.nan
    with pytest.raises(UserError, match="layer 1: the tiny attention has weights that are not finite"):
        attention_map(core, SeenText("a text", IDS), ["w"] * 24)
    assert not tiny_attention(model("bert_mlm_tiny")) and not tiny_attention(model("gmlp_mlm_tiny"))


def test_a_picture_of_attention_has_a_row_for_each_token():
    pytest.importorskip("matplotlib")
    weight_nn = np.arange(81.0).reshape(9, 9)
    symbols = ["<s>", "a$b", "c", "d", "</s>", "</s>", "e", "a$b", "</s>"]
    figure = draw_attention(AttentionMap(SeenText("x", IDS), symbols, [0, 1], weight_nn, weight_nn.astype(int)), "aMLP")
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == weight_nn.tolist()
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == symbols
    assert [line.get_ydata()[0] for line in axes.lines[::2]] == [4.5, 5.5], "between two texts"


def test_a_picture_of_all_layers_has_each_matrix_and_its_middle_row():
    pytest.importorskip("matplotlib")
    for arch, is_causal in (("gmlp_mlm_tiny", False), ("gmlp_lm_tiny", True)):
        layers = spatial_layers(model(arch, num_dense_layers=11, spatial_weights="full"))
        drawn = [(layer, filter_numbers(layer)[1]) for layer in layers]
        axes = draw_layers(drawn, arch).axes
        assert len(axes) == 22
        for place, (layer, numbers) in enumerate(drawn):
            panel, row = axes[2 * place], axes[2 * place + 1]
            weight_TT = layer.weight(1)
            seen = np.where(np.tri(12), weight_TT, np.nan) if is_causal else weight_TT
            assert np.array_equal(panel.images[0].get_array().filled(np.nan), seen, equal_nan=True)
            assert panel.get_title() == f"layer {place}, head 1: {numbers.toeplitz_share:.3f}"
            assert row.lines[0].get_ydata().tolist() == weight_TT[6, : 7 if is_causal else 12].tolist()
            assert row.get_xlim() == panel.get_xlim()


def samples_of(decoder: Decoder, num_tokens: int = 200) -> Samples:
    """Blocks of random tokens; the last is a short one."""
    tokens = np.random.default_rng(4).zipf(1.4, num_tokens) % 20 + 4
    cutting = Cutting(12, 12, prefix=decoder.config.prefix_tokens)
    return cut(tokens, np.array([num_tokens]), cutting)


ROUTED = {
    "smlp_tiny": {},
    "smlp_partial_tiny": {},
    "smlp_leaky_tiny": {},
    "gmlp_moe_tiny": {},
    "base_lm_tiny": {"num_sparse_layers": 2},
    "switch_lm_tiny": {"eval_capacity_factor": 0.5},
    "gshard_lm_tiny": {"eval_capacity_factor": 0.5},
    "hash_lm_tiny": {},
}


def one_by_one(decoder: Decoder, samples: Samples) -> tuple[dict[str, Counter], dict[str, Counter], dict[str, float]]:
    """What goes where, one sequence at a time: by layer, (id, expert), (feature, expert), and affinity to expert 0."""
    tokens, features, affinity = {}, {}, {}

    def token_hook(name, router, inputs, routing):
        ids = inputs[1].tolist()
        for row, expert in zip(routing.plan.token_A.tolist(), routing.plan.expert_A.tolist(), strict=True):
            tokens.setdefault(name, Counter())[ids[row], expert] += 1
        if routing.logits_NE is not None:
            is_base = "centroids" in dict(router.named_parameters())
            values = routing.logits_NE.sigmoid() if is_base else routing.logits_NE.softmax(dim=1)
            affinity[name] = affinity.get(name, 0) + float(values[:, 0].sum())

    def feature_hook(name, router, inputs, output):
        (experts,) = output[0].tolist()
        features.setdefault(name, Counter()).update(enumerate(experts))

    hooks = []
    for module in decoder.modules():
        if isinstance(module, TokenMoE | RoutedFeatureMoE):
            hook = token_hook if isinstance(module, TokenMoE) else feature_hook
            bound = lambda *found, hook=hook, name=module.name: hook(name, *found)  # noqa: E731
            hooks.append(module.router.register_forward_hook(bound))
    with torch.no_grad():
        for first, end in zip(samples.first_S.tolist(), samples.end_S.tolist(), strict=True):
            if end - first > decoder.config.prefix_tokens:
                decoder(torch.from_numpy(samples.sources_M[first:end])[None])
    for hook in hooks:
        hook.remove()
    return tokens, features, affinity


@pytest.mark.parametrize("arch", ROUTED)
def test_counts_are_those_of_one_sequence_at_a_time(arch):
    decoder = model(arch, **ROUTED[arch])
    decoder.train()
    samples = samples_of(decoder)
    counts = count_routing(decoder, samples, num_pieces=6, batch_tokens=60)
    assert decoder.training, "the mode is as it was"
    tokens, features, affinity = one_by_one(decoder.eval(), samples)
    fed = samples.sources_M.tolist()
    assert counts.num_tokens == len(fed) == 200 and counts.num_seqs == 17
    frequencies = Counter(fed)
    assert counts.frequency_P.tolist() == [count for _, count in frequencies.most_common(6)]
    assert [frequencies[piece] for piece in counts.pieces_P] == counts.frequency_P.tolist()
    assert {each.name for each in counts.tokens} == set(tokens)
    per_token = 2 if arch.startswith("gshard") else 1
    for layer in counts.tokens:
        expected = [[tokens[layer.name][piece, expert] for expert in range(4)] for piece in counts.pieces_P]
        assert layer.counts_PE.tolist() == expected
        loads = Counter()
        for (_, expert), count in tokens[layer.name].items():
            loads[expert] += count
        assert layer.load_E.tolist() == [loads[expert] for expert in range(4)]
        assert layer.load_E.sum() == per_token * 200 and layer.choices_per_token == per_token, "nothing is dropped"
        assert np.allclose(layer.shares_PE.sum(axis=1), 1) and layer.load_share_E.sum() == pytest.approx(1)
        if arch.startswith("hash"):
            assert layer.mean_affinity_E is None and layer.loyalty == 1
        else:
            assert layer.mean_affinity_E[0] == pytest.approx(affinity[layer.name] / 200, rel=1e-4)
            assert 0 < np.nanmin(layer.mean_own_affinity_E) <= np.nanmax(layer.mean_own_affinity_E) <= 1
    assert {each.name for each in counts.features} == set(features)
    for layer in counts.features:
        expected = [[features[layer.name][feature, expert] for expert in range(4)] for feature in range(16)]
        assert layer.counts_HE.tolist() == expected
        assert np.allclose(layer.shares_HE.sum(axis=1), 1) and (layer.counts_HE.sum(axis=0) == 17 * 4).all()


SIGMOID = ("loss_free", "sigmoid")


def affinities_token_by_token(decoder: Decoder, samples: Samples) -> dict[str, dict[int, list[list[float]]]]:
    """By layer and id, each token's affinities to all experts, from the scores of one sequence at a time."""
    found: dict[str, dict[int, list[list[float]]]] = {}

    def hook(name, inputs, routing):
        if routing.logits_NE is None:
            return
        for token, scores in zip(inputs[1].tolist(), routing.logits_NE.tolist(), strict=True):
            if decoder.config.router == "base" or (decoder.config.router, decoder.config.loss_free_gate) == SIGMOID:
                affinities = [1 / (1 + math.exp(-score)) for score in scores]
            else:
                affinities = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
            found.setdefault(name, {}).setdefault(token, []).append(affinities)

    layers = [module for module in decoder.modules() if isinstance(module, TokenMoE)]
    hooks = [
        layer.router.register_forward_hook(lambda _, *args, name=layer.name: hook(name, *args)) for layer in layers
    ]
    with torch.no_grad():
        for first, end in zip(samples.first_S.tolist(), samples.end_S.tolist(), strict=True):
            decoder(torch.from_numpy(samples.sources_M[first:end])[None])
    for each in hooks:
        each.remove()
    return found


AFFINITIES = ("base_lm_tiny", "smlp_partial_tiny", "switch_lm_tiny", "gshard_lm_tiny", "hash_lm_tiny")


@pytest.mark.parametrize("arch", AFFINITIES)
def test_affinities_of_pieces_are_means_over_their_tokens(arch):
    decoder = randomise(model(arch, **ROUTED[arch]), seed=6)  # tokens that do not all go to one expert
    samples = samples_of(decoder)
    counts = count_routing(decoder, samples, num_pieces=6, batch_tokens=60)
    expected = affinities_token_by_token(decoder, samples)
    symbols = [f"w{piece}" for piece in counts.pieces_P]
    facts = WeightPlots([], {}, counts, symbols).as_json()["token_routing"]
    assert len(counts.tokens) == len(facts) == (2 if arch == "base_lm_tiny" else 1)
    for layer, found in zip(counts.tokens, facts, strict=True):
        assert layer.tokens_P.tolist() == counts.frequency_P.tolist(), "a token counts once, whatever its choices"
        if arch.startswith("hash"):
            assert not expected and layer.mean_affinity_PE is None and found["mean_affinity_of_pieces"] is None
            continue
        assert layer.mean_affinity_PE.shape == (6, 4) and np.ptp(layer.mean_affinity_PE) > 0.05
        for row, piece in enumerate(counts.pieces_P.tolist()):
            tokens = expected[layer.name][piece]
            assert len(tokens) == counts.frequency_P[row]
            for expert in range(4):
                mean = sum(token[expert] for token in tokens) / len(tokens)
                assert layer.mean_affinity_PE[row, expert] == pytest.approx(mean, rel=1e-4, abs=1e-6)
                assert found["mean_affinity_of_pieces"][row][expert] == layer.mean_affinity_PE[row, expert]


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_the_affinity_of_a_loss_free_router_is_its_gate(gate):
    decoder = randomise(model("switch_lm_tiny", router="loss_free", loss_free_gate=gate), seed=6)
    samples = samples_of(decoder)
    (layer,) = count_routing(decoder, samples, num_pieces=6).tokens
    rows = [row for found in affinities_token_by_token(decoder, samples)[layer.name].values() for row in found]
    assert layer.router == "Loss-free" and layer.mean_affinity_E == pytest.approx(np.mean(rows, axis=0), rel=1e-4)


@pytest.mark.parametrize("arch", AFFINITIES)
def test_a_map_of_affinities_stands_below_that_of_shares_where_there_are_any(arch):
    pytest.importorskip("matplotlib")
    decoder = randomise(model(arch, **ROUTED[arch]), seed=6)  # tokens that do not all go to one expert
    counts = count_routing(decoder, samples_of(decoder), num_pieces=6)
    layer = counts.tokens[0]
    assert (layer.load_E > 0).sum() > 1
    symbols = [f"w{piece}" for piece in counts.pieces_P]
    figure = draw_tokens(layer, symbols, arch, "a text")
    figure.draw_without_rendering()
    maps = [axes for axes in figure.axes if axes.images]
    experts, pieces = orders(layer)
    values = [layer.shares_PE] + ([] if arch.startswith("hash") else [layer.mean_affinity_PE])
    assert len(maps) == len(values) == (1 if arch.startswith("hash") else 2)
    for axes, values_PE in zip(maps, values, strict=True):
        drawn = [[values_PE[piece, expert] for piece in pieces] for expert in experts]
        assert axes.images[0].get_array().tolist() == drawn
        assert axes.images[0].get_clim()[0] == 0 and axes.images[0].get_clim()[1] >= values_PE.max()
        assert [label.get_text() for label in axes.get_yticklabels()] == [str(expert) for expert in experts]
        assert axes.get_position().intervalx == pytest.approx(maps[0].get_position().intervalx), "columns line up"
    assert [label.get_text() for label in maps[-1].get_xticklabels()] == [symbols[piece] for piece in pieces]
    labels = [axes.get_ylabel().replace("\n", " ") for axes in figure.axes]
    unit = "sigmoid of the score" if decoder.config.router == "base" else "softmax gate"
    assert (f"mean affinity ({unit})" in labels) == (len(maps) == 2)


#: 41 characters
LONG_NAME = "an_architecture_of_a_plugin_that_is_long_"


def figures(kind: str) -> list:
    """Figures of a model with a long name."""
    name, text = f"{LONG_NAME}, T = 1024", "65,536 tokens of a_split_with_a_name_of_its_own"
    if kind == "attention":
        long_text, symbols = SeenText("some words " * 30, IDS * 2), ["a rather long symbol"] * 24
        encoder = model("gmlp_mlm_tiny", gmlp_attention_dim=4, max_tokens=18)
        return [draw_attention(attention_map(encoder, long_text, symbols), name)]
    if kind in ("toeplitz", "filters"):
        decoder = model("smlp_partial_tiny", num_heads=1, num_experts=8)
        layers = spatial_layers(decoder)
        numbers = {layer.layer: filter_numbers(layer) for layer in layers}
        if kind == "toeplitz":
            return [draw_toeplitz(layers, numbers, name)]
        few = [(layers[0], [0]), (layers[1], [3]), (layers[1], [2, 5]), (layers[1], range(8))]
        figures = [draw_filters(layer, numbers[layer.layer], list(indices), name) for layer, indices in few]
        return [*figures, draw_layers([(layer, numbers[layer.layer][0]) for layer in layers], name)]
    decoder = model(kind)
    counts = count_routing(decoder, samples_of(decoder), num_pieces=9)
    symbols = [f"word{piece}" for piece in counts.pieces_P]
    drawn = [draw_tokens(layer, symbols, name, text) for layer in counts.tokens]
    return drawn + [draw_features(layer, name, text) for layer in counts.features]


@pytest.mark.parametrize(
    "kind",
    ["toeplitz", "filters", "attention", "smlp_partial_tiny", "gshard_lm_tiny", "switch_lm_tiny", "hash_lm_tiny"],
)
def test_no_text_leaves_a_figure_whatever_the_name_of_the_model(kind, monkeypatch):
    text_class = pytest.importorskip("matplotlib.text").Text
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    seen, draw = [], text_class.draw

    def record(text, renderer, *args, **kwargs):
        seen.append((text.get_text(), text.get_window_extent(renderer)))
        return draw(text, renderer, *args, **kwargs)

    for figure in figures(kind):
        seen.clear()
        canvas = FigureCanvasAgg(figure)
        with monkeypatch.context() as patch:
            patch.setattr(text_class, "draw", record)
            canvas.draw()
        written = [(words, box) for words, box in seen if words.strip()]
        assert any(LONG_NAME in words for words, _ in written) and len(written) >= 5
        for words, box in written:
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
            assert inside, f"{words!r} at {box} leaves {figure.bbox}"


def test_a_picture_is_whole_or_as_before(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    save(new_figure(2, 2, "one"), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=f"cannot write {path}: No space left"):
        save(new_figure(2, 2, "two"), path)
    assert path.read_bytes() == before and before.startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1


def test_a_backend_that_there_is_not_is_one_sentence():
    code = "from smlp.plots.drawing import check_matplotlib; check_matplotlib()"
    pytest.importorskip("matplotlib")
    done = run_python("-c", f"import os; os.environ['MPLBACKEND'] = 'nope'; {code}")
    assert "UserError: matplotlib cannot start: " in done.stderr and "'nope' is not a valid value" in done.stderr


def test_titles_are_broken_between_words():
    pytest.importorskip("matplotlib")
    assert broken("one line\nand  another", 6.0) == ["one line", "and  another"]
    words = [f"word{number}" for number in range(40)]
    lines = broken(" ".join(words), 4.0)
    assert 4 < len(lines) < 10 and " ".join(lines).split(" ") == words
    assert all(len(broken(line, 4.0)) == 1 for line in lines)
    cut_lines = broken("a " + "w" * 200 + " b", 4.0)
    assert cut_lines[0] == "a" and "".join(cut_lines) == "a" + "w" * 200 + " b" and cut_lines[-1].endswith(" b")


def test_a_figure_is_higher_by_the_lines_by_which_its_title_is_too_long():
    pytest.importorskip("matplotlib")
    short, long = new_figure(5.0, 3.0, "Two\nlines"), new_figure(5.0, 3.0, "word " * 40)
    assert short.get_size_inches().tolist() == [5.0, 3.0]
    added = len(broken("word " * 40, 4.7)) - 1
    assert added >= 3 and long.get_size_inches()[1] == pytest.approx(3.0 + added * 1.2 * 11 / 72)


def test_loyalty_and_own_affinity_worked_by_hand():
    counts = TokenCounts(
        *("layer 0 (tMoE)", "BASE", np.array([[6, 2], [1, 1]]), np.array([10, 0])),
        *(np.array([4.0, 1.0]), np.array([4.0, 0.0]), 10),
    )
    assert counts.loyalty == 0.7
    assert counts.mean_affinity_E.tolist() == [0.4, 0.1]
    assert counts.mean_own_affinity_E[0] == 0.4 and math.isnan(counts.mean_own_affinity_E[1])
    assert counts.mean_affinity_PE is None
    # a piece that was not fed has no mean, in JSON null
    counts.tokens_P, counts.affinity_PE = np.array([8, 0]), np.array([[4.0, 1.0], [0.0, 0.0]])
    assert counts.mean_affinity_PE[0].tolist() == [0.5, 0.125] and np.isnan(counts.mean_affinity_PE[1]).all()
    routing = RoutingCounts(np.array([4, 5]), np.array([8, 0]), 10, 1, [counts])
    (facts,) = WeightPlots([], {}, routing, ["a", "b"]).as_json()["token_routing"]
    assert facts["mean_affinity_of_pieces"] == [[0.5, 0.125], [None, None]]


def test_agreement_of_sequences():
    # always the same expert; two of three pairs differ
    counts = FeatureCounts("layer 0 (sMoE)", "partial", np.array([[3, 0], [2, 1]]), 3)
    assert counts.agreement_H.tolist() == [1.0, pytest.approx(1 / 3)]
    assert np.isnan(FeatureCounts("layer 0 (sMoE)", "partial", np.array([[1, 0]]), 1).agreement_H).all()
    draw, total = np.random.default_rng(5), np.zeros((64, 4), dtype=int)
    for _ in range(50):
        total[np.arange(64), draw.permutation(64) % 4] += 1
    random = FeatureCounts("layer 0 (sMoE)", "partial", total, 50).agreement_H
    assert random.mean() == pytest.approx(1 / 4, abs=0.01)


def test_texts_that_are_too_short_for_the_prefix_are_refused():
    decoder = model("smlp_partial_tiny")
    with pytest.raises(UserError, match="no sample is longer than the prefix of 3 tokens"):
        count_routing(decoder, samples_of(decoder, num_tokens=3))


def test_what_is_drawn():
    assert Choice().of_layers(list(range(3, 37, 3))) == [3, 15, 24, 36]
    assert Choice(layers=[6, 7]).of_layers([3, 6, 9]) == [6]
    assert Choice(layers="all").of_layers([3, 6, 9]) == [3, 6, 9]
    assert Choice().of_matrices(3) == [[0, 1, 2]]
    (chosen,) = Choice().of_matrices(32)
    assert len(chosen) == 8 and chosen[0] == 0 and chosen[-1] == 31
    assert [len(part) for part in Choice(experts="all").of_matrices(20)] == [8, 8, 4]
    assert Choice(experts=[1, 9]).of_matrices(4) == [[1]]
    decoder = model("smlp_tiny")
    Choice(layers=[1], experts=[3]).check(decoder)
    with pytest.raises(UserError, match=r"--layers names 2, but the model has 2 layers: 0 to 1"):
        Choice(layers=[0, 2]).check(decoder)
    with pytest.raises(UserError, match=r"--experts names 4, but the model has 4 heads or experts"):
        Choice(experts=[4]).check(decoder)


def test_counting_leaves_the_result_plain():
    found = count_routing(model("base_lm_tiny"), samples_of(model("base_lm_tiny")), num_pieces=100)
    assert isinstance(found, RoutingCounts) and 0 < len(found.pieces_P) <= 20 and (found.frequency_P > 0).all()
    assert found.frequency_P.sum() == found.num_tokens == found.tokens[0].counts_PE.sum()
