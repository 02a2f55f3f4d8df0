"""``smlp data tokenizer``: the sample, the models, their dictionaries, and what the manifest says of them."""

import json
import random

import pytest
import sentencepiece

from data_prep.flow.documents import ReadSettings
from data_prep.flow.parts import find_files, plan_parts
from data_prep.tokenize import command
from data_prep.tokenize.models import padding_of, train_sentencepiece
from data_prep.tokenize.sampling import Sample, rank_of, sample_part
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import find_tokenizer

NOUNS = ["river", "stone", "house", "garden", "window", "teacher", "letter", "winter", "engine", "shadow", "basket"]
VERBS = ["follows", "carries", "watches", "answers", "crosses", "covers", "remembers", "paints"]


def sentences(count: int, seed: int) -> list[str]:
    choose = random.Random(seed).choice
    return ["The {} {} the {} near the {}.".format(*map(choose, (NOUNS, VERBS, NOUNS, NOUNS))) for _ in range(count)]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    for name, seed in (("a", 1), ("b", 2)):
        rows = ({"id": f"{name}{number}", "text": text} for number, text in enumerate(sentences(150, seed)))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def learn(*arguments):
    return main(["data", "tokenizer", *map(str, arguments), "--workers", "1", "--quiet"])


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def sample(corpus, out, num_bytes, seed=1, part_bytes=10**9):
    parts = plan_parts(find_files([corpus], [".jsonl"]), part_bytes)
    total = sum(part.num_bytes for part in parts)
    results = [sample_part(part, out, ReadSettings(), num_bytes, total, seed) for part in parts]
    return results, [out / result.outputs[0]["name"] for result in results]


def drawn_texts(files):
    """All that was drawn."""
    return Sample.of(files, 10**9).texts()


def drawn_lines(files):
    return Sample.of(files, 10**9).lines()


def test_the_sample_is_the_documents_of_each_file_with_the_smallest_hashes(corpus, tmp_path):
    results, files = sample(corpus, tmp_path / "one", 4000)
    for result, path, seed in zip(results, files, (1, 2), strict=True):
        drawn = list(drawn_texts([path]))
        ranks = [rank_of(text, 1) for text in drawn]
        others = [rank_of(text, 1) for text in sentences(150, seed) if text not in drawn]
        assert ranks == sorted(ranks) and max(ranks) < min(others)
        assert 2000 <= sum(map(len, drawn)) < 2000 + 60
        assert result.counts.documents_in == 150 and result.counts.kept == len(drawn)
        assert result.counts.dropped == {"not drawn": 150 - len(drawn)}
    assert [path.read_bytes() for path in files] == [
        path.read_bytes() for path in sample(corpus, tmp_path / "two", 4000)[1]
    ]
    other = list(drawn_lines(sample(corpus, tmp_path / "three", 4000, seed=2)[1]))
    assert set(other) != set(drawn_lines(files))
    assert sorted(drawn_texts(sample(corpus, tmp_path / "all", 10**6)[1])) == sorted(
        sentences(150, 1) + sentences(150, 2)
    )


def test_many_small_files_give_no_more_than_is_asked_for(tmp_path):
    """Each part draws a document; of these, the smallest hashes of all parts are the sample. One may go over."""
    texts = [f"{number} " + "word " * (number % 9) for number in range(120)]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number:03d}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    for num_bytes in (1, 200, 1000):
        _, files = sample(tmp_path / "in", tmp_path / "out", num_bytes)
        in_order, expected = sorted(texts, key=lambda text: rank_of(text, 1)), []
        while sum(map(len, expected)) < num_bytes:
            expected.append(in_order[len(expected)])
        found = Sample.of(files, num_bytes)
        assert list(found.texts()) == sorted(expected, key=texts.index)
        assert found.num_drawn == 120
    assert list(Sample.of(files, 1).texts()) == in_order[:1]
    assert learn("--in", tmp_path / "in", "--out", tmp_path / "model", "--vocab-size", 40, "--sample-bytes", 1000) == 0
    said = manifest_of(tmp_path / "model")
    assert said["counts"]["documents_in"] == 120 and said["counts"]["kept"] == len(expected) < 60
    assert said["counts"]["dropped"] == {"not drawn": 120 - len(expected)}
    assert said["sample"]["bytes"] == sum(map(len, expected)) < 1000 + 60


