"""Parameters and FLOPs: the formula by hand, against the paper's tables, and against fvcore on the real modules."""

import json

import pytest
import torch
from architectures import LANGUAGE_MODELS
from fvcore.nn import FlopCountAnalysis
from running import run_python
from torch import nn

import smlp
from smlp.cli import main
from smlp.cli.flops import account
from smlp.config import unflatten
from smlp.config.presets import PRESETS, preset
from smlp.costs import counted, formula
from smlp.costs.component import ATTENTION
from smlp.costs.counted import build_without_weights, counted_flops, counted_parameters, own_shares
from smlp.costs.formula import components, flops_per_token, forward_flops, parameters
from smlp.costs.operators import FREE, prepare
from smlp.nn.blocks.gmlp import SPATIAL_GATING
from smlp.nn.blocks.smlp import FEATURE_MOE

pytestmark = pytest.mark.long

SMALL = {"vocab_size": 10, "max_tokens": 4, "embed_dim": 4, "ffn_dim": 8, "num_experts": 2}


def one_layer(**settings):
    """A model with one sparse block, or one dense block: multiply-adds for each token by hand below."""
    return unflatten({**SMALL, "num_dense_layers": 0, "num_sparse_layers": 1, **settings})


ATTENTION_BY_HAND = 5 * 4 + 4 * 16 + 2 * 4 * 4  # norm, four projections, scores and values of 4 tokens
HEAD_BY_HAND = 10 * 4 + 5 * 4


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        (
            {"dense_block": "transformer", "num_dense_layers": 1, "num_sparse_layers": 0},
            ATTENTION_BY_HAND + 5 * 4 + 2 * 4 * 8,
        ),
        ({"num_dense_layers": 1, "num_sparse_layers": 0}, 5 * 4 + 4 * 8 + 4 * 4 + 5 * 4 + 4 * 4),
        # two norms and 4 positions x 4 features; 2 centroids; a norm and a feed-forward network
        ({}, 2 * 5 * 4 + 4 * 4 + 2 * 4 + 5 * 4 + 2 * 4 * 8),
        # prefix of 1: 4 x 1 x 2 scores and 3 x 3 x 4 spatial products in each sequence of 4
        ({"feature_routing": "partial"}, 2 * 5 * 4 + (4 * 2 + 9 * 4) / 4 + 2 * 4 + 5 * 4 + 2 * 4 * 8),
        ({"feature_routing": "leaky"}, 2 * 5 * 4 + (4 * 4 * 2 + 9 * 4) / 4 + 2 * 4 + 5 * 4 + 2 * 4 * 8),
        # each token meets n/E = 2 tokens at its expert
        ({"sparse_block": "gmlp_moe"}, 2 * 4 + 5 * 4 + 4 * 8 + 5 * 4 + 4 * 4 + 2 * 4),
        ({"sparse_block": "transformer", "router": "switch"}, ATTENTION_BY_HAND + 2 * 4 + 5 * 4 + 64),
        ({"sparse_block": "transformer", "router": "gshard"}, ATTENTION_BY_HAND + 2 * 4 + 5 * 4 + 2 * 64),
        ({"sparse_block": "transformer", "router": "hash"}, ATTENTION_BY_HAND + 5 * 4 + 64),
        ({"sparse_block": "transformer", "router": "base"}, ATTENTION_BY_HAND + 2 * 4 + 5 * 4 + 64),
    ],
)
def test_flops_by_hand(settings, by_hand):
    config = one_layer(**settings)
    assert flops_per_token(config) == HEAD_BY_HAND + by_hand
    assert forward_flops(config, num_seqs=3) == round(3 * 4 * (HEAD_BY_HAND + by_hand))


