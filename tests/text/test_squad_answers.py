"""Windows of contexts against BERT's loop, the files of a split, and scores with known values."""

import json
import zipfile

import numpy as np
import pytest

from smlp.errors import UserError
from smlp.text.squad import SquadSplit, score_answers, windows_of

pytest.importorskip("torchmetrics")


def split_of(contexts, questions):
    """A split whose tokens are characters; ``questions`` are (context, length of the question, answers)."""
    lengths = [length for _, length, _ in questions]
    places = [contexts[context].index(answers[0]) if answers else -1 for context, _, answers in questions]
    ends = [
        place + len(answers[0]) - 1 if answers else -1 for place, (_, _, answers) in zip(places, questions, strict=True)
    ]
    return SquadSplit(
        context_tokens=np.array([ord(letter) % 90 + 5 for context in contexts for letter in context]),
        context_starts=np.cumsum([0, *map(len, contexts)]),
        offsets=np.array([(at, at + 1) for context in contexts for at in range(len(context))]),
        question_tokens=np.arange(5, 5 + sum(lengths)),
        question_starts=np.cumsum([0, *lengths]),
        context_of_question=np.array([context for context, _, _ in questions]),
        answer_tokens=np.array([places, ends]).T,
        contexts=contexts,
        ids=[f"q{number}" for number in range(len(questions))],
        answers=[answers for _, _, answers in questions],
    )


def bert_windows(num_tokens, room, stride):
    """``run_squad.py`` of google-research/bert."""
    spans, offset = [], 0
    while offset < num_tokens:
        length = min(num_tokens - offset, room)
        spans.append((offset, length))
        if offset + length == num_tokens:
            break
        offset += min(length, stride)
    return spans


def test_windows_are_those_of_bert():
    for max_tokens, stride, max_question in ((20, 5, 64), (20, 1, 4), (12, 100, 8), (64, 16, 64)):
        lengths = [1, 5, 9, 30]
        contexts = ["x" * size for size in (1, 8, 17, 40, 101)]
        lengths = [size for size in lengths if min(size, max_question) + 3 < max_tokens]
        asked = [(context, size, []) for context in range(5) for size in lengths]
        split = split_of(contexts, asked)
        windows = windows_of(split, max_tokens, stride, max_question)
        expected = []
        for question, (context, size, _) in enumerate(asked):
            kept = min(size, max_question)
            spans = bert_windows(len(contexts[context]), max_tokens - kept - 3, stride)
            expected += [(question, begin, length, kept + 2) for begin, length in spans]
        found = zip(windows.question, windows.begin, windows.length, windows.prefix, strict=True)
        assert list(found) == expected
    with pytest.raises(UserError, match=r"--max-positions 12 .* the 9 tokens of question q0 and 3 symbols"):
        windows_of(split_of(["abc"], [(0, 9, [])]), 12, 4, 64)


def test_a_split_comes_back_from_its_files(tmp_path):
    split = split_of(["ab cd", "éf"], [(0, 2, ["cd"]), (1, 3, [])])
    files = split.files()
    np.savez(tmp_path / "valid.npz", **files["npz"])
    (tmp_path / "valid.json").write_text(json.dumps(files["json"]))
    found = SquadSplit.load(tmp_path, "valid", 100)
    assert found.text_of(0, *found.answer_tokens[0]) == "cd" and found.answers == [["cd"], []]
    assert [tokens.tolist() for tokens in found.tokens_of(1)] == [[7, 8, 9], split.context_tokens[5:].tolist()]
    assert found.has_unanswerable
    for vocab_size, name, content in (
        (20, None, None),
        (100, "valid.npz", b""),
        (100, "valid.npz", b"PK\3\4 and more"),
        (100, "valid.npz", (tmp_path / "valid.npz").read_bytes()[:900]),
        (100, "valid.json", b'{"contexts": []}'),
        (100, "valid.json", json.dumps({**files["json"], "ids": ["q0"]}).encode()),
        (100, "valid.json", json.dumps({**files["json"], "ids": ["q0", "q0"]}).encode()),
        (100, "valid.json", json.dumps({**files["json"], "ids": ["q0", {}]}).encode()),
        (100, "valid.json", json.dumps({**files["json"], "answers": ["cd", []]}).encode()),
        (100, "valid.json", json.dumps({**files["json"], "contexts": [3] * len(split.contexts)}).encode()),
    ):
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        if name:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=r"valid\.npz and valid\.json beside it are damaged, or not from"):
            SquadSplit.load(tmp_path, "valid", vocab_size)
        for path, old in before.items():
            path.write_bytes(old)
    changed = (
        *(("context_of_question", [0, 5]), ("context_of_question", [0, -1]), ("context_of_question", [0.0, 1.0])),
        *(("answer_tokens", None), ("answer_tokens", [[1, 0], [-1, -1]]), ("answer_tokens", [[-1, 1], [-1, -1]])),
        ("offsets", None),
        *(("offsets", files["npz"]["offsets"][:, ::-1]), ("offsets", files["npz"]["offsets"] - [1, 0])),
    )
    for name, value in changed:
        arrays = {**files["npz"], name: files["npz"][name] + 90 if value is None else np.array(value)}
        np.savez(tmp_path / "valid.npz", **arrays)
        with pytest.raises(UserError, match="are damaged, or not from"):
            SquadSplit.load(tmp_path, "valid", 100)
    np.savez_compressed(tmp_path / "valid.npz", **files["npz"])
    with pytest.raises(UserError, match=r"valid\.npz .*\(its arrays are compressed\)"):
        SquadSplit.load(tmp_path, "valid", 100)
    with zipfile.ZipFile(tmp_path / "valid.npz", "w") as archive, archive.open("context_tokens.npy", "w") as entry:
        np.lib.format.write_array_header_1_0(entry, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})
    with pytest.raises(UserError, match=r"valid\.npz .*context_tokens\.npy should have 8,000,000,000,000,000 bytes"):
        SquadSplit.load(tmp_path, "valid", 100)
    with pytest.raises(UserError, match=r"there is no file .*test\.npz"):
        SquadSplit.load(tmp_path, "test", 100)


