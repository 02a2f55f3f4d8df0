"""``smlp data inspect``: its counts against a slow reference, and every kind of damage named with its file."""

import errno
import json
import os
import shutil
import struct

import numpy as np
import pytest
from test_data_binarize import binarize, documents, write_jsonl
from test_data_tokenizer import sentences

from data_prep.binarize.shards import write_tokens
from data_prep.inspecting import checks, token_file
from data_prep.inspecting.checks import Statistics
from data_prep.inspecting.token_file import TokenFile
from data_prep.tokenize.models import pieces_of, train_sentencepiece
from smlp import files
from smlp.cli.main import main
from smlp.text.binarized import read_fairseq_tokens

HEADER_BYTES = 26


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two shards of train, and valid, with their manifest."""
    folder = tmp_path_factory.mktemp("made")
    model = train_sentencepiece(sentences(200, 1), 60)
    (folder / "sentencepiece.model").write_bytes(model)
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces_of(model)))
    write_jsonl(folder / "sample" / "train" / "a.jsonl", documents(60, 1))
    write_jsonl(folder / "sample" / "valid" / "v.jsonl", [*documents(8, 2), "A zebra æ stands."])
    arguments = ["--in", folder / "sample", "--tokenizer", folder, "--shards", 2, "--out", folder / "bin"]
    assert binarize(*arguments) == 0
    return folder / "bin"


@pytest.fixture
def data(made, tmp_path):
    shutil.copytree(made, tmp_path / "bin")
    return tmp_path / "bin"


def inspect(*arguments):
    return main(["data", "inspect", *map(str, arguments)])


def slow_documents(prefix):
    """Tokens of each document, with the ends of its lines but without the empty line after it."""
    found, tokens = [], 0
    for length in [*read_fairseq_tokens(prefix).lengths.tolist(), 1]:
        if length > 1:
            tokens += length
        elif tokens:
            found.append(tokens)
            tokens = 0
    return found


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_counts_are_those_of_a_slow_reader(made, monkeypatch, block):
    monkeypatch.setattr(token_file, "BLOCK_LINES", block)
    monkeypatch.setattr(token_file, "BLOCK_TOKENS", 7 * block)
    stored, lengths = read_fairseq_tokens(made / "shard00" / "train"), slow_documents(made / "shard00" / "train")
    file = TokenFile.open(made / "shard00" / "train")
    assert list(file.problems(62, True)) == []
    found = Statistics.of(file, 62)
    assert (found.tokens, found.lines) == (len(stored.tokens), len(stored.lengths))
    assert (found.documents, found.shortest, found.longest) == (len(lengths), min(lengths), max(lengths))
    assert found.ends == np.count_nonzero(stored.lengths == 1)
    assert found.frequency_V.tolist() == np.bincount(stored.tokens, minlength=62).tolist()
    expected = np.bincount([length.bit_length() - 1 for length in lengths], minlength=checks.NUM_BINS)
    assert found.histogram.tolist() == expected.tolist()


@pytest.mark.parametrize("verify", [False, True])
def test_progress_comes_to_what_was_said_before(made, monkeypatch, verify):
    monkeypatch.setattr(token_file, "BLOCK_LINES", 3)
    monkeypatch.setattr(token_file, "BLOCK_TOKENS", 7)
    total, seen = checks.bytes_to_read(made, verify), []
    assert checks.inspect(made, verify, seen.append).problems == []
    assert len(seen) > 100 and 0.9 * total < sum(seen) < 1.1 * total


def test_progress_is_shown_unless_it_is_not_wanted(made, capsys):
    assert inspect(made) == 0
    assert "inspect: 100%" in capsys.readouterr().err
    assert inspect(made, "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_a_report_of_whole_data(made, tmp_path, capsys):
    report, picture = tmp_path / "report.json", tmp_path / "lengths.png"
    assert inspect(made, "--verify", "--json", report, "--plot", picture, "--samples", 4) == 0
    out = capsys.readouterr().out
    assert "3 files are whole" in out and "most frequent in train: '" in out
    said = json.loads(report.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG") and said["problems"] == []
    assert sorted(said["files"]) == ["shard00/train", "shard00/valid", "shard01/train"]
    both = [said["files"][f"shard0{shard}/train"] for shard in range(2)]
    for name in ("tokens", "lines", "ends", "documents"):
        assert said["splits"]["train"][name] == both[0][name] + both[1][name]
    assert said["splits"]["train"]["shortest"] == min(row["shortest"] for row in both)
    by_tokens = said["splits"]["train"]["documents_by_tokens"]
    assert said["splits"]["train"]["documents"] == sum(by_tokens.values()) == len(documents(60, 1))
    assert said["splits"]["valid"]["unknown"] >= 1 and said["splits"]["train"]["unknown"] == 0
    assert len(said["samples"]["train"]) == 4 and set(said["samples"]["train"]) <= set(documents(60, 1))
    assert inspect(made, "--json", report, "--samples", 10**9) == 0  # no more work than there are lines
    shown = json.loads(report.read_text())["samples"]["train"]
    assert 10 < len(shown) == len(set(shown)) and set(shown) <= set(documents(60, 1))
    assert said["top"]["train"][0]["count"] >= said["top"]["train"][1]["count"] > 0


def test_a_link_stays_one(made, tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.touch()
    link.symlink_to(target)  # as /dev/stdout is; a device would be replaced in the same way
    assert inspect(made, "--json", link) == 0
    assert link.is_symlink() and json.loads(target.read_text())["problems"] == []
    picture, link = tmp_path / "target.png", tmp_path / "link.png"
    link.symlink_to(picture)
    assert inspect(made, "--plot", link) == 0
    assert link.is_symlink() and picture.read_bytes().startswith(b"\x89PNG")


def write_at(path, position, content):
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def spoil_id(data):
    write_at(data / "shard01" / "train.bin", 10, struct.pack("<H", 5000))


def spoil_end(data):
    last = int(TokenFile.open(data / "shard01" / "train").lengths[0]) - 1
    write_at(data / "shard01" / "train.bin", 2 * last, struct.pack("<H", 7))


def spoil_document_end(data):
    """The last line gets the empty one after it: still whole lines, but no end."""
    index = data / "shard01" / "train.idx"
    lines = len(TokenFile.open(data / "shard01" / "train").lengths)
    content = bytearray(index.read_bytes())
    lengths = np.frombuffer(content[HEADER_BYTES : HEADER_BYTES + 4 * lines], "<i4").copy()
    pointers = np.frombuffer(content[HEADER_BYTES + 4 * lines :], "<i8")
    lengths[-2] += 1
    index.write_bytes(
        bytes(content[: HEADER_BYTES - 8])
        + struct.pack("<Q", lines - 1)
        + lengths[:-1].tobytes()
        + pointers[:-1].tobytes()
    )


def spoil_pointer(data):
    index = data / "shard00" / "valid.idx"
    write_at(index, index.stat().st_size - 8, struct.pack("<q", 3))


def cut_bin(data):
    path = data / "shard00" / "valid.bin"
    path.write_bytes(path.read_bytes()[:-6])


def cut_index(data):
    path = data / "shard00" / "valid.idx"
    path.write_bytes(path.read_bytes()[:-5])


def lose_bin(data):
    (data / "shard01" / "train.bin").unlink()


def lose_both(data):
    (data / "shard01" / "train.bin").unlink()
    (data / "shard01" / "train.idx").unlink()


def other_dictionary(data):
    path = data / "shard01" / "dict.txt"
    path.write_text(path.read_text() + "more 1\n")


def other_token(data):
    """An id that is in the dictionary: only the checksum shows it."""
    path = data / "shard00" / "train.bin"
    before = struct.unpack("<H", path.read_bytes()[:2])[0]
    write_at(path, 0, struct.pack("<H", before + 1 if before < 50 else before - 1))


def other_counts(data):
    said = json.loads((data / "manifest.json").read_text())
    next(row for row in said["outputs"] if row["name"] == "shard00/train.bin")["tokens"] += 1
    said["counts"]["kept"] += 1
    (data / "manifest.json").write_text(json.dumps(said))


def a_negative_id(data):
    """In a type that other tools may have written."""
    index, path = (data / "shard00" / f"valid.{kind}" for kind in ("idx", "bin"))
    content = bytearray(index.read_bytes())
    content[17] = 3  # int16
    index.write_bytes(bytes(content))
    write_at(path, 0, struct.pack("<h", -3))


def a_file_more(data):
    for kind in ("bin", "idx"):
        shutil.copy(data / "shard00" / f"valid.{kind}", data / "shard01" / f"more.{kind}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (spoil_id, "shard01/train.bin holds the id 5000, but the dictionary has 5"),
        (a_negative_id, "shard00/valid.bin holds the id -3, but the dictionary has 5"),
        (spoil_end, "shard01/train.bin: line 0 ends in the id 7, not in </s> (2)"),
        (spoil_document_end, "shard01/train.bin does not end with a document: its last line has"),
        (spoil_pointer, "begins at byte 3, but the lines before it end at"),
        (cut_bin, "bytes, but the lines of valid.idx need"),
        (cut_index, "sentences need"),
        (lose_bin, "shard01/train.bin is missing"),
        (lose_both, "shard01/train.idx is missing, but the manifest lists it"),
        (other_dictionary, "shard01/dict.txt ("),
        (other_token, "shard00/train.bin has the SHA-256"),
        (other_counts, "documents kept, but"),
        (other_counts, "tokens, the manifest says"),
        (a_file_more, "shard01/more.bin is not in the manifest"),
    ],
)
def test_every_damage_is_a_line_that_names_the_file(data, capsys, damage, words):
    damage(data)
    assert inspect(data, "--verify", "--samples", 0) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED: ")]
    assert sum(words in line for line in failed) == 1, failed


def test_data_of_fairseq_preprocess(tiny_data, capsys):
    assert inspect(tiny_data) == 0
    out = capsys.readouterr().out
    assert "3 files are whole" in out and "--- from test" in out and "no checksum" not in out
    assert inspect(tiny_data, "--verify") == 0
    assert f"no checksum was compared: {tiny_data} has no manifest.json" in capsys.readouterr().out


def test_data_that_are_not_finished(data, capsys):
    (data / "manifest.json").unlink()
    for folder in (data, data / "shard00"):
        assert inspect(folder, "--samples", 0) == 1
        assert f"FAILED: {data} is not finished: run 'smlp data binarize' again" in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_leaves_the_old_one(made, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "lengths.png"
    picture.write_bytes(b"\x89PNG of before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    assert inspect(made, "--plot", picture) == 1
    assert f"cannot write {picture}: No space left on device" in capsys.readouterr().err
    assert picture.read_bytes() == b"\x89PNG of before" and list(tmp_path.iterdir()) == [picture]


def test_data_of_pieces_without_their_tokenizer(made, tmp_path, capsys):
    for path in made.glob("**/*"):
        if path.name in ("dict.txt", "train.bin", "train.idx"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert inspect(tmp_path) == 0
    out = capsys.readouterr().out
    assert f"no samples: {tmp_path} has no tokenizer" in out and "1 files are whole" in out and "--- from" not in out
    (tmp_path / "sentencepiece.model").write_bytes(b"damaged")
    (tmp_path / "valid.idx").touch()
    assert inspect(tmp_path, "--json", tmp_path / "report.json") == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED: ")]
    assert len(failed) == 2 and "valid.bin is missing" in failed[0]
    assert "sentencepiece.model is not a SentencePiece model" in failed[1]
    assert len(json.loads((tmp_path / "report.json").read_text())["problems"]) == 2


def test_what_failed_is_said_though_there_is_nothing_to_draw(made, tmp_path, capsys):
    (tmp_path / "dict.txt").write_bytes((made / "shard00" / "dict.txt").read_bytes())
    (tmp_path / "train.idx").touch()
    assert inspect(tmp_path, "--plot", tmp_path / "lengths.png") == 1
    said = capsys.readouterr()
    assert f"FAILED: {tmp_path / 'train.bin'} is missing" in said.out
    assert "--plot: there is no document whose length could be drawn" in said.err


def test_shards_without_data_are_named(data, capsys):
    for path in data.glob("shard*/*.???"):
        if path.suffix in (".idx", ".bin"):
            path.unlink()
    (data / "manifest.json").unlink()
    shutil.rmtree(data / ".state")
    assert inspect(data) == 1
    assert f"FAILED: {data} holds no binary data: no .idx files" in capsys.readouterr().out


def test_names_and_text_write_no_lines_and_mathematics(tmp_path, capsys):
    """Names of splits hold an escape sequence, a line end and dollar signs, and a text an escape sequence."""
    (tmp_path / "dict.txt").write_text("\x1b[31mred 1\n")
    for name in ("_\x1b[31m\nFAILED", "tr$_$"):
        write_tokens(tmp_path, name, np.array([4, 2, 2]), np.array([2, 1]), np.dtype("<u2"))
    assert inspect(tmp_path, "--plot", tmp_path / "lengths.png") == 0
    out = capsys.readouterr().out
    assert out.startswith(r"_\x1b[31m\nFAILED  ") and "\x1b" not in out
    assert "--- from tr$_$\n" + r"\x1b[31mred" in out


def test_places_that_cannot_be_written_are_found_before_the_work(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "inspect", lambda *_: pytest.fail("the work has begun"))
    other = tmp_path / "text.txt"
    other.write_text("no picture and no JSON")
    both, corpus, manifest = tmp_path / "both", tmp_path / "corpus.jsonl", tmp_path / "manifest.json"
    corpus.write_text('{"text": "a"}\n{"text": "b"}\n')
    manifest.write_text('{"step": "binarize", "smlp": "0.1.0"}')
    for arguments, words in [
        (["--json", corpus], f"--json {corpus}: a file of another kind exists"),
        (["--json", manifest], f"--json {manifest}: a file of another kind exists"),
        (["--json", tmp_path], f"--json {tmp_path} is a folder: name a file"),
        (["--json", tmp_path / "no" / "a.json"], f"there is no folder {tmp_path / 'no'}"),
        (["--json", other], f"--json {other}: a file of another kind exists"),
        (["--plot", tmp_path], f"--plot {tmp_path} is a folder: name a file"),
        (["--plot", tmp_path / "no" / "a.png"], f"there is no folder {tmp_path / 'no'}"),
        (["--plot", other], f"--plot {other}: a file of another kind exists"),
        (["--plot", both, "--json", both], f"--json and --plot both name {both}"),
    ]:
        assert inspect(made, *arguments) == 1
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert other.read_text() == "no picture and no JSON"


def test_mistakes(made, tmp_path, capsys):
    for arguments, words in [
        ([tmp_path / "nowhere"], "there is no folder"),
        ([tmp_path], "holds no binary data"),
        ([made, "--samples", -1], "--samples must be at least 0, got -1"),
    ]:
        assert inspect(*arguments) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("outputs", None), ("outputs", [1]), ("splits", []), ("splits", {"train": 3}), ("counts", {})]
)
def test_a_damaged_manifest_is_named(data, capsys, name, value):
    cut_bin(data)
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "manifest.json").write_text(json.dumps({**manifest, name: value}))
    assert inspect(data, "--verify") == 1
    said = capsys.readouterr()  # what is found only after everything was read hides no other line
    assert "manifest.json is damaged" in said.out + said.err
    assert "smlp: error: " in said.err or "bytes, but the lines of valid.idx need" in said.out


def test_a_manifest_names_no_file_elsewhere(data, capsys):
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["outputs"][0]["name"] = "../secret"
    (data / "manifest.json").write_text(json.dumps(manifest))
    assert inspect(data, "--verify") == 1
    assert "FAILED: " in (out := capsys.readouterr().out) and "'../secret'" in out


@pytest.mark.parametrize("content", ["[" * 100_000, "[]"])
def test_a_manifest_that_is_none(data, capsys, content):
    (data / "manifest.json").write_text(content)
    assert inspect(data, "--verify") == 1
    assert "manifest.json is not a manifest of smlp data" in capsys.readouterr().err
