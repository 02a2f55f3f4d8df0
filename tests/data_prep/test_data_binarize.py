"""``smlp data binarize``: the bytes of fairseq-preprocess, shards that fairseq reads, and what becomes of bad input."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from running import REPOSITORY
from test_data_tokenizer import sentences

from data_prep.binarize import encoding
from data_prep.binarize import shards as shards_module
from data_prep.binarize.encoding import line_blocks
from data_prep.binarize.shards import token_type
from data_prep.flow.parts import FilePart, find_files, plan_parts
from data_prep.tokenize.models import pieces_of, train_sentencepiece
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.text.binarized import read_fairseq_tokens

EOS, UNK = 2, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    model = train_sentencepiece(sentences(200, 1), 60)
    (folder / "sentencepiece.model").write_bytes(model)
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces_of(model)))
    return folder


def binarize(*arguments, workers=1):
    return main(["data", "binarize", *map(str, arguments), "--workers", str(workers), "--quiet"])


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def files_of(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and ".state" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def fairseq_preprocess(text, dictionary, out, workers=1):
    from fairseq import options
    from fairseq_cli import preprocess

    arguments = ["--only-source", "--srcdict", str(dictionary), "--trainpref", str(text), "--destdir", str(out)]
    parsed = options.get_preprocessing_parser().parse_args([*arguments, "--workers", str(workers)])
    preprocess.main(parsed)


def documents(count, seed, paragraphs=4):
    text, draw = sentences(count * paragraphs, seed), random.Random(seed)
    rows = []
    while text:
        number = draw.randint(1, paragraphs)
        rows.append("\n".join(text[:number]))
        text = text[number:]
    return rows


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"id": f"{path.stem}{number}", "text": text}) + "\n" for number, text in enumerate(texts))
    path.write_text("".join(rows))


@pytest.fixture
def sample(tmp_path):
    folder = tmp_path / "sample"
    for seed, name in enumerate(["train/a", "train/b", "valid/v", "test/t"]):
        write_jsonl(folder / f"{name}.jsonl", documents(40 if "train" in name else 8, seed))
    return folder


def text_of(folder, split, tokenizer):
    """Documents of a split as text: paragraphs, with an empty line after each document."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer / "sentencepiece.model"))
    stored, at = read_fairseq_tokens(folder / split), 0
    symbols = [None] * 4 + [line.rsplit(" ", 1)[0] for line in (folder / "dict.txt").read_text().splitlines()]
    found = []
    for length in stored.lengths.tolist():
        line = stored.tokens[at : at + length].tolist()
        assert line[-1] == EOS and EOS not in line[:-1]
        found.append(model.decode([symbols[token] for token in line[:-1]]))
        at += length
    return found