def row(split, question, text, score=0.0, null=-9.0):
    """A row for an answer that stands in the question's context."""
    first = split.contexts[split.context_of_question[question]].index(text)
    return question, null, score, first, first + len(text) - 1


def test_scores_are_the_official_ones():
    """Articles, punctuation and case do not count; F1 is over words; the best of several right answers counts."""
    split = split_of(["The Denver Broncos won, 24-10."], [(0, 3, ["Denver Broncos", "the Broncos!"])] * 4)
    texts = ["denver broncos".title(), "The Denver Broncos", "Denver Broncos won", "24-10"]
    scores = score_answers(split, np.array([row(split, at, text) for at, text in enumerate(texts)]))
    assert scores.threshold is None and list(scores.predictions.values()) == texts
    assert scores.exact_match == 50 and scores.f1 == pytest.approx((100 + 100 + 80 + 0) / 4)


def test_the_best_answer_of_all_windows_counts_in_any_order():
    split = split_of(["one two three"], [(0, 3, ["two"]), (0, 4, ["three"])])
    rows = [row(split, 1, "one", 1), row(split, 0, "two", 5), row(split, 1, "three", 2), row(split, 0, "one", 4)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        scores = score_answers(split, np.array(rows)[order])
        assert scores.predictions == {"q0": "two", "q1": "three"} and scores.f1 == 100
    assert score_answers(split, np.array(rows[1:2])).predictions == {"q0": "two"}  # questions that were not asked


def test_the_least_score_of_no_answer_counts():
    """A window without the answer is sure that there is none; the one with the answer decides."""
    split = split_of(["one two three"], [(0, 3, ["two"]), (0, 4, [])])
    rows = [row(split, 0, "two", 5, null=1), row(split, 0, "one", 0, null=20), row(split, 1, "one", 5, null=8)]
    scores = score_answers(split, np.array(rows), threshold=0.0)
    assert scores.predictions == {"q0": "two", "q1": ""} and scores.exact_match == 100


def test_answers_without_words_do_not_count():
    """As in evaluate-v2.0.py, where a question without any other has no answer."""
    split = split_of(["the one !"], [(0, 3, ["the", "!"]), (0, 3, ["the", "one"]), (0, 3, [])])
    rows = [row(split, question, "the", 5, null=0) for question in range(3)]
    for threshold, right in ((0.0, [1, 0, 1]), (-9.0, [1, 0, 1])):
        scores = score_answers(split, np.array(rows), threshold=threshold)
        assert scores.exact_match == scores.f1 == pytest.approx(100 * np.mean(right))


def brute_force(difference, answered, null):
    """The best mean F1 of all thresholds."""
    candidates = [-np.inf, *difference]
    return max(np.where(difference > threshold, null, answered).mean() for threshold in candidates)


def test_the_threshold_of_no_answer_is_the_best_one():
    """As in evaluate-v2.0.py; predictions are empty above it."""
    draw = np.random.default_rng(3)
    words = ["zero", "one", "two", "three", "four", "five", "six"]
    for trial in range(30):
        asked = [(0, 3, [words[draw.integers(7)]] if draw.random() < 0.5 else []) for _ in range(9)] + [(0, 3, [])]
        split = split_of([" ".join(words)], asked)
        rows = np.array(
            [row(split, q, words[draw.integers(7)], draw.integers(4), draw.integers(4)) for q in range(10)], float
        )
        scores = score_answers(split, rows)
        difference = rows[:, 1] - rows[:, 2]
        texts = [split.text_of(q, int(rows[q, 3]), int(rows[q, 4])) for q in range(10)]
        answered = np.array([100.0 * (texts[q] in asked[q][2]) for q in range(10)])
        null = np.array([100.0 * (not answers) for _, _, answers in asked])
        assert scores.f1 == pytest.approx(brute_force(difference, answered, null)), trial
        expected = ["" if difference[q] > scores.threshold else texts[q] for q in range(10)]
        assert list(scores.predictions.values()) == expected
        rows[:, 1:3] /= 3  # its threshold, rounded as in the log, gives the same score
        rounded = round(score_answers(split, rows).threshold, 6)
        assert score_answers(split, rows, rounded).f1 == scores.f1
        rows[:, 1:3] *= 3
        given = score_answers(split, rows, threshold=1.0)
        assert given.threshold == 1.0
        assert given.exact_match == pytest.approx(np.where(difference > 1, null, answered).mean())
