"""Tensors in files and elsewhere, read, computed and written piece by piece."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import os
import pickle
import struct
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import differences

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
from smlp.checkpoint.torch_file import (
    OtherClassError,
    damaged_places,
    is_archive,
    named_tensors,
    read_structure,
    write_torch_file,
)
from smlp.errors import UserError


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


def test_no_date_is_written(tmp_path: Path, monkeypatch) -> None:
    """A clock that was never set is at 1970, where files of this format cannot be from."""
    monkeypatch.setattr(zipfile.time, "time", lambda: 0.0)
    with open(tmp_path / "file.pt", "wb") as file:
        write_torch_file(file, CONTENT)
    assert {record.date_time for record in zipfile.ZipFile(tmp_path / "file.pt").infolist()} == {(1980, 1, 1, 0, 0, 0)}


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
    turned = torch.randn(30, 40)
    torch.save([turned.t(), turned.t(), turned[:, :7]], tmp_path / "c.pt")
    first, again, other = read_structure(tmp_path / "c.pt")
    assert first is again, "what is not contiguous is in memory, but once"
    assert torch.equal(first.load(), turned.t()) and torch.equal(other.load(), turned[:, :7])


class Anything:
    """A class that no checkpoint should hold."""


class Bomb:
    """Half a gigabyte, in a file of one kilobyte that torch reads, also with ``weights_only``."""

    def __reduce__(self) -> tuple:
        return bytearray, (500_000_000,)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), ["there is no checkpoint"]),
        (lambda path: (path.unlink(), path.mkdir()), ["is a folder"]),
        (lambda path: path.write_bytes(b""), ["(0 bytes)", "truncated"]),
        (lambda path: os.truncate(path, 5000), ["(5,000 bytes)", "truncated"]),
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), ["truncated or not a checkpoint"]),
        (
            lambda path: torch.save({"x": torch.ones(3)}, path, _use_new_zipfile_serialization=False),
            ["format from before 1.6", "weights_only=False"],
        ),
        (lambda path: torch.save(Anything(), path), ["Anything", "not read"]),
        (lambda path: torch.save(os.system, path), ["system", "not read"]),
        (lambda path: torch.save(Bomb(), path), ["bytearray", "not read"]),
        (lambda path: torch.save(torch._neg_view(torch.ones(2)), path), ["the negative or conjugate of its values"]),
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


NAMESPACE = b"cargparse\nNamespace\n"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\n%sStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<i", len(value)) + value.encode()


def _write_pickle(path: Path, instructions: bytes, again: bool = False) -> None:
    """Write a file of torch.save with a crafted data.pkl."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")  # of two records of one name
        archive.writestr("archive/data.pkl", b"\x80\2" + instructions + b".")
        for _ in range(1 + again):
            archive.writestr("archive/data/0", bytes(16))