def test_parameters_of_ranks():
    two_each = parameters(preset("gshard_lm"))  # 64 experts on the paper's 32 ranks
    one_each = parameters(preset("gshard_lm"), world_size=64)
    assert two_each.expert_per_rank == 2 * one_each.expert_per_rank == 2 * 9 * (2 * 1024 * 4096 + 4096 + 1024)
    assert two_each.total == one_each.total == two_each.other + 32 * two_each.expert_per_rank
    tiny = preset("smlp_tiny")
    assert formula.default_world_size(tiny) == 8
    assert parameters(tiny, 16) == parameters(tiny, 8) == parameters(tiny)  # two groups of 8 ranks hold one expert each
    assert parameters(tiny, 2).expert_per_rank == 4 * parameters(tiny).expert_per_rank
    assert parameters(preset("dense_lm"), 5).expert_per_rank == 0
    for world_size, words in ((3, ["8 experts", "world_size=3"]), (0, ["world_size", "0"])):
        with pytest.raises(smlp.UserError) as error:
            parameters(tiny, world_size)
        assert all(word in str(error.value) for word in words)


def kind(config, name):
    return next(part for part in components(config) if part.kind == name)


def test_modules_of_table_3():
    attention = kind(preset("dense_lm"), ATTENTION)
    assert attention.other_params == pytest.approx(4.198e6, rel=1e-3)
    assert 2048 * attention.flops_per_position == pytest.approx(12.885e9, rel=0.01)
    assert kind(preset("dense_lm", num_heads=1), ATTENTION) == attention
    for heads, params in ((16, 16.798e6), (1, 1.054e6)):
        unit = kind(preset("gmlp_lm", num_heads=heads), SPATIAL_GATING)
        assert unit.other_params == pytest.approx(params, rel=1e-3)
        assert 2048 * unit.flops_per_position == pytest.approx(4.316e9, rel=0.01)
    expert = kind(preset("smlp"), FEATURE_MOE)
    assert expert.expert_params + expert.other_params == pytest.approx(1.054e6, rel=1e-3)


@pytest.mark.parametrize(
    ("arch", "expert", "other", "flops"),
    [  # the formula column of the paper's rows: millions, millions, 10^12 at batch 2 x 1024
        ("dense_lm", 0, 354.74, 0.829),
        ("gmlp_lm", 0, 353.88, 0.813),
        ("smlp", 113.39, 258.69, 0.822),
        ("base_lm", 100.75, 241.79, 0.800),
        ("smlp_large", 277.0, 682.6, 2.1245),
        ("base_lm_large", 268.55, 642.55, 2.003),
    ],
)
def test_models_of_the_papers_tables(arch, expert, other, flops):
    config = preset(arch)
    params = parameters(config)
    assert formula.default_world_size(config) == 32
    assert params.expert_per_rank / 1e6 == pytest.approx(expert, rel=1e-3)
    assert params.other / 1e6 == pytest.approx(other, rel=1e-3)
    assert forward_flops(config, num_seqs=2) / 1e12 == pytest.approx(flops, rel=0.01)


def test_tiny_presets_cost_the_same():
    costs = {arch: flops_per_token(preset(arch)) for arch in LANGUAGE_MODELS if arch.endswith("_tiny")}
    assert len(costs) == 12
    assert max(costs.values()) <= 1.01 * min(costs.values()), costs


@pytest.mark.parametrize("arch", PRESETS)
def test_fvcore_counts_what_the_formula_says(arch):
    config = preset(arch)
    decoder = build_without_weights(config)
    flops, sizes = counted_flops(decoder, num_seqs=2), counted_parameters(decoder)
    total = forward_flops(config, num_seqs=2)
    assert sum(flops.values()) == pytest.approx(total, rel=0.005)
    for part in components(config):
        nominal = 2 * config.max_tokens * part.nominal_flops(config.max_tokens)
        assert flops.pop(part.name) == pytest.approx(nominal, rel=1e-6), part
        assert sizes.pop(part.name) == (part.num_experts * part.expert_params, part.other_params), part
    assert not flops and not sizes


