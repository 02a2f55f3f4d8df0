"""``smlp data sample``: fractions, budgets, weights, splits."""

import gzip
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from test_data_tokenizer import sentences

from data_prep.flow.documents import Record
from data_prep.flow.running import StepRun, locked
from data_prep.flow.streams import write_stream
from data_prep.sample import command, plan
from data_prep.sample.plan import _shares, find_cuts
from data_prep.sample.survey import Measure, hashes
from data_prep.tokenize.models import pieces_of, train_sentencepiece
from smlp import __version__
from smlp.cli.main import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two sources: 300 documents of 10 to 50 words, and 100 of 5 to 25; one text stands in both."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(1)
    for source, number, most in [("wiki", 300, 50), ("books", 100, 25)]:
        rows = []
        for index in range(number):
            words = [f"{source}{draw.randrange(1000)}" for _ in range(draw.randrange(most // 5, most + 1))]
            half = len(words) // 2
            rows.append({"id": f"{source}-{index}", "text": " ".join(words[:half]) + "\n" + " ".join(words[half:])})
        rows[7]["text"] = "the same words in both"
        for part in range(3):
            with write_stream(folder / source / f"{part}.jsonl.gz") as (stream, _):
                stream.write(b"".join(json.dumps({**row, "source": source}).encode() + b"\n" for row in rows[part::3]))
    return folder


def sample(corpus, out, *options, workers=1):
    status = main(
        ["data", "sample", "--in", str(corpus), "--out", str(out), "--quiet", "--workers", str(workers), *options]
    )
    if status:
        return None
    return json.loads((out / "manifest.json").read_text())


def rows_of(out, split):
    files = sorted((out / split).glob("*.jsonl.gz"))
    assert files
    return [json.loads(line) for path in files for line in gzip.open(path, "rt", encoding="utf-8")]


def ids(out, split="train"):
    return [row["id"] for row in rows_of(out, split)]


def words(rows):
    return sum(len(row["text"].split()) for row in rows)


NO_SPLITS = ("--valid", "0", "--test", "0")


def test_a_fraction_is_part_of_a_larger_one_and_depends_on_texts_and_seed_only(corpus, tmp_path):
    manifest = sample(corpus, tmp_path / "a", "--fraction", "0.3", *NO_SPLITS)
    drawn = set(ids(tmp_path / "a"))
    assert 80 < len(drawn) < 160
    assert manifest["counts"]["documents_in"] == 400
    assert manifest["counts"]["dropped"] == {"not in the fraction": 400 - len(drawn)}
    sample(corpus, tmp_path / "b", "--fraction", "0.6", *NO_SPLITS)
    assert drawn < set(ids(tmp_path / "b"))
    sample(corpus, tmp_path / "c", "--fraction", "0.3", "--seed", "2", *NO_SPLITS)
    assert set(ids(tmp_path / "c")) != drawn
    (tmp_path / "other").mkdir()
    with write_stream(tmp_path / "other" / "all.jsonl") as (stream, _):
        for path in sorted(corpus.rglob("*.gz"), reverse=True):
            stream.write(gzip.decompress(path.read_bytes()))
    sample(tmp_path / "other", tmp_path / "d", "--fraction", "0.3", "--part-bytes", "9000", *NO_SPLITS)
    assert set(ids(tmp_path / "d")) == drawn


def test_splits_have_the_exact_number_and_no_text_is_in_two(corpus, tmp_path):
    manifest = sample(corpus, tmp_path / "a", "--valid", "0.05", "--test", "0.1")
    found = {split: rows_of(tmp_path / "a", split) for split in ("train", "valid", "test")}
    assert {split: len(rows) for split, rows in found.items()} == {"train": 340, "valid": 20, "test": 40}
    texts = [{row["text"] for row in rows} for rows in found.values()]
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])
    assert sorted(row["id"] for rows in found.values() for row in rows) == sorted(
        f"{source}-{index}" for source, number in [("wiki", 300), ("books", 100)] for index in range(number)
    )
    other = manifest["counts"]["other"]
    assert other["train: words"] == words(found["train"])
    assert other["valid: documents"] == 20


@pytest.fixture
def copies(tmp_path):
    """Ten documents, and ten more with one text."""
    texts = [f"text number {index}" for index in range(10)] + ["the same again"] * 10
    with write_stream(tmp_path / "in" / "a.jsonl") as (stream, _):
        stream.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    return tmp_path / "in"


def test_equal_texts_go_to_one_split_and_make_it_smaller(copies, tmp_path, capsys):
    seen = set()
    for seed in range(12):
        out = tmp_path / str(seed)
        if sample(copies, out, "--valid", "0.25", "--test", "0.25", "--seed", str(seed)) is None:
            error = capsys.readouterr().err
            assert "0.25 of 20 documents is 5, but 10 at its beginning have the same text" in error
            seen.add("error")
            continue
        found = {split: [row["text"] for row in rows_of(out, split)] for split in ("train", "valid", "test")}
        assert len({text for rows in found.values() for text in set(rows)}) == sum(
            len(set(row)) for row in found.values()
        )
        assert (
            max(len(found[split]) for split in ("valid", "test")) <= 5 and found["train"].count("the same again") == 10
        )
        seen.add(len(found["valid"]) + len(found["test"]))
    assert "error" in seen and len(seen) > 2


@pytest.mark.parametrize("budget", [1, 57, 1000, 3333])
def test_a_budget_of_words_is_exact(corpus, tmp_path, budget):
    """The last document is cut, and where it begins with one word alone, at that word."""
    sample(corpus, tmp_path / "a", "--budget", str(budget), *NO_SPLITS)
    assert words(rows_of(tmp_path / "a", "train")) == budget


def test_a_smaller_budget_is_part_of_a_larger_one(corpus, tmp_path):
    for name, budget in [("a", "1K"), ("b", "0.002M")]:
        sample(corpus, tmp_path / name, "--budget", budget, "--weights", "wiki=1,books=1", *NO_SPLITS)
    small, large = ({row["id"]: row["text"] for row in rows_of(tmp_path / name, "train")} for name in "ab")
    assert set(small) < set(large) and sum(large[name] != text for name, text in small.items()) <= 2


def test_weights_mix_the_sources_and_repeat_reads_them_again(corpus, tmp_path, capsys):
    options = ("--budget", "3000", "--weights", "wiki=1,books=3", *NO_SPLITS)
    books = [
        json.loads(line) for path in corpus.glob("books/*") for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    words_in_books = words(books)
    assert words_in_books < 2250
    assert sample(corpus, tmp_path / "a", *options) is None
    assert f"wants 2,250 words of source books, which has {words_in_books:,}" in capsys.readouterr().err
    manifest = sample(corpus, tmp_path / "b", *options, "--repeat")
    rows = rows_of(tmp_path / "b", "train")
    assert words([row for row in rows if row["source"] == "books"]) == 2250
    assert words([row for row in rows if row["source"] == "wiki"]) == 750
    assert len({row["id"] for row in rows}) == len(rows)
    assert manifest["sources"]["books"] == {"available": words_in_books, "wanted": 2250, "whole_passes": 1}
    again = [row for row in rows if row["id"].endswith("#2")]
    assert manifest["counts"]["other"]["train: documents written again"] == len(again)
    whole = {row["id"]: row["text"] for row in rows if "#" not in row["id"]}
    assert sum(whole[row["id"].removesuffix("#2")] != row["text"] for row in again) <= 1


def test_the_name_of_a_source_cannot_write_lines(tmp_path, capsys):
    rows = [{"text": "Some words.", "source": "a\u001b[2J\nkept 9999"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--in", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--valid", "0", "--test", "0"]
    assert main(["data", "sample", *map(str, words)]) == 0
    said = capsys.readouterr().out
    assert r"a\x1b[2J\nkept 9999" in said and "\x1b" not in said


def test_weights_without_a_budget_take_as_much_as_there_is(corpus, tmp_path):
    sample(corpus, tmp_path / "a", "--weights", "wiki=1,books=1", "--unit", "documents", *NO_SPLITS)
    rows = rows_of(tmp_path / "a", "train")
    assert [sum(row["source"] == source for row in rows) for source in ("wiki", "books")] == [100, 100]
    sample(corpus, tmp_path / "b", "--weights", "wiki=0,books=1", *NO_SPLITS)
    assert {row["source"] for row in rows_of(tmp_path / "b", "train")} == {"books"}


def test_the_same_whatever_the_workers(corpus, tmp_path):
    options = (
        "--fraction",
        "0.5",
        "--budget",
        "1000",
        "--weights",
        "wiki=2,books=1",
        "--valid",
        "0.02",
        "--test",
        "0.02",
    )
    sample(corpus, tmp_path / "a", *options)
    sample(corpus, tmp_path / "b", *options, workers=2)
    one, two = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*.*")
            if ".state" not in str(path)
        }
        for name in "ab"
    )
    assert one == two and {path.parts[0] for path in one} == {"train", "valid", "test", "manifest.json"}


def test_documents_that_cannot_be_read_are_counted(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    rows = [json.dumps({"text": f"word number {index}"}) for index in range(9)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join([*rows, "no json"]))
    (tmp_path / "in" / "b.jsonl").touch()
    manifest = sample(tmp_path / "in", tmp_path / "out", *NO_SPLITS, "--budget", "20")
    assert manifest["counts"]["dropped"] == {"not JSON": 1, "beyond the budget": 2}
    assert sorted(defect["problem"] for defect in manifest["defects"]) == ["1 document not JSON", "empty file"]
    assert manifest["counts"]["documents_in"] == 10
    (tmp_path / "in" / "a.jsonl").write_text('{"txt": "a"}\nno json\n')
    assert sample(tmp_path / "in", tmp_path / "none") is None
    assert "in: no documents; dropped: 1 no text in field 'text'; dropped: 1 not JSON" in capsys.readouterr().err


def test_the_remedy_of_a_mistake_can_be_followed(corpus, tmp_path, capsys):
    """What was surveyed is kept, until something is written that depends on the rest."""
    assert sample(corpus, tmp_path / "out", "--budget", "1M", *NO_SPLITS) is None
    assert "more than the" in capsys.readouterr().err
    surveyed = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / ".state" / "survey").iterdir()}
    assert sample(corpus, tmp_path / "out", "--budget", "1M", "--unit", "bytes", *NO_SPLITS) is None
    assert "unit was 'words', now 'bytes'" in capsys.readouterr().err
    settings = (tmp_path / "out" / ".state" / "settings.json").read_bytes()
    small = ["--budget", "500", *NO_SPLITS]
    with locked(StepRun(tmp_path / "out")):
        assert sample(corpus, tmp_path / "out", *small) is None
    assert "another command is running" in capsys.readouterr().err
    assert (tmp_path / "out" / ".state" / "settings.json").read_bytes() == settings
    assert sample(corpus, tmp_path / "out", *small) == sample(corpus, tmp_path / "straight", *small)
    assert {path: path.stat().st_mtime_ns for path in surveyed} == surveyed
    assert sample(corpus, tmp_path / "out", "--budget", "400", *NO_SPLITS) is None
    assert "budget was 500, now 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fraction", "0"], "--fraction must be at least 8.67"),
        (["--fraction", "1e-19"], "--fraction must be at least 8.67"),
        (["--seed", str(2**63)], "--seed must be at most 9,223,372,036,854,775,807, got 9223372036854775808"),
        (["--seed", str(-(2**63) - 1)], "--seed must be at least -9,223,372,036,854,775,808, got -9223372036854775809"),
        (["--fraction", "1e-12"], "--fraction 1e-12 leaves no documents"),
        (["--valid", "0.0001"], "--valid 0.0001 of 400 documents rounds to no document"),
        (["--valid", "0.5", "--test", "0.5"], "leave nothing to train on of 400 documents"),
        (["--valid", "1"], "--valid must be below 1, got 1.0"),
        (["--budget", "1B", *NO_SPLITS], "a budget of 1,000,000,000 words is more than"),
        (
            ["--weights", "wiki=1,web=2", *NO_SPLITS],
            "--weights must name each source once: books missing; there is no web",
        ),
        (["--unit", "tokens"], "--unit tokens needs --tokenizer"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: there is no such folder"),
        (["--tokenizer", "."], "--tokenizer has no effect with --unit words: add --unit tokens"),
        (["--repeat"], "--repeat has no effect without --budget"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
    ],
)
def test_mistakes(corpus, tmp_path, capsys, options, message):
    assert sample(corpus, tmp_path / "a", *options) is None
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.parametrize(
    "option", [("--budget", "many"), ("--weights", "wiki"), ("--weights", "wiki=0"), ("--share", "2/2")]
)
def test_words_that_are_no_numbers(corpus, tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        sample(corpus, tmp_path / "a", *option)
    assert (
        repr(option[1]) in capsys.readouterr().err
        or "all weights are 0" in capsys.readouterr().err
        or option[1] == "wiki=0"
    )


def test_the_manifest_names_the_versions_of_all_phases(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    arguments = (tmp_path / "a.txt", tmp_path / "out", "--valid", "0", "--test", "0")
    assert sample(*arguments)["smlp"] == __version__
    (record,) = (tmp_path / "out" / ".state" / "survey").glob("*.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "smlp": "0.0.1"}))
    assert sample(*arguments)["smlp"] == f"0.0.1, {__version__}"


def test_a_document_without_size_is_written_once(tmp_path):
    rows = [{"id": str(index), "text": " " * index} for index in range(30)] + [{"id": "full", "text": "one two three"}]
    rows += [{"id": "alone", "text": " ", "source": "of nothing else"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample(tmp_path / "a.jsonl", tmp_path / "out", *NO_SPLITS)
    assert sorted(ids(tmp_path / "out")) == sorted(row["id"] for row in rows)
    sample(tmp_path / "a.jsonl", tmp_path / "again", *NO_SPLITS, "--budget", "8", "--repeat")
    assert sorted(ids(tmp_path / "again")) == sorted([*(row["id"] for row in rows), "full#2", "full#3"])


def test_copies_are_made_one_at_a_time():
    record = Record("one two three", "a", "source")
    copies = plan._copies(record, 10, 0, Measure("words"))
    assert [next(copies) for _ in range(2)] == [(record, 3), (replace(record, id="a#2"), 3)]


def test_a_source_of_which_nothing_is_left_makes_no_empty_sample(corpus, tmp_path, capsys):
    (tmp_path / "small.jsonl").write_text('{"text": "", "source": "small"}\n')
    inputs = ["--in", str(corpus), str(tmp_path / "small.jsonl"), "--out", str(tmp_path / "out"), *NO_SPLITS]
    assert main(["data", "sample", *inputs, "--weights", "wiki=1,books=1,small=2", "--quiet"]) == 1
    assert "words of source small, of which nothing is left for training" in capsys.readouterr().err


def test_shares_never_exceed_what_there_is():
    """Without a budget the scarcest source is used up; with one that they allow, shares add up to it."""
    draw = random.Random(1)
    for _ in range(2000):
        available = {
            source: draw.randrange(1, draw.choice([5, 500, 10**12])) for source in "abcde"[: draw.randrange(1, 6)]
        }
        weights = {source: draw.choice([1.0, 2.0, 0.1, 0.3, draw.random(), 0.0]) for source in available}
        weights["a"] += 0.5
        wanted = _shares(available, None, weights, False, "words")
        assert all(wanted[source] <= available[source] for source in available)
        assert any(wanted[source] == available[source] for source in available)
        unit = max(wanted[source] / weight for source, weight in weights.items() if weight)
        assert all(abs(wanted[source] - unit * weight) <= 1 + 1e-9 * unit for source, weight in weights.items())
        for budget in {sum(wanted.values()), draw.randint(0, sum(wanted.values()))}:
            parts = _shares(available, budget, weights, True, "words")
            assert sum(parts.values()) == budget
            assert all(parts[source] <= available[source] for source in available)
        budget = draw.randint(0, sum(available.values()))
        parts = _shares(available, budget, None, False, "words")
        assert sum(parts.values()) == budget and all(parts[source] <= available[source] for source in available)
    found = _shares({"a": 400, "b": 101, "c": 400}, None, {"a": 1, "b": 2, "c": 1}, False, "words")
    assert found == {"a": 50, "b": 101, "c": 50}
    assert _shares({"a": 400, "b": 101, "c": 400}, 202, {"a": 1, "b": 2, "c": 1}, False, "words")["b"] == 101


@pytest.mark.parametrize(("num_others", "bits"), [(0, 22), (3, 9), (9, 5)])
def test_cuts_against_sorting_everything(num_others, bits, monkeypatch):
    """Random keys, many of them equal or in one bin, sizes of 0 to 9, every budget near a step, and other groups."""
    monkeypatch.setattr(plan, "_BITS_OF_SUMS", bits)
    draw = np.random.default_rng(1)
    for trial in range(60):
        number = int(draw.integers(1, 40))
        keys = draw.integers(0, [1 << 64, 1 << 48, 5][trial % 3], number, dtype=np.uint64)
        sizes, places = draw.integers(0, 10, number), np.arange(number) * 3
        order = sorted(zip(keys.tolist(), places.tolist(), sizes.tolist(), strict=True))
        for budget in range(int(sizes.sum()) + 2):
            columns = (np.repeat(column, num_others + 1) for column in (keys, sizes, places))
            rows = (*columns, np.tile(np.arange(num_others + 1), number))
            blocks = [tuple(column[:7] for column in rows), tuple(column[7:] for column in rows)]
            budgets = [(budget + 3 * other) % (int(sizes.sum()) + 2) for other in range(num_others + 1)]
            cut, *others = find_cuts(lambda blocks=blocks: iter(blocks), budgets)
            for other, own in zip(others, budgets[1:], strict=True):
                assert other.taken + other.left == own and (own < budget or other.key >= cut.key)
            total, below = 0, []
            for _key, place, size in order:
                if total + size > budget:
                    break
                total += size
                below.append(place)
            assert [place for key, place, _ in order if (key, place) < (cut.key, cut.place)] == below
            assert (cut.taken, cut.left) == (total, budget - total)


def test_a_part_without_documents_of_a_split_writes_no_file_of_it(copies, tmp_path):
    """Nor does one leave there what an earlier run wrote, when more files are given."""
    assert sample(copies, tmp_path / "a", *NO_SPLITS)["outputs"][0]["name"] == "train/a.jsonl.gz"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".state", "manifest.json", "train"]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"more {index}"}) + "\n" for index in range(200)))
    one = tmp_path / "in" / "one.jsonl"
    one.write_text(json.dumps({"text": "a seldom one"}) + "\n")
    lowest = min(hashes(f"more {index}", 1)[0] for index in range(200))
    (tmp_path / "in" / "a.jsonl").unlink()
    sample(copies, tmp_path / "c", "--budget", "1", "--unit", "documents", *NO_SPLITS)
    assert (tmp_path / "c" / "train" / "one.jsonl.gz").is_file()
    assert lowest < hashes("a seldom one", 1)[0]
    (tmp_path / "b.jsonl").rename(tmp_path / "in" / "b.jsonl")
    sample(copies, tmp_path / "c", "--budget", "1", "--unit", "documents", *NO_SPLITS)
    assert [path.name for path in (tmp_path / "c" / "train").iterdir()] == ["b.jsonl.gz"]


