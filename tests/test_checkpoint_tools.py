"""``smlp checkpoint info | verify | merge | split | average``, and exports."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_states import PREFIX, WORDS, differences, save, state_of, trained
from running import USER_DIR, run_python

import smlp
from smlp.checkpoint import lazy
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.checkpoint.parts import INDEX_KEY
from smlp.checkpoint.verify import problems_of
from smlp.cli.main import main
from smlp.config import unflatten
from smlp.nn.decoder import Decoder

pytestmark = pytest.mark.timeout(120)

SPARSE = ["base_lm_tiny", "switch_lm_tiny", "hash_lm_tiny", "smlp_tiny", "smlp_partial_tiny", "gmlp_moe_tiny"]


def command(*arguments: object) -> int:
    """``smlp checkpoint ARGUMENTS``."""
    return main(["checkpoint", *map(str, arguments)])


def refused(capsys, *arguments: object) -> str:
    """The one sentence with which it fails."""
    assert command(*arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("smlp: error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


def content(path: Path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tmp_path, "base_lm_tiny")


@pytest.fixture
def parts(whole: Path, tmp_path: Path, capsys) -> Path:
    path = tmp_path / "parts" / "checkpoint_last.pt"
    assert command("split", whole, "-o", path, "--parts", 4) == 0
    shutil.copy(tmp_path / "dict.txt", tmp_path / "parts")
    capsys.readouterr()
    return path


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


def test_a_split_checkpoint_says_who_holds_what(parts: Path) -> None:
    index = content(parts)[INDEX_KEY]
    assert (index["num_experts"], index["world_size"], index["group_size"]) == (4, 4, 4)
    assert [tuple(part["expert_ids"]) for part in index["parts"]] == [(0,), (1,), (2,), (3,)]
    decoder, _ = trained("base_lm_tiny")
    order = [PREFIX + name for name, _ in decoder.named_parameters()]
    assert all(order[position] == name for name, position in index["positions"].items())


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


BLOCKED = """
import sys

class NoFairseq:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("fairseq", "hydra", "omegaconf"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, NoFairseq())
import smlp
for path in sys.argv[1:]:
    print(smlp.load_pretrained(path).generate("w1 w2", 5, smlp.generation.Sampling(temperature=0)))
