"""The reader of fairseq's token files against fairseq's own writer."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from smlp.errors import UserError
from smlp.evaluation.binarized import read_fairseq_tokens

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


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_missing_and_empty_files_are_named(tmp_path, suffix):
    prefix = write(tmp_path / "train")
    path = Path(f"{prefix}.{suffix}")
    path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"train.{suffix} is empty \(0 bytes\)"):
        read_fairseq_tokens(prefix)
    path.unlink()
    with pytest.raises(UserError, match=rf"train.{suffix} cannot be read: No such file"):
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
    fails("no fairseq index of the mmap kind: it starts with b'garbagega'")
    index.write_bytes(good_index[:12])
    fails("no fairseq index of the mmap kind")
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