def test_the_beginning_of_a_document():
    text = "one two\nthree  four"
    assert [Measure("words").beginning(text, size) for size in range(6)] == [
        "",
        "one",
        "one two",
        "one two\nthree",
        text,
        text,
    ]
    assert Measure("bytes").beginning(text, 12) == "one two"
    assert Measure("documents").beginning(text, 0) == ""


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    model = train_sentencepiece(sentences(200, 1), 60)
    (folder / "sentencepiece.model").write_bytes(model)
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces_of(model)))
    return folder


def test_tokens_are_those_that_binarize_writes(tokenizer, tmp_path, capsys):
    """Zero-width spaces, which are no tokens and no white space to Python, half a character, and white space."""
    texts = ["The stone.\n\u200b\n\n \nThe river.", "\u200b", " ", "a \ud800 b", *sentences(30, 2)]
    with write_stream(tmp_path / "in" / "a.jsonl") as (stream, _):
        stream.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    options = ["--unit", "tokens", "--tokenizer", str(tokenizer), *NO_SPLITS]
    said = sample(tmp_path / "in", tmp_path / "out", *options)["counts"]
    assert said["dropped"] == {"not text: half of a surrogate pair": 1}
    binarize = ["data", "binarize", "--tokenizer", str(tokenizer), "--workers", "1", "--quiet"]
    train = ["--train", str(tmp_path / "out" / "train")]
    assert main([*binarize, *train, "--out", str(tmp_path / "bin")]) == 0
    stored = json.loads((tmp_path / "bin" / "manifest.json").read_text())["splits"]["train"]["tokens"]
    assert said["other"]["train: tokens"] == stored > 200
    (tokenizer / "dict.txt").write_text((tokenizer / "dict.txt").read_text() + "more 1\n")
    capsys.readouterr()
    assert sample(tmp_path / "in", tmp_path / "out", *options) is None
    assert "with other settings (tokenizer was " in capsys.readouterr().err


