"""Checkpoints whose experts lie in parts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_states import PREFIX, differences, state_of, trained
from tiny_checkpoints import write_checkpoint

from smlp.checkpoint.index import INDEX_KEY, ExpertIndex, describe_tensors, new_token, part_file
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.checkpoint.parts import PartReader, attach, detach, open_part, read_all, write_part
from smlp.errors import UserError
from smlp.fairseq_compat.changed_settings import compare_with
from smlp.moe.experts import expert_parameters


@pytest.fixture
def saved(tmp_path: Path):
    """A whole state, and the path of the same in parts of one and of three experts, out of order."""
    decoder, optimizer = trained("base_lm_tiny")
    whole = state_of(decoder, optimizer, "base_lm_tiny", 2)
    names = [PREFIX + name for name, _, _ in expert_parameters(decoder)]
    order = [PREFIX + name for name, _ in decoder.named_parameters()]
    positions = {name: order.index(name) for name in names}
    state = state_of(decoder, optimizer, "base_lm_tiny", 2)
    tensors, token = detach(state, names, positions), new_token()
    parts = []
    for ids in ((3,), (0, 1, 2)):
        own = {key: tensor[list(ids)] for key, tensor in tensors.items()}
        parts.append(write_part(tmp_path, part_file(2, token, ids), token, ids, own))
    index = ExpertIndex(token, 4, 2, 2, tuple(parts), describe_tensors(tensors), positions)
    state[INDEX_KEY] = index.to_plain()
    torch.save(state, tmp_path / "checkpoint_last.pt")
    return whole, tmp_path / "checkpoint_last.pt", index


def test_parts_bring_back_the_whole_state(saved) -> None:
    whole, path, index = saved
    state = torch.load(path, weights_only=True)
    experts = [name for name in whole["model"] if ".experts." in name]
    assert len(experts) == 6 and not set(experts) & set(state["model"]), "the shared file has no experts"
    assert attach(state, path).index == index and INDEX_KEY not in state
    state["model"] = read_all(state["model"])
    moments = state["last_optimizer_state"]["state"]
    state["last_optimizer_state"]["state"] = {number: read_all(value) for number, value in moments.items()}
    assert differences(whole, state) == []


def test_rows_are_read_by_global_id_and_in_the_order_asked_for(saved) -> None:
    whole, path, index = saved
    reader = pickle.loads(pickle.dumps(PartReader(path, index)))  # as fairseq sends it to other ranks
    for name in (name for name in whole["model"] if ".experts." in name):
        assert torch.equal(reader.rows(f"model/{name}", [2, 3, 0]).load(), whole["model"][name][[2, 3, 0]])


def test_detaching_leaves_the_optimizer_alone() -> None:
    decoder, optimizer = trained("hash_lm_tiny")
    state = state_of(decoder, optimizer, "hash_lm_tiny", 2)
    names = [PREFIX + name for name, _, _ in expert_parameters(decoder)]
    order = [PREFIX + name for name, _ in decoder.named_parameters()]
    tensors = detach(state, names, {name: order.index(name) for name in names})
    assert len(tensors) == 3 * len(names) and all(tensor.shape[0] == 4 for tensor in tensors.values())
    assert all("exp_avg" in of_parameter for of_parameter in optimizer.state.values())
    left = state["last_optimizer_state"]["state"][order.index(names[0])]
    assert set(left) == {"step"}


def test_a_part_has_the_size_and_checksum_of_the_index(saved) -> None:
    _, path, index = saved
    for part in index.parts:
        data = (path.parent / part.file).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (part.num_bytes, part.sha256)
        for mapped in (False, True):
            content = torch.load(path.parent / part.file, weights_only=True, mmap=mapped)
            assert content["token"] == index.token and tuple(content["expert_ids"]) == part.expert_ids


def _rewrite(file: Path, **changes) -> None:
    content = torch.load(file, weights_only=True)
    torch.save({**content, **changes}, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), ["experts 0 to 2", "is missing", "together with its folder experts/"]),
        (lambda file: (file.unlink(), file.symlink_to("gone")), ["is a link to gone", "experts 0 to 2"]),
        (lambda file: os.truncate(file, 1000), ["has 1,000 bytes where the index says", "truncated"]),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), ["cannot be read"]),
    ],
)
def test_unusable_parts_are_named(saved, damage, words) -> None:
    _, path, index = saved
    damage(path.parent / index.parts[1].file)
    with pytest.raises(UserError) as caught:
        PartReader(path, index).open(index.parts[1])
    assert all(word in str(caught.value) for word in [index.parts[1].file, str(path), *words]), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token": "00000000"}, ["is not a part of", "of state 00000000"]),
        ({"expert_ids": [1, 2, 3]}, ["is not a part of", "experts 1 to 3", "not 0 to 2"]),
        ({"expert_ids": []}, ["is not a part of", "experts none"]),
        ({"tensors": {}}, ["has nothing as", "where the index says float32 (3, "]),
        ({"tensors": {"model/x": torch.ones(3)}}, ["model/decoder.core", "has nothing"]),
    ],
)
def test_foreign_parts_are_named(saved, changes, words) -> None:
    _, path, index = saved
    part = index.parts[1]
    _rewrite(path.parent / part.file, **changes)
    with pytest.raises(UserError) as caught:
        open_part(path, index, part)
    assert all(word in str(caught.value) for word in [part.file, str(path), *words]), str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, ["format 2", "this version reads 1"]),
        ({"num_experts": 5}, ["lists experts [0, 1, 2, 3], but there are 5"]),
        ({"parts": None}, ["index of experts", "damaged"]),
        ({"surprise": 1}, ["index of experts", "damaged", "surprise"]),
        ({"one file": True}, ["index of experts", "names experts/", ".pt for 2 parts"]),
    ],
)
def test_an_unusable_index_is_named(saved, change, words) -> None:
    _, path, index = saved
    plain = index.to_plain()
    if change.pop("one file", False):
        change["parts"] = [{**part, "file": plain["parts"][0]["file"]} for part in plain["parts"]]
    with pytest.raises(UserError) as caught:
        ExpertIndex.from_plain({**plain, **change}, path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)
    assert ExpertIndex.from_plain(index.to_plain(), path) == index


def test_settings_of_a_checkpoint_in_parts_are_compared(tmp_path: Path, caplog) -> None:
    """Also if it has more experts than what its parts share is long."""
    path, _ = write_checkpoint(tmp_path, [f"w{i}" for i in range(9)], "hash_lm_tiny", num_experts=512)
    whole = open_checkpoint(path)
    write_in_parts(whole, tmp_path / "parts.pt", 2)
    trainer = SimpleNamespace(is_data_parallel_master=True)
    compare_with(str(tmp_path / "parts.pt"), trainer, whole.config)
    assert not caplog.messages
    compare_with(str(tmp_path / "parts.pt"), trainer, dataclasses.replace(whole.config, activation="relu"))
    (said,) = caplog.messages
    assert said.endswith("was trained with activation=gelu; this run continues with activation=relu")


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("smlp.checkpoint.parts.write_torch_file", full)
    with pytest.raises(UserError, match=r"experts_0-1\.pt: No space left"):
        write_part(tmp_path, "experts/experts_0-1.pt", "token", (0, 1), {"x": torch.ones(2)})
    assert list((tmp_path / "experts").iterdir()) == []
