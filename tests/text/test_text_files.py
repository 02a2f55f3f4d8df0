"""The corpus from a user's own files."""

import codecs
import hashlib
import os
from pathlib import Path

import pytest

from data_prep import corpus, text_files
from data_prep.text_files import build, documents_of, read_text
from smlp.cli.main import guarded
from smlp.errors import UserError


def lines(path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def test_every_twentieth_line_is_held_out_alternately(tmp_path):
    source = tmp_path / "book.txt"
    source.write_text("\n".join(f"line {number}" for number in range(1, 101)))
    manifest = build(tmp_path / "out", [source])
    assert lines(tmp_path / "out" / "valid.txt") == ["line 20", "line 60", "line 100"]
    assert lines(tmp_path / "out" / "test.txt") == ["line 40", "line 80"]
    train = lines(tmp_path / "out" / "train.txt")
    assert len(train) == 95 and train[:2] == ["line 1", "line 2"] and train[-1] == "line 99"
    assert manifest["splits"]["train"] == {
        "documents": 1,
        "paragraphs": 95,
        "words": 190,
        "chars": sum(map(len, train)),
    }


def test_held_out_text_stands_in_no_other_split(tmp_path):
    rows = [f"line {number}" for number in range(1, 101)]
    rows[4] = rows[59]  # a train line that is held out for valid too
    rows[6] = rows[39]  # a train line that is held out for test too
    rows[19] = rows[79]  # a valid line that is held out for test too
    source = tmp_path / "book.txt"
    source.write_text("\n".join(rows))
    manifest = build(tmp_path / "out", [source])
    splits = {name: lines(tmp_path / "out" / f"{name}.txt") for name in ("train", "valid", "test")}
    assert splits["valid"] == ["line 60", "line 100"] and splits["test"] == ["line 40", "line 80"]
    assert len(splits["train"]) == 93 and not {"line 60", "line 40"} & set(splits["train"])
    assert manifest["removed"] == {
        "paragraphs: in train and in another split": 2,
        "paragraphs: in valid and in another split": 1,
    }


def test_documents_stay_apart_and_spaces_are_folded(tmp_path):
    documents = documents_of("one\r\n two \t three\x0bfour\n\n\n\nfive\x00six\n", "g")
    assert [document.paragraphs for document in documents] == [("one", "two three four"), ("five six",)]
    (document,) = documents_of("co\u00adoperate می\u200cخواهم 👩\u200d👩 a\ue000b", "g")
    assert document.paragraphs == ("cooperate می\u200cخواهم 👩\u200d👩 a b",)
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("\n".join(f"a {number}" for number in range(30)))
    second.write_text("b 0\n\n" + "\n".join(f"b {number}" for number in range(1, 30)))
    build(tmp_path / "out", [first, second])
    train = lines(tmp_path / "out" / "train.txt")
    assert [index for index, line in enumerate(train) if not line] == [29, 31]


def test_byte_order_mark_is_no_text(tmp_path):
    source = tmp_path / "bom.txt"
    source.write_bytes(codecs.BOM_UTF8 + "grün".encode())
    assert read_text(source) == "grün"


@pytest.mark.parametrize("prefix", [b"", codecs.BOM_UTF8])
def test_wrong_encoding_names_file_line_and_byte(tmp_path, prefix):
    source = tmp_path / "latin.txt"
    source.write_bytes(prefix + b"one\ntwo\ngr\xfcn\n")
    with pytest.raises(UserError) as caught:
        read_text(source)
    assert str(caught.value) == f"text file {source} is not UTF-8: byte 0xfc at byte offset {len(prefix) + 10}, line 3"


@pytest.mark.parametrize("content", [b"", b" \n\n\t\n"])
def test_empty_file_is_named(tmp_path, content):
    source = tmp_path / "nothing.txt"
    source.write_bytes(content)
    with pytest.raises(UserError, match=rf"nothing.txt is empty: {len(content)} bytes"):
        read_text(source)


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone.txt cannot be read: No such file"):
        read_text(tmp_path / "gone.txt")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_too_few_lines_and_repeated_lines(tmp_path):
    source = tmp_path / "short.txt"
    source.write_text("\n".join(f"line {number}" for number in range(39)))
    with pytest.raises(UserError, match="39 lines of text are too few, at least 40"):
        build(tmp_path / "out", [source])
    source.write_text("the same\n" * 100)
    with pytest.raises(UserError, match="nothing is left for train"):
        build(tmp_path / "out", [source])
    assert not (tmp_path / "out").exists()


def test_files_of_something_else_are_not_overwritten(tmp_path):
    """A corpus of an earlier call is."""
    out, source = tmp_path / "out", tmp_path / "book.txt"
    source.write_text("\n".join(f"line {number}" for number in range(60)))
    out.mkdir()
    for name in ("valid.txt", "manifest.json"):
        (out / name).write_text('{"splits": {}, "step": "sample"}')
        with pytest.raises(UserError, match=f"--out {out} has a {name} of something else: name another folder"):
            build(out, [source])
        with pytest.raises(UserError, match=f"has a {name} of something else"):  # before anything is read
            text_files.main(["--text", str(tmp_path / "gone.txt"), "--out", str(out)])
        assert [path.name for path in out.iterdir()] == [name]
        (out / name).unlink()
    build(out, [source])
    (out / "manifest.json").unlink()  # as a call leaves it that is interrupted
    (out / ".unfinished").touch()
    source.write_text("\n".join(f"row {number}" for number in range(60)))
    build(out, [source])
    before = (out / "train.txt").read_text()
    assert before.startswith("row 0\n")
    with pytest.raises(UserError, match=f"--out {out} would overwrite the text file {out}/train.txt: name another"):
        build(out, [source, out / "train.txt"])
    assert (out / "train.txt").read_text() == before


def test_two_calls_that_write_one_corpus_at_once_both_end_well(tmp_path, monkeypatch):
    splits = {name: [corpus.Document("g", (name,))] for name in corpus.SPLITS}
    writing = corpus.write_whole

    def meanwhile(path, content):
        monkeypatch.setattr(corpus, "write_whole", writing)
        corpus.write_corpus(tmp_path, splits, {"sources": [], "removed": {}})
        writing(path, content)

    monkeypatch.setattr(corpus, "write_whole", meanwhile)
    corpus.write_corpus(tmp_path, splits, {"sources": [], "removed": {}})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(corpus.FILES)


def test_a_pipe_is_read_once(tmp_path):
    """Its checksum is that of its text."""
    content = "\n".join(f"line {number}" for number in range(1, 101)).encode()
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(content)
    manifest = build(tmp_path / "out", [Path(f"/dev/fd/{reading}")])
    os.close(reading)
    assert manifest["sources"][0]["sha256"] == hashlib.sha256(content).hexdigest()


def test_command_line_ends_with_one_line(tmp_path, capsys):
    missing = str(tmp_path / "gone.txt")
    arguments = ["--text", missing, "--out", str(tmp_path / "out")]
    assert guarded(lambda: text_files.main(arguments)) == 1
    error = capsys.readouterr().err
    assert error == f"smlp: error: text file {missing} cannot be read: No such file or directory\n"
    source = tmp_path / "book.txt"
    source.write_text("\n".join(f"line {number}" for number in range(1, 101)))
    assert guarded(lambda: text_files.main(["--text", str(source), "--out", str(tmp_path / "out")])) == 0
    assert "95.0%" in capsys.readouterr().out