def test_a_file_that_grows_between_the_readings_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.jsonl"
    path.write_text("".join(f'{{"text": "words {number}"}}\n' for number in range(30)))

    def make_plan(*arguments):
        with open(path, "a") as file:
            file.write('{"text": "more", "source": "new"}\n')
        return plan.make_plan(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(command, "make_plan", make_plan)
        assert sample(tmp_path / "in", tmp_path / "out", *NO_SPLITS) is None
    assert "a.jsonl changed after it was read: run the same command again" in capsys.readouterr().err
    assert sample(tmp_path / "in", tmp_path / "out", *NO_SPLITS)["counts"]["kept"] == 31


def test_what_is_added_later_moves_the_cut_for_the_files_before(corpus, tmp_path):
    """The second run finds other cuts, so that parts whose files have not changed are written anew."""
    (tmp_path / "in").mkdir()
    for number, path in enumerate(sorted(corpus.rglob("*.gz"))):
        (tmp_path / "in" / f"{number}.jsonl.gz").write_bytes(path.read_bytes())
        if number == 3:
            sample(tmp_path / "in", tmp_path / "a", "--budget", "900", *NO_SPLITS)
    sample(tmp_path / "in", tmp_path / "a", "--budget", "900", *NO_SPLITS)
    sample(tmp_path / "in", tmp_path / "b", "--budget", "900", *NO_SPLITS)
    assert ids(tmp_path / "a") == ids(tmp_path / "b") and words(rows_of(tmp_path / "a", "train")) == 900
