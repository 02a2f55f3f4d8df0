"""The reader of fairseq's token files against fairseq's own writer."""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import IndexedDatasetBuilder, MMapIndexedDataset, MMapIndexedDatasetBuilder
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.language_modeling import LanguageModelingTask

from smlp import fairseq_compat
from smlp.errors import UserError
from smlp.fairseq_compat import data
from smlp.fairseq_compat.data import check_ids, check_split
from smlp.fairseq_compat.trainer import SparseTrainer
from smlp.text.binarized import TOKEN_TYPES, BinarizedTokens, check_older, open_tokens, read_fairseq_tokens

SENTENCES = [[5, 6, 2], [2], [7, 8, 9, 10, 2]]


def write(prefix: Path, dtype: type = np.int32) -> Path:
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sentence in SENTENCES:
        builder.add_item(torch.tensor(sentence))
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_reads_what_fairseq_writes(tmp_path, dtype):
    read = read_fairseq_tokens(write(tmp_path / "train", dtype))
    assert read.tokens.dtype == np.int64
    assert read.tokens.tolist() == [token for sentence in SENTENCES for token in sentence]
    assert read.lengths.tolist() == [3, 1, 5]


def test_an_id_of_more_than_63_bits_is_named(tmp_path):
    prefix = write(tmp_path / "train", np.int64)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    code = next(code for code, kind in TOKEN_TYPES.items() if np.dtype(kind) == np.uint64)
    index.write_bytes(index.read_bytes().replace(bytes([5]), bytes([code]), 1))
    data.write_bytes(np.array([2**63 + 5, *range(8)], np.uint64).tobytes())
    with pytest.raises(UserError, match=r"train\.bin is damaged: it holds the id 9223372036854775813"):
        read_fairseq_tokens(prefix)


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_missing_and_empty_files_are_named(tmp_path, suffix):
    prefix = write(tmp_path / "train")
    path = Path(f"{prefix}.{suffix}")
    path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"train.{suffix} is empty \(0 bytes\)"):
        read_fairseq_tokens(prefix)
    path.unlink()
    with pytest.raises(UserError, match=rf"there is no data file .*train.{suffix}"):
        read_fairseq_tokens(str(prefix))