ODD_PIECES = (
    "▁stone he ▁river .\n"
    "\n"
    "   \n"
    "▁not ▁a piece T <unk> <s> </s> <pad>\n"
    "▁house\u00a0T\u3000.\ts\x1che\n"
    "one\r\ntwo\rT .\n"
    + "▁stone " * 40_000
    + "\n\n\n▁engine"
)  # fmt: skip


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_pieces_become_the_bytes_of_fairseq_preprocess(tokenizer, tmp_path, end):
    text, theirs = tmp_path / "train.spm", tmp_path / "theirs"
    text.write_text(ODD_PIECES + end, newline="")
    fairseq_preprocess(text, tokenizer / "dict.txt", theirs)
    for part_bytes in (10**9, 5000):
        ours = tmp_path / f"ours{part_bytes}"
        arguments = ["--format", "pieces", "--in", tmp_path, "--tokenizer", tokenizer, "--out", ours]
        assert binarize(*arguments, "--part-bytes", part_bytes) == 0
        for name in ("train.bin", "train.idx", "dict.txt"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    tokens = read_fairseq_tokens(theirs / "train").tokens
    assert np.count_nonzero(tokens > UNK) > 40_000 and np.count_nonzero(tokens == UNK) == 6


def test_raw_lines_become_what_their_pieces_become(tokenizer, tmp_path):
    rows = [*sentences(300, 5), "", "", "A zebra æ stands.", "  The  stone. ", ""]
    (tmp_path / "train.txt").write_text("\n".join(rows) + "\n")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer / "sentencepiece.model"))
    (tmp_path / "train.spm").write_text("".join(" ".join(model.encode(row, out_type=str)) + "\n" for row in rows))
    fairseq_preprocess(tmp_path / "train.spm", tokenizer / "dict.txt", tmp_path / "theirs")
    arguments = ["--format", "lines", "--in", tmp_path, "--tokenizer", tokenizer, "--out", tmp_path / "ours"]
    assert binarize(*arguments) == 0
    for name in ("train.bin", "train.idx"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    said = manifest_of(tmp_path / "ours")["splits"]["train"]
    unknown = np.count_nonzero(read_fairseq_tokens(tmp_path / "ours" / "train").tokens == UNK)
    assert said["unknown"] == unknown > 0 and said["lines"] == 305 and said["ends"] == 3


@pytest.mark.parametrize(("size", "name"), [(65_499, "<u2"), (65_500, "<u4"), (2**32 - 2, "<u4"), (2**32 - 1, "<i8")])
def test_the_type_of_tokens_is_the_one_that_fairseq_chooses(size, name):
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    assert token_type(size) == np.dtype(name) == np.dtype(best_fitting_int_dtype(size))


def test_a_dictionary_too_large_for_two_bytes(tmp_path):
    (tmp_path / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(65_600)))
    (tmp_path / "train.txt").write_text("w0 w65599 w70000\n")
    fairseq_preprocess(tmp_path / "train.txt", tmp_path / "dict.txt", tmp_path / "theirs")
    arguments = ["--format", "pieces", "--in", tmp_path, "--tokenizer", tmp_path, "--out", tmp_path / "ours"]
    assert binarize(*arguments) == 0
    for name in ("train.bin", "train.idx"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_documents_are_whole_in_their_shards_whatever_the_parts(sample, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "SEGMENT_TOKENS", 50)  # several for each part and shard
    common = ["--in", sample, "--tokenizer", tokenizer, "--shards", 3]
    assert binarize(*common, "--out", tmp_path / "one") == 0
    assert binarize(*common, "--out", tmp_path / "two", "--part-bytes", 1000) == 0
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert sorted(one) == sorted(
        ["manifest.json"]
        + [f"shard0{shard}/{name}" for shard in range(3) for name in ("dict.txt", "sentencepiece.model")]
        + [f"shard0{shard}/train.{kind}" for shard in range(3) for kind in ("bin", "idx")]
        + [f"shard00/{split}.{kind}" for split in ("valid", "test") for kind in ("bin", "idx")]
    )
    assert {name: content for name, content in one.items() if name != "manifest.json"} == {
        name: content for name, content in two.items() if name != "manifest.json"
    }
    train = documents(40, 0) + documents(40, 1)
    found = ["\n".join(text_of(tmp_path / "one" / f"shard0{shard}", "train", tokenizer)) for shard in range(3)]
    shards = [text.removesuffix("\n").split("\n\n") for text in found]
    assert sorted(text.removesuffix("\n") for shard in shards for text in shard) == sorted(train)
    assert min(map(len, shards)) > len(train) / 6
    assert [train.index(text) for text in shards[1]] == sorted(train.index(text) for text in shards[1])
    assert text_of(tmp_path / "one" / "shard00", "valid", tokenizer) == [
        line for document in documents(8, 2) for line in [*document.split("\n"), ""]
    ]
    said = manifest_of(tmp_path / "one")
    assert said["splits"]["train"]["ends"] == len(train)
    assert said["counts"]["kept"] == sum(said["splits"][split]["ends"] for split in ("train", "valid", "test"))


@pytest.mark.timeout(120)
def test_the_same_files_with_two_workers_and_with_shares(sample, tokenizer, tmp_path, capsys):
    common = ["--in", sample, "--tokenizer", tokenizer, "--shards", 2, "--part-bytes", 3000]
    assert binarize(*common, "--out", tmp_path / "one") == 0
    assert binarize(*common, "--out", tmp_path / "two", workers=2) == 0
    for share in ("0/2", "1/2"):
        assert binarize(*common, "--out", tmp_path / "three", "--share", share) == 0
        assert not (tmp_path / "three" / "manifest.json").exists()
    assert "0 parts are not encoded yet" in capsys.readouterr().out
    assert binarize(*common, "--out", tmp_path / "three") == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "three")


