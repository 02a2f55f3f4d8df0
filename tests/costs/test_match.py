"""Settings of equal FLOPs for every model family."""

import json

import pytest

import smlp
from smlp.cli import main
from smlp.config import SETTINGS
from smlp.config.presets import FROM_TASK, preset
from smlp.costs.formula import flops_per_token, parameters
from smlp.costs.match import FAMILIES, like, match


def settings_of(arguments):
    """The architecture and the settings that command-line arguments stand for."""
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    arch = pairs.pop("--arch")
    settings = {name.removeprefix("--").replace("-", "_"): int(value) for name, value in pairs.items()}
    settings["max_tokens"] = settings.pop("tokens_per_sample")
    assert set(settings) <= set(SETTINGS) - set(FROM_TASK) | {"max_tokens"}
    return arch, settings


def rebuild(arguments, vocab_size):
    arch, settings = settings_of(arguments)
    return preset(arch, **settings, vocab_size=vocab_size)


LIKE = ["smlp", "smlp_tiny", "smlp_large", "gshard_lm_tiny", "gshard_lm_large", "switch_lm_enlarged"]
SHAPES = [  # far from the presets: whatever their layers were, here others are needed
    (6e6, {"embed_dim": 256, "max_tokens": 128, "vocab_size": 8192, "num_experts": 8}),
    (3e6, {"embed_dim": 64, "max_tokens": 64, "vocab_size": 1000}),
    (1.2e9, {"embed_dim": 1536}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "vary"),
    [(arch, vary) for arch in LIKE for vary in ("layers", "ffn")] + [(shape, "layers") for shape in SHAPES],
)
def test_all_families_cost_the_same(target, vary):
    goal, size, shared = like(target) if isinstance(target, str) else (target[0], "", target[1])
    costs = []
    for family in FAMILIES:
        found = match(family, goal, vary, size, shared)
        config = rebuild(found.arguments(), shared.get("vocab_size", 51200))
        assert config == found.config and found.matches
        assert config.embed_dim == shared.get("embed_dim", 1024)
        assert config.max_tokens == shared.get("max_tokens", 1024)
        costs.append(flops_per_token(config))
        assert costs[-1] == pytest.approx(goal, rel=0.005), found.arguments()
        start = found.start
        if vary == "ffn":
            assert (config.num_dense_layers, config.num_sparse_layers) == (
                start.num_dense_layers,
                start.num_sparse_layers,
            )
        else:
            assert bool(config.num_sparse_layers) == bool(start.num_sparse_layers)
            assert found.share_moved <= 0.15 and found.width_moved <= 0.25
            assert config.ffn_dim % 8 == 0
        assert len(set(config.sparse_layer_indices())) == config.num_sparse_layers
    assert max(costs) - min(costs) <= 0.01 * goal


@pytest.mark.parametrize("arch", ["smlp", "smlp_tiny", "switch_lm", "gshard_lm_tiny", "base_lm_large", "dense_lm"])
def test_an_architecture_matches_itself(arch):
    goal, size, shared = like(arch)
    family = arch.removesuffix(size)
    for vary in ("layers", "ffn"):
        assert match(family, goal, vary, size, shared).config == preset(arch)


def test_whole_layers_come_before_feed_forward_widths():
    goal, size, shared = like("smlp_large")
    found = match("gmlp_moe", goal, "layers", size, shared)
    assert found.config.ffn_dim == found.start.ffn_dim == 8192  # no large preset: widths follow the embedding's
    assert found.config.num_layers != found.start.num_layers
    assert found.arguments()[:2] == ["--arch", "gmlp_moe"] and "--embed-dim" in found.arguments()
    adjusted = match("dense_lm", goal, "layers", size, shared)
    assert adjusted.config.ffn_dim != adjusted.start.ffn_dim and adjusted.config.ffn_dim % 8 == 0


def test_no_settings_are_said_to_be_none(capsys, tmp_path):
    assert main.main(["match", "--flops-per-token", "1e6", "--json", str(tmp_path / "match.json")]) == 1
    shown = capsys.readouterr().out
    assert shown.count("no settings within 0.5%: these are the nearest") == len(FAMILIES)
    assert "no match: dense_lm, gmlp_lm" in shown
    rows = json.loads((tmp_path / "match.json").read_text())["families"]
    assert not any(row["matches"] for row in rows)
    # nothing is nearer than one layer, as narrow as the range allows
    assert "--num-dense-layers 1 --num-sparse-layers 0 --ffn-dim 3072" in shown


