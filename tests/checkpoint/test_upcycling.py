"""Sparse upcycling: the sparse model computes what the dense one did, and its experts then part."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import PREFIX, WORDS, differences, save, state_of, train_once, trained
from running import USER_DIR

import smlp
from smlp.checkpoint import lazy, upcycle
from smlp.checkpoint.opened import open_checkpoint
from smlp.cli.main import main
from smlp.config.presets import PRESETS
from smlp.moe.plan import random_table
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer_files import RECORD, Vocabulary, record_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:feature_routing=leaky")]

BY_COPY = ["hash_lm_tiny", "switch_lm_tiny", "gshard_lm_tiny", "base_lm_tiny"]
BY_GROWING = ["smlp_tiny", "smlp_partial_tiny", "smlp_leaky_tiny", "gmlp_moe_tiny"]


def dense_for(arch: str) -> str:
    return "dense_lm_tiny" if arch in BY_COPY else "gmlp_lm_tiny"


def upcycled(folder: Path, arch: str, *options: object, force: bool = False, **dense: Any) -> tuple[Decoder, Decoder]:
    """A dense model and what the command makes of it, in float64."""
    path = save(folder, dense_for(arch), "dense.pt", **{"num_dense_layers": 4, **dense})
    arguments = ["upcycle", path, "-o", folder / "sparse.pt", "--arch", arch, *options]
    assert main(["checkpoint", *map(str, arguments)]) == 0
    assert main(["checkpoint", "verify", str(folder / "sparse.pt")]) == 0
    return tuple(smlp.load_pretrained(folder / name).decoder.double() for name in ("dense.pt", "sparse.pt"))


def largest_difference(first: Decoder, second: Decoder, num_tokens: int = 12) -> float:
    """Of any logit, for the same tokens; some sequences are padded, and what follows padding counts for nothing."""
    tokens = torch.randint(4, first.config.vocab_size, (5, num_tokens), generator=torch.Generator().manual_seed(7))
    tokens[1, 7:] = first.config.padding_idx
    tokens[2, 9:] = first.config.padding_idx
    with torch.no_grad():
        logits = [model(tokens).logits for model in (first, second)]
    assert logits[0].abs().max() > 0.1
    return (logits[0] - logits[1])[tokens != first.config.padding_idx].abs().max().item()


@pytest.mark.parametrize("arch", [*BY_COPY, *BY_GROWING])
@pytest.mark.parametrize("num_experts", [4, 6, 1])
def test_equal_logits_at_step_0(tmp_path: Path, arch: str, num_experts: int, monkeypatch) -> None:
    monkeypatch.setattr(lazy, "PIECE_BYTES", 1000)
    width = {"embed_dim": 24} if arch in BY_GROWING else {}  # which the experts of an sMoE divide
    options = ("--num-sparse-layers", 2, "--num-experts", num_experts)
    dense, sparse = upcycled(tmp_path, arch, *options, **width)
    assert sparse.config.num_sparse_layers == 2 and sparse.config.num_experts == num_experts
    assert sparse.config.num_dense_layers == (2 if arch in BY_COPY else 4)
    # Switch's experts are multiplied by E, which float32 does without error for powers of two only
    tolerance = 1e-6 if (arch, num_experts) == ("switch_lm_tiny", 6) else 1e-9
    assert largest_difference(dense, sparse) < tolerance
    assert largest_difference(dense, sparse, num_tokens=10) < tolerance


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("hash_lm_tiny", []),
        ("switch_lm_tiny", ["--capacity-factor", 0]),
        ("gshard_lm_tiny", ["--capacity-factor", 0, "--second-expert", "all"]),
        ("base_lm_tiny", []),
        ("base_lm_tiny", ["--base-gate", "one", "--base-offset-rate", 0.1, "--base-warmup", 0.1]),
        ("smlp_tiny", []),
        ("smlp_tiny", ["--base-offset-rate", 0.1, "--base-warmup", 0.1]),
        ("smlp_hash_tiny", ["--feature-experts", "linear"]),
        ("gmlp_moe_tiny", []),
    ],
)
def test_equal_logits_in_training_too_where_nothing_is_dropped(tmp_path: Path, arch: str, options) -> None:
    dense, sparse = upcycled(tmp_path, arch, "--num-sparse-layers", 2, "--num-experts", 4, *options)
    assert largest_difference(dense.train(), sparse.train()) < 1e-9


@pytest.mark.parametrize("arch", ["switch_lm_tiny", "base_lm_tiny"])
def test_the_test_would_see_a_gate_that_is_not_undone(tmp_path: Path, arch: str) -> None:
    dense, sparse = upcycled(tmp_path, arch, "--num-sparse-layers", 2, "--num-experts", 4, "--router-scale", 0.3)
    assert largest_difference(dense, sparse) > 1e-3


@pytest.mark.parametrize("arch", BY_COPY)
def test_experts_are_used_and_part_from_each_other(tmp_path: Path, arch: str) -> None:
    """Routing is not stuck on one expert, and after some updates no two experts are equal.

    The dense model is an untrained one: after training on noise it would take all tokens for one and the same.
    """
    _, sparse = upcycled(tmp_path, arch, "--num-sparse-layers", 2, "--num-experts", 4, updates=0)
    sparse.float()
    layers = [block.token_moe for block in sparse.blocks if hasattr(block, "token_moe")]
    assert len(layers) == 2
    tokens = torch.randint(4, 24, (8, 12))
    for layer in layers:
        assert torch.equal(layer.experts.w1[0], layer.experts.w1[3])
        x_NH = torch.randn(96, 16)
        counts = layer.router.eval()(x_NH, tokens.flatten()).plan.counts_E
        assert (counts > 0).all(), f"all experts have a side of their own: {counts.tolist()}"
    optimizer = torch.optim.Adam(sparse.train().parameters(), lr=1e-3)
    for _ in range(5):
        train_once(sparse, optimizer)
    for layer in layers:
        for first in range(4):
            for second in range(first):
                assert not torch.allclose(layer.experts.w1[first], layer.experts.w1[second], atol=1e-5)


def test_grown_blocks_learn(tmp_path: Path) -> None:
    """Their silence is a starting point, not a trap: every silent tensor gets a gradient."""
    _, sparse = upcycled(tmp_path, "smlp_tiny", "--num-sparse-layers", 2, "--num-experts", 4)
    before = copy.deepcopy(sparse.float().state_dict())
    train_once(sparse.train(), torch.optim.Adam(sparse.parameters(), lr=1e-3))
    for name, tensor in sparse.state_dict().items():
        if name.endswith(("feature_moe.experts.weight", "feature_moe.experts.bias", "experts.w2", "experts.b2")):
            assert before[name].abs().max() == 0 and tensor.abs().max() > 0, name


def test_everything_else_is_the_dense_models_own(tmp_path: Path) -> None:
    dense = save(tmp_path, "dense_lm_tiny", "dense.pt", num_dense_layers=4)
    run = ["upcycle", dense, "-o", tmp_path / "s.pt", "--arch", "base_lm_tiny", "--num-experts", 4]
    assert main(["checkpoint", *map(str, run)]) == 0
    old, new = (torch.load(tmp_path / name, weights_only=True) for name in ("dense.pt", "s.pt"))
    config = open_checkpoint(tmp_path / "s.pt").config
    assert config.sparse_layer_indices() == (1, 2)
    for name, tensor in old["model"].items():
        index = int(name.split(".")[3]) if ".blocks." in name else None
        if index in (1, 2) and ".mixing." not in name:
            assert name not in new["model"]
        else:
            assert torch.equal(tensor, new["model"][name]), name
    for index in (1, 2):
        block = f"{PREFIX}blocks.{index}."
        for expert, (theirs, factor) in {
            "w1": ("feed_forward.fc1.weight", 1),
            "b1": ("feed_forward.fc1.bias", 1),
            "w2": ("feed_forward.fc2.weight", 2),
            "b2": ("feed_forward.fc2.bias", 2),
            "norm_weight": ("norm.weight", 1),
            "norm_bias": ("norm.bias", 1),
        }.items():
            rows = new["model"][f"{block}token_moe.experts.{expert}"]
            assert rows.shape[0] == 4 and all(torch.equal(row, factor * old["model"][block + theirs]) for row in rows)
    assert "last_optimizer_state" not in new and new["optimizer_history"][-1]["num_updates"] == 0
    assert new["extra_state"]["train_iterator"]["iterations_in_epoch"] == 0
    assert new["cfg"]["task"] == old["cfg"]["task"] and new["cfg"]["model"]["_name"] == "base_lm_tiny"


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    dense = save(tmp_path, "gmlp_lm_tiny", "dense.pt")
    models = []
    for name, seed in (("a.pt", 1), ("b.pt", 1), ("c.pt", 2)):
        options = ("--arch", "smlp_tiny", "--num-sparse-layers", 2, "--num-experts", 4, "--seed", seed)
        torch.manual_seed(len(models))
        assert main(["checkpoint", *map(str, ("upcycle", dense, "-o", tmp_path / name, *options))]) == 0
        models.append(torch.load(tmp_path / name, weights_only=True)["model"])
    assert differences(models[0], models[1]) == []
    assert any("experts.w1" in name for name in differences(models[0], models[2]))
    weights = [tensor for name, tensor in models[0].items() if name.endswith("token_moe.experts.w1")]
    assert len(weights) == 2 and not torch.equal(*weights), "blocks do not start alike"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("arch", ["switch_lm_tiny", "base_lm_tiny"])
def test_half_precision_keeps_its_type_and_a_router_that_can_choose(tmp_path: Path, arch: str, half) -> None:
    decoder, _ = trained("dense_lm_tiny")
    torch.save(state_of(decoder.to(half), None, "dense_lm_tiny", 2), tmp_path / "dense.pt")
    out = tmp_path / "s.pt"
    options = ("--arch", arch, "--num-sparse-layers", 1, "--num-experts", 4)
    assert main(["checkpoint", *map(str, ("upcycle", tmp_path / "dense.pt", "-o", out, *options))]) == 0
    model = torch.load(out, weights_only=True)["model"]
    assert {tensor.dtype for tensor in model.values()} == {half}
    (router,) = [tensor for name, tensor in model.items() if ".router." in name]
    assert (router != 0).all() and router.abs().max() <= upcycle.TINY_FP16


def test_a_run_in_fp16_gets_a_router_that_fp16_can_hold(tmp_path: Path) -> None:
    path = save(tmp_path, "dense_lm_tiny", "dense.pt")
    dense = open_checkpoint(path)
    for in_fp16, scale in ((False, upcycle.TINY), (True, upcycle.TINY_FP16)):
        dense.state["cfg"]["common"] = {"fp16": in_fp16}
        sparse = upcycle.upcycled(dense, "switch_lm_tiny", {"num_sparse_layers": 1, "num_experts": 4})
        weight = sparse.state["model"][PREFIX + "blocks.1.token_moe.router.weight"].load()
        assert weight.abs().unique().tolist() == [torch.tensor(scale).item()]


def test_balanced_hash_tables_are_made_of_the_training_data(tmp_path: Path, tiny_data: Path, capsys) -> None:
    num_words = len((tiny_data / "dict.txt").read_text().splitlines())
    path = save(tmp_path, "dense_lm_tiny", "dense.pt", vocab_size=num_words + 4)
    shutil.copy(tiny_data / "dict.txt", tmp_path)
    options = ("--arch", "hash_lm_tiny", "--num-sparse-layers", 1, "--num-experts", 4, "--hash-kind", "balanced")
    run = ["checkpoint", *map(str, ("upcycle", path, "-o", tmp_path / "s.pt", *options))]
    assert main(run) == 1
    assert "hash_kind=balanced needs the training data: give --data" in capsys.readouterr().err
    assert main([*run, "--data", str(tiny_data)]) == 0
    from smlp.moe.routers.hashed import balanced_table
    from smlp.text.binarized import count_tokens

    (table,) = [t for n, t in torch.load(tmp_path / "s.pt", weights_only=True)["model"].items() if ".table" in n]
    frequencies = torch.from_numpy(count_tokens(tiny_data / "train", num_words + 4))
    assert torch.equal(table, balanced_table(frequencies, 4))
    shutil.copytree(tiny_data, tmp_path / "data")
    lines = (tiny_data / "dict.txt").read_text().splitlines()
    for wrong in (lines[::-1], [*lines, "one_more 1"]):
        (tmp_path / "data" / "dict.txt").write_text("\n".join(wrong) + "\n")
        assert main([*run, "--force", "--data", str(tmp_path / "data")]) == 1
        assert "has another dictionary" in capsys.readouterr().err
    # an export has its dictionary inside, and a checkpoint without dict.txt its record
    (tmp_path / "data" / "dict.txt").write_text("\n".join(lines[::-1]) + "\n")
    lone = {"export": tmp_path / "lone" / "e.pt", "record": tmp_path / "lone" / "r.pt"}
    lone["export"].parent.mkdir()
    assert main(["checkpoint", "merge", str(path), "--export", "-o", str(lone["export"])]) == 0
    state = torch.load(path)
    state["extra_state"][RECORD] = record_of(Vocabulary.load(tiny_data / "dict.txt").symbols)
    torch.save(state, lone["record"])
    for dense in map(str, lone.values()):
        again = ["checkpoint", "upcycle", dense, *run[3:], "--force", "--data"]
        assert main([*again, str(tmp_path / "data")]) == 1
        assert "has another dictionary" in capsys.readouterr().err
        assert main([*again, str(tiny_data)]) == 0
    assert torch.load(tmp_path / "s.pt", weights_only=True)["extra_state"][RECORD] == state["extra_state"][RECORD]


def test_from_an_export_and_to_parts(tmp_path: Path) -> None:
    save(tmp_path, "dense_lm_tiny", "dense.pt")
    chain = (
        ("merge", "dense.pt", "-o", "e.safetensors"),
        ("upcycle", "e.safetensors", "-o", "s/s.pt", "--arch", "hash_lm_tiny", "--num-sparse-layers", 1),
        ("split", "s/s.pt", "-o", "p/p.pt", "--parts", 8),
    )
    for name, *arguments in chain:
        assert main(["checkpoint", name, *(str(tmp_path / a) if "." in str(a) else str(a) for a in arguments)]) == 0
    (tmp_path / "p" / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    models = [smlp.load_pretrained(tmp_path / name).decoder for name in ("dense.pt", "s/s.pt", "p/p.pt")]
    assert largest_difference(models[0], models[2]) < 1e-5 and largest_difference(models[1], models[2]) == 0


@pytest.mark.parametrize(
    ("dense", "arguments", "words"),
    [
        ("dense_lm_tiny", ["--arch", "base_lm"], ["has 2 blocks", "11 dense and 12 sparse", "add up to 2"]),
        ("dense_lm_tiny", ["--arch", "base_lm", "--num-sparse-layers", "5"], ["has 2 blocks", "-3 dense and 5 sparse"]),
        ("dense_lm_tiny", ["--arch", "base_lm", "--num-sparse-layers", "0"], ["num_sparse_layers is 0"]),
        ("dense_lm_tiny", ["--arch", "smlp_tiny"], ["are transformer blocks", "smlp_tiny are gmlp blocks"]),
        ("gmlp_lm_tiny", ["--arch", "hash_lm_tiny"], ["are gmlp blocks", "hash_lm_tiny are transformer blocks"]),
        ("gmlp_lm_tiny", ["--arch", "smlp_tiny", "--num-dense-layers", "1"], ["all 2 blocks", "cannot be 1"]),
        (
            "gmlp_lm_tiny",
            ["--arch", "smlp_tiny", "--num-experts", "5"],
            ["dense.pt cannot become a smlp_tiny: num_experts=5 must"],
        ),
        ("gmlp_lm_tiny", ["--arch", "smlp_tiny", "--feature-experts", "additive"], ["supports gated and linear"]),
        (
            "dense_lm_tiny",
            ["--arch", "hash_lm_tiny", "--num-sparse-layers", "1", "--num-experts", "1000000000"],
            ["with 1,000,000,000 experts has", "GB of weights, and the disk has only"],
        ),
        ("dense_lm_tiny", ["--arch", "dense_lm"], ["--arch dense_lm has no sparse blocks"]),
        ("dense_lm_tiny", ["--arch", "base_ml"], ["unknown architecture", "did you mean 'base_lm'"]),
        ("base_lm_tiny", ["--arch", "hash_lm_tiny"], ["base_lm_tiny", "has 1 sparse blocks already"]),
        ("dense_lm_tiny", ["--arch", "gshard_lm", "--num-sparse-layers", "2"], ["num_sparse_layers=2 must not exceed"]),
        ("dense_lm_tiny", ["--arch", "hash_lm", "--data", "none"], ["none/train.idx"]),
        (
            "dense_lm_tiny",
            ["--arch", "switch_lm", "--num-sparse-layers", "1", "--hash-seed", "5"],
            ["--hash-seed would not be used: the router is neither base nor hash"],
        ),
        (
            "dense_lm_tiny",
            ["--arch", "hash_lm", "--num-sparse-layers", "1", "--router-scale", "3"],
            ["of hash_lm starts"],
        ),
        ("gmlp_lm_tiny", ["--arch", "smlp_tiny", "--router-scale", "3"], ["--router-scale would not be used"]),
        (
            "dense_lm_tiny",
            ["--arch", "base_lm", "--num-sparse-layers", "1", "--centroid-init-gain", "0.5"],
            ["--centroid-init-gain would not be used: --router-scale"],
        ),
        ("gmlp_lm_tiny", ["--arch", "smlp_tiny", "--spatial-bias-init", "1"], ["--spatial-bias-init would not be"]),
        ("dense_lm_tiny", ["--arch", "base_lm", "--seed", str(2**90)], ["--seed must be at most"]),
        (
            "dense_lm_tiny",
            ["--arch", "base_lm", "--router-scale", "nan"],
            ["--router-scale must be at least 0"],
        ),
        (
            "dense_lm_tiny",
            ["--arch", "switch_lm", "--num-sparse-layers", "1", "--router-scale", "1e-60"],
            ["--router-scale 1e-60 is 0 in float32"],
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, dense, arguments, words, capsys) -> None:
    path = save(tmp_path, dense, "dense.pt")
    assert main(["checkpoint", "upcycle", str(path), "-o", str(tmp_path / "s.pt"), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("smlp: error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert not (tmp_path / "s.pt").exists()


def test_fairseq_trains_on_with_the_options_that_are_printed(
    tmp_path: Path, tiny_data: Path, run_fairseq_many, capsys
) -> None:
    """The perplexity of the dense checkpoint and of the upcycled one is the same, and training goes on from it."""
    settings = ("--embed-dim", 16, "--ffn-dim", 32, "--num-heads", 2, "--num-dense-layers", 2)
    task = [tiny_data, "--user-dir", USER_DIR, "--task", "language_modeling"]
    run = ("--optimizer", "adam", "--lr", 1e-3, "--batch-size", 4, "--no-epoch-checkpoints", "--num-workers", 0)

    def train(name: str, *options: object) -> dict:
        return {"tool": "train", "args": [*task, *run, "--save-dir", tmp_path / name, *options]}

    context = ("--tokens-per-sample", 16, "--max-target-positions", 32)  # of which the checkpoint has 32
    dense_options = ("--arch", "dense_lm_tiny", *settings, *context, "--max-update", 20)
    (first,) = run_fairseq_many([train("dense", *dense_options)])
    assert first.rc == 0, first.stderr
    dense, sparse = tmp_path / "dense" / "checkpoint_last.pt", tmp_path / "sparse.pt"
    upcycling = ("--arch", "switch_lm_tiny", "--num-sparse-layers", 1, "--num-experts", 4)
    assert main(["checkpoint", *map(str, ("upcycle", dense, "-o", sparse, *upcycling))]) == 0
    printed = capsys.readouterr().out.splitlines()[-1].removeprefix("train it with ").split()
    assert printed[:2] == ["--finetune-from-model", str(sparse)]
    evaluate = [
        {"tool": "eval_lm", "args": [*task, "--path", path, "--gen-subset", "valid", "--tokens-per-sample", 32]}
        for path in (dense, sparse)
    ]
    # a learning rate of zero: what is saved, and scored after the update, is what was loaded
    results = run_fairseq_many([*evaluate, train("on", *printed, "--max-update", 1, "--lr", 0)])
    assert [result.rc for result in results] == [0] * 3, [result.stderr for result in results]
    losses = [re.search(r"Loss \(base 2\): ([\d.]+)", result.stdout + result.stderr)[1] for result in results[:2]]
    assert losses[0] == losses[1]
    loaded = torch.load(tmp_path / "on" / "checkpoint_last.pt", weights_only=True)["model"]
    assert differences(torch.load(sparse, weights_only=True)["model"], dict(loaded)) == []


def test_the_options_that_are_printed_are_read(tmp_path: Path, monkeypatch, capsys) -> None:
    """Flags of the architecture cannot be turned off, and a path may have spaces."""
    monkeypatch.setitem(PRESETS["hash_lm_tiny"], "checkpoint_activations", True)
    path, out = save(tmp_path, "dense_lm_tiny"), tmp_path / "sp ace.pt"
    options = ("--arch", "hash_lm_tiny", "--num-sparse-layers", 1, "--num-experts", 4)
    assert main(["checkpoint", *map(str, ("upcycle", path, "-o", out, *options))]) == 0
    printed = capsys.readouterr().out.splitlines()[-1].removeprefix("train it with ")
    assert shlex.split(printed)[:4] == ["--finetune-from-model", str(out), "--arch", "hash_lm_tiny"]
    assert "--checkpoint-activations" not in printed


def test_each_new_layer_gets_a_table_of_its_own_if_asked(tmp_path: Path) -> None:
    path = save(tmp_path, "dense_lm_tiny", "dense.pt")
    settings = {"num_sparse_layers": 2, "num_experts": 4, "hash_tables": "own"}
    sparse = upcycle.upcycled(open_checkpoint(path), "hash_lm_tiny", settings)
    tables = [tensor.load() for name, tensor in sparse.state["model"].items() if name.endswith(".table")]
    assert len(tables) == 2
    for seed, table in enumerate(tables, start=1):
        assert torch.equal(table, random_table(table.numel(), 4, seed))
