"""Fast tokenizers of exported models give the ids of this package's own."""

import json
import random
from pathlib import Path

import pytest

import smlp.hf
from data_prep.tokenize.models import pieces_of, train_byte_level, train_sentencepiece
from smlp.errors import UserError
from smlp.hf.fast_tokenizer import fast_tokenizer
from smlp.text.tokenizer import load_tokenizer

# isort: split
from transformers import AutoTokenizer

KINDS = ["unigram", "bpe", "unigram, bytes", "bpe, bytes", "gpt2", "words"]
# Not a joiner after a character that is normalised: the library tokenizers loses it then (docs/huggingface.md).
CHARACTERS = [
    *"aàÅéßﬁ…‘’—–  \t\u00a0\u2003\u3000\u200b“”½²№①ぁｱア漢字한글êö٣€😀م",
    "e\u0301",
    "👩\u200d👩\u200d👧",
    "🇩🇪",
]


def corpus(count, seed):
    """Lines of words of syllables, with numbers, runs of a sign and, in every tenth, characters from everywhere."""
    syllables = random.Random(0)
    parts = [first + last for first in "bdfghklmnprstvwy" for last in ("a", "e", "i", "on", "ur")]
    words = ["".join(syllables.choices(parts, k=syllables.choice((1, 2, 2, 3)))) for _ in range(2000)]
    words[20:20] = [
        "the",
        "file",
        "path",
        "that",
        "of",
        "def",
        "return",
        "<unk>",
        "</s>",
        "(x)",
        "a_b=3;",
        "1,024",
        "...",
    ]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    draw, lines = random.Random(seed), []
    for number in range(count):
        chosen = draw.choices(words, weights, k=draw.randint(0, 18))
        chosen = [word.capitalize() if draw.random() < 0.1 else word for word in chosen]
        if number % 10 == 0:
            chosen.insert(draw.randint(0, len(chosen)), "".join(draw.choices(CHARACTERS, k=4)))
        # runs, which may be two orders of the same pieces
        chosen.append(draw.choice(("the", "of")) + draw.choice(".-!=0") * draw.randint(1, 9))
        indent, space = draw.choice(("", "", "    ")), draw.choice((" ", " ", "  "))
        lines.append(indent + space.join(chosen))
    return lines