def test_half_a_surrogate_pair_is_dropped_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud800 b"}\n{"text": "c"}\n')
    results, files = sample(tmp_path, tmp_path / "out", 100)
    assert list(drawn_texts(files)) == ["c"]
    assert results[0].counts.dropped == {"not text: half of a surrogate pair": 1}


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_dictionary_has_all_pieces_of_the_model_in_its_order(corpus, tmp_path, capsys, kind):
    out = tmp_path / "out"
    assert learn("--in", corpus, "--out", out, "--kind", kind, "--vocab-size", 60, "--pad-multiple", 16) == 0
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "sentencepiece.model"))
    rows = [line.rsplit(" ", 1) for line in (out / "dict.txt").read_text().splitlines()]
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    fill = [f"madeupword{number:04d}" for number in range(len(rows) - len(pieces))]
    assert [symbol for symbol, _ in rows] == pieces + fill and (len(rows) + 4) % 16 == 0 and 0 < len(fill) < 16
    encoded = [piece for line in sentences(150, 1) + sentences(150, 2) for piece in model.encode(line, out_type=str)]
    assert [int(count) for _, count in rows] == [encoded.count(symbol) for symbol, _ in rows]
    said = manifest_of(out)
    assert said["vocabulary"]["symbols"] == len(rows) + 4 and said["vocabulary"]["padding"] == len(fill)
    assert said["sample"]["tokens"] == len(encoded) and said["sample"]["unknown"] == 0
    assert said["sample"]["tokens_per_word"] == pytest.approx(len(encoded) / said["sample"]["words"])
    assert said["counts"]["documents_in"] == said["counts"]["kept"] == said["round_trip"]["same"] == 300
    assert "300 come back as they were" in capsys.readouterr().out
    from fairseq.data import Dictionary

    assert Dictionary.load(str(out / "dict.txt")).symbols == Vocabulary.load(out / "dict.txt").symbols


def test_the_same_text_gives_the_same_files(corpus, tmp_path):
    for name in ("one", "two"):
        assert learn("--in", corpus, "--out", tmp_path / name, "--vocab-size", 60) == 0
    files = ("sentencepiece.model", "dict.txt", "manifest.json")
    first = {name: (tmp_path / "one" / name).read_bytes() for name in files}
    assert first == {name: (tmp_path / "two" / name).read_bytes() for name in files}
    before = (tmp_path / "one" / "dict.txt").stat().st_mtime_ns
    assert learn("--in", corpus, "--out", tmp_path / "one", "--vocab-size", 60) == 0
    assert (tmp_path / "one" / "dict.txt").stat().st_mtime_ns == before  # it was all there
    (tmp_path / "one" / "sentencepiece.model").unlink()
    assert learn("--in", corpus, "--out", tmp_path / "one", "--vocab-size", 60) == 0
    assert first == {name: (tmp_path / "one" / name).read_bytes() for name in files}
    (corpus / "b.jsonl").unlink()
    assert learn("--in", corpus, "--out", tmp_path / "one", "--vocab-size", 60) == 0
    assert manifest_of(tmp_path / "one")["counts"]["documents_in"] == 150


def test_a_file_that_grew_gives_the_sample_of_a_fresh_run(corpus, tmp_path):
    size = ("--sample-bytes", 4000, "--vocab-size", 60)
    assert learn("--in", corpus, "--out", tmp_path / "one", *size) == 0
    (corpus / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(2000, 5)))
    for name in ("one", "two"):
        assert learn("--in", corpus, "--out", tmp_path / name, *size) == 0
    first, second = ((tmp_path / name / "sentencepiece.model").read_bytes() for name in ("one", "two"))
    assert first == second