"""


def test_exports_are_read_alone_and_without_fairseq(whole: Path, parts: Path, tmp_path: Path) -> None:
    exports = [tmp_path / "alone" / name for name in ("model.pt", "model.safetensors")]
    for path in exports:
        assert command("merge", parts, "-o", path, "--export") == 0
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["model.pt", "model.safetensors"]
    script = tmp_path / "read.py"
    script.write_text("import smlp.generation\n" + BLOCKED)
    run = run_python(script, whole, parts, *exports, timeout=60)
    assert run.rc == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 4 and lines[0] and lines == [lines[0]] * 4
    tokens = torch.randint(4, 24, (2, 12))
    original = smlp.load_pretrained(whole)
    for path in (parts, *exports):
        model = smlp.load_pretrained(path)
        assert torch.equal(model(tokens).logits, original(tokens).logits)
        assert model.vocabulary.symbols == original.vocabulary.symbols


def test_an_export_is_plain_torch(whole: Path, tmp_path: Path) -> None:
    assert command("merge", whole, "-o", tmp_path / "e.pt", "--export") == 0
    for mapped in (False, True):
        export = torch.load(tmp_path / "e.pt", weights_only=True, mmap=mapped)
        decoder = Decoder(unflatten(export["settings"]))
        decoder.load_state_dict(export["weights"])
    assert export["arch"] == "base_lm_tiny" and export["num_updates"] == 2
    assert bytes(export["files"]["dict.txt"].tolist()).decode().split() == [w for word in WORDS for w in (word, "1")]
    assert "last_optimizer_state" not in export


def test_an_export_is_plain_safetensors(whole: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = tmp_path / "e.safetensors"
    assert command("merge", whole, "-o", path) == 0
    tensors = load_file(path)
    expected = {name.removeprefix(PREFIX): tensor for name, tensor in content(whole)["model"].items()}
    assert differences(expected, {n: t for n, t in tensors.items() if not n.startswith("files/")}) == []
    assert tensors["files/dict.txt"].dtype == torch.uint8
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["smlp"])
    assert facts["settings"]["num_experts"] == 4 and facts["cfg"]["model"]["activation"] == "gelu"


def test_the_sentencepiece_model_travels_along(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("the old man and the sea\nthe young man and the old sea\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "sentencepiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.model"))
    symbols = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size()) if not pieces.is_control(i)]
    path = save(tmp_path, "dense_lm_tiny", vocab_size=len(symbols) + 4)
    (tmp_path / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    for name in ("e.pt", "e.safetensors"):
        export = tmp_path / "alone" / name
        assert command("merge", path, "-o", export, "--export") == 0
        tokenizer = smlp.load_pretrained(export).tokenizer
        assert tokenizer.decode(tokenizer.encode("the young sea")) == "the young sea"
        assert command("merge", export, "-o", tmp_path / name.replace(".", "") / "x.pt") == 0
    assert sorted(path.name for path in (tmp_path / "ept").iterdir()) == ["dict.txt", "sentencepiece.model", "x.pt"]
    model = (tmp_path / "ept" / "sentencepiece.model").read_bytes()
    assert model == (tmp_path / "sentencepiece.model").read_bytes()


def test_an_export_keeps_the_settings_that_presets_may_change(whole: Path, tmp_path: Path, monkeypatch) -> None:
    state = content(whole)
    state["cfg"]["model"]["activation"] = None  # left to the architecture, as fairseq keeps it
    torch.save(state, whole)
    assert command("merge", whole, "-o", tmp_path / "e.pt", "--export") == 0
    monkeypatch.setitem(smlp.PRESETS["base_lm_tiny"], "activation", "relu")
    assert smlp.load_pretrained(whole).decoder.config.activation == "relu"
    assert smlp.load_pretrained(tmp_path / "e.pt").decoder.config.activation == "gelu"


def test_without_the_library_safetensors_is_refused_before_anything_is_written(
    whole: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'smlp[export]'" in refused(capsys, "merge", whole, "-o", tmp_path / "e.safetensors")
    assert not (tmp_path / "e.safetensors").exists()


@pytest.mark.parametrize("arch", ["base_lm_tiny", "hash_lm_tiny", "dense_lm_tiny"])
def test_the_average_is_the_mean(tmp_path: Path, arch: str, monkeypatch) -> None:
    monkeypatch.setattr(lazy, "PIECE_BYTES", 1000)
    paths = [save(tmp_path, arch, f"checkpoint{n}.pt", seed=n, updates=n) for n in (1, 2, 3)]
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
    assert "last_optimizer_state" not in found and found["optimizer_history"][-1]["num_updates"] == 1
    one = tmp_path / "same.pt"
    assert command("average", *[tmp_path / "checkpoint1.pt"] * 3, "-o", one) == 0
    assert differences(content(one)["model"], models[0]) == []


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
        "hash_seed": (save(tmp_path, "hash_lm_tiny", "b.pt", hash_seed=2), ["router.table is not the same"]),
        "experts": (
            save(tmp_path, "hash_lm_tiny", "c.pt", num_experts=2),
            ["experts.w1 is float32 (4, 24, 16)", "(2, "],
        ),
        "router": (save(tmp_path, "base_lm_tiny", "d.pt"), ["of different models", "tensors are in one"]),
    }
    for other, words in others.values():
        error = refused(capsys, "average", first, other, "-o", tmp_path / "mean.pt")
        assert all(word in error for word in [str(first), str(other), *words]), error
    assert not (tmp_path / "mean.pt").exists()


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
    assert "experts 2 to 2" in printed and f"{experts:,} of them in 4 experts" in printed


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def _an_expert(path: Path) -> Path:
    return sorted(path.parent.glob("experts/*/*.pt"))[2]


def _swap(path: Path) -> None:
    """Puts a part of another state in the place of one, of the same size."""
    target = _an_expert(path)
    other = torch.load(target, weights_only=True)
    other["token"] = "0" * 8
    state = content(path)
    from smlp.checkpoint.parts import write_part

    part = write_part(path.parent, "foreign.pt", other["token"], other["expert_ids"], other["tensors"])
    os.replace(path.parent / part.file, target)
    assert target.stat().st_size == state[INDEX_KEY]["parts"][2]["num_bytes"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), ["there is no checkpoint"]),
        (lambda path: os.truncate(path, path.stat().st_size - 500), ["checkpoint_last.pt", "truncated"]),
        (lambda path: _an_expert(path).unlink(), ["experts_2-2.pt", "experts 2 of", "is missing"]),
        (lambda path: os.truncate(_an_expert(path), 999), ["experts_2-2.pt", "has 999 bytes", "truncated"]),
        (_swap, ["experts_2-2.pt", "is no part of", "experts 2 of state 00000000"]),
        (lambda path: _flip(_an_expert(path), 9000), ["experts_2-2.pt", "damaged", "experts 2 of"]),
    ],
)
def test_damaged_parts_are_named_by_every_command(parts: Path, tmp_path: Path, damage, words, capsys) -> None:
    assert command("verify", parts) == 0
    capsys.readouterr()
    damage(parts)
    out = tmp_path / "out.pt"
    for arguments in (["verify", parts], ["merge", parts, "-o", out], ["average", parts, "-o", out]):
        error = refused(capsys, *arguments)
        assert all(word in error for word in words), error
    assert not out.exists()


def test_verify_names_every_bad_file_and_tensor(parts: Path, whole: Path, capsys) -> None:
    first, _, third, fourth = sorted(parts.parent.glob("experts/*/*.pt"))
    first.unlink()
    _flip(third, 5000)
    os.truncate(fourth, 10)
    weight = content(whole)["model"][PREFIX + "embedding.weight"]
    data = whole.read_bytes()
    _flip(whole, data.index(weight.numpy().tobytes()) + 77)
    assert command("verify", parts, whole) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for line, file in zip(lines, ("experts_0-0.pt", "experts_2-2.pt", "experts_3-3.pt", "whole.pt"), strict=True):
        assert file in line
    assert "model/decoder.core.embedding.weight differs from its checksum" in lines[3]


def test_no_flipped_bit_goes_unnoticed(whole: Path, parts: Path, tmp_path: Path) -> None:
    """Wherever a bit is flipped: either it is reported, or what is read is still the same."""
    export = tmp_path / "e.safetensors"
    assert command("merge", whole, "-o", export) == 0
    draw, found = random.Random(1), 0
    for path, tries in ((whole, 40), (_an_expert(parts), 15), (export, 15)):
        original, checkpoint = path.read_bytes(), parts if path.parent != tmp_path else path
        assert problems_of(checkpoint) == []
        for _ in range(tries):
            _flip(path, draw.randrange(len(original)))
            if problems_of(checkpoint):
                found += 1
            else:
                assert path == whole, "every byte of a part, and of what is behind an export's header, has a checksum"
                good = tmp_path / "good.pt"
                good.write_bytes(original)
                assert differences(content(good), content(path)) == []
            path.write_bytes(original)
    assert found > 50


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["model"].pop(PREFIX + "norm.bias"), ["does not fit its configuration", "lacks", "norm.bias"]),
        (lambda s: s["model"].update({PREFIX + "x": torch.ones(1)}), ["has besides", PREFIX + "x"]),
        (
            lambda s: s["cfg"]["model"].update(ffn_dim=32),
            ["(base_lm_tiny): decoder.core.blocks.1.token_moe.experts.w1 has shape (4, 24, 16), not (4, 32, 16)"],
        ),
        (lambda s: s["cfg"]["model"].update(ffn_dim=-1), ["no model that can be built", "ffn_dim", "-1"]),
        (lambda s: s["model"].update({PREFIX + "norm.bias": torch.zeros(16).half()}), ["weights of several types"]),
        (lambda s: s["last_optimizer_state"]["state"][3].update(exp_avg=torch.ones(2, 2)), ["exp_avg of", "(2, 2)"]),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(whole: Path, change, words, capsys) -> None:
    state = content(whole)
    change(state)
    torch.save(state, whole)
    assert command("verify", whole) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in [str(whole), *words]), error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["merge", "whole.pt", "-o", "whole.pt", "--force"], ["is what is read"]),
        (["merge", "whole.pt", "-o", "taken.pt"], ["taken.pt exists", "--force"]),
        (["merge", "whole.pt", "-o", "."], ["is a folder"]),
        (["merge", "whole.pt", "-o", "taken.pt/x.pt"], ["cannot make taken.pt"]),
        (["merge", "none.pt", "-o", "x.pt"], ["there is no checkpoint none.pt"]),
        (["merge", ".", "-o", "x.pt"], ["is a folder: name a checkpoint"]),
        (["merge", "bart.pt", "-o", "x.pt"], ["another kind of model (bart)"]),
        (["merge", "taken.pt", "-o", "x.pt"], ["taken.pt", "truncated or is no checkpoint"]),
        (["merge", "other.pt", "-o", "x.pt"], ["no checkpoint of fairseq-train"]),
        (["merge", "whole.pt", "-o", "x.safetensors", "--dict", "short.txt"], ["short.txt has 5 symbols", "24"]),
        (["merge", "whole.pt", "-o", "x.pt", "--export", "--dict", "none.txt"], ["none.txt"]),
        (["merge", "whole.pt", "-o", "x.pt", "--export", "--sentencepiece-model", "none"], ["SentencePiece", "none"]),
        (["merge", "future.pt", "-o", "x.pt"], ["export in format 2", "known is 1"]),
        (["merge", "foreign.safetensors", "-o", "x.pt"], ["no export of smlp"]),
        (["merge", "short.safetensors", "-o", "x.pt"], ["short.safetensors (9 bytes)", "truncated"]),
        (["split", "whole.pt", "-o", "x.pt", "--parts", "3"], ["4 experts", "3 parts"]),
        (["split", "whole.pt", "-o", "x.pt", "--parts", "0"], ["4 experts", "0 parts"]),
        (["split", "whole.pt", "-o", "x.bin", "--parts", "2"], ["x.bin must end in .pt"]),
        (["split", "dense.pt", "-o", "x.pt", "--parts", "1"], ["dense.pt", "no experts"]),
        (["split", "flat.pt", "-o", "x.pt", "--parts", "2"], ["flat.pt", "--fp16", "--no-optimizer"]),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(
    whole: Path, tmp_path: Path, arguments, words, capsys, monkeypatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    Path("taken.pt").write_text("something of value")
    Path("short.txt").write_text("the 1\n")
    Path("short.safetensors").write_bytes(bytes(9))
    save_file({"x": torch.ones(3)}, "foreign.safetensors")
    torch.save({"model": {"x": torch.ones(1)}, "cfg": {"model": {"_name": "bart"}}}, "bart.pt")
    torch.save({"weights": 1}, "other.pt")
    torch.save({"smlp_export": 2}, "future.pt")
    save(tmp_path, "dense_lm_tiny", "dense.pt")
    state = content(whole)
    flat = torch.zeros(sum(p.numel() for p in trained("base_lm_tiny")[0].parameters()))
    state["last_optimizer_state"]["state"] = {0: {"step": 3, "exp_avg": flat}}
    torch.save(state, "flat.pt")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    error = refused(capsys, *arguments)
    assert all(word in error for word in words), error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "experts").exists()


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


def test_a_split_that_fails_leaves_no_parts(whole: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    from smlp.checkpoint import output

    def full(*_) -> None:
        raise smlp.UserError("cannot write: No space left on device")

    monkeypatch.setattr(output, "write_whole", full)  # of the shared file, after all parts
    assert "No space left" in refused(capsys, "split", whole, "-o", tmp_path / "p" / "x.pt", "--parts", 2)
    assert list((tmp_path / "p").iterdir()) == []


def test_parts_that_a_run_clears_away_meanwhile_are_noticed(whole: Path, tmp_path: Path, monkeypatch) -> None:
    from smlp.checkpoint import output

    write = output.write_whole

    def write_and_clear(target, *rest) -> None:
        write(target, *rest)
        shutil.rmtree(tmp_path / "experts")

    monkeypatch.setattr(output, "write_whole", write_and_clear)
    with pytest.raises(smlp.UserError, match="if a run is training in"):
        write_in_parts(open_checkpoint(whole), tmp_path / "x.pt", 2)


def test_another_dictionary_beside_the_output_is_not_written_over(whole: Path, tmp_path: Path, capsys) -> None:
    export = tmp_path / "e.pt"
    assert command("merge", whole, "-o", export, "--export") == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "dict.txt").write_text("the 1\n")
    capsys.readouterr()
    for arguments in (["merge", export, "-o", other / "x.pt"], ["split", export, "-o", other / "x.pt", "--parts", 2]):
        assert "dict.txt is another one than that of the export" in refused(capsys, *arguments)
    assert [path.name for path in other.iterdir()] == ["dict.txt"]


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
run("average", small, small, "-o", f"{folder}/warm/z.pt")
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
