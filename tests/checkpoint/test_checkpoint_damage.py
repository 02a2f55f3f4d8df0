"""``smlp checkpoint verify``, and what the other commands say of files that they cannot use."""

from __future__ import annotations

import collections
import copy
import os
import pickle
import random
import re
import shutil
import tracemalloc
import zipfile
from functools import reduce
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoint_states import PREFIX, command, content, differences, refused, save, trained

import smlp
from smlp.checkpoint import output
from smlp.checkpoint.content import moment_problems
from smlp.checkpoint.index import INDEX_KEY, remove_unused_parts
from smlp.checkpoint.inspection import problems_of
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.checkpoint.parts import read_all, write_part
from smlp.errors import UserError
from smlp.fairseq_compat.limits import MOST_SEED
from smlp.models.fitting import check_fit

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
        (_swap, ["experts_2-2.pt", "is not a part of", "experts 2 of state 00000000"]),
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


def _read_by_fairseq(path: Path) -> dict:
    """What training, resumed or fine-tuned, and fairseq-eval-lm read."""
    from fairseq import checkpoint_utils

    from smlp.fairseq_compat.command_line import load_plugin
    from smlp.fairseq_compat.loading import reading_moments

    load_plugin()
    with reading_moments(True):
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    moments = state["last_optimizer_state"]["state"]
    moments = {number: read_all(of_parameter) for number, of_parameter in moments.items()}
    return {"model": read_all(state["model"]), "moments": moments}


def _read_by_smlp(path: Path) -> dict:
    return dict(smlp.load_pretrained(path).decoder.state_dict())


def test_no_flipped_bit_is_read(whole: Path, parts: Path, tmp_path: Path) -> None:
    """Whichever way weights are read: either the damage is reported, or what is read is still the same."""
    exports = [tmp_path / "e.pt", tmp_path / "e.safetensors"]
    for export in exports:
        assert command("merge", whole, "-o", export, "--export") == 0
    both = (_read_by_smlp, _read_by_fairseq)
    cases = [(whole, whole, both), (parts, parts, both), (_an_expert(parts), parts, both)]
    cases += [(export, export, (_read_by_smlp,)) for export in exports]
    draw = random.Random(2)
    for file, checkpoint, ways in cases:
        original = file.read_bytes()
        # of the records, and of the table behind them
        table = original.rfind(b"PK\1\2") if file.suffix == ".pt" else 0
        places = [draw.randrange(len(original)) for _ in range(7)] + [
            draw.randrange(table - 600, len(original)) for _ in range(3 if table else 0)
        ]
        for read in ways:
            good, found = read(checkpoint), 0
            for place in places:
                _flip(file, place)
                try:
                    assert differences(read(checkpoint), good) == [], (file, place)
                except smlp.UserError as error:
                    found += 1
                    assert file.name in str(error) or checkpoint.name in str(error)
                file.write_bytes(original)
            assert found > 3


@pytest.mark.parametrize("field", [34, 38])
def test_a_flipped_bit_that_only_torch_heeds_is_found(whole: Path, tmp_path: Path, field: int) -> None:
    """In the table of a file: the number of its disk, and the attribute that makes a record a folder without bytes."""
    data = bytearray(whole.read_bytes())
    data[data.rfind(b"PK\1\2", 0, data.rfind(b"data/3")) + field] ^= 0x10
    whole.write_bytes(data)
    assert problems_of(whole)
    with pytest.raises(smlp.UserError, match="damaged"):
        smlp.load_pretrained(whole)


def test_checksums_can_be_left_out(whole: Path, monkeypatch) -> None:
    data = whole.read_bytes()
    _flip(whole, data.index(content(whole)["model"][PREFIX + "norm.bias"].numpy().tobytes()) + 1)
    with pytest.raises(smlp.UserError, match=r"norm\.bias differs from its checksum"):
        smlp.load_pretrained(whole)
    monkeypatch.setenv("SMLP_VERIFY_CHECKPOINTS", "0")
    assert not torch.equal(smlp.load_pretrained(whole).decoder.norm.bias, torch.zeros(16))