@pytest.mark.parametrize(
    ("arch", "num_tokens", "settings"),
    [
        ("smlp_tiny", 37, {"activation": "swish"}),
        ("smlp_partial_tiny", 90, {}),
        ("smlp_partial_tiny", 20, {}),  # all of it is prefix
        ("smlp_leaky_tiny", 90, {"router": "switch"}),
        ("gmlp_lm_tiny", 50, {"num_heads": 4}),
        ("gmlp_mlm_tiny", 32, {"embed_dim": 8, "ffn_dim": 8, "vocab_size": 50}),
        ("gmlp_moe_tiny", 64, {"router": "gshard", "num_experts": 4}),
        ("gshard_lm_tiny", 128, {"num_experts": 1}),
        ("switch_lm_tiny", 7, {"num_experts": 6, "positions": "learned", "activation": "relu"}),
    ],
)
def test_fvcore_and_formula_agree_on_other_settings_and_short_inputs(arch, num_tokens, settings):
    config = preset(arch, **settings)
    decoder = build_without_weights(config)
    total = sum(counted_flops(decoder, 3, num_tokens).values())
    # a trace leaves out what is computed and not used: the second norm of a sequence that is all prefix
    assert total == pytest.approx(forward_flops(config, 3, num_tokens), rel=1e-3 if num_tokens == 20 else 1e-6)
    sizes = counted_parameters(decoder)
    assert sum(expert + other for expert, other in sizes.values()) == parameters(config).total


@pytest.mark.parametrize("num_tokens", [1, 3, 100])
def test_uneven_experts_cost_what_the_formula_says(num_tokens):
    """A token is its own key at its expert, so that k*n/E keys would be too few where E does not divide k*n."""
    config = preset("gmlp_moe_tiny", embed_dim=8, ffn_dim=8, vocab_size=50)
    total = sum(counted_flops(build_without_weights(config), 3, num_tokens).values())
    assert total == forward_flops(config, 3, num_tokens)


def test_buckets_of_distances_are_free_in_a_small_model():
    sizes = {"embed_dim": 32, "ffn_dim": 64, "vocab_size": 500, "max_tokens": 64}
    config = preset("dense_lm_tiny", transformer_attention="relative", positions="none", **sizes)
    assert sum(counted_flops(build_without_weights(config), 1, 64).values()) == forward_flops(config, 1, 64)


def test_inputs_longer_than_the_context_are_refused():
    with pytest.raises(smlp.UserError, match=r"num_tokens=129.*max_tokens=128"):
        forward_flops(preset("smlp_tiny"), num_tokens=129)
    with pytest.raises(smlp.UserError, match="num_tokens=0"):
        components(preset("smlp_tiny"), 0)


class Operators(nn.Module):
    """What fvcore has no handles for; sizes in the test."""

    def forward(self, x_234: torch.Tensor) -> torch.Tensor:
        w_245 = torch.ones(2, 4, 5)
        out = torch.baddbmm(torch.ones(2, 1, 5), x_234, w_245)
        mixed = nn.functional.scaled_dot_product_attention(x_234, torch.ones(2, 7, 4), torch.ones(2, 7, 6))
        return out.sum() + mixed.sum() + torch.addcmul(x_234, x_234, x_234).sum()


def test_handles_count_by_hand():
    counts = prepare(FlopCountAnalysis(Operators(), (torch.ones(2, 3, 4),))).by_operator()
    attention = 2 * 3 * 7 * (4 + 6)
    assert counts == {"baddbmm": 2 * 3 * 4 * 5, "scaled_dot_product_attention": attention, "addcmul": 24}


def with_activation(activation):
    decoder = build_without_weights(preset("dense_lm_tiny", num_dense_layers=1))
    decoder.blocks[0].feed_forward.activation = activation
    return decoder


def test_an_unknown_operator_that_costs_is_an_error():
    decoder = with_activation(lambda x: x + torch.cdist(x, x).sum())
    with pytest.raises(smlp.UserError, match=r"aten::(cdist|_euclidean_dist).*multiply-adds"):
        counted_flops(decoder)


def test_an_unknown_operator_that_costs_next_to_nothing_is_let_pass():
    plain = counted_flops(with_activation(nn.functional.gelu))
    assert "erfinv" not in FREE
    assert counted_flops(with_activation(lambda x: x * x[..., :1].erfinv())) == plain