@pytest.mark.parametrize(
    ("instructions", "words"),
    [
        # attributes of a class, which is the whole process's
        (NAMESPACE + b"N}" + _text("__init__") + b"Ns\x86b", "an object with attributes"),
        # another shape, or file, for a tensor that has been checked
        (TENSOR % b"Float" + b"K\0K\4\x85K\1\x85\x89NtR}" + _text("shape") + b"M\0\1\x85sb", "with attributes"),
        (b"ccollections\nOrderedDict\n)R}" + _text("items") + b"Nsb", "an object with attributes"),
        # keys of equal hash: n of them take n * n steps
        (b"}(" + b"".join(pickle.dumps(n * sys.hash_info.modulus)[2:-1] + b"N" for n in range(1, 5002)) + b"u", "keys"),
        (b"}K\1\x85\x85Ns", "a tuple as a key"),  # whose hash takes a frame of C for each level
        (b"\x8f(K\1\x85\x85\x90", "a tuple as a key"),
        # a dictionary that is read again and again
        (b"}(" + b"".join(_text(str(n)) + b"N" for n in range(2000)) + b"uq\0" + NAMESPACE + b")\x81" + b"h\0b" * 2000,
         "referred to too often"),
        (b"}\x8b" + struct.pack("<i", 200) + b"\x7f" * 200 + b"q\0h\0\x86Ns", "a number of more than 1,024 bits"),
        # behind an object of another class, which torch may know
        (b"cxyz\nAny\n)R0c__builtin__\nbytearray\nJ" + struct.pack("<i", 2_000_000_000) + b"\x85R", "bytearray"),
        (b"(c__builtin__\ncomplex\n(K\1K\2tRc__builtin__\nbytearray\nK\1\x85Rl", "bytearray"),
        (b"ctorch\nFloatTensor\nJ" + struct.pack("<i", 2_000_000_000) + b"\x85R", "torch.FloatTensor"),
        # a list that is written once and copied many times
        (b"(" + b"K\1" * 1000 + b"tq\0" + b"ctorch\nSize\nh\0\x85R0" * 1000 + b"N", "referred to too often"),
        (b"c_codecs\nencode\n(" + _text("x" * 9999) + b"q\0" + _text("latin1") + b"q\1tR"
         + b"0c_codecs\nencode\n(h\0h\1tR" * 99, "referred to too often"),
        # memory that no byte of the file stands for
        (b"\x96" + struct.pack("<Q", 2 << 30), "an instruction that torch.save does not write"),
        (b"c__builtin__\nbytearray\nJ" + struct.pack("<i", 2_000_000_000) + b"\x85R", "bytearray"),
        (b"ccollections\ndefaultdict\n(N]tR", "a defaultdict of something"),
        (b"ccollections\nCounter\n(lK\1a\x85R", "a Counter of something"),
        (b"(" + b"".join(TENSOR % b"Float" + b"K\0(J" + struct.pack("<i", 250_000 + n) + b"K\1t(K\0K\1t\x89NtR"
                        for n in range(60)) + b"l", "too many tensors"),
        (b"(" + TENSOR % b"Float" + b"K\0(" + b"K\1" * 65 + b"t(" + b"K\1" * 65 + b"t\x89NtR", "without a shape"),
        (NAMESPACE + b")\x81]K\1a" + b"a", "something else than a list"),
        (NAMESPACE + b")\x81K\1K\2s", "something else than a dictionary"),
    ],
)  # fmt: skip
def test_instructions_that_do_more_than_make_values_are_refused(tmp_path: Path, instructions, words) -> None:
    path = tmp_path / "file.pt"
    _write_pickle(path, instructions)
    with pytest.raises(UserError, match=rf"file\.pt holds .*{words}.*, which is not read"):
        read_structure(path)
    assert "__init__" in vars(argparse.Namespace) and argparse.Namespace.__init__ is not None


def test_tensors_that_overlap_are_bounded(tmp_path: Path) -> None:
    """Each would be written in full."""
    numbers = torch.zeros(1 << 20)
    torch.save([numbers[k:] for k in range(8)], tmp_path / "some.pt")
    assert len(read_structure(tmp_path / "some.pt")) == 8
    torch.save([numbers[k:] for k in range(20)], tmp_path / "many.pt")
    with pytest.raises(UserError, match="too many tensors in the same records"):
        read_structure(tmp_path / "many.pt")
    torch.save([numbers] * 100, tmp_path / "same.pt")
    assert len(read_structure(tmp_path / "same.pt")) == 100


