"""``smlp data dedup`` against a comparison of all pairs; held-out documents; overlap with zero-shot tasks."""

import gzip
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from zeroshot_data import write_tasks

from data_prep.dedup import command, contamination, groups
from data_prep.dedup.contamination import Index, index_tasks, read_tasks, summary
from data_prep.dedup.files import Lookup, read_partition, spilling
from data_prep.dedup.groups import first_of_each
from data_prep.dedup.signatures import (
    Scheme,
    band_keys,
    ngram_hashes,
    shingles,
    signatures,
    similarity,
    text_hash,
    word_hashes,
    words_of,
)
from data_prep.flow.manifest import read_manifest
from smlp.cli.main import main
from smlp.errors import UserError

SCHEME = Scheme.for_threshold(0.8, 128, 5, 1)
WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in ("r", "st", "nd", "ck", "p")]


def hashes_of(text):
    return word_hashes(words_of(text))


def signature(text, scheme=SCHEME):
    return signatures([shingles(hashes_of(text), scheme.ngram)], scheme)[0]


def test_words():
    assert words_of("Don't  PANIC—it's 42_x!\n") == [b"don", b"t", b"panic", b"it", b"s", b"42", b"x"]
    assert words_of("Cafe\u0301 ÉTÉ “so”\ud800") == ["café".encode(), "été".encode(), b"so"]
    assert words_of("?! —") == []
    assert words_of("दिन, दीन") == ["दिन".encode(), "दीन".encode()]  # day and poor: their vowel signs are no letters
    assert words_of("x\u0331\u030cab ❤\ufe0f") == ["x\u0331\u030cab".encode()]
    assert text_hash("A b", words_of("A b")) == text_hash("a, B.", words_of("a, B."))
    assert text_hash("?", []) != text_hash("!", [])


def test_runs_of_words_are_equal_where_the_words_are():
    hashes = hashes_of("to be or not to be or so")
    keys = ngram_hashes(hashes, 3)
    assert len(keys) == 6 and keys[0] == keys[4] and len(set(keys.tolist())) == 5
    assert len(ngram_hashes(hashes, 9)) == 0 and len(ngram_hashes(hashes, 8)) == 1
    assert ngram_hashes(hashes_of("be to or"), 3)[0] != ngram_hashes(hashes_of("to be or"), 3)[0]


def test_hashes_are_the_same_in_every_process_and_version():
    """Tasks of a job array sign parts of one corpus, perhaps in processes of other settings."""
    assert hashes_of("the lighthouse")[:1].tolist() == [3331141520948189790]
    assert text_hash("x", words_of("THE keeper!")) == (10941074282135894420, 17868793261399424962)
    assert signature("the lighthouse keeper", replace(SCHEME, ngram=2))[:2].tolist() == [1902252643, 685703511]


def jaccard(first, second, n=5):
    sets = []
    for text in (first, second):
        words = words_of(text)
        sets.append({tuple(words[k : k + n]) for k in range(max(len(words) - n + 1, 1))})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def changed(text, number, draw):
    """A copy with some words replaced, other capitals and punctuation."""
    words = text.split()
    for place in draw.sample(range(len(words)), number):
        words[place] = draw.choice(WORDS) + "x"
    return ", ".join(word.capitalize() for word in words)


def test_signatures_estimate_similarity():
    draw = random.Random(2)
    for number in (0, 1, 4, 15):
        text = " ".join(draw.choices(WORDS, k=400))
        other = changed(text, number, draw)
        estimate = similarity(signature(text), signature(other)[None])[0]
        assert abs(estimate - jaccard(text, other)) < 0.12
        assert (estimate == 1) == (number == 0)


def test_long_documents_are_signed_in_pieces_as_in_one():
    from datasketch import MinHash

    keys = [shingles(hashes_of(" ".join(random.Random(1).choices(WORDS, k=size))), 5) for size in (3000, 3, 1028)]
    together = signatures(keys, SCHEME)
    for row, key in zip(together, keys, strict=True):
        whole = MinHash(num_perm=128, seed=1, hashfunc=int)
        whole.update_batch(key.tolist())
        assert (row == whole.hashvalues).all()


