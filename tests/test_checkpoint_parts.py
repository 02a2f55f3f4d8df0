"""Files of tensors read and written piece by piece, and checkpoints whose experts lie in parts."""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_states import PREFIX, differences, state_of, trained

from smlp.checkpoint import lazy
from smlp.checkpoint.lazy import (
    FileVersion,
    HeldTensor,
    MadeTensor,
    StoredTensor,
    are_equal,
    joined_rows,
    mean,
    repeated,
    rows_of,
    scaled,
)
from smlp.checkpoint.parts import (
    INDEX_KEY,
    ExpertIndex,
    PartReader,
    attach,
    describe_tensors,
    detach,
    new_token,
    open_part,
    part_file,
    read_all,
    write_part,
)
from smlp.checkpoint.torch_file import damaged_places, named_tensors, read_structure, write_torch_file
from smlp.errors import UserError
from smlp.moe.ownership import expert_parameters


@pytest.fixture(params=[32, lazy.PIECE_BYTES], ids=["small pieces", "usual pieces"])
def pieces(request, monkeypatch):
    """Tensors cross many borders of pieces, or none."""
    monkeypatch.setattr(lazy, "PIECE_BYTES", request.param)


CONTENT = {
    "float": torch.randn(5, 7),
    "half": torch.randn(33).half(),
    "bfloat16": torch.randn(3, 2, 4).bfloat16(),
    "double": torch.randn(2, 9).double(),
    "ids": torch.arange(40),
    "small ids": torch.arange(40, dtype=torch.int32),
    "bytes": torch.arange(77, dtype=torch.uint8),
    "flags": torch.rand(50) > 0.5,
    "number": torch.tensor(3.5),
    "nothing": torch.empty(0, 3),
    "transposed": torch.randn(6, 4).t(),
    "slice": torch.randn(10, 3)[2:5],
    "column": torch.randn(10, 3)[:, 1],
    "parameter": torch.nn.Parameter(torch.randn(4)),
    "plain": {"list": [1, 2.5, None, "x", True], "tuple": (1, (2,)), "ordered": collections.OrderedDict(b=1, a=2)},
    "namespace": argparse.Namespace(lr=0.1),
    "dtype": torch.float16,
    "size": torch.Size([2, 3]),
    3: {"nested": torch.ones(2)},
}


def _plainly(content: dict) -> dict:
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in content.items()}


@pytest.mark.parametrize("can_seek", [True, False])
def test_torch_reads_what_is_written_piece_by_piece(tmp_path: Path, pieces, can_seek: bool) -> None:
    path = tmp_path / "file.pt"

    class OnlyWrites:
        def __init__(self, file) -> None:
            self.write, self.flush, self.tell = file.write, file.flush, file.tell

    with open(path, "wb") as file:
        write_torch_file(file if can_seek else OnlyWrites(file), CONTENT)
    assert zipfile.ZipFile(path).testzip() is None
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert differences(_plainly(CONTENT), loaded) == []
        assert all(t.data_ptr() % 64 == 0 for t in loaded.values() if isinstance(t, torch.Tensor) and mapped)


def test_what_torch_writes_is_read_piece_by_piece(tmp_path: Path, pieces) -> None:
    path = tmp_path / "file.pt"
    torch.save(CONTENT, path)
    read = read_structure(path)
    assert isinstance(read["float"], StoredTensor), "it stays in the file"
    loaded = {key: value.load() if isinstance(value, lazy.LazyTensor) else value for key, value in read.items()}
    loaded[3] = {"nested": read[3]["nested"].load()}
    assert differences(_plainly(CONTENT), loaded) == []
    read_twice = tmp_path / "again.pt"
    with open(read_twice, "wb") as file:
        write_torch_file(file, read)
    assert differences(_plainly(CONTENT), torch.load(read_twice, weights_only=True)) == []


def test_one_tensor_with_two_names_is_written_once(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    torch.save({"a": shared, "b": shared.view(10, 100).view(-1)}, tmp_path / "a.pt")
    with open(tmp_path / "b.pt", "wb") as file:
        write_torch_file(file, read_structure(tmp_path / "a.pt"))
    assert (tmp_path / "b.pt").stat().st_size < 6000
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(loaded["a"], shared) and torch.equal(loaded["b"], shared)


class Anything:
    """A class that no checkpoint should hold."""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), ["there is no checkpoint"]),
        (lambda path: (path.unlink(), path.mkdir()), ["is a folder"]),
        (lambda path: path.write_bytes(b""), ["(0 bytes)", "truncated"]),
        (lambda path: os.truncate(path, 5000), ["(5,000 bytes)", "truncated"]),
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), ["truncated or is no checkpoint"]),
        (lambda path: torch.save(Anything(), path), ["Anything", "not read"]),
        (lambda path: torch.save(os.system, path), ["system", "not read"]),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, damage, words) -> None:
    path = tmp_path / "file.pt"
    torch.save({"x": torch.zeros(4000)}, path)
    damage(path)
    with pytest.raises(UserError) as caught:
        read_structure(path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path, tensor = tmp_path / "file.pt", torch.randn(3, 1000)
    torch.save({"model": {"a": torch.zeros(10), "b": tensor}}, path)
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 5000] ^= 1
    path.write_bytes(data)
    ((record, start, stop),) = damaged_places(path)
    (name,) = [name for name, tensor in named_tensors(read_structure(path)) if start <= tensor.offset < stop]
    assert name == "model/b" and record.startswith("data/")