def test_widths_may_need_fewer_layers_than_the_next_numbers():
    """Steps of F by 8 pass over the target with 22 and with 23 layers."""
    found = match("dense_lm", 1e5, overrides={"embed_dim": 16, "max_tokens": 32, "vocab_size": 301})
    assert found.matches and found.config.num_dense_layers < 22 and found.config.ffn_dim > 64


@pytest.mark.parametrize("words", [["--like", "smlp_tiny"], ["--like", "smlp", "--vary", "ffn"]])
def test_match_command(words, capsys, tmp_path):
    assert main.main(["match", *words, "--json", str(tmp_path / "match.json")]) == 0
    shown, result = capsys.readouterr().out, json.loads((tmp_path / "match.json").read_text())
    goal = flops_per_token(preset(words[1]))
    assert result["flops_per_token"] == goal
    assert [row["family"] for row in result["families"]] == list(FAMILIES)
    for row in result["families"]:
        assert " ".join(row["arguments"]) in shown
        config = rebuild(row["arguments"], preset(words[1]).vocab_size)
        params = parameters(config)
        assert row["flops_per_token"] == flops_per_token(config)
        assert row["difference"] == pytest.approx(row["flops_per_token"] / goal - 1)
        assert row["params"]["total"] == params.total and row["params"]["expert_per_rank"] == params.expert_per_rank


def test_a_family_that_cannot_be_built_is_named(capsys):
    assert main.main(["match", "--like", "smlp_tiny", "--experts", "7"]) == 1
    shown = capsys.readouterr().out
    assert "num_experts=7 must divide embed_dim=256" in shown and "no match: smlp, smlp_partial, smlp_leaky\n" in shown


def test_experts_do_not_matter_for_dense_models():
    """Neither does what their number divides."""
    goal, size, shared = like("gmlp_lm_tiny", {"embed_dim": 60})
    assert match("gmlp_lm", goal, "layers", size, shared).difference == 0


def test_a_width_that_only_some_families_take(capsys):
    assert main.main(["match", "--like", "gmlp_lm_tiny", "--embed-dim", "63"]) == 1
    shown = capsys.readouterr().out
    assert "H=63" in shown and "sinusoidal positions need an even embed_dim, got 63" in shown


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--flops-per-token", "-3"], ["--flops-per-token must be above 0", "-3"]),
        (["--flops-per-token", "nan"], ["--flops-per-token must be above 0", "nan"]),
        (["--like", "smlp_tinny"], ["smlp_tinny", "did you mean 'smlp_tiny'"]),
        (["--like", "smlp_tiny", "--embed-dim", "0"], ["--embed-dim must be at least 1", "0"]),
        (["--like", "smlp_tiny", "--json", "no/such/folder/x"], ["--json no/such/folder/x"]),
    ],
)
def test_match_command_refuses_in_one_sentence(words, parts, capsys):
    assert main.main(["match", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("smlp: error: ") and error.count("\n") == 1
    assert all(part in error for part in parts), error


def test_depth_has_a_limit():
    with pytest.raises(smlp.UserError, match=r"more than 500 layers of embed_dim=1024"):
        match("smlp", 1e15)


def test_the_share_of_sparse_layers_moves_no_more_than_it_must(capsys):
    """Where no choice keeps the share within its range, the one that moves it least is taken, and the note says so."""
    shape = {"max_tokens": 37, "vocab_size": 777, "embed_dim": 60, "num_heads": 4, "num_experts": 5}
    found = match("base_lm", 4.6e5, "layers", "", shape)
    assert found.matches and (found.config.num_dense_layers, found.config.num_sparse_layers) == (1, 7)
    shape_words = ["--tokens", "37", "--vocab-size", "777", "--embed-dim", "64", "--experts", "5"]
    main.main(["match", "--flops-per-token", "4e5", *shape_words])
    assert "7 of 7 layers are sparse instead of 12 of 23" in capsys.readouterr().out