def test_a_result_of_other_settings_is_not_taken_for_this_one(corpus, tmp_path):
    """As when two commands worked in one folder."""
    assert learn("--in", corpus, "--out", tmp_path / "one", "--vocab-size", 60) == 0
    manifest = manifest_of(tmp_path / "one")
    manifest["settings"]["vocab_size"] = 70
    (tmp_path / "one" / "manifest.json").write_text(json.dumps(manifest))
    assert learn("--in", corpus, "--out", tmp_path / "one", "--vocab-size", 60) == 0
    assert manifest_of(tmp_path / "one")["settings"]["vocab_size"] == 60


def test_a_tokenizer_that_is_not_finished_is_not_used_and_can_be_made_anew(corpus, tmp_path, capsys, monkeypatch):
    out, text = tmp_path / "one", tmp_path / "text.txt"
    text.write_text("The dog sees the cat.\n")
    use = ("binarize", "--format", "lines", "--train", text, "--tokenizer", out, "--out", tmp_path / "bin", "--quiet")

    def stop(lines, tokenizer):
        raise UserError("stopped")

    def is_stopped(*more):
        with monkeypatch.context() as patch:
            patch.setattr(command, "count_pieces", stop)
            assert learn("--in", corpus, "--out", out, *more) == 1
        assert "stopped" in capsys.readouterr().err
        assert (out / "sentencepiece.model").is_file() and not (out / "dict.txt").exists()

    is_stopped("--vocab-size", 60)
    assert learn("--in", corpus, "--out", out, "--vocab-size", 50, "--restart") == 0
    (corpus / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(20, 5)))
    is_stopped("--vocab-size", 50)
    (out / "dict.txt").write_text("a 1\n")
    assert main(["data", *map(str, use)]) == 1
    assert f"--tokenizer: {out} is not finished: run 'smlp data tokenizer' again" in capsys.readouterr().err
    assert learn("--in", corpus, "--out", out, "--vocab-size", 60, "--restart") == 0
    assert main(["data", *map(str, use)]) == 0


def test_what_sentencepiece_changes_is_reported(tmp_path):
    long = "The stone. " * 6000 + "The house."
    text = "\n".join([*sentences(60, 1), "The ﬁrst  stone.", " The stone.", long])
    (tmp_path / "a.txt").write_text(text + "\n")
    out = tmp_path / "out"
    assert learn("--in", tmp_path / "a.txt", "--out", out, "--vocab-size", 60) == 0
    said = manifest_of(out)["round_trip"]
    assert said["changed_by_normalisation"] == 2 and said["same"] == 61
    assert manifest_of(out)["sample"]["too_long_for_sentencepiece"] == 1
    assert {"was": "The ﬁrst  stone.", "becomes": "The first stone."} in said["examples"]


def test_byte_fallback_leaves_nothing_unknown(tmp_path):
    model = tmp_path / "sentencepiece.model"
    model.write_bytes(train_sentencepiece(sentences(100, 1), 350, byte_fallback=True))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = Vocabulary(pieces.id_to_piece(number) for number in range(3, pieces.get_piece_size()))
    tokenizer = Tokenizer(vocabulary, model)
    tokens = tokenizer.encode("The 中 stone")
    assert vocabulary.unk not in tokens and tokenizer.decode(tokens) == "The 中 stone"
    decoder = tokenizer.decoder(vocabulary.eos)
    assert "".join(map(decoder.push, tokens)) == "The 中 stone"