def test_tensors_of_kinds_that_are_left_to_torch_are_bounded(tmp_path: Path) -> None:
    for tensor in (torch.ones(6, dtype=torch.uint16), torch.ones(6, dtype=torch.complex64), torch.eye(3).to_sparse()):
        torch.save([tensor, {"a": 1}], tmp_path / "some.pt")
        with pytest.raises(OtherClassError):
            read_structure(tmp_path / "some.pt")
    for dtype in (torch.uint16, torch.complex64):
        torch.save(torch.ones(1, dtype=dtype).expand(10**5, 10**5), tmp_path / "large.pt")
        with pytest.raises(UserError, match=r"holds a tensor of shape \(100000, 100000\) in a file of") as caught:
            read_structure(tmp_path / "large.pt")
        assert not isinstance(caught.value, OtherClassError)


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    _write_pickle(path, b"N")
    assert read_structure(path) is None
    _write_pickle(path, b"N", again=True)  # torch reads the first, Python the last
    with pytest.raises(UserError, match="two records of one name"):
        read_structure(path)


def test_a_record_has_one_type(tmp_path: Path) -> None:
    """Torch would read the second tensor as the first one's type, too."""
    tensor = b"K\0K\2\x85K\1\x85\x89NtR"
    _write_pickle(tmp_path / "file.pt", b"](" + TENSOR % b"Half" + tensor + TENSOR % b"BFloat16" + tensor + b"e")
    with pytest.raises(UserError, match="a record of two types or sizes"):
        read_structure(tmp_path / "file.pt")
    same = TENSOR % b"Half" + tensor
    _write_pickle(tmp_path / "file.pt", b"](" + same + same + b"e")
    assert len(read_structure(tmp_path / "file.pt")) == 2


def _archives(directory: Path) -> tuple[bytes, bytes]:
    """Return files of a tensor of zeros and of one of ones, which are laid out alike."""
    for value in (0, 1):
        with open(directory / f"{value}.pt", "wb") as file:
            write_torch_file(file, {"weight": torch.full((300,), float(value))})
    return (directory / "0.pt").read_bytes(), (directory / "1.pt").read_bytes()


def _moved(directory: bytes, by: int) -> bytes:
    """Return a list of records whose offsets are ``by`` larger."""
    moved, place = bytearray(directory), 0
    while place < len(moved):
        (offset,) = struct.unpack_from("<I", moved, place + 42)
        struct.pack_into("<I", moved, place + 42, offset + by)
        place += 46 + sum(struct.unpack_from("<HHH", moved, place + 28))
    return bytes(moved)


def _with_two_lists(zeros: bytes, ones: bytes) -> bytes:
    (length, begin) = struct.unpack_from("<II", zeros, len(zeros) - 10)
    records = zeros[:begin] + ones[:begin]  # the second at offset begin
    lists = zeros[begin : begin + length] + _moved(ones[begin : begin + length], begin - length)
    end = bytearray(zeros[-22:])
    struct.pack_into("<I", end, 16, len(records))
    return records + lists + end


def _with_large_list(zeros: bytes, ones: bytes) -> bytes:
    """Return an archive that has two ends of the kind for large ones; torch follows the offset of the first."""
    (length, begin) = struct.unpack_from("<II", zeros, len(zeros) - 10)
    records = zeros[:begin] + ones[:begin]
    (count,) = struct.unpack_from("<H", zeros, len(zeros) - 12)

    def end(offset: int) -> bytes:
        return struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, offset)

    first = zeros[begin : begin + length] + end(len(records))
    second = _moved(ones[begin : begin + length], begin) + end(len(records) + len(first))
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(records) + length, 1)
    return records + first + second + locator + zeros[-22:]


def _after_something(zeros: bytes, ones: bytes) -> bytes:
    """Return an archive that is whole, but that torch does not take for one, as it begins with something else."""
    (length, begin) = struct.unpack_from("<II", zeros, len(zeros) - 10)
    end = bytearray(zeros[-22:])
    struct.pack_into("<I", end, 16, begin + 64)
    return bytes(64) + zeros[:begin] + _moved(zeros[begin : begin + length], 64) + end


def _with_capitals(zeros: bytes, ones: bytes) -> bytes:
    return _packed({name.replace("data/", "DATA/"): data for name, data in _unpacked(ones).items()} | _unpacked(zeros))