def test_bands_that_share_all_their_entries_and_only_those_have_one_key():
    values = np.random.default_rng(0).integers(0, 1 << 32, (2, 128), dtype=np.uint32)
    values[1, 2 * SCHEME.rows : 3 * SCHEME.rows] = values[0, 2 * SCHEME.rows : 3 * SCHEME.rows]
    keys = band_keys(values, SCHEME)
    assert keys.shape == (2, SCHEME.bands)
    assert np.flatnonzero(keys[0] == keys[1]).tolist() == [2]
    shared = {similarity: 1 - (1 - similarity**SCHEME.rows) ** SCHEME.bands for similarity in (0.3, 0.8)}
    assert shared[0.8] > 0.9 and shared[0.3] < 0.05


def test_spilled_rows_come_back_by_partition(tmp_path):
    draw = np.random.default_rng(1)
    blocks = [draw.integers(0, 1 << 63, (size, 2)).astype(np.uint64) for size in (5, 0, 300, 1)]
    with spilling(tmp_path / "a", 7) as add:
        for block in blocks:
            add(block)
    rows = np.concatenate(blocks)
    for partition in range(7):
        assert (read_partition(tmp_path / "a", 2, 7, partition) == rows[rows[:, 0] % np.uint64(7) == partition]).all()


def slow_first_of_each(number, pairs):
    first = list(range(number))
    for _ in range(number):
        for a, b in pairs:
            first[a] = first[b] = min(first[a], first[b])
    return first


def test_components_agree_with_a_slow_search(tmp_path):
    draw = random.Random(5)
    for number, count in [(1, 0), (30, 10), (60, 40), (60, 200)]:
        pairs = [sorted(draw.choices(range(number), k=2)) for _ in range(count)]
        files = []
        for part in range(3):
            files.append(tmp_path / str(part))
            np.array(pairs[part::3], dtype=np.int64).tofile(files[-1])
        assert first_of_each(number, files).tolist() == slow_first_of_each(number, pairs)
    chain = [[k, k + 1] for k in reversed(range(500))]
    np.array(chain, dtype=np.int64).tofile(files[0])
    assert not first_of_each(501, files[:1]).any()


class Signatures:
    """Of documents in memory, as ``Lookup`` reads them from files."""

    def __init__(self, values):
        self.values = values

    def signatures(self, documents):
        return self.values[documents]


def test_documents_in_one_band_are_compared(monkeypatch):
    """Of 0, 1, 2, 3 each differs from the next in 3 of 16 entries, and 9 from all in most."""
    values = np.zeros((10, 16), dtype=np.uint32)
    for number in range(1, 4):
        values[number] = values[number - 1]
        values[number, 3 * number : 3 * number + 3] = number
    values[9, 4:] = 99
    documents = np.array([0, 1, 2, 3, 9])
    lookup = Signatures(values)
    assert list(groups.alike(documents, lookup, 0.8)) == [(0, 1), (1, 2), (2, 3)]
    assert list(groups.alike(documents, lookup, 0.6)) == [(0, 1), (0, 2), (1, 3)]
    monkeypatch.setattr(groups, "ALL_PAIRS", 4)
    assert list(groups.alike(documents, lookup, 0.8)) == [(0, 1), (2, 3)]