def test_garbage_and_damage_are_named(tmp_path):
    prefix = write(tmp_path / "train")
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    good_index, good_data = index.read_bytes(), data.read_bytes()

    def fails(message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_fairseq_tokens(prefix)
        index.write_bytes(good_index)
        data.write_bytes(good_data)

    index.write_bytes(b"garbage" * 10)
    fails("not a fairseq index of the mmap kind: it starts with b'garbagega'")
    index.write_bytes(good_index[:12])
    fails("not a fairseq index of the mmap kind")
    index.write_bytes(good_index[:-4])
    fails("train.idx holds 58 bytes, but 3 sentences need 62")
    index.write_bytes(good_index[:9] + struct.pack("<Q", 2) + good_index[17:])
    fails("version 2 and token type 4")
    index.write_bytes(good_index[:17] + bytes([6]) + good_index[18:])
    fails("version 1 and token type 6")
    index.write_bytes(good_index[:18] + struct.pack("<Q", 0))
    fails("lists no sentence")
    index.write_bytes(good_index[:-8] + struct.pack("<q", 0))
    fails("its sentences do not follow each other")
    index.write_bytes(good_index[:26] + struct.pack("<i", -3) + good_index[30:])
    fails("a sentence of -3 tokens")
    data.write_bytes(good_data[:-2])
    fails("train.bin holds 34 bytes, but train.idx lists 9 tokens of 4 bytes")
    assert len(read_fairseq_tokens(prefix).tokens) == 9


def test_data_to_be_masked_hold_no_mask(tmp_path):
    prefix = write(tmp_path / "train")
    largest = max(token for sentence in SENTENCES for token in sentence)
    check_split(prefix.parent, prefix.name, largest + 2, mask=largest + 1)
    with pytest.raises(UserError, match=f"holds the id {largest}, which is <mask> in this dictionary"):
        check_split(prefix.parent, prefix.name, largest + 1, mask=largest)


def in_training(prefix: Path, vocab_size: int) -> BinarizedTokens:
    """What fairseq reads in training, after our checks."""
    check_split(prefix.parent, prefix.name, vocab_size)
    read = MMapIndexedDataset(str(prefix))
    return BinarizedTokens(torch.cat([read[i] for i in range(len(read))]).numpy(), np.array(read.sizes))


def flipped(path: Path) -> Iterator[int]:
    """Flips each bit of a file in turn."""
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        yield bit
    path.write_bytes(good)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_flipped_bit_of_an_index_is_found_in_training_too(tmp_path, dtype):
    """But for one that makes the numbers signed, which changes none."""
    prefix, unsigned = write(tmp_path / "train", dtype), 17
    for bit in flipped(tmp_path / "train.idx"):
        try:
            read = in_training(prefix, 11)
        except UserError:
            continue
        assert bit // 8 == unsigned and read.tokens.tolist() == [token for sentence in SENTENCES for token in sentence]


def test_a_flipped_bit_of_the_data_is_found_if_it_makes_no_symbol(tmp_path):
    prefix, found = write(tmp_path / "train", np.uint16), 0
    for bit in flipped(tmp_path / "train.bin"):
        try:
            in_training(prefix, 11)
        except UserError as error:
            found += 1
            assert "train.bin holds the id" in str(error) and "the dictionary has 11 symbols" in str(error)
        else:
            assert bit % 16 < 4  # another id below 11
    assert found > 9 * 12


@pytest.mark.parametrize("folder", ["", "shard01"])
def test_a_flipped_bit_is_found_by_the_sum_in_a_manifest(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    prefix, rows = write(tmp_path / folder / "train", np.uint16), []
    for kind in ("idx", "bin"):
        content = Path(f"{prefix}.{kind}").read_bytes()
        name = f"{folder}/train.{kind}".strip("/")
        rows.append({"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    (tmp_path / "manifest.json").write_text(json.dumps({"step": "binarize", "outputs": rows}))
    in_training(prefix, 11)
    for _ in flipped(Path(f"{prefix}.bin")):
        for read in (lambda: in_training(prefix, 11), lambda: read_fairseq_tokens(prefix)):
            with pytest.raises(UserError, match=r"train.bin has changed: its SHA-256 is .*manifest.json says"):
                read()


@pytest.mark.parametrize("content", ["[]", "{}", '{"step": "binarize"}', '{"outputs": 3}', '{"step": "clean"}'])
def test_another_manifest_is_left_alone(tmp_path, content):
    prefix = write(tmp_path / "train")
    (tmp_path / "manifest.json").write_text(content)
    in_training(prefix, 11)


@pytest.mark.parametrize("content", [b"", b"not JSON", b'{"step": "bina', b"\xff", b"[" * 10**5])
def test_a_damaged_manifest_is_named(tmp_path, content):
    prefix = write(tmp_path / "train")
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be compared with .*manifest.json: it is no JSON; make .* and \.state"):
        in_training(prefix, 11)


def test_a_large_file_is_not_read_at_the_start_but_its_batches_are_checked(tmp_path, monkeypatch):
    prefix = write(tmp_path / "train")
    with pytest.raises(UserError, match=r"train.bin holds the id 10, but the dictionary has 10 symbols"):
        in_training(prefix, 10)
    monkeypatch.setattr(data, "READ_AT_START", 35)
    assert in_training(prefix, 10).tokens.max() == 10
    vocabulary = Dictionary()  # of 4 special symbols
    trainer = SimpleNamespace(task=LanguageModelingTask(SimpleNamespace(), vocabulary))
    for tokens, wrong in ([[3, 4]], 4), ([[-3, 3]], -3):
        with pytest.raises(UserError, match=rf"a batch of the data holds the id {wrong}, but the dictionary has 4 "):
            SparseTrainer._prepare_sample(trainer, {"net_input": {"src_tokens": torch.tensor(tokens)}})
    for sample in (None, {}, {"net_input": {"src_tokens": torch.tensor([[0, 9]])}}):
        check_ids(sample, 10)
    last = {"net_input": {"src_tokens": torch.tensor([[0, 9]])}, "target": torch.tensor([[9, 10]])}
    with pytest.raises(UserError, match="holds the id 10, but the dictionary has 10 symbols"):
        check_ids(last, 10)


def test_the_ids_of_what_is_scored_are_checked():
    """``fairseq-eval-lm`` of a .bin file that is too large to be read whole at the start."""
    fairseq_compat.apply()
    model = SimpleNamespace(decoder=SimpleNamespace(dictionary=range(4)))
    scorer = SequenceScorer(SimpleNamespace(pad=lambda: 1, eos=lambda: 2))
    with pytest.raises(UserError, match="holds the id 9, but the dictionary has 4 symbols"):
        scorer.generate([model], {"net_input": {"src_tokens": torch.tensor([[0, 9]])}})


def test_an_older_index_is_checked_bit_by_bit(tmp_path):
    prefix = tmp_path / "train"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for sentence in SENTENCES:
        builder.add_item(torch.tensor(sentence) - 1)  # which it adds again
    builder.finalize(f"{prefix}.idx")
    check_older(prefix)
    for _ in flipped(tmp_path / "train.idx"):
        with pytest.raises(UserError, match=r"train\.(idx|bin) "):
            check_older(prefix)
    index = (tmp_path / "train.idx").read_bytes()
    for size in (1, 8, 40, len(index) - 8):
        (tmp_path / "train.idx").write_bytes(index[:size])
        with pytest.raises(UserError, match=r"train\.idx (is not a fairseq index|holds \d+ bytes)"):
            check_older(prefix)


def test_an_index_is_checked_across_pieces(tmp_path, monkeypatch):
    prefix = write(tmp_path / "train")
    monkeypatch.setattr("smlp.text.binarized._PIECE", 2)
    assert open_tokens(prefix).lengths.tolist() == [3, 1, 5]
    for bit in flipped(tmp_path / "train.idx"):
        if bit // 8 >= 26:  # lengths and offsets
            with pytest.raises(UserError):
                open_tokens(prefix)


def test_pieces_are_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("smlp.text.binarized._PIECE", 4)
    pieces = list(open_tokens(write(tmp_path / "train")).pieces(11))
    assert [len(piece) for piece in pieces] == [4, 4, 1]
    assert np.concatenate(pieces).tolist() == [token for sentence in SENTENCES for token in sentence]