def test_lazy_tensors_compute_what_torch_does(tmp_path: Path, pieces) -> None:
    tensors = [torch.randn(6, 5, 3), torch.randn(4, 5, 3)]
    held = [HeldTensor(tensor) for tensor in tensors]
    assert torch.equal(rows_of(held[0], [1, 2, 5]).load(), tensors[0][[1, 2, 5]])
    mixed = joined_rows([(held[1], 3), (held[0], 0), (held[0], 1)])
    assert torch.equal(mixed.load(), torch.stack([tensors[1][3], tensors[0][0], tensors[0][1]]))
    for start, stop in itertools.combinations(range(0, 46, 7), 2):
        assert torch.equal(mixed.read(start, stop), mixed.load().flatten()[start:stop])
    assert torch.equal(torch.cat(list(mixed.pieces())), mixed.load().flatten())
    assert torch.equal(repeated(scaled(held[0], 3), 4).load(), (tensors[0] * 3).expand(4, 6, 5, 3))
    three = [HeldTensor(torch.full((9,), value, dtype=torch.float16)) for value in (40000.0, 44000.0, 60000.0)]
    assert mean(three).load().tolist() == [48000.0] * 9, "summed in more than float16 can hold"
    made = MadeTensor((2, 30), torch.float32, lambda: torch.arange(60))
    assert torch.equal(made.load(), torch.arange(60.0).view(2, 30))
    assert are_equal(held[0], HeldTensor(tensors[0].clone())) and not are_equal(held[0], held[1])
    assert not are_equal(held[0], HeldTensor(tensors[0] + torch.eye(3)[2] * 1e-6))


def test_a_file_that_changes_under_the_reader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_last.pt"
    torch.save({"x": torch.ones(100)}, path)
    tensor = read_structure(path)["x"]
    torch.save({"x": torch.zeros(100)}, tmp_path / "new.pt")
    os.replace(tmp_path / "new.pt", path)  # as a training run does
    with pytest.raises(UserError, match=r"checkpoint_last\.pt: it has changed"):
        tensor.load()
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        tensor.load()


def test_reading_beyond_the_end_is_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(UserError, match="changed"):
        StoredTensor(FileVersion.of(tmp_path / "file"), 5, torch.uint8, (10,)).load()


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
    assert attach(state, path) == index and INDEX_KEY not in state
    state["model"] = read_all(state["model"])
    moments = state["last_optimizer_state"]["state"]
    state["last_optimizer_state"]["state"] = {number: read_all(value) for number, value in moments.items()}
    assert differences(whole, state) == []


def test_rows_are_read_by_global_id_and_in_the_order_asked_for(saved) -> None:
    whole, path, index = saved
    reader = pickle.loads(pickle.dumps(PartReader(path, index)))  # as fairseq sends it to other ranks
    for name in (name for name in whole["model"] if ".experts." in name):
        assert torch.equal(reader.read(f"model/{name}", [2, 3, 0]), whole["model"][name][[2, 3, 0]])


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
        (lambda file: file.unlink(), ["experts 0 to 2", "is missing", "moves together with its experts/"]),
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
        ({"token": "00000000"}, ["is no part of", "of state 00000000"]),
        ({"expert_ids": [1, 2, 3]}, ["is no part of", "experts 1 to 3", "not 0 to 2"]),
        ({"expert_ids": []}, ["is no part of", "experts none"]),
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
        ({"format": 2}, ["format 2", "known is 1"]),
        ({"num_experts": 5}, ["lists experts [0, 1, 2, 3] where there are 5"]),
        ({"parts": None}, ["index of experts", "damaged"]),
        ({"surprise": 1}, ["index of experts", "damaged", "surprise"]),
    ],
)
def test_an_unusable_index_is_named(saved, change, words) -> None:
    _, path, index = saved
    with pytest.raises(UserError) as caught:
        ExpertIndex.from_plain({**index.to_plain(), **change}, path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)
    assert ExpertIndex.from_plain(index.to_plain(), path) == index


def test_a_part_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("smlp.checkpoint.parts.write_torch_file", full)
    with pytest.raises(UserError, match=r"experts_0-1\.pt: No space left"):
        write_part(tmp_path, "experts/experts_0-1.pt", "token", (0, 1), {"x": torch.ones(2)})
    assert list((tmp_path / "experts").iterdir()) == []