class OfTwoFeatures(nn.Module):
    """A layer over the positions of the first two features, in the place of an activation."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.to("meta")

    def forward(self, x_BnF: torch.Tensor) -> torch.Tensor:
        return x_BnF + self.layer(x_BnF[..., :2].transpose(1, 2)).sum()


@pytest.mark.parametrize(
    ("out_channels", "width", "settings"),
    [(1, 3, {}), (4, 3, {"padding": 2, "stride": 3}), (2, 4, {"dilation": [2], "groups": 2, "padding": (1,)})],
)
def test_convolutions_of_blocks_are_counted(out_channels, width, settings):
    convolution = nn.Conv1d(2, out_channels, width, **settings)
    out_tokens = convolution(torch.ones(1, 2, preset("dense_lm_tiny").max_tokens)).size(2)
    plain, counted = (counted_flops(with_activation(OfTwoFeatures(layer))) for layer in (nn.Identity(), convolution))
    more = out_tokens * out_channels * 2 // settings.get("groups", 1) * width
    assert {name: counted[name] - plain[name] for name in plain if counted[name] != plain[name]} == {"blocks.0": more}


def test_a_convolution_whose_padding_is_a_word_is_refused():
    with pytest.raises(smlp.UserError, match="padding='same' is not counted: give the number of positions"):
        counted_flops(with_activation(OfTwoFeatures(nn.Conv1d(2, 1, 3, padding="same"))))


@pytest.mark.parametrize("arch", ["smlp_tiny", "gmlp_moe_tiny", "gshard_lm_tiny"])
def test_tracing_blocks_that_are_alike_once_changes_nothing(arch, monkeypatch):
    decoder = build_without_weights(preset(arch))
    once = counted_flops(decoder, 2)
    monkeypatch.setattr(counted, "distinct_blocks", lambda blocks: (blocks, list(range(len(blocks)))))
    assert counted_flops(decoder, 2) == once
    assert len(decoder.blocks) == preset(arch).num_layers


def test_blocks_are_alike_if_modules_and_sizes_are():
    blocks = build_without_weights(preset("smlp_tiny")).blocks
    distinct, kinds = counted.distinct_blocks(blocks)
    assert kinds == [0, 0, 1, 0, 0, 1, 0, 0] and list(distinct) == [blocks[0], blocks[2]]
    blocks[4] = build_without_weights(preset("smlp_tiny", max_tokens=64)).blocks[0]  # other spatial weights
    assert counted.distinct_blocks(blocks)[1] == [0, 0, 1, 0, 2, 1, 0, 0]
    blocks[6].num_passes = 2  # as a plug-in's block may have, which its repr does not show
    assert counted.distinct_blocks(blocks)[1] == [0, 0, 1, 0, 2, 1, 3, 0]


@pytest.mark.parametrize("scores", ["rotary", "relative"])
def test_tables_of_positions_are_free_also_in_the_smallest_models(scores):
    sizes = {"embed_dim": 16, "ffn_dim": 32, "num_heads": 1, "num_dense_layers": 1, "max_tokens": 16, "vocab_size": 30}
    config = preset("dense_lm_tiny", transformer_attention=scores, positions="none", **sizes)
    assert account(config, 1, None, None)["agrees"]


def test_own_shares_add_up():
    by_module = {"decoder": 100, "decoder.blocks.1": 30, "decoder.blocks.1.mixing": 10, "decoder.blocks.10": 50}
    own = own_shares(by_module, ["decoder", "blocks.1", "blocks.1.mixing", "blocks.10"], "decoder")
    assert own == {"decoder": 20, "blocks.1": 20, "blocks.1.mixing": 10, "blocks.10": 50}


def flops_command(*arguments, tmp_path=None):
    json_file = [] if tmp_path is None else ["--json", str(tmp_path / "flops.json")]
    return main.main(["flops", *map(str, arguments), *json_file])


def test_flops_command(tmp_path, capsys):
    assert (
        flops_command("--arch", "smlp_tiny", "--experts", 4, "--world-size", 2, "--tokens", 64, tmp_path=tmp_path) == 0
    )
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "flops.json").read_text())
    config = preset("smlp_tiny", num_experts=4, max_tokens=64)
    params = parameters(config, 2)
    assert report["arch"] == "smlp_tiny"
    assert report["params"] == {"expert_per_rank": params.expert_per_rank, "other": params.other, "total": params.total}
    assert report["flops"]["formula"] == report["flops"]["fvcore"] == forward_flops(config, 2)
    assert (report["tokens"], report["batch"], report["experts"], report["world_size"]) == (64, 2, 4, 2)
    for key, name in (("params", "expert_per_rank"), ("params", "other"), ("flops", "formula"), ("flops", "fvcore")):
        assert sum(row[key][name] for row in report["components"]) == report[key][name]
    for name in ("embedding and head", "gMLP block", "spatial gating", "sMoE", "tMoE experts", "router", "total"):
        assert f"\n{name} " in shown
    assert f"{params.total / 1e6:.3f} M parameters" in shown and "formula and count agree" in shown


def test_flops_command_shows_disagreement(monkeypatch, capsys):
    monkeypatch.setattr("smlp.costs.counted.counted_flops", lambda decoder, *_: dict.fromkeys(
        [part.name for part in components(decoder.config)], 1
    ))  # fmt: skip
    assert flops_command("--arch", "smlp_tiny") == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_flops_of_a_checkpoint(tmp_path, capsys):
    """No dictionary, no data: the options and the size of the embedding are in the file."""
    config = preset("switch_lm_tiny", vocab_size=50, max_tokens=32, embed_dim=16, num_heads=2)
    options = {"_name": "switch_lm_tiny", "embed_dim": 16, "num_heads": 2, "tokens_per_sample": 32}
    blocks = {f"decoder.core.blocks.{block}.weight": torch.zeros(16) for block in range(config.num_layers)}
    weights = {"decoder.core.embedding.weight": torch.zeros(50, 16), **blocks}
    torch.save({"cfg": {"model": options}, "model": weights}, tmp_path / "model.pt")
    assert flops_command("--path", tmp_path / "model.pt", "--tokens", 20, tmp_path=tmp_path) == 0
    report = json.loads((tmp_path / "flops.json").read_text())
    assert report["flops"]["fvcore"] == forward_flops(config, 2, 20)
    assert report["params"]["total"] == parameters(config).total
    assert flops_command("--path", tmp_path / "model.pt", "--tokens", 33) == 1
    assert "--tokens is 33, and " in capsys.readouterr().err
    torch.save({"cfg": {"model": {"_name": "transformer_lm"}}, "model": {}}, tmp_path / "other.pt")
    assert flops_command("--path", tmp_path / "other.pt") == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--arch", "smlp_tinny"], ["smlp_tinny", "did you mean 'smlp_tiny'"]),
        (["--arch", "smlp_tiny", "--batch", "0"], ["--batch", "0"]),
        (["--arch", "smlp_tiny", "--tokens", "0"], ["--tokens must be at least 1", "0"]),
        (["--arch", "smlp_tiny", "--experts", "7"], ["num_experts=7", "embed_dim=256"]),
        (["--arch", "gmlp_lm_tiny", "--experts", "8"], ["--experts", "gmlp_lm_tiny"]),
        (["--arch", "smlp_tiny", "--world-size", "3"], ["8 experts", "world_size=3"]),
        (["--arch", "gmlp_lm_tiny", "--world-size", "3"], ["--world-size has no effect for gmlp_lm_tiny"]),
        (["--path", "nowhere.pt"], ["nowhere.pt"]),
        (["--path", "nowhere.pt", "--experts", "8"], ["--experts", "--arch"]),
        (["--arch", "smlp_tiny", "--json", "no/such/folder/x"], ["--json no/such/folder/x"]),
    ],
)
def test_flops_command_refuses_in_one_sentence(words, parts, capsys):
    assert flops_command(*words) == 1
    error = capsys.readouterr().err
    assert error.startswith("smlp: error: ") and error.count("\n") == 1
    assert all(part in error for part in parts), error


@pytest.mark.slow
def test_the_largest_model_needs_no_memory():
    """15.6 B parameters, which would be 62 GB."""
    code = (
        "import resource, sys; from smlp.cli.main import main; status = main(sys.argv[1:]);"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024); sys.exit(status)"
    )
    done = run_python("-c", code, "flops", "--arch", "gshard_lm_large", timeout=60)
    assert done.rc == 0, done.stderr
    assert "15612.815 M parameters" in done.stdout
    assert int(done.stdout.split()[-1]) < 2 * 2**30