def test_byte_level_and_given_files(corpus, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    first, again = tmp_path / "first", tmp_path / "again"
    assert learn("--in", corpus, "--out", first, "--kind", "gpt2", "--vocab-size", 300, "--pad-to", 320) == 0
    said = manifest_of(first)
    assert said["vocabulary"] == {
        "symbols": 320, "special": ["<s>", "<pad>", "</s>", "<unk>"], "asked_for": 300, "pieces": 300, "padding": 16,
        "never_seen": said["vocabulary"]["never_seen"],
    }  # fmt: skip
    symbols = Vocabulary.load(first / "dict.txt").symbols[4:]
    assert symbols == [str(number) for number in range(300)] + [f"madeupword{number:04d}" for number in range(16)]
    assert said["sample"]["unknown"] == 0 and said["round_trip"]["same"] == 300
    (tmp_path / "v.bpe").write_bytes((first / "vocab.bpe").read_bytes().removesuffix(b"\n"))
    given = ["--encoder-json", first / "encoder.json", "--vocab-bpe", tmp_path / "v.bpe"]
    assert learn("--in", corpus, "--out", again, "--kind", "gpt2", *given, "--pad-to", 320) == 0
    for name in ("encoder.json", "vocab.bpe", "dict.txt"):
        assert (again / name).read_bytes() == (first / name).read_bytes()
    tokenizer = Tokenizer(Vocabulary.load(again / "dict.txt"), find_tokenizer([again]))
    assert tokenizer.decode(tokenizer.encode(" ünder\t")) == " ünder\t"
    capsys.readouterr()
    for arguments, words in [
        (["--kind", "gpt2", *given[:2]], "must be given together"),
        (["--kind", "gpt2", *given, "--vocab-size", 300], "--vocab-size is for training a vocabulary"),
        (["--kind", "gpt2", *given, "--pad-to", 303], "--pad-to 303 is less than the 304 symbols"),
        (["--kind", "gpt2", "--vocab-size", 255], "at least 256 for byte-level BPE, not 255"),
        (["--kind", "gpt2", "--byte-fallback"], "--byte-fallback is for SentencePiece"),
        (["--sample-bytes", 0], "--sample-bytes must be at least 1, got 0"),
        (["--seed", -1], "--seed must be at least 0, got -1"),
        (["--vocab-size", 10], "vocabulary size 10 is too small: the training text has"),
        (["--vocab-size", 0], "at least 1, got 0"),
    ]:
        assert learn("--in", corpus, "--out", tmp_path / "bad", *arguments, "--restart") == 1
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        assert not (tmp_path / "bad" / "manifest.json").exists()


def test_a_text_that_cannot_be_read_on_is_named_without_a_stack():
    def lines():
        yield "some words"
        raise UserError("there is no file a.txt")

    with pytest.raises(UserError, match=r"^there is no file a\.txt$"):
        train_sentencepiece(lines(), 30)


def test_a_text_of_long_paragraphs_alone_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("word " * 20_000)
    assert learn("--in", tmp_path / "a.txt", "--out", tmp_path / "out", "--vocab-size", 10) == 1
    assert "every paragraph of the text is empty or above 65,536 bytes" in capsys.readouterr().err


def test_a_small_text_gives_a_smaller_vocabulary_and_no_text_none(corpus, tmp_path, capsys):
    assert learn("--in", corpus, "--out", tmp_path / "out") == 0
    pieces = manifest_of(tmp_path / "out")["vocabulary"]["pieces"]
    assert pieces < 1000 and "the text is too small for 32,000 pieces" in capsys.readouterr().out
    for kind, missing in (("unigram", 3), ("gpt2", 0)):  # <unk>, <s> and </s> are no pieces of text
        assert learn("--in", corpus, "--out", tmp_path / kind, "--kind", kind) == 0
        pieces = manifest_of(tmp_path / kind)["vocabulary"]["pieces"]
        capsys.readouterr()
        for more, words in ((missing, False), (missing + 1, True)):
            size = str(pieces + more)
            assert learn("--in", corpus, "--out", tmp_path / kind / size, "--kind", kind, "--vocab-size", size) == 0
            assert (f"too small for {int(size):,} pieces" in capsys.readouterr().out) == words
    (corpus / "a.jsonl").write_text('{"text": " "}\n')
    (corpus / "b.jsonl").write_text("")
    assert learn("--in", corpus, "--out", tmp_path / "none") == 1
    assert "no line of text to build a vocabulary from" in capsys.readouterr().err
    (corpus / "a.jsonl").write_text(json.dumps({"text": "word " * 300}) + "\n")
    assert learn("--in", corpus, "--out", tmp_path / "long", "--max-document-bytes", 1000) == 1
    assert "to build a vocabulary from; dropped: 1 longer than 1,000 bytes" in capsys.readouterr().err
    with pytest.raises(UserError, match="no line of text"):
        train_sentencepiece(["", ""], 10)


def test_padding():
    assert padding_of(50261, 51200, 1) == [f"madeupword{number:04d}" for number in range(939)]
    assert padding_of(8, None, 8) == [] and len(padding_of(9, None, 8)) == 7