def test_fairseq_reads_a_shard_an_epoch_and_valid_from_the_first(sample, tokenizer, tmp_path):
    from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

    out = tmp_path / "bin"
    assert binarize("--in", sample, "--tokenizer", tokenizer, "--shards", 2, "--out", out) == 0
    data = f"{out / 'shard00'}:{out / 'shard01'}"
    config = LanguageModelingConfig(data=data, tokens_per_sample=32, sample_break_mode="none", dataset_impl="mmap")
    config.seed, config.use_plasma_view, config.data_buffer_size = 1, False, 10
    task = LanguageModelingTask.setup_task(config)
    assert task.has_sharded_data("train")
    for epoch, shard in ((1, "shard00"), (2, "shard01"), (3, "shard00")):
        task.load_dataset("train", epoch=epoch, combine=True)
        seen = [
            token for index in range(len(task.dataset("train"))) for token in task.dataset("train")[index]["target"]
        ]
        assert [int(token) for token in seen] == read_fairseq_tokens(out / shard / "train").tokens.tolist()
    task.load_dataset("valid", epoch=1, combine=False)
    assert sum(task.dataset("valid").sizes) == len(read_fairseq_tokens(out / "shard00" / "valid").tokens)
    with pytest.raises(Exception, match="valid"):
        task.load_dataset("valid", epoch=2)


def test_bad_documents_are_counted_and_the_rest_goes_on(tokenizer, tmp_path):
    rows = [
        {"text": "The stone.\n\n \nThe river."},
        {"text": "\u200b\n"},
        {"text": ""},
        {"body": "no"},
        {"text": "x" * 3000},
        {"text": "half \ud800 pair"},
    ]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "no json\n")
    (tmp_path / "train" / "b.jsonl").write_text("")
    out = tmp_path / "out"
    assert binarize("--in", tmp_path, "--tokenizer", tokenizer, "--out", out, "--max-document-bytes", 2000) == 0
    said = manifest_of(out)
    assert said["counts"] == {
        "documents_in": 7,
        "kept": 1,
        "dropped": {
            "longer than 2,000 bytes": 1, "no text in field 'text'": 1, "no token in it": 2, "not JSON": 1,
            "not text: half of a surrogate pair": 1,
        },
        "other": {"paragraphs without a token left out": 2},
    }  # fmt: skip
    assert {"problem": "empty file", "where": str(tmp_path / "train" / "b.jsonl")} in said["defects"]
    assert {"problem": "1 document not JSON", "where": str(tmp_path / "train" / "a.jsonl")} in said["defects"]
    assert len(said["defects"]) == 4
    assert text_of(out, "train", tokenizer) == ["The stone.", "The river.", ""]


def test_what_is_finished_is_kept_and_a_changed_file_is_read_again(sample, tokenizer, tmp_path, capsys):
    common, out = ["--in", sample, "--tokenizer", tokenizer, "--shards", 2], tmp_path / "out"
    assert binarize(*common, "--out", out) == 0
    assert not (out / ".state" / "segments").exists()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.bin")}
    first = files_of(out)
    assert " tokens/s; to train: smlp train " in (printed := capsys.readouterr().out) and "MB/s" in printed
    assert binarize(*common, "--out", out) == 0
    printed = capsys.readouterr().out  # nothing was read that could have a rate
    assert "to train: smlp train " in printed and "(parts were done before)" in printed
    assert "tokens/s" not in printed and "MB/s" not in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.bin")} == times and files_of(out) == first
    (out / "shard01" / "train.idx").unlink()
    assert binarize(*common, "--out", out) == 0
    assert files_of(out) == first
    write_jsonl(sample / "valid" / "v.jsonl", documents(9, 77))
    assert binarize(*common, "--out", out) == 0 and binarize(*common, "--out", tmp_path / "new") == 0
    assert files_of(out) == files_of(tmp_path / "new") != first
    write_jsonl(sample / "train" / "b.jsonl", documents(41, 78))
    assert binarize(*common, "--out", out) == 0 and binarize(*common, "--out", tmp_path / "newer") == 0
    assert files_of(out) == files_of(tmp_path / "newer") != files_of(tmp_path / "new")
    (sample / "train" / "a.jsonl").rename(tmp_path / "a.jsonl")
    assert binarize(*common, "--out", out) == 0 and binarize(*common, "--out", tmp_path / "less") == 0
    assert files_of(out) == files_of(tmp_path / "less") != files_of(tmp_path / "newer")
    capsys.readouterr()
    assert binarize(*common[:-1], 3, "--out", out) == 1
    assert "with other settings (shards was 2, now 3)" in capsys.readouterr().err
    assert files_of(out) == files_of(tmp_path / "less")


