"""``smlp checkpoint split | merge | average | info``: every bit, in little memory."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_states import PREFIX, WORDS, command, content, differences, refused, save, state_of, trained
from running import USER_DIR, run_python

import smlp
from smlp.checkpoint import lazy
from smlp.checkpoint.index import INDEX_KEY
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.nn.layers import SpatialWeights
from smlp.text.tokenizer_files import RECORD, record_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

SPARSE = ["base_lm_tiny", "switch_lm_tiny", "hash_lm_tiny", "smlp_tiny", "smlp_partial_tiny", "gmlp_moe_tiny"]


@pytest.mark.parametrize("arch", SPARSE)
def test_split_and_merge_give_back_every_bit(tmp_path: Path, arch: str, monkeypatch) -> None:
    monkeypatch.setattr(lazy, "PIECE_BYTES", 1000)
    whole = save(tmp_path, arch)
    split, other, merged = tmp_path / "a" / "x.pt", tmp_path / "b" / "x.pt", tmp_path / "merged.pt"
    assert command("split", whole, "-o", split, "--parts", 4) == 0
    state = content(split)
    assert not [name for name in state["model"] if ".experts." in name], "experts are in parts only"
    assert len(list((tmp_path / "a").glob("experts/update_2_*/experts_*.pt"))) == 4
    assert command("split", split, "-o", other, "--parts", 2) == 0
    assert command("merge", other, "-o", merged) == 0
    assert differences(content(whole), content(merged)) == []
    assert list(content(merged)["model"]) == list(content(whole)["model"])
    assert command("verify", whole, split, other, merged) == 0


def test_frozen_parameters_have_no_place_among_the_moments(tmp_path: Path) -> None:
    whole, path = save(tmp_path, "switch_lm_tiny"), tmp_path / "p" / "x.pt"
    checkpoint = open_checkpoint(whole)
    before = checkpoint.positions
    next(checkpoint.skeleton.parameters()).requires_grad_(False)
    assert checkpoint.positions == {name: number - 1 for name, number in before.items()}
    optimizer = checkpoint.state["last_optimizer_state"]
    optimizer["state"] = {number - 1: moments for number, moments in optimizer["state"].items() if number}
    write_in_parts(checkpoint, path, 2)
    assert content(path)[INDEX_KEY]["positions"] == checkpoint.positions


def test_a_name_that_is_not_utf8_is_no_damage(whole: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/a\xff.pt"))
    shutil.copy(whole, odd)
    assert command("verify", odd) == 0 and command("merge", odd, "-o", tmp_path / "merged.pt") == 0


def test_a_split_checkpoint_says_who_holds_what(parts: Path) -> None:
    index = content(parts)[INDEX_KEY]
    assert (index["num_experts"], index["world_size"], index["group_size"]) == (4, 4, 4)
    assert [tuple(part["expert_ids"]) for part in index["parts"]] == [(0,), (1,), (2,), (3,)]
    decoder, _ = trained("base_lm_tiny")
    order = [PREFIX + name for name, _ in decoder.named_parameters()]
    assert all(order[position] == name for name, position in index["positions"].items())


@pytest.mark.slow
def test_training_on_from_a_merged_split_is_training_on(tmp_path: Path, tiny_data: Path, run_fairseq_many) -> None:
    """A real fairseq run: from its checkpoint, from the same in parts, and from an export without an optimizer."""
    settings = ("--embed-dim", 16, "--ffn-dim", 32, "--num-heads", 2, "--num-experts", 4, "--dropout", 0)
    blocks = ("--num-dense-layers", 1, "--num-sparse-layers", 1)
    model = ("--task", "language_modeling", "--arch", "base_lm_tiny", *settings, *blocks, "--tokens-per-sample", 32)
    run = ("--optimizer", "adam", "--lr", 1e-2, "--batch-size", 4, "--log-format", "json", "--log-interval", 1)
    usual = [tiny_data, "--user-dir", USER_DIR, *model, *run, "--no-epoch-checkpoints", "--num-workers", 0]

    def train(name: str, updates: int, *options: object) -> dict:
        save_dir = tmp_path / name
        return {"tool": "train", "args": [*usual, "--save-dir", save_dir, "--max-update", updates, *options]}

    def evaluate(path: Path) -> dict:
        options = ("--path", path, "--gen-subset", "valid", "--batch-size", 8, "--tokens-per-sample", 32)
        return {"tool": "eval_lm", "args": [tiny_data, "--user-dir", USER_DIR, *options]}

    (first,) = run_fairseq_many([train("first", 3)])
    assert first.rc == 0, first.stderr
    whole = tmp_path / "first" / "checkpoint_last.pt"
    split, merged, export = (tmp_path / name for name in ("split/checkpoint_last.pt", "merged.pt", "model.safetensors"))
    assert command("split", whole, "-o", split, "--parts", 2) == 0
    assert command("merge", split, "-o", merged) == 0
    assert differences(content(whole), content(merged)) == []
    assert command("merge", split, "-o", export) == 0
    assert command("merge", export, "-o", tmp_path / "weights" / "weights.pt") == 0
    assert differences(content(whole)["model"], content(tmp_path / "weights" / "weights.pt")["model"]) == []
    assert (tmp_path / "weights" / "dict.txt").read_bytes() == (tiny_data / "dict.txt").read_bytes()

    weights = tmp_path / "weights" / "weights.pt"
    resets = ("--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader")
    results = run_fairseq_many(
        [
            *(train(f"on from {path.parent.name}", 5, "--restore-file", path) for path in (whole, split)),
            train("restored", 1, "--restore-file", weights, *resets),
            train("finetuned", 1, "--finetune-from-model", weights),
            *(evaluate(path) for path in (split, weights)),
        ]
    )
    assert [result.rc for result in results] == [0] * 6, [result.stderr[-500:] for result in results]
    ends = [content(tmp_path / f"on from {name}" / "checkpoint_last.pt") for name in ("first", "split")]
    for key in ("model", "last_optimizer_state", "optimizer_history"):
        assert differences(ends[0][key], ends[1][key]) == []
    starts = [content(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("restored", "finetuned")]
    assert differences(*starts) == []
    scores = [re.search(r"Loss \(base 2\): [\d.]+", result.stdout + result.stderr)[0] for result in results[4:]]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("arch", ["base_lm_tiny", "hash_lm_tiny", "dense_lm_tiny"])
def test_the_average_is_the_mean(tmp_path: Path, arch: str, monkeypatch) -> None:
    monkeypatch.setattr(lazy, "PIECE_BYTES", 1000)
    paths = [save(tmp_path, arch, f"checkpoint{n}.pt", seed=n, updates=n) for n in (1, 2, 3)]
    state = content(paths[0])
    state["extra_state"]["ema"] = dict(state["model"])
    torch.save(state, paths[0])
    if arch != "dense_lm_tiny":
        assert command("split", paths[1], "-o", tmp_path / "p" / "x.pt", "--parts", 2) == 0
        paths[1] = tmp_path / "p" / "x.pt"
    assert command("average", *paths, "-o", tmp_path / "mean.pt") == 0
    assert command("verify", tmp_path / "mean.pt") == 0
    found, models = content(tmp_path / "mean.pt"), [content(tmp_path / f"checkpoint{n}.pt")["model"] for n in (1, 2, 3)]
    for name, tensor in found["model"].items():
        expected = models[0][name]
        if tensor.dtype.is_floating_point:
            expected = (sum(model[name].double() for model in models) / 3).float()
        assert torch.equal(tensor, expected), name
    assert "ema" not in found["extra_state"], "averages of other weights"
    assert "last_optimizer_state" not in found and found["optimizer_history"][-1]["num_updates"] == 1
    one, copies = tmp_path / "same.pt", [tmp_path / f"copy{n}.pt" for n in (1, 2, 3)]
    for path in copies:
        shutil.copy(tmp_path / "checkpoint1.pt", path)
    assert command("average", *copies, "-o", one) == 0
    assert differences(content(one)["model"], models[0]) == []


def test_weights_that_are_not_finite_are_refused(whole: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    state, path, output = content(whole), tmp_path / "nan.pt", tmp_path / "out.pt"
    next(iter(state["model"].values()))[-1, 0] = float("inf")
    torch.save(state, path)
    for words in (["average", whole, path, "-o", output], ["merge", path, "-o", output], ["verify", path]):
        assert f"decoder.core.embedding.weight of {path} is not finite" in refused(capsys, *words)
    with pytest.raises(UserError, match="is not finite"):
        smlp.load_pretrained(path)
    assert not output.exists()
    monkeypatch.setenv("SMLP_VERIFY_CHECKPOINTS", "0")
    assert f"decoder.core.embedding.weight of {path} is not finite" in refused(capsys, "verify", path)


def test_masks_of_minus_infinity_are_no_damage(tmp_path: Path, capsys, monkeypatch) -> None:
    build = SpatialWeights.__init__

    def with_mask(self, *args, **options) -> None:
        build(self, *args, **options)
        self.of_a_plugin = shared

    shared = torch.nn.Module()
    shared.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    monkeypatch.setattr(SpatialWeights, "__init__", with_mask)
    path, export = save(tmp_path, "gmlp_lm_tiny", embed_dim=24), tmp_path / "export.pt"
    assert command("verify", path) == command("merge", path, "-o", export, "--export") == 0
    masks = [tensor for name, tensor in smlp.load_pretrained(export).decoder.state_dict().items() if "mask" in name]
    assert masks and all(torch.equal(mask, torch.full((2, 2), -torch.inf).triu(1)) for mask in masks)
    state = content(path)
    for number in (torch.inf, torch.nan):
        name = next(name for name in state["model"] if "mask" in name)
        state["model"][name] = torch.full((2, 2), number)
        torch.save(state, path)
        assert f"mask of {path} is not finite" in refused(capsys, "verify", path)


def test_offsets_of_minus_infinity_are_damage(tmp_path: Path, capsys) -> None:
    path = save(tmp_path, "smlp_tiny", router="loss_free")
    state = content(path)
    name = next(name for name in state["model"] if name.endswith("router.bias.value"))
    state["model"][name].fill_(-torch.inf)
    torch.save(state, path)
    assert f"{name} of {path} is not finite" in refused(capsys, "verify", path)


def test_tables_that_name_experts_that_are_not_there_are_refused(tmp_path: Path, capsys) -> None:
    path = save(tmp_path, "hash_lm_tiny", "a.pt")
    state = content(path)
    name = next(name for name in state["model"] if name.endswith("router.table"))
    state["model"][name][5] = 77
    torch.save(state, path)
    assert f"{name} of {path} names experts that are not there: the model has " in refused(capsys, "verify", path)
    with pytest.raises(UserError, match="names experts that are not there"):
        smlp.load_pretrained(path)


def test_the_newest_checkpoints_of_a_run_are_averaged(whole: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("checkpoint9.pt", "checkpoint10.pt", "checkpoint_1_9.pt", "checkpoint_1_80.pt", "checkpoint_best.pt"):
        shutil.copy(whole, run / name)

    def taken(*options: object) -> list[str]:
        assert command("average", run, *options, "-o", tmp_path / "mean.pt", "--force") == 0
        line = capsys.readouterr().out.splitlines()[0]
        return [Path(path).name for path in line.removeprefix("mean of ").split(", ")]

    assert taken("--num-epoch-checkpoints", 2) == ["checkpoint10.pt", "checkpoint9.pt"]
    assert taken("--num-epoch-checkpoints", 1, "--checkpoint-upper-bound", 9) == ["checkpoint9.pt"]
    assert taken("--num-update-checkpoints", 2) == ["checkpoint_1_80.pt", "checkpoint_1_9.pt"]
    for options, words in (
        (("--num-update-checkpoints", 3), "has 2 checkpoints checkpoint_EPOCH_UPDATE.pt, not 3"),
        (("--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 9), "has 1 checkpoints checkpointEPOCH.pt up to 9"),
        (("--num-epoch-checkpoints", 0), "at least 1, got 0"),
        (("--checkpoint-upper-bound", 9), "--checkpoint-upper-bound is for"),
        ((whole, "--num-epoch-checkpoints", 2), "name one, not 2"),
    ):
        assert words in refused(capsys, "average", run, *options, "-o", tmp_path / "other.pt")


def test_models_that_have_no_mean_are_named(tmp_path: Path, capsys) -> None:
    first = save(tmp_path, "hash_lm_tiny", "a.pt")
    others = {
        "hash_seed": (
            save(tmp_path, "hash_lm_tiny", "b.pt", hash_seed=2),
            ["hash_seed is 1 in one and 2 in the other"],
        ),
        "experts": (
            save(tmp_path, "hash_lm_tiny", "c.pt", num_experts=2),
            ["num_experts is 4 in one and 2 in the other"],
        ),
        "activation": (
            save(tmp_path, "hash_lm_tiny", "e.pt", activation="relu"),
            ["of different models: activation is gelu in one and relu in the other"],
        ),
        "router": (
            save(tmp_path, "base_lm_tiny", "d.pt"),
            ["of different models", "is hash in one and base in the other"],
        ),
    }
    state = content(save(tmp_path, "hash_lm_tiny", "f.pt"))  # of as many positions, the first for <s>
    state["cfg"]["model"].update(add_bos_token=True, tokens_per_sample=state["cfg"]["model"]["tokens_per_sample"] - 1)
    torch.save(state, tmp_path / "f.pt")
    others["start"] = (tmp_path / "f.pt", ["add_bos_token is False in one and True in the other"])
    (tmp_path / "dictionary").mkdir()
    words = (tmp_path / "dict.txt").read_text().splitlines(keepends=True)
    (tmp_path / "dict.txt").write_text("".join(reversed(words)))
    others["dictionary"] = (save(tmp_path / "dictionary", "hash_lm_tiny", "a.pt"), ["have different dictionaries"])
    (tmp_path / "dictionary" / "dict.txt").rename(tmp_path / "dictionary" / "kept.txt")
    state = content(tmp_path / "dictionary" / "a.pt")  # with its data instead, where fairseq-train leaves it
    state["cfg"]["task"]["data"] = str(tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "dictionary" / "kept.txt").rename(tmp_path / "data" / "dict.txt")
    torch.save(state, tmp_path / "dictionary" / "a.pt")
    (tmp_path / "recorded").mkdir()  # says it itself, without any dict.txt
    others["record"] = (save(tmp_path / "recorded", "hash_lm_tiny", "a.pt"), ["have different dictionaries"])
    (tmp_path / "recorded" / "dict.txt").unlink()
    state = content(tmp_path / "recorded" / "a.pt")
    state["extra_state"][RECORD] = record_of(["another"])
    torch.save(state, tmp_path / "recorded" / "a.pt")
    for other, words in others.values():
        error = refused(capsys, "average", first, other, "-o", tmp_path / "mean.pt")
        assert all(word in error for word in [str(first), str(other), *words]), error
    assert not (tmp_path / "mean.pt").exists()
    (tmp_path / "data" / "dict.txt").write_text("a 1\n")  # too few for the model: that of another project
    assert command("average", first, others["dictionary"][0], "-o", tmp_path / "mean.pt") == 0


def test_info_says_what_is_there(whole: Path, parts: Path, tmp_path: Path, capsys) -> None:
    decoder, _ = trained("base_lm_tiny")
    assert command("merge", parts, "-o", tmp_path / "e.safetensors") == 0
    for path, kind, ranks, files in (
        (whole, "one file", 1, 1),
        (parts, "parts", 4, 5),
        (tmp_path / "e.safetensors", "export", 1, 1),
    ):
        assert command("info", path, "--json", tmp_path / "facts.json") == 0
        facts = json.loads((tmp_path / "facts.json").read_text())
        assert (facts["kind"], facts["layout"]["group_size"], len(facts["files"])) == (kind, ranks, files)
        assert facts["arch"] == "base_lm_tiny" and facts["num_updates"] == 2 and facts["dtypes"] == ["float32"]
        assert facts["params"]["total"] == sum(p.numel() for p in decoder.parameters())
        experts = sum(p.numel() for name, p in decoder.named_parameters() if ".experts." in name)
        assert facts["params"]["experts"] == experts
        has_optimizer = None if kind == "export" else {"name": "FairseqAdam", "moments": ["exp_avg", "exp_avg_sq"]}
        assert facts["optimizer"] == has_optimizer
        assert facts["bytes"] == sum((path.parent / file["file"]).stat().st_size for file in facts["files"])
    printed = capsys.readouterr().out
    assert "experts in 4 parts, as W = 4 ranks with P = 4 write them" in printed
    assert "experts 2 to 2" in printed and f"{experts:,} of them in 4 experts" in printed


def test_force_writes_over_and_no_optimizer_leaves_it_out(whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    target.write_text("old")
    assert command("merge", whole, "-o", target, "--force", "--no-optimizer") == 0
    expected = content(whole)
    del expected["last_optimizer_state"]
    assert differences(expected, content(target)) == []
    assert command("split", whole, "-o", target, "--force", "--no-optimizer", "--parts", 2) == 0
    keys = torch.load(next(tmp_path.glob("experts/*/experts_0-1.pt")), weights_only=True)["tensors"]
    assert keys and all(key.startswith("model/") for key in keys)
    (tmp_path / "y.pt").write_bytes(target.read_bytes())
    for parts, folders in ((4, 2), (2, 2), (4, 2)):  # those of y.pt stay, and the newest of x.pt
        assert command("split", whole, "-o", target, "--force", "--parts", parts) == 0
        assert len(list(tmp_path.glob("experts/*"))) == folders
    assert command("verify", tmp_path / "y.pt", target) == 0
    for export in ([], ["--export"]):  # the parts of what they replace go, too
        assert command("split", whole, "-o", target, "--force", "--parts", 4) == 0
        assert command("merge", whole, "-o", target, "--force", *export) == 0
        assert len(list(tmp_path.glob("experts/*"))) == 1
        assert command("verify", tmp_path / "y.pt", target) == 0
    own = tmp_path / "experts" / "run1" / "a.pt"  # in no folder of parts
    assert [command("merge", whole, "-o", own, *force) for force in ([], ["--force"])] == [0, 0]


MEASURED = """
import contextlib, io, json, sys