def corpus(draw):
    """(source, text) of documents among which there are copies, exact and near, within and across sources."""
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(60, 200))) for _ in range(60)]
    for _ in range(50):
        text = draw.choice(texts)
        texts.append(changed(text, draw.choice([0, 0, 1, len(text.split()) // 2]), draw))
    texts += ["too short", "Too short!", "!!", "!!", "??", " ".join(texts[3].split()[:30])]
    draw.shuffle(texts)
    return [(draw.choice(["books", "web"]), text) for text in texts]


def expected_of(documents, threshold=0.8):
    """Kept texts, by comparing all pairs: (position, source, text) in the order of documents."""
    pairs = []
    for later, (_, text) in enumerate(documents):
        for first in range(later):
            other = documents[first][1]
            words, others = words_of(text), words_of(other)
            if (words == others if words and others else text == other) or (
                words and others and jaccard(text, other) >= threshold
            ):
                pairs.append((first, later))
    return slow_first_of_each(len(documents), pairs)


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def run(*options, out):
    assert main(["data", "dedup", *map(str, options), "--out", str(out), "--quiet"]) == 0
    return read_manifest(out, "dedup")


def files_of(out):
    paths = [path for path in [*out.iterdir(), *(out / ".reports").iterdir()] if path.is_file()]
    return {path.name: path.read_bytes() for path in paths if path.name != "manifest.json"}


def without(manifest, *names):
    return {**manifest, "settings": {k: v for k, v in manifest["settings"].items() if k not in names}}


@pytest.mark.parametrize("kept", ["", "x", "0", "99999999999"])
def test_a_damaged_number_of_partitions_is_named(tmp_path, kept, capsys):
    text = tmp_path / "text.txt"
    text.write_text("one\n\ntwo")
    run("--in", text, out=tmp_path / "out")
    (tmp_path / "out" / ".work" / "num_partitions").write_text(kept)
    text.write_text("one\n\nthree")
    assert main(["data", "dedup", "--in", str(text), "--out", str(tmp_path / "out"), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert f"num_partitions is damaged: it holds {kept!r:.40}" in said and ": remove it" in said
    (tmp_path / "out" / ".work" / "num_partitions").unlink()
    run("--in", text, out=tmp_path / "out")


def test_against_all_pairs(tmp_path):
    documents = corpus(random.Random(7))
    held_out, documents = documents[:12], documents[12:]
    paths = {}
    for name in ("books", "web"):
        rows = [{"id": str(n), "text": text} for n, (source, text) in enumerate(documents) if source == name]
        paths[name] = write_jsonl(tmp_path / f"{name}.jsonl", rows)
    own = tmp_path / "own.txt"
    own.write_text("\n\n".join(text for _, text in held_out))
    order = [(text, "own", None) for _, text in held_out]
    order += [(text, s, str(n)) for name in ("web", "books") for n, (s, text) in enumerate(documents) if s == name]
    first = expected_of([(None, text) for text, _, _ in order])
    kept = {(s, i) for k, (text, s, i) in enumerate(order) if first[k] == k and i}

    options = ["--in", paths["web"], paths["books"], "--held-out", own]
    manifest = run(*options, "--workers", 1, out=tmp_path / "out")
    found = {(name, row["id"]) for name in paths for row in read_rows(tmp_path / "out" / f"{name}.jsonl.gz")}
    assert found == kept
    removed = read_rows(tmp_path / "out" / ".reports" / "removed.jsonl.gz")
    names = {(s, i): k for k, (_, s, i) in enumerate(order)}
    assert {(row["source"], row["id"]) for row in removed} == {(s, i) for _, s, i in order if i} - kept
    for row in removed:
        place, text = names[row["source"], row["id"]], order[names[row["source"], row["id"]]][0]
        winner, source, identity = order[first[place]]
        assert row["kept_source"] == source and (identity is None or row["kept_id"] == identity)
        assert row["held_out"] == (identity is None)
        same_words = words_of(text) == words_of(winner)
        assert row["kind"] == ("exact" if same_words else "near")
        assert not same_words or row["similarity"] == 1
        assert abs(row["similarity"] - (1 if text == winner else jaccard(text, winner))) < 0.15
    counts = manifest["counts"]
    assert counts["documents_in"] == len(documents) and counts["kept"] == len(kept)
    assert set(counts["dropped"]) == {
        *("exact duplicate", "near duplicate"),
        *("exact duplicate of a held-out document", "near duplicate of a held-out document"),
    }
    table = {(row["removed_from"], row["because_of"]): 0 for row in manifest["pairs"]}
    for row in manifest["pairs"]:
        table[row["removed_from"], row["because_of"]] += row["documents"]
    assert sum(table.values()) == len(removed) and ("books", "web") in table and ("web", "books") not in table
    assert manifest["held_out"]["documents_in"] == len(held_out)

    many = run(*options, "--workers", 2, "--partitions", 5, out=tmp_path / "many")
    assert files_of(tmp_path / "many") == files_of(tmp_path / "out")
    assert without(many, "partitions") == without(manifest, "partitions")


def test_exact_only_and_nothing_in_common(tmp_path):
    text = " ".join(random.Random(1).choices(WORDS, k=80))
    near = changed(text, 1, random.Random(1))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text}, {"text": near}, {"text": text.upper()}])
    assert run("--in", path, "--no-near", "--workers", 1, out=tmp_path / "a")["counts"]["kept"] == 2
    assert run("--in", path, "--workers", 1, out=tmp_path / "b")["counts"]["kept"] == 1
    assert run("--in", path, "--threshold", 1, "--workers", 1, out=tmp_path / "c")["counts"]["kept"] == 2


def test_what_changes_is_done_again_and_nothing_else(tmp_path):
    draw = random.Random(3)
    texts = [" ".join(draw.choices(WORDS, k=80)) for _ in range(4)]
    first = write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": text} for text in texts])
    write_jsonl(tmp_path / "in" / "b.jsonl", [{"text": text} for text in texts[:2]] + [{"text": "of its own"}])
    options = ["--in", tmp_path / "in", "--workers", 1]
    before = run(*options, out=tmp_path / "out")
    assert before["counts"]["kept"] == 5
    times = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out" / ".work").iterdir() if "signatures" in path.name
    }
    assert run(*options, out=tmp_path / "out") == before
    assert all(path.stat().st_mtime_ns == then for path, then in times.items())
    write_jsonl(first, [{"text": text} for text in texts[1:]])  # b's first document is now the only copy
    assert run(*options, out=tmp_path / "out")["counts"]["kept"] == 5
    assert [row["text"] for row in read_rows(tmp_path / "out" / "b.jsonl.gz")] == [texts[0], "of its own"]
    assert files_of(tmp_path / "out") == (run(*options, out=tmp_path / "new"), files_of(tmp_path / "new"))[1]


def test_signatures_of_another_kind_of_words_are_made_anew(tmp_path, monkeypatch):
    """Those of an earlier version are not compared with those of this one."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "One and the same text."}])
    options = ["--in", tmp_path / "a.jsonl", "--workers", 1]
    run(*options, out=tmp_path / "out")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "One and the same text."}])
    monkeypatch.setattr(command, "WORDS", 3)
    signed, sign = [], command.sign_part
    monkeypatch.setattr(
        command, "sign_part", lambda part, out, settings: signed.append(part.name) or sign(part, out, settings)
    )
    run(*options, out=tmp_path / "out")
    assert signed == ["a"]


def test_what_was_written_for_an_input_that_is_gone_goes_too(tmp_path, tasks):
    """Also when the tasks have changed, whose n-grams are in the name of the first phase."""
    folder, _ = tasks
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [{"text": f"the text of {name}"}])
    options = ["--in", tmp_path / "in", "--decontaminate", folder, "--workers", 1]
    run(*options, out=tmp_path / "out")
    (tmp_path / "in" / "b.jsonl").unlink()
    manifest = run(*options, out=tmp_path / "out")
    assert {row["name"] for row in manifest["outputs"]} == {"a.jsonl.gz", "c.jsonl.gz"}
    assert {path.name for path in (tmp_path / "out").glob("*.gz")} == {"a.jsonl.gz", "c.jsonl.gz"}
    (tmp_path / "in" / "c.jsonl").unlink()
    write_jsonl(folder / "copa" / "val.jsonl", [row_of_copa("a premise that is made of quite a few words here")])
    manifest = run(*options, out=tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*.gz")} == {"a.jsonl.gz"}
    assert {path.name for path in (tmp_path / "out" / ".work").glob("*.names")} == {"a.names"}
    assert manifest == run(*options, out=tmp_path / "new")


def test_held_out_parts_have_names_of_their_own(tmp_path):
    for name, text in (("v.txt", "one"), ("held-out+v.txt", "two"), ("held-out+v+2.txt", "One")):
        (tmp_path / name).write_text(text)
    inputs = [tmp_path / "held-out+v.txt", tmp_path / "held-out+v+2.txt"]
    manifest = run("--in", *inputs, "--held-out", tmp_path / "v.txt", "--workers", 1, out=tmp_path / "out")
    assert manifest["counts"]["kept"] == 1
    assert manifest["counts"]["dropped"] == {"exact duplicate of a held-out document": 1}


def test_the_number_of_partitions_stays_when_inputs_change(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": "one two three"}])
    options = ["--in", tmp_path / "in", "--workers", 1]
    run(*options, out=tmp_path / "out")
    signed = tmp_path / "out" / ".work" / "a.signatures"
    before = signed.stat().st_mtime_ns
    monkeypatch.setattr(command, "PARTITION_BYTES", 16)
    write_jsonl(tmp_path / "in" / "b.jsonl", [{"text": "One, two, three!"}, {"text": "four"}])
    manifest = run(*options, out=tmp_path / "out")
    assert manifest["counts"]["kept"] == 2 and signed.stat().st_mtime_ns == before
    assert len(list((tmp_path / "out" / ".work" / "partitions").iterdir())) == 1
    assert manifest == run(*options, out=tmp_path / "new")
    assert (
        len(list((tmp_path / "new" / ".work" / "partitions").iterdir()))
        == 1 + sum(path.stat().st_size for path in (tmp_path / "in").iterdir()) // 16
    )


def test_reports_are_no_documents_of_the_next_step(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one two"}, {"text": "One, two."}])
    run("--in", path, "--workers", 1, "--no-near", out=tmp_path / "first")
    second = run("--in", tmp_path / "first", "--workers", 1, "--no-near", out=tmp_path / "second")
    assert second["counts"]["documents_in"] == second["counts"]["kept"] == 1


def test_a_corpus_may_be_called_like_a_report(tmp_path, tasks, capsys):
    folder, words = tasks
    for name, text in (("removed", words[30]), ("contaminated", "one two")):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [{"text": text}, {"text": text.upper()}])
    options = ["--decontaminate", folder, "--workers", 1]
    manifest = run("--in", tmp_path / "in", *options, out=tmp_path / "first")
    assert manifest["counts"]["kept"] == 2
    output = capsys.readouterr().out
    assert all(f"{tmp_path}/first/.reports/{name}.jsonl.gz" in output for name in ("removed", "contaminated"))
    rows = [row for name in ("removed", "contaminated") for row in read_rows(tmp_path / "first" / f"{name}.jsonl.gz")]
    assert [row["text"] for row in rows] == [words[30], "one two"]
    assert len(read_rows(tmp_path / "first" / ".reports" / "contaminated.jsonl.gz")) == 2
    second = run("--in", tmp_path / "first", *options, out=tmp_path / "second")
    assert second["counts"]["documents_in"] == second["counts"]["kept"] == 2


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": "x"}])
    (tmp_path / "in" / "b.pdf").write_text("")
    assert main(["data", "dedup", "--in", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert f"not read in {tmp_path / 'in'}: b.pdf" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["one\n\nother words", "one\n\ntwo\n\nthree"])
def test_a_file_that_changes_between_the_phases_is_named(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "text.txt"
    path.write_text("one\n\none")
    first_of_each = command.first_of_each
    monkeypatch.setattr(command, "first_of_each", lambda *of: (path.write_text(text), first_of_each(*of))[1])
    assert main(["data", "dedup", "--in", str(path), "--out", str(tmp_path / "out"), "--quiet"]) == 1
    assert "text.txt changed after it was read: run the same command again" in capsys.readouterr().err


def test_losses_and_defects_are_counted(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbad\n{"text": "two"}\n')
    (tmp_path / "b.txt").touch()
    held_out = tmp_path / "own.jsonl"
    held_out.write_text('bad\n{"text": "TWO"}\n')
    manifest = run("--in", path, tmp_path / "b.txt", "--held-out", held_out, "--workers", 1, out=tmp_path / "out")
    dropped = {"not JSON": 1, "exact duplicate of a held-out document": 1}
    assert manifest["counts"] == {"documents_in": 3, "kept": 1, "dropped": dropped, "other": {}}
    assert manifest["held_out"]["dropped"] == {"not JSON": 1}
    output = capsys.readouterr().out
    assert "empty file" in output and "held out: 1 documents, 1 not JSON" in output


def row_of_copa(premise):
    return {"premise": premise, "choice1": "aa", "choice2": "bb", "question": "cause", "label": 0}


@pytest.fixture
def tasks(tmp_path):
    """Six tasks; the scored split of COPA and HellaSwag is written by hand."""
    folder = write_tasks(tmp_path / "tasks")
    words = {number: " ".join(WORDS[start : start + number]) for start, number in ((0, 10), (20, 7), (40, 30))}
    rows = [
        row_of_copa(words[10]),
        {"premise": words[7], "choice1": "", "choice2": "", "question": "cause", "label": 0},
    ]
    write_jsonl(folder / "copa" / "val.jsonl", rows)
    row = {"activity_label": "x", "ctx_a": words[30], "ctx_b": "", "endings": list("abcd"), "label": 0, "ind": 4}
    write_jsonl(folder / "hellaswag" / "hellaswag_val.jsonl", [row])
    return folder, words


def test_overlap_with_tasks(tmp_path, tasks, capsys):
    folder, words = tasks
    rows = {
        "short record": f"before {words[10]} AA after",
        "not its ending": f"before {words[10]} after",
        "thirteen": "so, " + " ".join(words[30].split()[4:17]).title() + "; and on",
        "twelve": " ".join(words[30].split()[4:16]) + " and on",
        "seven": words[7],
        "copy of thirteen": "SO " + " ".join(words[30].split()[4:17]) + " and on",
    }
    long = " ".join(random.Random(8).choices(WORDS, k=120)) + " " + " ".join(words[30].split()[4:17])
    rows["long"], rows["like long"] = long, long.replace(words[30].split()[10], "other")
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": name, "text": text} for name, text in rows.items()])
    options = ["--in", path, "--decontaminate", folder, "--workers", 1]
    manifest = run(*options, out=tmp_path / "report")
    by_task = {row.pop("task"): row for row in manifest["contamination"]}
    assert len(by_task) == 6
    assert by_task["copa/val"] == {
        **{"documents": 1, "ngrams": 1, "records_found": 1, "records": 2, "records_too_short": 1}
    }
    assert by_task["hellaswag/val"] == {
        **{"documents": 3, "ngrams": 3, "records_found": 1, "records": 1, "records_too_short": 0}
    }
    assert by_task["piqa/valid"]["documents"] == 0
    assert manifest["counts"]["dropped"] == {"exact duplicate": 1, "near duplicate": 1}
    hits = {row["id"]: row["tasks"] for row in read_rows(tmp_path / "report" / ".reports" / "contaminated.jsonl.gz")}
    assert set(hits) == {"short record", "thirteen", "copy of thirteen", "long"}
    assert hits["short record"] == {"copa/val": {"ngrams": 1, "text": f"{words[10]} aa"}}
    output = capsys.readouterr().out
    assert "hellaswag/val" in output and "no file of" not in output
    shutil.rmtree(folder / "piqa")
    run(*options, out=tmp_path / "fewer")
    assert f"no file of piqa in {folder}" in capsys.readouterr().out

    removed = run(*options, "--decontaminate-action", "remove", out=tmp_path / "remove")
    assert removed["counts"]["dropped"] == {"contaminated": 4}  # so that none of them is the copy that is kept
    assert {row["task"]: row["documents"] for row in removed["contamination"]}["hellaswag/val"] == 3
    kept = [row["id"] for row in read_rows(tmp_path / "remove" / "a.jsonl.gz")]
    assert kept == ["not its ending", "twelve", "seven", "like long"]
    smaller = run(*options, "--decontaminate-ngram", 12, out=tmp_path / "twelve")
    assert {row["task"]: row["documents"] for row in smaller["contamination"]}["hellaswag/val"] == 4


def test_what_belongs_to_another_record_is_signed_anew(tmp_path, tasks):
    """The n-grams stay the same, and those of another command in the same folder are left alone."""
    folder, words = tasks
    inputs = tmp_path / "in"
    inputs.mkdir()
    write_jsonl(inputs / "a.jsonl", [{"id": "found", "text": f"before {words[10]} AA after"}])
    options = ["--in", inputs, "--decontaminate", folder, "--workers", 1]
    run(*options, out=tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out" / ".work" / "tasks").rglob("*.bin")}
    rows = (folder / "copa" / "val.jsonl").read_text().splitlines()
    (folder / "copa" / "val.jsonl").write_text("\n".join(reversed(rows)))
    contamination._arrays.cache_clear()  # as in another process
    write_jsonl(inputs / "b.jsonl", [{"id": "again", "text": f"so {words[10]} AA again"}])
    (copa,) = (row for row in run(*options, out=tmp_path / "out")["contamination"] if row["task"] == "copa/val")
    assert (copa["documents"], copa["records_found"], copa["records"]) == (2, 1, 2)
    assert len(before) == 3 and all(file.read_bytes() == held for file, held in before.items())


def test_one_overlap_may_belong_to_several_tasks(tmp_path, tasks):
    _, words = tasks
    texts = {"a/x": [[words[30]], [words[30] + " more"]], "b/x": [["other"], [words[30][:120]]]}
    indexed = index_tasks(texts, 13, tmp_path / "index")
    index = Index(indexed)
    assert set(index.hits(hashes_of(words[30]))) == {"a/x", "b/x"}
    rows = summary(indexed, [index.facts()])
    assert [(row["records_found"], row["records"], row["records_too_short"]) for row in rows] == [(2, 2, 0), (1, 2, 1)]
    assert index.hits(hashes_of("nothing of it")) == {} and index.hits(hashes_of("")) == {}
    with pytest.raises(UserError, match="has 8 words"):
        index_tasks({"a/x": [["short"]]}, 13, tmp_path / "none")


def test_splits_of_tasks(tasks):
    folder, _ = tasks
    scoring, everything = (read_tasks(folder, splits) for splits in ("scoring", "all"))
    assert len(scoring) == 6 and "copa/train" in everything and "copa/train" not in scoring
    assert all(everything[name] == texts for name, texts in scoring.items())
    assert all("_" not in text for record in scoring["winogrande/dev"] for text in record)
    assert all("@placeholder" not in text for record in scoring["record/val"] for text in record)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threshold", "0"], "--threshold must be at least 0.1, got 0.0"),
        (["--num-perm", "1"], "--num-perm must be at least 16, got 1"),
        (["--ngram", "0"], "--ngram must be at least 1, got 0"),
        (["--partitions", "0"], "--partitions must be at least 1, got 0"),
        (["--partitions", "4097"], "--partitions must be at most 4,096, got 4097"),
        (["--decontaminate", "."], "holds none of the files that 'smlp zeroshot --data-dir' reads"),
        (["--held-out", "a.jsonl"], "is read twice"),
        (["--decontaminate-action", "remove"], "would not be used: it is for --decontaminate"),
        (["--no-near", "--threshold", "0.5"], "--threshold would not be used: it is for near duplicates"),
        (["--no-near", "--seed", "5"], "--seed would not be used: it is for near duplicates"),
    ],
)
def test_wrong_options(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), [{"text": "x"}])
    assert main(["data", "dedup", "--in", "a.jsonl", "--out", "out", *options]) == 1
    assert message in capsys.readouterr().err


def test_intermediate_files_that_cannot_be_read_are_named(tmp_path):
    (path := tmp_path / "a").symlink_to("/proc/self/mem")
    lookup = Lookup(None, 16)
    reads = (lambda: command._gather(tmp_path, "removed.jsonl.gz", ["a"]), lambda: lookup._read(path, 0, 8))
    for read in reads:
        with pytest.raises(OSError, match="error") as caught:
            read()
        assert caught.value.filename == str(path)
    lookup.close()
