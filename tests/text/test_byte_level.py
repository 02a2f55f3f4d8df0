"""Byte-level BPE: the encoding of fairseq's --bpe gpt2, lossless, also where a character's bytes part."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from running import REPOSITORY
from tiny_checkpoints import write_checkpoint

import smlp
from data_prep.tokenize.measuring import ODD_LINES, check_lossless
from data_prep.tokenize.models import given_byte_level, train_byte_level
from smlp.checkpoint.load import load_pretrained, text_files
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_exported
from smlp.errors import UserError
from smlp.evaluation.report import decoded_sizes, tokens_of
from smlp.inference.generation.continuations import ShownText
from smlp.text import tokenizer_kinds
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import byte_characters, files_of, find_tokenizer

pytest.importorskip("tokenizers")
LINES = ["the old man and the sea", "the young man's 12 seas", " two  spaces", "über dem Café: 中文 \U0001f600"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    for name, content in train_byte_level(LINES * 5, 290).items():
        (folder / name).write_bytes(content)
    number = len(json.loads((folder / "encoder.json").read_text()))
    (folder / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in range(number)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(Vocabulary.load(folder / "dict.txt"), find_tokenizer([folder]))


def test_the_characters_of_bytes_are_those_of_fairseq():
    from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

    assert byte_characters() == {character: byte for byte, character in bytes_to_unicode().items()}


def test_the_ids_are_those_of_fairseq(folder, tokenizer):
    from fairseq.data.encoders.gpt2_bpe import GPT2BPE

    config = SimpleNamespace(gpt2_encoder_json=str(folder / "encoder.json"), gpt2_vocab_bpe=str(folder / "vocab.bpe"))
    theirs = GPT2BPE(config)
    for line in [*LINES, *ODD_LINES]:
        symbols = [tokenizer.vocabulary.symbols[token] for token in tokenizer.encode(line)]
        assert " ".join(symbols) == theirs.encode(line)
        assert theirs.decode(" ".join(symbols)) == line
    assert len(tokenizer.encode("the old man")) < len("the old man")


def test_every_text_comes_back(tokenizer):
    check_lossless(tokenizer)
    text = "\n".join([*LINES, "", *ODD_LINES, "  "])
    assert tokenizer.decode(tokenizer.encode_lines(text)) == text
    ids, lengths = tokenizer.encode_batch([*LINES, "", *ODD_LINES])
    assert ids.tolist() == [token for line in [*LINES, *ODD_LINES] for token in tokenizer.encode(line)]
    assert lengths.tolist() == [len(tokenizer.encode(line)) for line in [*LINES, "", *ODD_LINES]]
    assert tokenizer.vocabulary.unk not in ids


def test_long_lines_are_encoded_in_stretches_with_the_same_ids(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_kinds, "STRETCH", 5)
    lines = [" ".join([*LINES, "a  b", " ", "\u00a0 c d'll e"]), "", *LINES, *ODD_LINES, "x" * 30]
    assert max(len(tokenizer_kinds._stretches(line)) for line in lines) > 8
    ids, lengths = tokenizer.encode_batch(lines)
    assert [tokens.tolist() for tokens in np.split(ids, np.cumsum(lengths)[:-1])] == list(map(tokenizer.encode, lines))
    assert [len(part) for part in tokenizer.encode_batch([])] == [0, 0]


def test_text_that_grows_token_by_token_has_whole_characters(tokenizer):
    line = " 中\U0001f600é"
    tokens = [tokenizer.vocabulary.eos, *tokenizer.encode(line), tokenizer.vocabulary.eos]
    decoder = tokenizer.decoder(tokenizer.vocabulary.eos)
    pieces = [decoder.push(token) for token in tokens]
    assert "".join(pieces) == f"\n{line}\n" and "\ufffd" not in "".join(pieces) and "" in pieces
    assert decoder.rest() == ""
    broken = tokenizer.encode("\U0001f600")[:1]
    assert [*map(decoder.push, broken), decoder.rest(), decoder.rest()] == ["", "\ufffd", ""]


def test_generation_shows_the_rest_of_a_character_that_is_cut_off(tokenizer):
    tokens = tokenizer.encode("中文")
    shown = ShownText(tokenizer, ["中文"], tokenizer.vocabulary.eos, tokenizer.vocabulary.eos)
    text = SimpleNamespace(tokens=[], finish=None)
    for token in tokens[:-1]:
        text.tokens.append(token)
        assert shown.follow(text) == ""  # it may become the stop string
    text.tokens.append(tokens[-1])
    assert shown.follow(text) == "" and text.finish == "stop"
    shown = ShownText(tokenizer, [], tokenizer.vocabulary.eos, tokenizer.vocabulary.eos)
    text = SimpleNamespace(tokens=tokenizer.encode("\U0001f525")[:1], finish="length")
    assert shown.follow(text) == "\ufffd"


def test_words_and_bytes_of_the_original_lines(tokenizer):
    lines = [*LINES, "", "  deux  "]
    text = tokens_of(lines, tokenizer)
    sizes = decoded_sizes(text, tokenizer)
    starts = np.cumsum(text.lengths) - text.lengths
    assert np.add.reduceat(sizes.bytes_N, starts).tolist() == [len(line.encode()) + 1 for line in lines]
    assert np.add.reduceat(sizes.words_N, starts).tolist() == [len(line.split()) for line in lines]


def test_a_model_scores_writes_and_is_exported_with_it(folder, tokenizer, tmp_path):
    path, _ = write_checkpoint(tmp_path, tokenizer.vocabulary.symbols[4:])
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    model = load_pretrained(path)
    assert model.tokenize("über\n dem") == tokenizer.encode_lines("über\n dem")
    ((written,),) = model.continuations(["the 中"], max_tokens=6, seed=1)
    assert written.text == tokenizer.decode(written.tokens).removesuffix("\n") and written.tokens
    (tmp_path / "alone").mkdir()
    write_exported(open_checkpoint(path), tmp_path / "alone" / "x.pt")
    assert sorted(text_files(open_checkpoint(path))) == ["dict.txt", "encoder.json", "vocab.bpe"]
    assert load_pretrained(tmp_path / "alone" / "x.pt").tokenize(LINES[3]) == tokenizer.encode(LINES[3])
    (tmp_path / "vocab.bpe").unlink()
    with pytest.raises(UserError, match=r"there is no file .*vocab\.bpe"):
        load_pretrained(path)


def test_files_that_are_none(folder, tokenizer, tmp_path):
    fillers = [f"madeupword{number:04d}" for number in range(1000)]  # as of --pad-to
    for symbols in (tokenizer.vocabulary.symbols[4:], [*tokenizer.vocabulary.symbols[4:], *fillers]):
        with pytest.raises(UserError, match=r"ids of byte-level BPE but there is no encoder\.json"):
            Tokenizer(Vocabulary(symbols))
    (tmp_path / "dict.txt").write_text("".join(f"{n} 1\nword{n} 1\n" for n in range(300)))  # as texts with years
    assert Tokenizer(Vocabulary.load(tmp_path / "dict.txt")).encode("7 word9") == [4 + 14, 4 + 19]
    bad = tmp_path / "encoder.json"
    for content, words in [
        ("[1]", "pieces with their ids"),
        ('{"a": true}', "pieces with their ids"),
        ("x", "not an encoder.json"),
        ('{"a": 0}', "255 of the 256"),
        ('{"\\ud800": 0}', "a piece has half of a surrogate pair, which is no Unicode text"),
    ]:
        bad.write_text(content)
        with pytest.raises(UserError, match=words):
            Tokenizer(tokenizer.vocabulary, bad)
    ids = json.loads((folder / "encoder.json").read_text())
    merges = tmp_path / "vocab.bpe"
    merges.write_text("#version\nt h e\n")
    with pytest.raises(UserError, match=r"vocab.bpe, line 2: expected two pieces, found 't h e'"):
        given_byte_level(folder / "encoder.json", merges)
    merges.write_text("#version\nq x\n")
    with pytest.raises(UserError, match=r"merges q and x, but .* has no piece qx"):
        given_byte_level(folder / "encoder.json", merges)
    whole = (folder / "vocab.bpe").read_text().splitlines(keepends=True)
    merges.write_text("".join(whole[: len(whole) // 2]))
    bad.write_text(json.dumps(ids))
    for load in (lambda: given_byte_level(bad, merges), lambda: Tokenizer(tokenizer.vocabulary, bad)):
        with pytest.raises(
            UserError, match=r"vocab.bpe has merges for \d+ pieces, but none for \d+ others of .* cut off"
        ):
            load()
    bad.write_text(json.dumps({**ids, "zz": 1 << 40}))
    with pytest.raises(
        UserError, match=r"gives the piece 'zz' the id 1,099,511,627,776, but ids are at most 16,777,215"
    ):
        Tokenizer(tokenizer.vocabulary, bad)
    for content, words in [
        (b"\xff", f"{bad} is not UTF-8 at byte 0"),
        (None, f"there is no file {bad} of byte-level BPE"),
    ]:
        bad.unlink() if content is None else bad.write_bytes(content)
        with pytest.raises(UserError, match=f"^{re.escape(words)}$"):
            Tokenizer(tokenizer.vocabulary, bad)
    bad.write_text(json.dumps({**ids, "zz": 5000}))
    with pytest.raises(UserError, match=r"ids are not 0 to"):
        given_byte_level(bad, folder / "vocab.bpe")


def test_an_entry_without_merges_such_as_gpt2_has_is_never_made_from_text(folder, tmp_path):
    ids = json.loads((folder / "encoder.json").read_text())
    (tmp_path / "encoder.json").write_text(json.dumps({**ids, "<|endoftext|>": len(ids)}))
    (tmp_path / "vocab.bpe").write_bytes((folder / "vocab.bpe").read_bytes())
    files = given_byte_level(tmp_path / "encoder.json", tmp_path / "vocab.bpe")
    assert files["vocab.bpe"] == (folder / "vocab.bpe").read_bytes()
    tokenizer = Tokenizer(Vocabulary(map(str, range(len(ids) + 1))), tmp_path / "encoder.json")
    tokens = tokenizer.encode("a<|endoftext|>")
    assert 4 + len(ids) not in tokens and tokenizer.decode(tokens) == "a<|endoftext|>"
    assert tokenizer.content(4 + len(ids)) == b"<|endoftext|>"


def test_the_file_that_is_named_may_have_another_name(tmp_path):
    assert files_of(tmp_path / "mine.json") == {
        "encoder.json": tmp_path / "mine.json",
        "vocab.bpe": tmp_path / "vocab.bpe",
    }
    assert files_of(tmp_path / "my.model") == {"sentencepiece.model": tmp_path / "my.model"}


def test_without_the_library_smlp_is_imported_and_says_what_is_missing(folder):
    code = (
        "import sys; sys.modules['tokenizers'] = None; sys.modules['fairseq'] = None\n"
        "from smlp.text.tokenizer import Tokenizer, Vocabulary\n"
        "try: Tokenizer(Vocabulary(map(str, range(290))), sys.argv[1])\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "encoder.json")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "byte-level BPE needs the package tokenizers: pip install -e '.[data]'" in done.stdout
    assert smlp.__version__
