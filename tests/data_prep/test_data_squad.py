"""``smlp data squad``: official files of both versions, exact spans, compressed and damaged files, bad input."""

import copy
import gzip
import json
import lzma
import sys

import numpy as np
import pytest
from squad_data import ASKED, RIVER, squad_json, write_squad, write_tokenizer

from smlp.cli.main import main
from smlp.errors import UserError
from smlp.text.squad import SquadSplit, score_answers
from smlp.text.tokenizer import load_tokenizer

KINDS = ["unigram", "gpt2"]


def squad(*arguments):
    return main(["data", "squad", *map(str, arguments), "--workers", "1", "--quiet"])


def load(out, split, tokenizer):
    return SquadSplit.load(out, split, len(load_tokenizer(tokenizer).vocabulary))


def test_a_folder_that_is_finished_no_more_can_be_written_anew(tmp_path):
    path, out = tmp_path / "train.json", tmp_path / "out"
    whole = write_squad(tmp_path / "files")["v1.1"].read_bytes()
    words = ("--train", path, "--out", out, "--tokenizer")
    path.write_bytes(whole)
    assert squad(*words, write_tokenizer(tmp_path / "one", "unigram")) == 0
    path.write_bytes(whole[:-9])
    assert squad(*words, tmp_path / "one") == 1
    path.write_bytes(whole)
    assert squad(*words, write_tokenizer(tmp_path / "two", "gpt2"), "--restart") == 0
    assert not (out / "sentencepiece.model").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_gold_spans_as_predictions_score_100(kind, version, tmp_path, capsys):
    pytest.importorskip("torchmetrics")
    files, tokenizer = write_squad(tmp_path / "files"), write_tokenizer(tmp_path / "tokenizer", kind)
    path = files[version]
    assert squad("--train", path, "--valid", path, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 0
    found, encoder = load(tmp_path / "out", "valid", tokenizer), load_tokenizer(tokenizer)
    asked = [row for row in ASKED if row[2] or version == "v2.0"]
    assert found.answers == [answers for _, _, answers in asked] and len(found.contexts) == 2
    for number, (context, text, answers) in enumerate(asked):
        question_tokens, context_tokens = found.tokens_of(number)
        assert question_tokens.tolist() == encoder.encode(text)
        assert context_tokens.tolist() == encoder.encode(context.replace("\n", " "))
        first, last = found.answer_tokens[number]
        if answers:
            assert found.text_of(number, first, last) == answers[0]
        else:
            assert first == last == -1
    # the gold spans, and what a model sure of itself says where there is none
    rows = [(at, 0 if answers else 9, 5, *found.answer_tokens[at]) for at, (_, _, answers) in enumerate(asked)]
    scores = score_answers(found, np.array(rows, float))
    assert scores.exact_match == scores.f1 == 100
    assert (scores.threshold is None) == (version == "v1.1")
    said = capsys.readouterr().out
    assert "--task squad --criterion span" in said and "--best-checkpoint-metric f1" in said
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    facts = manifest["splits"]["train"]
    assert (facts["questions"], facts["unanswerable"], facts["inexact"]) == (len(asked), 2 * (version == "v2.0"), 0)
    for name in ("dict.txt", "sentencepiece.model" if kind == "unigram" else "vocab.bpe"):
        assert (tmp_path / "out" / name).read_bytes() == (tokenizer / name).read_bytes()


def test_answers_within_a_token_take_the_whole_token_and_are_counted(tmp_path):
    """A tokenizer of words: 2,850 of "2,850" is one, "rise" of "rises" is none."""
    (tmp_path / "tokenizer").mkdir()
    words = sorted(set(RIVER.split()))
    (tmp_path / "tokenizer" / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    rows = [("2,850", "2,850"), ("rise", "rises"), ("lack Forest", "Black Forest."), ("ows  thr", "flows  through")]
    qas = [
        {"id": f"q{at}", "question": "long", "answers": [{"text": text, "answer_start": RIVER.index(text)}]}
        for at, (text, _) in enumerate(rows)
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": RIVER, "qas": qas}]}]}))
    assert squad("--valid", path, "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out") == 0
    found = load(tmp_path / "out", "valid", tmp_path / "tokenizer")
    texts = [found.text_of(at, *found.answer_tokens[at]) for at in range(len(rows))]
    assert texts == [covering for _, covering in rows]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]["valid"]["inexact"] == 3


def test_compressed_files_give_the_same(tmp_path):
    content = json.dumps(squad_json("v2.0")).encode()
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content))
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(content))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "unigram")
    names = ("a.json", "a.json.gz", "a.json.xz")
    for name in names:
        assert squad("--valid", tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / f"out-{name}") == 0
    for file in ("valid.npz", "valid.json"):
        assert len({(tmp_path / f"out-{name}" / file).read_bytes() for name in names}) == 1
    texts, size = tmp_path / "out-a.json" / "valid.json", 2000  # of the dictionary, at most
    SquadSplit.load(texts.parent, "valid", size)
    texts.write_text(texts.read_text().replace("km", "kn"))
    with pytest.raises(UserError, match=r"valid\.json has changed: .*'smlp data squad' wrote"):
        SquadSplit.load(texts.parent, "valid", size)