from smlp.cli.main import main

def mebibytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":")) / 1024

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["checkpoint", *arguments]) == 0

small, big, folder = sys.argv[1:]
dictionary = ["--dict", f"{folder}/dict.txt"]
run("split", small, "-o", f"{folder}/warm/x.pt", "--parts", "2")  # imports everything
run("merge", f"{folder}/warm/x.pt", "-o", f"{folder}/warm/y.safetensors", *dictionary)
run("average", small, f"{folder}/warm/x.pt", "-o", f"{folder}/warm/z.pt")
peaks = {}
for name, arguments in {
    "split": ["split", big, "-o", f"{folder}/p/x.pt", "--parts", "4"],
    "verify": ["verify", f"{folder}/p/x.pt"],
    "merge": ["merge", f"{folder}/p/x.pt", "-o", f"{folder}/m.pt"],
    "safetensors": ["merge", f"{folder}/p/x.pt", "-o", f"{folder}/m.safetensors", *dictionary],
    "reshard": ["split", f"{folder}/p/x.pt", "-o", f"{folder}/r/x.pt", "--parts", "2"],
    "average": ["average", f"{folder}/p/x.pt", big, f"{folder}/m.pt", "-o", f"{folder}/a.pt"],
}.items():
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the highest resident set so far becomes the present one
    before = mebibytes("VmRSS")
    run(*arguments)
    peaks[name] = mebibytes("VmHWM") - before
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_peak_memory_is_below_twice_the_largest_shard(tmp_path: Path) -> None:
    """Measured as the kernel's highest resident set of a process (VmHWM, reset before each command), file-backed
    pages included, above what it was before the command; what imports and torch take is there already. The shards are
    large beside what is held at a time, and loading all of them would take four times the bound's half."""
    small = save(tmp_path, "base_lm_tiny", "small.pt")
    sizes = {"embed_dim": 128, "ffn_dim": 1600, "num_experts": 16, "vocab_size": len(WORDS) + 4}
    big = save(tmp_path, "base_lm_tiny", "big.pt", updates=1, **sizes)
    script = tmp_path / "measure.py"
    script.write_text(MEASURED)
    run = run_python(script, small, big, tmp_path, timeout=100)
    assert run.rc == 0, run.stderr
    peaks = json.loads(run.stdout.splitlines()[-1])
    shard = max(path.stat().st_size for path in [*(tmp_path / "p").rglob("*.pt")]) / 2**20
    assert big.stat().st_size / 2**20 > 3.5 * shard > 50
    print(f"largest shard {shard:.1f} MiB; peaks {peaks}")
    assert {name: peak for name, peak in peaks.items() if peak > 2 * shard} == {}