def test_a_tokenizer_with_a_file_of_another_is_refused(sample, tmp_path, capsys):
    one, other = tmp_path / "one", tmp_path / "other"
    for out, size in ((one, 60), (other, 50)):
        words = ["--in", sample / "train", "--vocab-size", size, "--out", out, "--quiet"]
        assert main(["data", "tokenizer", *map(str, words)]) == 0
    (one / "sentencepiece.model").write_bytes((other / "sentencepiece.model").read_bytes())
    capsys.readouterr()
    assert binarize("--in", sample, "--tokenizer", one, "--out", tmp_path / "out") == 1
    assert (
        f"{one / 'sentencepiece.model'} is not the file that {one / 'manifest.json'} names" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_finished_no_more_can_be_written_anew(tokenizer, tmp_path):
    text, out = tmp_path / "train.txt", tmp_path / "out"
    common = ("--format", "lines", "--in", tmp_path, "--tokenizer", tokenizer, "--out", out)
    text.write_text("one\n")
    assert binarize(*common) == 0
    text.write_bytes(b"one\n\xff\n")
    assert binarize(*common) == 1
    text.write_text("one\ntwo\n")
    assert binarize(*common, "--max-document-bytes", "1000", "--restart") == 0
    (out / "dict.txt.bak").touch()
    assert binarize(*common, "--restart") == 1


def test_other_words_of_the_same_number_are_another_shard(tokenizer, tmp_path):
    text, out = tmp_path / "train.spm", tmp_path / "out"
    symbols = [line.rsplit(" ", 1)[0] for line in (tokenizer / "dict.txt").read_text().splitlines()]
    for number in (5, 9):
        text.write_text(f"{symbols[number]}\n\n")
        assert binarize("--format", "pieces", "--in", tmp_path, "--tokenizer", tokenizer, "--out", out) == 0
        stored = read_fairseq_tokens(out / "train").tokens.tolist()
        assert stored == [4 + number, EOS, EOS]


@pytest.mark.timeout(120)
def test_after_a_kill_the_same_shards_and_no_half_one(sample, tokenizer, tmp_path):
    arguments = ["--in", sample, "--tokenizer", tokenizer, "--shards", 2, "--part-bytes", 1500]
    arguments = list(map(str, arguments))
    slow = (
        "import sys, time; from data_prep.binarize import shards; from smlp.cli.main import main\n"
        "def late(*a, do=shards._index): time.sleep(60); yield from do(*a)\n"
        "shards._index = late\n"
        "main(['data', 'binarize', *sys.argv[1:], '--workers', '1', '--quiet'])"
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *arguments, "--out", str(out)], cwd=REPOSITORY, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (out / "shard00" / "train.bin").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    encoded = {path: path.stat().st_mtime_ns for path in (out / ".state" / "segments").iterdir()}
    assert len(encoded) > 8 and not (out / "shard00" / "train.idx").exists()
    assert not (out / "manifest.json").exists()
    assert binarize(*arguments, "--out", out) == 0
    assert binarize(*arguments, "--out", tmp_path / "fresh") == 0
    assert files_of(out) == files_of(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--in", "sample", "--shards", 0], "--shards must be at least 1, got 0"),
        (["--in", "sample", "--shards", 500], "of 500 shards of train are empty"),
        (["--in", "sample", "--train", "sample"], "--in DIR or with --train"),
        ([], "--in DIR or with --train"),
        (["--in", "nothing"], "holds no folder or file train with text"),
        (["--in", "sample", "--out", "x:y/bin"], "--out x:y/bin has a colon"),
        (["--in", "sample", "--out", "sample/train/bin"], "--out sample/train/bin lies in the input sample/train"),
        (["--train", "bad.txt", "--format", "lines"], "bad.txt is not UTF-8: byte 0xff at position 6"),
        (["--train", "cut.txt.gz", "--format", "lines"], "cut.txt.gz: "),
        (["--train", "sample/train/a.jsonl", "--tokenizer", "nowhere"], "--tokenizer nowhere is not a folder"),
        (["--train", "sample/train/a.jsonl", "--tokenizer", "sample"], "there is no dictionary file sample/dict.txt"),
        (["--train", "empty.txt", "--format", "lines"], "train is empty"),
        (
            ["--train", "sample/train/a.jsonl", "--text-field", "body"],
            "documents (63, dropped: 63 no text in field 'body')",
        ),
    ],
)
def test_mistakes(sample, tokenizer, tmp_path, monkeypatch, capsys, arguments, words):
    import gzip

    monkeypatch.chdir(tmp_path)
    Path("nothing").mkdir()
    Path("bad.txt").write_bytes(b"The .\n\xff\n")
    Path("empty.txt").write_bytes(b"")
    Path("cut.txt.gz").write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-2000])
    assert binarize("--tokenizer", tokenizer, "--out", "out", *arguments) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_splits_that_are_not_there_or_hold_nothing_are_left_out_unless_they_are_named(tokenizer, tmp_path, capsys):
    write_jsonl(tmp_path / "in" / "a.jsonl", documents(10, 1))
    out = tmp_path / "sample"
    run = ["data", "sample", "--in", str(tmp_path / "in"), "--out", str(out), "--workers", "1", "--quiet"]
    assert main([*run, "--valid", "0", "--test", "0"]) == 0
    common = ["--tokenizer", tokenizer, "--out"]
    assert binarize("--in", out, *common, tmp_path / "one") == 0
    assert set(manifest_of(tmp_path / "one")["splits"]) == {"train"} and not manifest_of(tmp_path / "one")["defects"]
    (out / "valid").mkdir()
    (out / "test").mkdir()
    (out / "test" / "a.jsonl").write_text("\n")
    assert binarize("--in", out, *common, tmp_path / "two") == 0
    assert [row["where"] for row in manifest_of(tmp_path / "two")["defects"]] == [str(out / "test" / "a.jsonl")]
    assert {path.name for path in (tmp_path / "two").glob("*.bin")} == {"train.bin"}
    capsys.readouterr()
    for name in ("train.jsonl", "dev.txt"):
        (out / name).write_text("not read")
    assert binarize("--in", out, *common, tmp_path / "two") == 0
    assert f"not read in {out}: dev.txt, train.jsonl" in capsys.readouterr().err
    (out / "train.jsonl").unlink()
    assert binarize("--in", out, *common, tmp_path / "two") == 0
    capsys.readouterr()
    for split, words in (("test", "test is empty"), ("valid", "holds no file that ends in")):
        assert (
            binarize("--train", out / "train", f"--{split}", out / split, *common, tmp_path / "bad", "--restart") == 1
        )
        assert words in capsys.readouterr().err
    for name in ("a", "b"):
        (out / "valid" / f"{name}.jsonl").symlink_to(out / "test" / "a.jsonl")
    assert binarize("--in", out, *common, tmp_path / "bad", "--restart") == 1
    assert "are one file, which would be read twice" in capsys.readouterr().err
    (out / "valid" / "b.jsonl").unlink()
    (out / "manifest.json").unlink()
    assert binarize("--in", out, *common, tmp_path / "bad", "--restart") == 1
    assert f"{out} is not finished: run 'smlp data sample' again" in capsys.readouterr().err
    (out / "train").rename(out / "valid" / "train")
    (out / "train").mkdir()
    assert binarize("--in", out, *common, tmp_path / "bad", "--restart") == 1
    assert "holds no folder or file train with text" in capsys.readouterr().err