def _with_other_byte_order(zeros: bytes, ones: bytes) -> bytes:
    files = _unpacked(zeros)
    files["archive/BYTEORDER"] = b"big" if files.pop("archive/byteorder") == b"little" else b"little"
    return _packed(files)


def _unpacked(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_with_two_lists, "a list of records at another place"),
        (_with_large_list, "a list of records at another place"),
        (_with_capitals, "two records of one name"),
        (lambda zeros, ones: b"before" + zeros, "a list of records at another place"),
        (lambda zeros, ones: zeros[:-2] + b"\4\0PK\5\6", "truncated or not a checkpoint"),
        (lambda zeros, ones: zeros + b"after", "a list of records at another place"),
        (_after_something, "a list of other records"),
        (lambda zeros, ones: zeros[:-14] + b"\1\0\1\0" + zeros[-10:], "a list of other records"),
        (_with_other_byte_order, "numbers in the byte order of another kind of machine"),
    ],
    ids=[
        "two lists",
        "a list for large archives",
        "capitals",
        "before",
        "two ends",
        "after",
        "moved",
        "fewer",
        "byte order",
    ],
)
def test_archives_that_torch_may_read_otherwise_are_refused(tmp_path: Path, write: Any, words: str) -> None:
    zeros, ones = _archives(tmp_path)
    path = tmp_path / "file.pt"
    path.write_bytes(write(zeros, ones))
    assert is_archive(path)
    with pytest.raises(UserError, match=words):
        read_structure(path)
    path.write_bytes(zeros[:-2] + b"\7\0comment")
    assert list(read_structure(path)) == ["weight"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_of_all_kinds_are_read(tmp_path: Path, protocol: int) -> None:
    states = torch.nn.BatchNorm1d(3).state_dict()
    plain = {"bytes": b"\0\xff", "set": {1, "a"}, "counts": collections.Counter(a=2), None: [], True: (), -1: 2**60}
    plain |= {0.5: 1, ("a", 2): 3, 2**40: None}
    if protocol > 3:
        plain["frozen"] = [1, frozenset({2, (3, 4)}), 5]
    plain["many"] = dict.fromkeys(range(2**40, 2**40 + 1001))
    plain["of sets"] = collections.defaultdict(set, a={1})
    plain["default"] = collections.defaultdict(None, a=[1])
    torch.save({"plain": plain, "states": states}, tmp_path / "file.pt", pickle_protocol=protocol)
    read = read_structure(tmp_path / "file.pt")
    assert read["plain"] == plain and read["plain"]["of sets"].default_factory is set
    assert read["states"]._metadata == states._metadata and list(read["states"]) == list(states)


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
    assert rows_of(HeldTensor(torch.empty(4, 0)), [1, 2]).load().shape == (2, 0)
    mixed = joined_rows([(held[1], 3), (held[0], 0), (held[0], 1)])
    assert torch.equal(mixed.load(), torch.stack([tensors[1][3], tensors[0][0], tensors[0][1]]))
    for start, stop in itertools.combinations(range(0, 46, 7), 2):
        assert torch.equal(mixed.read(start, stop), mixed.load().flatten()[start:stop])
    assert torch.equal(torch.cat(list(mixed.pieces())), mixed.load().flatten())
    assert torch.equal(repeated(scaled(held[0], 3), 4).load(), (tensors[0] * 3).expand(4, 6, 5, 3))
    three = [HeldTensor(torch.full((9,), value, dtype=torch.float16)) for value in (40000.0, 44000.0, 60000.0)]
    assert mean(three).load().tolist() == [48000.0] * 9, "summed in more than float16 can hold"
    doubles = [HeldTensor(torch.full((4,), value, dtype=torch.float64)) for value in (1.0, 3.0)]
    average = mean(doubles)
    assert average.load().tolist() == average.load().tolist() == [2.0] * 4 and doubles[0].load().tolist() == [1.0] * 4
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
