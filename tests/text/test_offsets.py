"""Where in a text the tokens of each kind of tokenizer come from."""

import io
import itertools
import random

import pytest
import sentencepiece

from data_prep.tokenize.models import pieces_of, train_byte_level, train_sentencepiece
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer, Vocabulary

TEXT = [
    "the river follows the stone",
    "a house, a garden: 1990s",
    "naïve café — (NFL) 9 and 10",
    "日本 stones and houses",
]
KINDS = ["words", "unigram", "bpe", "bytes", "gpt2"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "words":
        return Tokenizer(Vocabulary(sorted({word for line in TEXT for word in line.split()})))
    if request.param == "gpt2":
        files = train_byte_level(iter(TEXT), 300)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return Tokenizer(Vocabulary(map(str, range(300))), folder / "encoder.json")
    kind, fallback = ("unigram", True) if request.param == "bytes" else (request.param, False)
    model = train_sentencepiece(iter(TEXT), 330 if fallback else 90, kind, byte_fallback=fallback)
    (folder / "sentencepiece.model").write_bytes(model)
    return Tokenizer(Vocabulary(pieces_of(model)), folder / "sentencepiece.model")


def test_every_character_but_spaces_belongs_to_a_token(tokenizer):
    """Also characters that the tokenizer has never seen, normalises to several, or writes as bytes."""
    draw = random.Random(1)
    odd = ["½", "ﬁlm", "  ", "\n", "語", "e\u0301", "…", "\u00a0x", "🙂"]
    for _ in range(40):
        text = " ".join(draw.choices([*" ".join(TEXT).split(), *odd], k=12))
        ids, offsets_N2 = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text.replace("\n", " "))
        assert len(ids) == len(offsets_N2) and (offsets_N2[:, 0] <= offsets_N2[:, 1]).all()
        covered = set(itertools.chain.from_iterable(range(begin, end) for begin, end in offsets_N2))
        assert covered >= {place for place, character in enumerate(text) if not character.isspace()}
        for (begin, _), (later, _) in itertools.pairwise(offsets_N2):
            assert begin <= later
        pieces = [text[begin:end] for begin, end in offsets_N2]
        assert all(piece == piece.strip() for piece in pieces)


def test_words_of_known_text_are_where_they_stand(tokenizer):
    text = "the stone,\nthe café"
    _, offsets_N2 = tokenizer.encode_with_offsets(text)
    starts, ends = offsets_N2[:, 0].tolist(), offsets_N2[:, 1].tolist()
    for word in ("the", "café"):
        assert text.index(word) in starts and text.index(word) + len(word) in ends
    assert 11 in starts  # the first letter after the line break


def test_each_piece_of_a_character_has_all_of_it(tokenizer):
    """Bytes of one that the tokenizer lacks, and letters to which one is normalised."""
    text = "the 🙂 house, ½ stone"
    ids, offsets_N2 = tokenizer.encode_with_offsets(text)
    for character in "🙂½":
        place = text.index(character)
        first, of_before = int((offsets_N2[:, 1] > place).argmax()), len(tokenizer.encode(text[:place].strip()))
        assert first == of_before or tokenizer.content(ids[of_before]) == b" "
        assert offsets_N2[first].tolist() == [place, place + 1]


def test_a_piece_of_white_space_has_none_of_what_follows(tmp_path):
    """Models whose normalisation keeps tabs and the like have such pieces."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["das wort ist gut", "ist das gut"] * 5), model_writer=writer, vocab_size=17,
        normalization_rule_name="identity", user_defined_symbols=["\t", "\u3000"], minloglevel=2,
    )  # fmt: skip
    (tmp_path / "sentencepiece.model").write_bytes(writer.getvalue())
    tokenizer = Tokenizer(Vocabulary(pieces_of(writer.getvalue())), tmp_path / "sentencepiece.model")
    text = "das\twort ist\u3000\u3000gut"
    ids, offsets_N2 = tokenizer.encode_with_offsets(text)
    for place in (4, 14):
        first = int((offsets_N2[:, 1] > place).argmax())
        assert offsets_N2[first, 0] == place and tokenizer.content(ids[first]).decode().strip()


def test_text_without_tokens_and_no_text(tokenizer):
    ids, offsets_N2 = tokenizer.encode_with_offsets("")
    assert ids == [] and offsets_N2.shape == (0, 2)
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode_with_offsets("a \ud800")