def test_an_empty_folder_hides_no_file_of_its_name(tokenizer, tmp_path, capsys):
    write_jsonl(tmp_path / "in" / "train.jsonl", documents(3, 1))
    (tmp_path / "in" / "train").mkdir()
    (tmp_path / "in" / "notes.md").write_text("not read")
    assert binarize("--in", tmp_path / "in", "--tokenizer", tokenizer, "--out", tmp_path / "one") == 0
    assert manifest_of(tmp_path / "one")["counts"]["kept"] == len(documents(3, 1))
    capsys.readouterr()
    assert binarize("--train", tmp_path / "in", "--tokenizer", tokenizer, "--out", tmp_path / "two") == 0
    assert f"not read in {tmp_path / 'in'}: notes.md" in capsys.readouterr().err


def test_lines_go_to_shards_by_parts(tokenizer, tmp_path):
    rows = [line for document in documents(60, 3) for line in [*document.split("\n"), ""]]
    (tmp_path / "train.txt").write_text("\n".join(rows) + "\n")
    common = ["--format", "lines", "--in", tmp_path, "--tokenizer", tokenizer, "--shards", 2]
    assert binarize(*common, "--out", tmp_path / "out", "--part-bytes", 1000) == 0
    found = [text_of(tmp_path / "out" / f"shard0{shard}", "train", tokenizer) for shard in range(2)]
    assert sorted(found[0] + found[1]) == sorted(rows) and min(map(len, found)) > len(rows) / 3