def test_a_state_without_optimizer_history_still_has_a_name(tmp_path: Path) -> None:
    """Checkpoints that other tools wrote may lack what only training needs."""
    decoder, _ = trained("base_lm_tiny")
    state = state_of(decoder, None, "base_lm_tiny", 5)
    del state["optimizer_history"]
    torch.save(state, tmp_path / "x.pt")
    assert open_checkpoint(tmp_path / "x.pt").num_updates == 0
    assert command("split", tmp_path / "x.pt", "-o", tmp_path / "y.pt", "--parts", 2) == 0
    assert command("verify", tmp_path / "y.pt") == 0


def test_offsets_of_experts_are_in_float32_beside_weights_in_16_bits(tmp_path):
    path = save(tmp_path, "base_lm_tiny", base_offset_rate=0.1)
    state = torch.load(path, weights_only=False)
    offsets = [name for name in state["model"] if name.endswith("offsets.value")]
    state["model"] = {name: value if name in offsets else value.bfloat16() for name, value in state["model"].items()}
    state["last_optimizer_state"] = None
    torch.save(state, path)
    assert offsets and main(["checkpoint", "verify", str(path)]) == 0


def test_moments_of_a_criterion_follow_those_of_the_model(whole, tmp_path):
    state = torch.load(whole, weights_only=False)
    moments = state["last_optimizer_state"]["state"]
    own = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    for criterion, status in (({"scale": torch.zeros(3)}, 0), (None, 1)):
        torch.save(
            {**state, "criterion": criterion, "last_optimizer_state": {"state": {**moments, len(moments): own}}}, whole
        )
        assert main(["checkpoint", "verify", str(whole)]) == status
        words = ["checkpoint", "split", str(whole), "--parts", "2", "-o", str(tmp_path / f"{status}" / "split.pt")]
        (tmp_path / f"{status}").mkdir()
        assert main(words) == status