def first_paragraph(data):
    return data["data"][0]["paragraphs"][0]


def first_question(data):
    return first_paragraph(data)["qas"][0]


def set_in(row, name, value):
    row[name] = value


BAD = {
    "question 000000000000000000000000: the answer '2,850 km' is not at character 15": lambda data: set_in(
        first_question(data)["answers"][0], "answer_start", 15
    ),
    "the answer '2,850 km long' is not at character -1": lambda data: (
        set_in(first_question(data)["answers"][1], "answer_start", -1),
        set_in(first_paragraph(data), "context", RIVER.replace("long", "wide")),
    ),
    "the answer ' ' is blank": lambda data: set_in(first_question(data)["answers"][0], "text", " "),
    "it has no answer": lambda data: set_in(first_question(data), "answers", []),
    "it has answers but is_impossible is true": lambda data: set_in(first_question(data), "is_impossible", True),
    "'is_impossible' must be true or false, found 1": lambda data: set_in(first_question(data), "is_impossible", 1),
    "'answers' must be a list, but is missing": lambda data: first_question(data).pop("answers"),
    "'answers' must be a list, found None": lambda data: set_in(first_question(data), "answers", None),
    "'answer_start' must be a whole number, found '5'": lambda data: set_in(
        first_question(data)["answers"][0], "answer_start", "5"
    ),
    "data[0].paragraphs[0].qas[0]: 'id' must be a text": lambda data: first_question(data).pop("id"),
    "data[0].paragraphs[0]: 'context' must be a text": lambda data: first_paragraph(data).pop("context"),
    "data[0]: 'paragraphs' must be a list, found {}": lambda data: set_in(data["data"][0], "paragraphs", {}),
    "'data' must be a list": lambda data: data.pop("data"),
    "has no question": lambda data: data["data"].clear(),
    "two questions with the id '000000000000000000000001'": lambda data: set_in(
        first_question(data), "id", f"{1:024x}"
    ),
    "its answer '\ufffd' ends before the first token": lambda data: (
        set_in(first_paragraph(data), "qas", [first_question(data)]),
        set_in(first_question(data), "answers", [{"text": "\ufffd", "answer_start": 0}]),
        set_in(first_paragraph(data), "context", "\ufffd " + RIVER),
    ),
    "its answer '\ufffd' begins after the last token": lambda data: (
        set_in(first_paragraph(data), "qas", [first_question(data)]),
        set_in(first_question(data), "answers", [{"text": "\ufffd", "answer_start": len(RIVER) + 1}]),
        set_in(first_paragraph(data), "context", RIVER + " \ufffd"),
    ),
    "its question has no token": lambda data: set_in(first_question(data), "question", "  "),
    "qas[0]: 'id': the text 'a\\ud800' has a lone surrogate": lambda data: set_in(
        first_question(data), "id", "a\ud800"
    ),
    "lone surrogate": lambda data: set_in(first_question(data), "question", "a \ud800"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("squad") / "tokenizer", "unigram")


@pytest.mark.parametrize("message", BAD)
def test_bad_questions_are_one_sentence(message, tokenizer, tmp_path, capsys):
    data = copy.deepcopy(squad_json("v1.1"))
    BAD[message](data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    assert squad("--train", tmp_path / "bad.json", "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert message in error and str(tmp_path / "bad.json") in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_later_answer_off_by_one_is_named_and_kept(tokenizer, tmp_path, capsys):
    """SQuAD's own files have some; only the first answer is learnt, and scores need texts alone."""
    data = squad_json("v1.1")
    first_question(data)["answers"][1]["answer_start"] -= 1
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert squad("--valid", tmp_path / "a.json", "--tokenizer", tokenizer, "--out", tmp_path / "out") == 0
    assert "the answer '2,850 km long' is not at character 12" in capsys.readouterr().out
    assert load(tmp_path / "out", "valid", tokenizer).answers[0] == ["2,850 km", "2,850 km long"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "is not SQuAD's JSON"),
        ("a.json", b'{"data": "\xe9"}', "is not SQuAD's JSON"),
        ("a.json", b"[" * 100_000, "is not SQuAD's JSON"),
        ("a.json", b"[1]", "'data' must be a list, but is missing"),
        ("a.json.gz", gzip.compress(b'{"data": []}' * 99, mtime=0)[:-9], "it is damaged"),
        ("a.json.xz", b"no xz", "it is damaged"),
        (
            "a.json.gz",
            gzip.compress(bytes(70 << 20), 1, mtime=0),
            "unpack to more than 67,108,864: it is damaged",
        ),
    ],
)
def test_files_that_cannot_be_read_are_one_sentence(name, content, message, tokenizer, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert squad("--train", tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert message in error and name in error and error.count("\n") == 1


def test_a_package_that_is_missing_is_no_wrong_file(tokenizer, tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.json.zst"
    path.touch()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert squad("--train", path, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith(f"smlp: error: {path}: for .zst files install the extra 'data'")


def test_missing_files_are_one_sentence(tokenizer, tmp_path, capsys):
    for arguments, message in (((), "name the files with --train"), (("--valid", "gone.json"), "no file gone.json")):
        assert squad(*arguments, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
        assert message in capsys.readouterr().err