def test_a_line_longer_than_a_block_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BLOCK_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 95 + "\n\n" + "y" * 25)
    expected = ["short", "x" * 95, "", "y" * 25]
    for part_bytes in (1, 5, 7, 40, 1000):
        parts = plan_parts(find_files([path], [".txt"]), part_bytes, all_lines=True)
        assert [line for part in parts for block in line_blocks(part, 95) for line in block] == expected
        with pytest.raises(UserError, match=r"a\.txt: the line at byte 6 is longer than 94 bytes"):
            [block for part in parts for block in line_blocks(part, 94)]
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8: byte 0xe4 at position 7"):
        path.write_bytes(b"short\na\xe4b\n")
        list(line_blocks(parts[0], 95))


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_carriage_returns_end_lines_of_any_length(tmp_path, monkeypatch, end, last):
    monkeypatch.setattr(encoding, "BLOCK_BYTES", 7)
    path, lines = tmp_path / "a.txt", ["aaaa", "bb", "", "cccccccccc", "d"] * 3
    path.write_bytes((end.join([*lines, last])).encode())
    expected = [*lines, last] if last else lines
    for part_bytes in (1, 5, 11, 1000):
        parts = plan_parts(find_files([path], [".txt"]), part_bytes, all_lines=True)
        assert [line for part in parts for block in line_blocks(part, 11) for line in block] == expected
    with pytest.raises(UserError, match=f"the line at byte {6 + 3 * len(end)} is longer than 9 bytes"):
        list(line_blocks(FilePart.whole(path), 9))


def test_segments_that_break_off_are_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    for read in (shards_module._tokens, shards_module._index):
        with pytest.raises(UserError, match=r"a\.bin breaks off: run the same command again"):
            list(itertools.islice(read(tmp_path, np.dtype("<u2"), [["a.bin", 0, 10, 1, 0]]), 4))


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifest: manifest["outputs"][0].pop("name"),
        lambda manifest: manifest["outputs"][0].pop("bytes"),
        lambda manifest: manifest["inputs"][0].pop("bytes"),
        lambda manifest: manifest["defects"].append({"a": 1}),
        lambda manifest: manifest["counts"].pop("kept"),
        lambda manifest: manifest.pop("splits"),
    ],
)
def test_a_damaged_manifest_is_named(tokenizer, tmp_path, capsys, damage):
    (tmp_path / "train.txt").write_text("one\n")
    words = ("--format", "lines", "--in", tmp_path, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert binarize(*words) == 0
    damage(manifest := manifest_of(tmp_path / "out"))
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert binarize(*words) == 1
    assert "manifest.json is damaged: " in capsys.readouterr().err


def test_data_without_train_are_not_said_to_train(tokenizer, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\n")
    for split, is_said in (("train", True), ("valid", False)):
        words = ("--format", "lines", f"--{split}", tmp_path / "a.txt", "--tokenizer", tokenizer)
        assert binarize(*words, "--out", tmp_path / split) == 0
        assert ("smlp train" in capsys.readouterr().out) == is_said


def test_a_segment_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.bin").symlink_to("/proc/self/mem")
    plan = tmp_path / "plan.json"
    for tokens in (2, 0):  # ids are read, or only lengths of lines
        plan.write_text(json.dumps({"name": "train", "dtype": "<u2", "segments": [["a.bin", 0, tokens, 1, 0]]}))
        with pytest.raises(OSError, match="error") as caught:
            shards_module.merge_part(FilePart.whole(plan), tmp_path)
        assert caught.value.filename == str(tmp_path / "a.bin")