def test_parts_of_a_checkpoint_with_a_damaged_index_are_kept(parts: Path) -> None:
    """A flipped bit in the name of a folder would make its parts look unused."""
    data = bytearray(parts.read_bytes())
    data[data.index(b"experts/update_") + 16] ^= 1
    parts.write_bytes(data)
    held = sorted(parts.parent.glob("experts/*/*.pt"))
    remove_unused_parts(parts.parent)
    assert sorted(parts.parent.glob("experts/*/*.pt")) == held


def test_parts_behind_a_link_are_kept(parts: Path, tmp_path: Path, caplog) -> None:
    """They may be those of another run, whose checkpoints are not seen."""
    (other := tmp_path / "other").mkdir()
    (other / "experts").symlink_to(parts.parent / "experts")
    held = sorted(parts.parent.glob("experts/*/*.pt"))
    remove_unused_parts(other)
    assert held and sorted(parts.parent.glob("experts/*/*.pt")) == held
    assert f"unused files of experts are kept: {other / 'experts'} is a link" in caplog.text


def test_an_architecture_with_control_characters_is_refused(whole: Path, capsys) -> None:
    """It would be printed, and could pass for another line."""
    state = torch.load(whole)
    state["cfg"]["model"]["_name"] = "smlp\x1b[31m\nwhole"
    torch.save(state, whole)
    for name in ("info", "verify"):
        assert command(name, whole) == 1
        assert r"is damaged: its architecture is 'smlp\x1b[31m\nwhole'" in "".join(capsys.readouterr())


