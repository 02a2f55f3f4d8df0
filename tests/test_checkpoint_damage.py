"""``smlp checkpoint verify``, and what the other commands say of files that they cannot use."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_states import PREFIX, command, content, differences, refused, save, trained

import smlp
from smlp.checkpoint import output
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.checkpoint.parts import INDEX_KEY, write_part
from smlp.checkpoint.verify import problems_of

pytestmark = pytest.mark.timeout(120)


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


PART = "experts/update_6_8bc6f344/experts_0-3.pt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["merge", "whole.pt", "-o", "whole.pt", "--force"], ["is what is read"]),
        (["merge", "whole.pt", "-o", "taken.pt"], ["taken.pt exists", "--force"]),
        (["merge", "whole.pt", "-o", PART, "--force"], [PART, "belongs to checkpoints"]),
        (["info", "whole.pt", "--json", "other.pt"], ["other.pt", "of another kind"]),
        (["merge", "whole.pt", "-o", "."], ["is a folder"]),
        (["merge", "whole.pt", "-o", "taken.pt/x.pt"], ["cannot make taken.pt"]),
        (["merge", "none.pt", "-o", "x.pt"], ["there is no checkpoint none.pt"]),
        (["merge", ".", "-o", "x.pt"], ["is a folder: name a checkpoint"]),
        (["average", ".", "-o", "x.pt"], ["of the folder .: give --num-epoch-checkpoints N"]),
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
    Path(PART).parent.mkdir(parents=True)
    Path(PART).write_text("experts of another checkpoint")
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
    assert [path.name for path in tmp_path.glob("experts/*/*")] == [Path(PART).name]


def test_a_split_that_fails_leaves_no_parts(whole: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def full(*_) -> None:
        raise smlp.UserError("cannot write: No space left on device")

    monkeypatch.setattr(output, "write_whole", full)  # of the shared file, after all parts
    assert "No space left" in refused(capsys, "split", whole, "-o", tmp_path / "p" / "x.pt", "--parts", 2)
    assert list((tmp_path / "p").iterdir()) == []


def test_parts_that_a_run_clears_away_meanwhile_are_noticed(whole: Path, tmp_path: Path, monkeypatch) -> None:
    write = output.write_whole

    def write_and_clear(target, *rest) -> None:
        write(target, *rest)
        shutil.rmtree(tmp_path / "experts")

    monkeypatch.setattr(output, "write_whole", write_and_clear)
    with pytest.raises(smlp.UserError, match="if a run is training in"):
        write_in_parts(open_checkpoint(whole), tmp_path / "x.pt", 2)
