"""Vocabulary from train alone, encoded splits, and fairseq's binariser at the end."""

import random
import shutil

import numpy as np
import pytest
import sentencepiece

from data_prep import tokenizer
from data_prep.binarize import binarize
from data_prep.command import run
from data_prep.tokenizer import tokenize, train_model
from smlp.errors import UserError
from smlp.evaluation.binarized import read_fairseq_tokens


def sentences(count: int, seed: int) -> list[str]:
    chooser = random.Random(seed)
    nouns = ["river", "stone", "house", "garden", "window", "teacher", "letter", "winter", "engine", "shadow", "basket"]
    verbs = ["follows", "carries", "watches", "answers", "crosses", "covers", "remembers", "paints"]
    return [
        "The {} {} the {} near the {}.".format(*(chooser.choice(words) for words in (nouns, verbs, nouns, nouns)))
        for _ in range(count)
    ]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train.txt").write_text("\n".join([*sentences(300, 1), "", *sentences(100, 2)]) + "\n")
    (folder / "valid.txt").write_text("\n".join([*sentences(20, 3), "A zebra æ stands here."]) + "\n")
    (folder / "test.txt").write_text("\n".join(sentences(20, 4)) + "\n")
    return folder


def test_encoded_splits_decode_to_the_text(corpus, tmp_path):
    out = tmp_path / "spm"
    result = tokenize(corpus, out, vocab_size=45)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(out / "sentencepiece.model"))
    assert processor.get_piece_size() == result.vocab_size == 45
    for name in ("train", "valid", "test"):
        texts = (corpus / f"{name}.txt").read_text().split("\n")
        encoded = (out / f"{name}.spm").read_text().split("\n")
        assert [processor.decode(line.split()) for line in encoded] == texts
        assert result.num_pieces[name] == sum(len(line.split()) for line in encoded)


def test_only_train_shapes_the_vocabulary(corpus, tmp_path):
    tokenize(corpus, tmp_path / "one", vocab_size=45)
    (corpus / "valid.txt").write_text("Quite other words, xylophones.\n")
    tokenize(corpus, tmp_path / "two", vocab_size=45)
    models = [(tmp_path / name / "sentencepiece.model").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]
    processor = sentencepiece.SentencePieceProcessor(model_proto=models[0])
    assert processor.piece_to_id("æ") == processor.unk_id()


def test_small_text_falls_back_and_says_so(corpus, tmp_path, capsys):
    arguments = ["--in", str(corpus), "--out", str(tmp_path / "spm")]
    assert run(lambda: tokenizer.main(arguments)) == 0
    text = capsys.readouterr().out
    assert "too small for 8000 pieces: the vocabulary has " in text


def test_vocabulary_smaller_than_the_alphabet(corpus):
    with pytest.raises(UserError, match=r"vocabulary size 10 is too small: the training text has \d+ different"):
        train_model((corpus / "train.txt").read_text().split("\n"), 10)
    with pytest.raises(UserError, match="at least 1, not 0"):
        tokenize(corpus, corpus, vocab_size=0)
    with pytest.raises(UserError, match="no line of text"):
        train_model(["", ""], 10)


def test_missing_and_broken_splits_are_named(corpus, tmp_path):
    (corpus / "test.txt").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"test.txt is not UTF-8 at byte offset 2"):
        tokenize(corpus, tmp_path / "spm", vocab_size=45)
    (corpus / "test.txt").unlink()
    with pytest.raises(UserError, match=r"test.txt is missing"):
        tokenize(corpus, tmp_path / "spm", vocab_size=45)


@pytest.mark.timeout(120)
def test_binarized_data_holds_every_line_and_nothing_half_written(corpus, tmp_path):
    pieces, data = tmp_path / "spm", tmp_path / "data"
    tokenize(corpus, pieces, vocab_size=45)
    binarize(pieces, data, tmp_path / "logs" / "binarize.log")
    assert sorted(path.name for path in data.iterdir()) == sorted(
        [f"{name}.{kind}" for name in ("train", "valid", "test") for kind in ("bin", "idx")]
        + ["dict.txt", "sentencepiece.model"]
    )
    symbols = ["<s>", "<pad>", "</s>", "<unk>"]
    symbols += [line.split()[0] for line in (data / "dict.txt").read_text().splitlines()]
    for name in ("train", "test"):
        stored = read_fairseq_tokens(data / name)
        encoded = [line.split() for line in (pieces / f"{name}.spm").read_text().removesuffix("\n").split("\n")]
        assert stored.lengths.tolist() == [len(line) + 1 for line in encoded]
        expected = [piece for line in encoded for piece in [*line, "</s>"]]
        assert [symbols[token] for token in stored.tokens] == expected
    assert np.count_nonzero(read_fairseq_tokens(data / "valid").tokens == symbols.index("<unk>")) >= 1


@pytest.mark.timeout(120)
def test_failed_binarisation_names_step_and_log_and_keeps_old_data(corpus, tmp_path):
    pieces, data, log = tmp_path / "spm", tmp_path / "data", tmp_path / "binarize.log"
    with pytest.raises(UserError, match=r"binarising: .*train.spm.* missing: run the tokenizer step first"):
        binarize(pieces, data, log)
    tokenize(corpus, pieces, vocab_size=45)
    data.mkdir()
    (data / "dict.txt").write_text("old\n")
    (pieces / "valid.spm").write_bytes(b"\xff\xfe broken\n")
    with pytest.raises(UserError) as caught:
        binarize(pieces, data, log)
    assert "fairseq-preprocess failed with exit status 1" in str(caught.value) and str(log) in str(caught.value)
    assert "UnicodeDecodeError" in log.read_text()
    assert [path.name for path in data.iterdir()] == ["dict.txt"] and (data / "dict.txt").read_text() == "old\n"
    shutil.rmtree(data)