def write_files(folder: Path, kind: str) -> None:
    """``dict.txt`` with a filler symbol, and the files of a tokenizer trained on some lines."""
    train = corpus(1500, 1)
    name = kind.split(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "gpt2":
        for file, content in train_byte_level(train, 600).items():
            (folder / file).write_bytes(content)
        symbols = list(map(str, json.loads((folder / "encoder.json").read_text()).values()))
    elif name == "words":
        symbols = sorted(
            {word for line in train for word in line.split()} - {"<s>", "<pad>", "</s>", "<unk>", "<mask>"}
        )
    else:
        model = train_sentencepiece(train, 600, name, kind.endswith("bytes"))
        (folder / "sentencepiece.model").write_bytes(model)
        symbols = pieces_of(model)
    lines = [f"{symbol} 1\n" for symbol in [*symbols, "madeupword0000"]]
    (folder / "dict.txt").write_text("".join(lines), encoding="utf-8")


def write_sentencepiece(folder: Path, **settings) -> None:
    """``dict.txt`` and a model of SentencePiece with other settings than :func:`train_sentencepiece` has."""
    import sentencepiece

    options = {"model_type": "unigram", "vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, **settings}
    prefix = str(folder / "sentencepiece")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus(200, 3)), model_prefix=prefix, **options)
    symbols = pieces_of((folder / "sentencepiece.model").read_bytes())
    (folder / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_same_on_ten_thousand_lines(kind, tmp_path):
    write_files(tmp_path, kind)
    ours = load_tokenizer(tmp_path)
    fast_tokenizer(tmp_path, False, 2, 128).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    assert fast.is_fast and len(fast) == len(ours.vocabulary) and fast.model_max_length == 128
    lines = [*corpus(10_000, 2), "<0x41> the<0x0A> <0x41"]  # letters, not the names of pieces for bytes
    if kind == "words":  # where `</s>` between spaces is the symbol
        lines = [line.replace("</s>", "") for line in lines]
    want = [ours.encode(line) for line in lines]
    found = fast(lines, add_special_tokens=False, verbose=False)["input_ids"]
    differ = [(ours, theirs) for ours, theirs in zip(want, found, strict=True) if ours != theirs]
    assert differ == []
    together = "\n".join([*lines[:40], "", "  two  ", " "])
    assert fast(together, verbose=False)["input_ids"] == [2, *ours.encode_lines(together)]
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (2, 2, 1)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_spaces_that_a_model_keeps_are_kept(kind, tmp_path):
    write_sentencepiece(tmp_path, model_type=kind, remove_extra_whitespaces=False)
    ours, fast = load_tokenizer(tmp_path), fast_tokenizer(tmp_path, False, 2, 128)
    for text in (" that", "    the file", "the  path ", "\u2581the", " ", "", "the\n  file"):
        assert fast(text, add_special_tokens=False)["input_ids"] == ours.encode_lines(text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(kind, tmp_path):
    write_files(tmp_path, kind)
    ours, fast = load_tokenizer(tmp_path), fast_tokenizer(tmp_path, False, 2, 128)
    text = "the file that\nthe path of"
    found = fast.decode(fast.encode(text, add_special_tokens=False))
    assert found.removeprefix(" ") == text == ours.decode(ours.encode_lines(text))
    first, *others = fast.encode("the file that", add_special_tokens=False)
    joined = fast.decode([first]) + fast.decode(others)
    assert joined.removeprefix(" ") == "the file that"  # what follows a prompt keeps its space
    unknown = [first, ours.vocabulary.unk, *others]
    assert fast.decode(unknown).removeprefix(" ") == ours.decode(unknown)
    batch = fast(["the", "the file that"], padding=True)
    assert batch["attention_mask"][0][0] == 0 and batch["input_ids"][0][0] == 1 and "token_type_ids" not in batch


def test_start_symbols_and_encoders(tmp_path):
    write_files(tmp_path, "unigram")
    ours = load_tokenizer(tmp_path)
    ids, more = ours.encode("the file <unk>"), ours.encode("a path")
    assert fast_tokenizer(tmp_path, False, 0, 128).encode("the file <unk>") == [0, *ids]
    encoder = fast_tokenizer(tmp_path, True, 0, 128)
    mask = len(ours.vocabulary)
    assert encoder.encode("the file <unk>") == [0, *ids, 2]
    assert encoder.encode("the file <unk>", "a path") == [0, *ids, 2, *more, 2]
    assert encoder.encode("the file <mask> a path") == [0, *ours.encode("the file"), mask, *more, 2]
    assert (encoder.mask_token_id, encoder.padding_side) == (mask, "right")


@pytest.mark.parametrize(
    ("kind", "old", "new", "words"),
    [
        ("unigram", "\u2581the 1\n", "", r"lacks 1 pieces of .*sentencepiece.model, such as '\u2581the'"),
        ("gpt2", "\n7 1\n", "\n", "lacks 1 pieces of .*encoder.json, such as '7'"),
        ("words", "\nmadeupword0000 1", "\ndef 1 #fairseq:overwrite", "has 1 duplicate symbols"),
    ],
)
def test_what_no_fast_tokenizer_does_is_refused(kind, old, new, words, tmp_path):
    write_files(tmp_path, kind)
    dictionary = (tmp_path / "dict.txt").read_text(encoding="utf-8")
    assert old in dictionary
    (tmp_path / "dict.txt").write_text(dictionary.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=words):
        fast_tokenizer(tmp_path, False, 2, 128)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "char"}, "splits into words or characters"),
        ({"user_defined_symbols": ["<sep>"]}, "has user-defined symbols"),
        ({"treat_whitespace_as_suffix": True}, "spaces after words"),
    ],
)
def test_other_sentencepiece_models_are_refused(settings, words, tmp_path):
    write_sentencepiece(tmp_path, **settings)
    with pytest.raises(UserError, match=words):
        fast_tokenizer(tmp_path, False, 2, 128)


def test_other_ids_are_found_before_a_tokenizer_is_handed_out(tmp_path, monkeypatch):
    write_files(tmp_path, "bpe")
    monkeypatch.setattr("smlp.hf.fast_tokenizer._merges", lambda scores: [])
    with pytest.raises(
        UserError, match=r"cannot be a fast tokenizer of transformers: it would give .* of 200 texts other ids"
    ):
        smlp.hf.fast_tokenizer.fast_tokenizer(tmp_path, False, 2, 128)