def _rewritten(path: Path, **records: bytes) -> None:
    """Writes the records of a file anew, compressed, some of them with other bytes."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, records.get(Path(name).stem, data))


def _nested() -> list:
    nested: list = ["x"]
    for _ in range(40):
        nested = [nested, nested]
    return nested


def _index(path: Path, **values: object) -> None:
    state = content(path)
    state[INDEX_KEY].update(values)
    torch.save(state, path)


def _add(path: Path, **values: object) -> None:
    torch.save({**content(path), **values}, path)


#: files that would take far more memory than they have bytes, and what is said of them
BOMBS = {
    "experts": (lambda p: _index(p, num_experts=10**9), "but there are 1000000000"),
    "compressed": (lambda p: _rewritten(p, data=pickle.dumps(bytes(50_000_000))), "compressed records"),
    "named often": (lambda p: _add(p, x=_nested()), "more than 10,000,000 values"),
    "long text": (lambda p: _add(p, x=[["x" * 20_000] * 200] * 200), "more than 10,000,000 values"),
    "short texts": (lambda p: _add(p, x=[["x" * 63] * 200] * 1000), "more than 10,000,000 values"),
    "whole numbers": (lambda p: _add(p, x=[[1 << 1023] * 100] * 1000), "more than 10,000,000 values"),
    "digits": (lambda p: _add(p, x=10**5000), "a number of more than 1,024 bits"),
    "repeated": (lambda p: _add(p, x=torch.zeros(1).expand(10**11)), "a tensor of shape (100000000000,)"),
    "index of sizes": (
        lambda p: _index(p, tensors={k: ((10**6, 10**6), d) for k, (_, d) in content(p)[INDEX_KEY]["tensors"].items()}),
        "where the index says float32 (1, 1000000, 1000000)",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_memory_is_bounded_by_the_size_of_the_file(parts: Path, bomb: str) -> None:
    make, words = BOMBS[bomb]
    for read in (_read_by_smlp, _read_by_fairseq):
        read(parts)  # imports take memory too
    make(parts)
    for read in (_read_by_smlp, _read_by_fairseq):
        tracemalloc.start()
        with pytest.raises(smlp.UserError, match=re.escape(words)):
            read(parts)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
        tracemalloc.stop()
    assert words in problems_of(parts)[0]


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_experts": value} for value in (-1, "4", 4.0, None, True)),
        {"world_size": "many"},
        {"group_size": None},
        {"positions": "x"},
        {"tensors": {3: ((3,), "float32")}},
        {"tensors": {"model/x": ((3,), "no_dtype")}},
        {"token": None},
        *(
            {"file": name}
            for name in ("/etc/passwd", "../whole.pt", "experts/../../whole.pt", "whole.pt", "experts/a\nb.pt", 7, None)
        ),
        {"expert_ids": "abc"},
        {"expert_ids": [0, "a"]},
        {"num_bytes": -5},
        {"num_bytes": "x"},
    ],
)
def test_a_damaged_index_is_one_sentence(parts: Path, changes: dict) -> None:
    state = content(parts)
    index = state[INDEX_KEY]
    (index["parts"][0] if changes.keys() & {"file", "expert_ids", "num_bytes"} else index).update(changes)
    torch.save(state, parts)
    for read in (_read_by_smlp, _read_by_fairseq):
        with pytest.raises(smlp.UserError, match=r"checkpoint_last\.pt"):
            read(parts)
    assert problems_of(parts)


def test_moments_that_are_not_used_may_be_damaged(whole: Path) -> None:
    from fairseq import checkpoint_utils

    from smlp.fairseq_compat.command_line import load_plugin

    load_plugin()
    state = content(whole)
    state["last_optimizer_state"]["state"][3].pop("exp_avg")
    torch.save(state, whole)
    assert checkpoint_utils.load_checkpoint_to_cpu(str(whole))["model"], "for an evaluation, or --reset-optimizer"


def test_adafactor_keeps_other_moments_of_matrices_than_of_vectors() -> None:
    from fairseq.optim.adafactor import Adafactor

    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 6, 5), (6, 5), (5,), (3, 5, 6), (5, 6), (6,))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = Adafactor(weights)
    optimizer.step()
    state = {"last_optimizer_state": optimizer.state_dict()}
    assert moment_problems(state, "a.pt") == []
    for number, moment in ((0, "exp_avg_sq_row"), (4, "exp_avg_sq_col")):
        changed = copy.deepcopy(state)
        del changed["last_optimizer_state"]["state"][number][moment]
        assert any(f"of parameter {number} lacks" in problem for problem in moment_problems(changed, "a.pt"))


def test_the_largest_seed_is_no_damage(whole: Path) -> None:
    state = content(whole)
    state["extra_state"]["train_iterator"]["seed"] = MOST_SEED + state["extra_state"]["train_iterator"]["epoch"]
    torch.save(state, whole)
    assert problems_of(whole) == []


def test_moments_of_two_kinds_without_axes_are_no_error() -> None:
    states = {0: {"x_row": torch.tensor(1.0)}, 1: {"y": torch.tensor(1.0)}}
    assert moment_problems({"last_optimizer_state": {"state": states}}, "a.pt") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (
                lambda s, v=v: s["extra_state"]["train_iterator"].update(epoch=v),
                ["train_iterator.epoch", "number from 1"],
            )
            for v in (-1, 0, "3", 1.5, None)
        ),
        (lambda s: s["extra_state"]["train_iterator"].update(iterations_in_epoch=-5), ["iterations_in_epoch is -5"]),
        *(
            (lambda s, v=v: s["extra_state"]["train_iterator"].update(num_shards=v), [f"num_shards is {v!r:.60}, but"])
            for v in ("x" * 1000, -3)
        ),
        (lambda s: s["optimizer_history"][-1]["lr_scheduler_state"].update(best="x"), ["best is 'x', not a number"]),
        (lambda s: s["optimizer_history"][-1].update(optimizer_name="A\nC"), [r"optimizer_name is 'A\nC', not a name"]),
        (lambda s: s["optimizer_history"][-1].update(criterion_name=7), ["criterion_name is 7, not a name"]),
        (lambda s: s["extra_state"].update(train_iterator=[1]), ["train_iterator is [1], not a dictionary"]),
        (lambda s: s["optimizer_history"][-1].update(num_updates="six"), ["num_updates is 'six'"]),
        (lambda s: s["optimizer_history"][-1].update(num_updates=-1), ["num_updates is -1"]),
        (lambda s: s.update(criterion=2**40), ["criterion is 1099511627776, not a dictionary"]),
        (
            lambda s: s["last_optimizer_state"]["state"][0].update({1: 2}),
            ["optimizer state is not stored by parameter"],
        ),
        (lambda s: s.update(optimizer_history="x"), ["optimizer_history is 'x', not a list"]),
        (lambda s: s.update(optimizer_history=["x"]), ["optimizer_history is 'x', not a dictionary"]),
        (lambda s: s.update(last_optimizer_state="x"), ["last_optimizer_state is 'x'"]),
        (lambda s: s["last_optimizer_state"].update(state="x"), ["not stored by parameter"]),
        (lambda s: s["last_optimizer_state"]["state"][3].pop("exp_avg"), ["parameter 3 lacks exp_avg, which"]),
        *(
            (
                lambda s, v=v: s["last_optimizer_state"]["state"][3].update(step=v),
                [f"step of parameter 3 is {v!r:.60}, not"],
            )
            for v in (-1, float("nan"), float("inf"), 10**300)
        ),
        *(
            (
                lambda s, v=v: s["last_optimizer_state"]["state"][3].update(step=torch.tensor(v)),
                [f"step of parameter 3 is {v}, not"],
            )
            for v in (-1.0, float("inf"), True)
        ),
        (
            lambda s: s["extra_state"].update(smlp_plateau={"annealed": {"from": 0.1}}),
            ["smlp_plateau.annealed is {'from': 0.1}, not a rate with the --lr"],
        ),
        (lambda s: s["extra_state"].update(val_loss="x"), ["extra_state.val_loss is 'x', not a number"]),
        (lambda s: s["optimizer_history"].append({}), ["optimizer_history is {}, without the name of"]),
        (
            lambda s: [s["last_optimizer_state"]["state"][3].pop(name) for name in ("exp_avg", "exp_avg_sq")],
            ["parameter 3 lacks exp_avg, exp_avg_sq, which"],
        ),
    ],
)
def test_what_training_cannot_resume_from_is_named(whole: Path, change, words) -> None:
    state = content(whole)
    change(state)
    torch.save(state, whole)
    (problem, *_) = problems_of(whole)
    with pytest.raises(smlp.UserError) as raised:
        _read_by_fairseq(whole)
    for said in (problem, str(raised.value)):
        assert "whole.pt is damaged" in said and all(word in said for word in words), said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["model"].pop(PREFIX + "norm.bias"), ["does not fit its configuration", "lacks", "norm.bias"]),
        (lambda s: s["model"].update({PREFIX + "x": torch.ones(1)}), ["has besides", PREFIX + "x"]),
        (
            lambda s: s["cfg"]["model"].update(ffn_dim=32),
            ["(base_lm_tiny): decoder.core.blocks.1.token_moe.experts.w1 has shape (4, 24, 16), not (4, 32, 16)"],
        ),
        (lambda s: s["cfg"]["model"].update(num_dense_layers=9000), ["which has 9,001 blocks: its tensors"]),
        (lambda s: s["cfg"]["model"].update(num_experts=10**9), ["which has 1,000,000,000 experts: its tensors"]),
        (lambda s: s["cfg"]["model"].update(tokens_per_sample=10**9), ["which has 1,000,000,000 positions"]),
        (lambda s: s["model"].update({PREFIX + "norm.bias": "x"}), ["norm.bias, which is not a tensor"]),
        (lambda s: s["model"].update({5: torch.ones(1)}), ["its model has 5 in place of a tensor's name"]),
        (
            lambda s: s["cfg"]["model"].update(ffn_dim=-1),
            ["does not describe a model that can be built", "ffn_dim", "-1"],
        ),
        (
            lambda s: s["cfg"]["model"].update(ffn_dim=2**63),
            ["does not describe a model that can be built: ffn_dim must be at most 2,"],
        ),
        (
            lambda s: s["cfg"]["model"].update(embed_dim=2**31 - 2),
            ["does not fit its configuration (base_lm_tiny), which has 2,147,483,646 features: its tensors"],
        ),
        (
            lambda s: s["cfg"]["model"].update(tokens_per_sample="12"),
            ["--tokens-per-sample must be a whole number of at least 1, got '12'"],
        ),
        (lambda s: s["cfg"]["model"].pop("tokens_per_sample"), ["--tokens-per-sample must be", "got None"]),
        (
            lambda s: s["cfg"]["model"].update(max_target_positions=-5),
            ["--max-target-positions must be a whole number of at least 1, got -5"],
        ),
        (lambda s: s["cfg"]["model"].update(add_bos_token="no"), ["--add-bos-token must be true or false, got 'no'"]),
        (lambda s: s["cfg"]["model"].update(_name=["x"]), ["the name of the architecture must be text, got ['x']"]),
        (lambda s: s["model"].update({PREFIX + "norm.bias": torch.zeros(16).half()}), ["weights of several types"]),
        (lambda s: s["last_optimizer_state"]["state"][3].update(exp_avg=torch.ones(2, 2)), ["exp_avg of", "(2, 2)"]),
        (
            lambda s: s["model"].update({PREFIX + "norm.bias": torch.zeros(16).char()}),
            ["norm.bias has type torch.int8, not floats"],
        ),
        (lambda s: s["cfg"].update(criterion=[1]), ["is damaged: cfg.criterion is [1], not options"]),
        (lambda s: s["cfg"].update(distributed_training="x"), ["is damaged: cfg.distributed_training is 'x'"]),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(whole: Path, change, words, capsys) -> None:
    state = content(whole)
    change(state)
    torch.save(state, whole)
    assert command("verify", whole) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in [str(whole), *words]), error


def test_torchs_advice_to_read_a_file_all_the_same_is_left_out(whole: Path) -> None:
    state = content(whole)
    state["cfg"]["common"] = collections.defaultdict(None)
    torch.save(state, whole)
    (problem,) = problems_of(whole)
    said = "(UnpicklingError: Unsupported global: GLOBAL collections.defaultdict)"
    assert problem.endswith(f"is damaged: torch cannot read it {said}")


def test_an_index_with_other_places_of_moments_is_found(parts: Path) -> None:
    state = content(parts)
    places = state[INDEX_KEY]["positions"]
    moved = dict(zip(places, reversed(places.values()), strict=True))
    state[INDEX_KEY]["positions"] = moved
    torch.save(state, parts)
    name = min(name for name in places if moved[name] != places[name])
    assert f"{name} at place {moved[name]} of the optimizer's state, not {places[name]}" in problems_of(parts)[0]


def test_what_json_cannot_hold_is_left_to_the_other_format(whole: Path, tmp_path: Path, capsys) -> None:
    state = content(whole)
    state["cfg"]["common"] = {"odd": {1}}
    torch.save(state, whole)
    assert command("merge", whole, "-o", tmp_path / "x.safetensors") == 1
    assert "a .safetensors file cannot hold the configuration (Object of type set" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists() and command("merge", whole, "-o", tmp_path / "x.pt") == 0


def test_a_dictionary_is_looked_for_in_few_folders(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    path = Path(shutil.copy(whole, tmp_path / "alone" / "x.pt"))
    state = content(path)
    state["cfg"]["task"]["data"] = ":".join(["a"] * 2_000_000)
    torch.save(state, path)
    tracemalloc.start()
    with pytest.raises(smlp.UserError, match=r"no dict\.txt beside"):
        smlp.load_pretrained(path)
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()


def test_verify_names_moments_that_cannot_be_used(whole: Path, capsys) -> None:
    state = content(whole)
    state["last_optimizer_state"]["state"][2]["exp_avg_sq"].view(-1)[-1] = torch.inf
    torch.save(state, whole)
    assert command("verify", whole) == 0
    name = PREFIX + [*dict(trained("base_lm_tiny")[0].named_parameters())][3]
    before = content(whole)
    faults = (
        ("exp_avg", torch.nan, "has NaN"),
        ("exp_avg", torch.inf, "is infinite"),
        ("exp_avg_sq", -1e-9, "is negative"),
    )
    for moment, value, fault in faults:
        state = copy.deepcopy(before)
        state["last_optimizer_state"]["state"][3][moment].view(-1)[-1] = value
        torch.save(state, whole)
        said = f"{whole} is damaged: {moment} of parameter {name} {fault}; --reset-optimizer starts with new moments"
        assert said in refused(capsys, "verify", whole)
    assert smlp.load_pretrained(whole), "weights are whole"
    before["last_optimizer_state"]["state"][3]["exp_avg"] = torch.zeros(3, 3, 3)
    torch.save(before, whole)
    said = f"{whole}: exp_avg of {name.removeprefix(PREFIX)} has shape (3, 3, 3), not ("
    assert said in refused(capsys, "verify", whole)


PART = "experts/update_6_8bc6f344/experts_0-3.pt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["merge", "whole.pt", "-o", "whole.pt", "--force"], ["is an input"]),
        (["merge", "whole.pt", "-o", "taken.pt"], ["taken.pt exists", "--force"]),
        (["merge", "whole.pt", "-o", PART, "--force"], [PART, "belongs to checkpoints"]),
        (["info", "whole.pt", "--json", "other.pt"], ["other.pt", "of another kind"]),
        (["merge", "whole.pt", "-o", "."], ["is a folder"]),
        (["merge", "whole.pt", "-o", "taken.pt/x.pt"], ["cannot write taken.pt/x.pt: taken.pt cannot be made"]),
        (["merge", "none.pt", "-o", "x.pt"], ["there is no checkpoint none.pt"]),
        (["merge", ".", "-o", "x.pt"], ["is a folder: name a checkpoint"]),
        (["merge", "pipe", "-o", "x.pt"], ["pipe is not a regular file but a named pipe"]),
        (["verify", "pipe"], ["a named pipe"]),
        (["merge", "whole.pt", "-o", "pipe", "--force"], ["pipe is a named pipe, which is not replaced"]),
        (["average", "whole.pt", "-o", "/dev/null", "--force"], ["/dev/null is a device, which is not replaced"]),
        (["merge", "whole.pt", "-o", "n" * 300], ["cannot write", "File name too long"]),
        (["split", "whole.pt", "-o", "n" * 252, "--parts", "2"], ["cannot write", "File name too long"]),
        (["average", "whole.pt", "./whole.pt", "-o", "x.pt"], ["./whole.pt is named twice"]),
        (["average", ".", "-o", "x.pt"], [". is a folder: give --num-epoch-checkpoints N"]),
        (["merge", "bart.pt", "-o", "x.pt"], ["another kind of model (bart)"]),
        (["merge", "headless.pt", "-o", "x.pt"], ["headless.pt is damaged: it lacks decoder.core.embedding.weight"]),
        (["merge", "taken.pt", "-o", "x.pt"], ["taken.pt", "truncated or not a checkpoint"]),
        (["merge", "other.pt", "-o", "x.pt"], ["not a checkpoint of fairseq-train"]),
        (["merge", "whole.pt", "-o", "x.safetensors", "--dict", "short.txt"], ["short.txt has 5 symbols", "24"]),
        (["merge", "whole.pt", "-o", "x.pt", "--dict", "short.txt"], ["short.txt would not be used", "give --export"]),
        (["merge", "whole.pt", "-o", "x.pt", "--export", "--dict", "none.txt"], ["none.txt"]),
        (["merge", "whole.pt", "-o", "x.pt", "--export", "--sentencepiece-model", "none"], ["SentencePiece", "none"]),
        (["merge", "future.pt", "-o", "x.pt"], ["export in format 2", "this version reads 1"]),
        (["merge", "foreign.safetensors", "-o", "x.pt"], ["not an export of smlp"]),
        (["merge", "short.safetensors", "-o", "x.pt"], ["short.safetensors (9 bytes)", "truncated"]),
        (["split", "whole.pt", "-o", "x.pt", "--parts", "3"], ["4 experts", "3 parts"]),
        (["split", "whole.pt", "-o", "new/x.pt", "--parts", "3"], ["4 experts", "3 parts"]),
        (["merge", "whole.pt", "-o", "x.bin"], ["x.bin: a checkpoint to train from must end in .pt"]),
        (["merge", "whole.pt", "-o", "x.bin", "--export"], ["x.bin: an export must end in .safetensors or .pt"]),
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
    os.mkfifo("pipe")
    Path("short.txt").write_text("the 1\n")
    Path("short.safetensors").write_bytes(bytes(9))
    save_file({"x": torch.ones(3)}, "foreign.safetensors")
    torch.save({"model": {"x": torch.ones(1)}, "cfg": {"model": {"_name": "bart"}}}, "bart.pt")
    torch.save({"model": {PREFIX + "norm.bias": torch.ones(1)}, "cfg": {"model": {"_name": "smlp"}}}, "headless.pt")
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
    assert [path.name for path in tmp_path.glob("experts/*/*")] == [Path(PART).name] and not Path("new").exists()


def test_a_split_that_fails_leaves_no_parts(whole: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def full(*_) -> None:
        raise smlp.UserError("cannot write: No space left on device")

    monkeypatch.setattr(output, "write_whole", full)  # of the shared file, after all parts
    for words in (("split", "--parts", 2), ("merge",), ("merge", "--export")):
        assert "No space left" in refused(capsys, *words, whole, "-o", tmp_path / "p" / "q" / "x.pt")
        assert not (tmp_path / "p").exists()
        assert "File name too long" in refused(capsys, *words, whole, "-o", tmp_path / "p" / "q" / ("n" * 300) / "x.pt")
        assert not (tmp_path / "p").exists()
    (tmp_path / "p").mkdir()
    assert "No space left" in refused(capsys, "split", whole, "-o", tmp_path / "p" / "x.pt", "--parts", 2)
    assert list((tmp_path / "p").iterdir()) == []
    (tmp_path / "p" / "experts").mkdir()
    assert "No space left" in refused(capsys, "split", whole, "-o", tmp_path / "p" / "x.pt", "--parts", 2)
    assert list((tmp_path / "p").iterdir()) == [tmp_path / "p" / "experts"], "it was there before"


def interrupt_when_written(monkeypatch, target: Path) -> None:
    """Let Ctrl-C come while the folder is forced to the disk, when the file has its name already."""
    sync = os.fsync

    def interrupted(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), target.parent.stat()):
            raise KeyboardInterrupt
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)


def test_a_checkpoint_that_is_written_keeps_its_parts(whole: Path, tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "x.pt"
    write_in_parts(open_checkpoint(whole), target, 2)
    interrupt_when_written(monkeypatch, target)
    with pytest.raises(KeyboardInterrupt):
        write_in_parts(open_checkpoint(whole), target, 2)
    assert problems_of(target) == []


def test_a_checkpoint_that_is_written_keeps_its_dictionary(whole: Path, tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "new" / "x.pt"
    assert command("merge", whole, "-o", tmp_path / "export.pt", "--export") == 0
    export = open_checkpoint(tmp_path / "export.pt")
    target.parent.mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output, "write_torch_file", Mock(side_effect=KeyboardInterrupt))
        output.write_one_file(export, target)
    assert list(target.parent.iterdir()) == []
    write = output.write_whole

    def write_and_interrupt(*arguments) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "write_whole", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        output.write_one_file(export, target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["dict.txt", "x.pt"]


def test_parts_that_a_run_clears_away_meanwhile_are_noticed(whole: Path, tmp_path: Path, monkeypatch) -> None:
    write = output.write_whole

    def write_and_clear(target, *rest) -> None:
        write(target, *rest)
        shutil.rmtree(tmp_path / "experts")

    monkeypatch.setattr(output, "write_whole", write_and_clear)
    with pytest.raises(smlp.UserError, match="if a run is training in"):
        write_in_parts(open_checkpoint(whole), tmp_path / "x.pt", 2)


def test_a_dictionary_is_never_written_over(whole: Path, tmp_path: Path, capsys) -> None:
    before = (whole.parent / "dict.txt").read_bytes()
    for options in ([], ["--export"]):
        error = refused(capsys, "merge", whole, "-o", whole.parent / "dict.txt", "--force", *options)
        assert "dict.txt has the name of a dictionary or tokenizer file" in error
    words = tmp_path / "words.txt"
    words.write_bytes(before)
    error = refused(capsys, "merge", whole, "-o", words, "--force", "--export", "--dict", words)
    assert "words.txt is an input" in error
    assert (whole.parent / "dict.txt").read_bytes() == words.read_bytes() == before


def test_the_experts_of_an_input_stay_whatever_its_name(whole: Path, tmp_path: Path, capsys) -> None:
    """Those of a file that is written over are removed, and only names in ``*.pt`` keep them."""
    target, backup, other = tmp_path / "p" / "x.pt", tmp_path / "p" / "x.pt.bak", tmp_path / "q" / "x.pt"
    assert command("split", whole, "-o", target, "--parts", 2) == 0
    other.parent.mkdir()
    (other.parent / "experts").symlink_to(target.parent / "experts")
    for alike in (backup, other):
        shutil.copy(target, alike)
        for action in (["merge"], ["average"], ["split", "--parts", 4], ["merge", "--export"]):
            error = refused(capsys, *action, alike, "-o", target, "--force")
            assert f"{target} has its experts in the files of the input {alike}" in error
        assert command("verify", alike) == 0
    beside = target.with_name("y.pt")
    shutil.copy(target, beside)
    assert command("merge", beside, "-o", target, "--force") == 0 == command("verify", beside)
    shutil.copy(beside, target)
    (target.parent / "experts").rename(tmp_path / "real")
    (target.parent / "experts").symlink_to(tmp_path / "real")
    part = next(target.parent.glob("experts/*/*.pt"))
    assert f"{part} belongs to checkpoints" in refused(capsys, "merge", target, "-o", part, "--force")
    assert command("verify", target) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([None], "a checkpoint must be a path, got None"),
        ([b"whole.pt"], "a checkpoint must be a path, got b'whole.pt'"),
        (["whole.pt", 5], "a dictionary must be a path, got 5"),
        (["whole.pt", None, 5], "a tokenizer must be a path, got 5"),
        (["w" * 300], "cannot read w+: File name too long"),
    ],
)
def test_what_is_no_path_is_named(arguments, said) -> None:
    with pytest.raises(UserError, match=f"^{said}$"):
        smlp.load_pretrained(*arguments)


@pytest.mark.parametrize("compare", [False, True])
def test_only_what_training_can_resume_from_is_offered_instead(whole: Path, parts: Path, compare: bool) -> None:
    from smlp.fairseq_compat.loading import newest_loadable

    folder = parts.parent
    last, split, export, lacking = (folder / f"checkpoint_{name}.pt" for name in ("last", "split", "export", "lacking"))
    parts.rename(split)
    os.utime(split, (1, 1))
    assert newest_loadable(last, compare) == split
    assert command("merge", whole, "-o", export, "--export") == 0
    torch.save({"a": 1}, folder / "checkpoint_else.pt")
    torch.save({**content(whole), "extra_state": None}, lacking)
    assert newest_loadable(last, compare) == split
    _an_expert(split).unlink()
    assert newest_loadable(last, compare) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_no_weights(whole: Path, dtype) -> None:
    state = content(whole)
    decoder, _ = trained("base_lm_tiny")
    name = PREFIX + "embedding.weight"
    own = {PREFIX + key: value for key, value in decoder.state_dict().items()}
    shapes = {key: value.shape for key, value in own.items()}
    check_fit(state["model"], own, shapes, decoder.config)
    state["model"][name] = state["model"][name].to(dtype)
    with pytest.raises(UserError, match=rf"damaged: {name} has type {dtype}, not floats"):
        check_fit(state["model"], own, shapes, decoder.config)
    torch.save(state, whole)
    with pytest.raises(UserError, match=rf"{name} has type {dtype}, not floats"):
        smlp.load_pretrained(whole)


@pytest.mark.parametrize(
    ("way", "value", "said"),
    [
        (["optimizer_history", -1], None, "optimizer_history is None, not a dictionary"),
        (["optimizer_history", -1, "num_updates"], 2**70, "num_updates is 1180591620717411303424, but must be"),
        (["extra_state", "train_iterator"], None, "train_iterator is None, not a dictionary"),
        (["extra_state", "train_iterator", "epoch"], 10**15, "epoch is 1000000000000000, but must be"),
        (["extra_state", "previous_training_time"], "long", "previous_training_time is 'long', not a number of sec"),
        (["extra_state", "previous_training_time"], float("nan"), "previous_training_time is nan, not a number of sec"),
        (["extra_state", "previous_training_time"], torch.tensor(torch.nan), "previous_training_time is "),
        (["extra_state", "previous_training_time"], -1e12, "previous_training_time is -1000000000000.0, not a"),
        (["last_optimizer_state", "state"], {"a": {}}, "optimizer state is not stored by parameter"),
        (["last_optimizer_state", "state", 0, "step"], -5, "step of parameter 0 is -5, not a number from 0 to"),
    ],
)
def test_a_position_in_training_that_cannot_be_is_named(whole: Path, tmp_path: Path, way, value, said, capsys) -> None:
    state = content(whole)
    reduce(lambda part, step: part[step], way[:-1], state)[way[-1]] = value
    torch.save(state, whole)
    assert said in refused(capsys, "merge", whole, "-o", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_the_time_of_training_is_a_tensor_with_several_ranks(whole: Path) -> None:
    state = content(whole)
    state["extra_state"]["previous_training_time"] = torch.tensor(-2.5, dtype=torch.float64)
    torch.save(state, whole)
    assert command("verify", whole) == 0
