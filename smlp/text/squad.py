"""Question answering in the form of SQuAD: the files of a split, windows of contexts, and scores of answers.

``smlp data squad`` writes a folder with ``dict.txt``, the tokenizer's files and, for each split, ``SPLIT.npz`` and
``SPLIT.json``: the arrays and the lists of :class:`SquadSplit`, by their names.

Letters: ``C`` contexts, ``Q`` questions, ``N`` tokens of all contexts, ``M`` of all questions, ``W`` windows.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import string
import tokenize
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.files import read_text, regular_file
from smlp.launch.machine import let_torchvision_load
from smlp.text.binarized import check_recorded

NO_ANSWER = -1  # in place of a token
_ARRAYS = (
    *("context_tokens", "context_starts", "offsets", "question_tokens", "question_starts", "context_of_question"),
    "answer_tokens",
)
_LISTS = ("contexts", "ids", "answers")


@dataclass(frozen=True)
class SquadSplit:
    """Tokens, offsets and answers of a split."""

    context_tokens: np.ndarray  # (N,) without a symbol at either end
    context_starts: np.ndarray  # (C + 1,) where the tokens of each context begin, and N
    offsets: np.ndarray  # (N, 2) characters of each token in its context: the first, and one after the last
    question_tokens: np.ndarray  # (M,)
    question_starts: np.ndarray  # (Q + 1,)
    context_of_question: np.ndarray  # (Q,)
    answer_tokens: np.ndarray  # (Q, 2) first and last token of the first answer in its context, or NO_ANSWER twice
    contexts: list[str]  # C texts
    ids: list[str]  # Q names
    answers: list[list[str]]  # Q lists of texts; empty where the context has no answer

    @property
    def has_unanswerable(self) -> bool:
        """Return whether some questions have no answer, as in version 2 of SQuAD."""
        return not all(self.answers)

    def tokens_of(self, question: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a question and of its context."""
        context = self.context_of_question[question]
        return (
            self.question_tokens[slice(*self.question_starts[question : question + 2])],
            self.context_tokens[slice(*self.context_starts[context : context + 2])],
        )

    def text_of(self, question: int, first: int, last: int) -> str:
        """Return the text from token ``first`` to ``last`` of a question's context."""
        context = self.context_of_question[question]
        start = self.context_starts[context]
        return self.contexts[context][self.offsets[start + first, 0] : self.offsets[start + last, 1]]

    def files(self) -> dict[str, Any]:
        """Return what ``SPLIT.npz`` and ``SPLIT.json`` hold: ``{"npz": arrays, "json": lists}``, each by name."""
        return {
            "npz": {name: getattr(self, name) for name in _ARRAYS},
            "json": {name: getattr(self, name) for name in _LISTS},
        }

    @classmethod
    def load(cls, folder: Path, split: str, vocab_size: int) -> SquadSplit:
        """Read the files of a split.

        Raises:
            UserError: one is missing or damaged, they do not fit each other, or a token is not in the dictionary.
        """
        arrays_path, texts_path = (regular_file(folder / f"{split}.{suffix}", "file") for suffix in ("npz", "json"))
        check_recorded(folder / split, suffixes=("npz", "json"))
        try:
            with np.load(arrays_path, allow_pickle=False) as arrays:
                _check_sizes(arrays.zip, arrays_path.stat().st_size)
                found = cls(**{name: arrays[name] for name in _ARRAYS}, **json.loads(read_text(texts_path)))
            found._check(vocab_size)
        except (OSError, EOFError, ValueError, TypeError, LookupError, zipfile.BadZipFile, RuntimeError) as error:
            raise UserError(
                f"{arrays_path} and {texts_path.name} beside it are damaged, or not from 'smlp data squad' ({error})"
            ) from None
        return found

    def _check(self, vocab_size: int) -> None:
        num_contexts, num_questions = len(self.contexts), len(self.ids)
        shapes = {
            "context_starts": (num_contexts + 1,),
            "offsets": (len(self.context_tokens), 2),
            "question_starts": (num_questions + 1,),
            "context_of_question": (num_questions,),
            "answer_tokens": (num_questions, 2),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, not {shape}")
        for name in _ARRAYS:
            if getattr(self, name).dtype.kind not in "iu":
                raise ValueError(f"{name} has type {getattr(self, name).dtype}, not whole numbers")
        if not all(isinstance(text, str) for text in (*self.contexts, *self.ids, *itertools.chain(*self.answers))):
            raise ValueError("a context, an id or an answer is no text")
        if not all(isinstance(texts, list) for texts in self.answers):
            raise ValueError("the answers of a question are no list")
        if len(set(self.ids)) < num_questions:
            raise ValueError("two questions have one id")
        for name in ("context", "question"):
            tokens, starts = getattr(self, f"{name}_tokens"), getattr(self, f"{name}_starts")
            if starts[0] or starts[-1] != len(tokens) or np.any(np.diff(starts) < 1):
                raise ValueError(f"{name}_starts do not cover {len(tokens)} tokens")
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise ValueError(f"the dictionary has {vocab_size} symbols, but {name}_tokens has {tokens.max()}")
        lengths = np.diff(self.context_starts)
        if np.any((self.context_of_question < 0) | (self.context_of_question >= num_contexts)):
            raise ValueError(f"there are {num_contexts} contexts, but a question has another one")
        if np.any((self.answer_tokens < NO_ANSWER) | (self.answer_tokens >= lengths[self.context_of_question, None])):
            raise ValueError("an answer ends outside of its context")
        first, last = self.answer_tokens.T
        if np.any((first > last) | ((first == NO_ANSWER) != (last == NO_ANSWER))):
            raise ValueError("an answer ends before it begins")
        begin_N, end_N = self.offsets.T
        if np.any((begin_N < 0) | (end_N > np.repeat([len(text) for text in self.contexts], lengths))):
            raise ValueError("a token lies outside of its context")
        if np.any(begin_N > end_N):
            raise ValueError("a token ends before it begins")
        if len(self.answers) != num_questions or not num_questions:
            raise ValueError(f"{num_questions} ids, {len(self.answers)} answers")


def _check_sizes(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Refuse arrays that are larger than their file, before they are made."""
    for name in _ARRAYS:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its arrays are compressed")
        with archive.open(entry) as file:
            if (version := np.lib.format.read_magic(file)) != (1, 0):
                raise ValueError(f"{entry.filename} is of version {version}")
            try:
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            except (MemoryError, tokenize.TokenError):  # of Python's parser
                raise ValueError(f"the header of {entry.filename} is damaged") from None
        if (wanted := math.prod(shape) * dtype.itemsize) > min(entry.file_size, num_bytes):
            raise ValueError(f"{entry.filename} should have {wanted:,} bytes, but is shorter")


@dataclass(frozen=True)
class Windows:
    """Parts of contexts that fit into a model together with their question: ``<s> question </s> part </s>``."""

    question: np.ndarray  # (W,) number of the question
    begin: np.ndarray  # (W,) the part's first token in the context
    length: np.ndarray  # (W,) tokens of the part
    prefix: np.ndarray  # (W,) tokens before the part


def windows_of(split: SquadSplit, max_tokens: int, stride: int, max_question: int) -> Windows:
    """Cut every context as BERT does: windows begin every ``stride`` tokens until one reaches the end of the context.

    Args:
        split: with the questions.
        max_tokens: of a window, with the question and three symbols.
        stride: tokens between the beginnings of windows; the tokens of a part where those are fewer.
        max_question: tokens of a question; what is beyond them is cut off.

    Raises:
        UserError: a question leaves no room for the context.
    """
    rows = []
    for question, context in enumerate(split.context_of_question):
        question_length = min(int(np.diff(split.question_starts[question : question + 2])[0]), max_question)
        context_length = int(np.diff(split.context_starts[context : context + 2])[0])
        room = max_tokens - question_length - 3
        if room < 1:
            raise UserError(
                f"--max-positions {max_tokens} leaves no room for a context after the {question_length} tokens of "
                f"question {split.ids[question]} and 3 symbols: raise it, or lower --max-query-length {max_question}"
            )
        begin = 0
        while True:
            rows.append((question, begin, min(room, context_length - begin), question_length + 2))
            if begin + room >= context_length:
                break
            begin += min(stride, room)
    return Windows(*np.array(rows, np.int64).T)


@dataclass(frozen=True)
class SquadScores:
    """Exact match and F1 in percent, over ``predictions`` (texts by question id, "" for no answer).

    ``threshold``: a question gets no answer if the score of "no answer" exceeds that of its best answer by more than
    this; None for splits in which every question has an answer.
    """

    exact_match: float
    f1: float
    threshold: float | None
    predictions: dict[str, str]


def score_answers(split: SquadSplit, rows_W5: np.ndarray, threshold: float | None = None) -> SquadScores:
    """Score the best answers of windows by SQuAD's exact match and F1.

    A question's answer is the best one of its windows; its score of "no answer" is the least of its windows (Devlin et
    al., 2019, and their code).

    Args:
        split: with the questions.
        rows_W5: of any windows in any order: question, score of "no answer", score of the best answer, its first and
            its last token in the context. Questions without a row are not scored.
        threshold: see :class:`SquadScores`; None chooses the one with the best F1 on these questions.

    Raises:
        UserError: torchmetrics is not installed.
    """
    measure = answer_metric()
    order_W = np.lexsort((-rows_W5[:, 2], rows_W5[:, 0]))  # by question, the best answer first
    rows_W5 = rows_W5[order_W]
    question_Q, first_Q = np.unique(rows_W5[:, 0].astype(np.int64), return_index=True)
    null_Q = np.minimum.reduceat(rows_W5[:, 1], first_Q)
    best_Q5 = rows_W5[first_Q]
    texts = [split.text_of(int(row[0]), int(row[3]), int(row[4])) for row in best_Q5]
    right_Q = [split.answers[question] for question in question_Q]
    if split.has_unanswerable:  # as in evaluate-v2.0.py
        right_Q = [[answer for answer in answers if _has_words(answer)] for answers in right_Q]
    answer_Q2 = np.array([measure(text, answers) for text, answers in zip(texts, right_Q, strict=True)])
    if split.has_unanswerable:
        null_Q2 = np.array([(0.0, 0.0) if answers else (100.0, 100.0) for answers in right_Q])
        difference_Q = null_Q - best_Q5[:, 2]
        if threshold is None:
            threshold = _best_threshold(difference_Q, answer_Q2[:, 1], null_Q2[:, 1])
        is_null_Q = difference_Q > threshold
        answer_Q2 = np.where(is_null_Q[:, None], null_Q2, answer_Q2)
        texts = ["" if is_null else text for text, is_null in zip(texts, is_null_Q, strict=True)]
    else:
        threshold = None
    exact_match, f1 = answer_Q2.mean(axis=0).tolist()
    predictions = {split.ids[question]: text for question, text in zip(question_Q, texts, strict=True)}
    return SquadScores(exact_match, f1, threshold, predictions)


def _has_words(answer: str) -> bool:
    """Return whether more than punctuation and articles, which do not count, is in an answer."""
    plain = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return bool(re.sub(r"\b(a|an|the)\b|\s", "", plain))


def _best_threshold(difference_Q: np.ndarray, answered_Q: np.ndarray, null_Q: np.ndarray) -> float:
    """Return the threshold with the best mean, where questions up to it are answered and the others are not.

    It is halfway between the last question that is answered and the next one, so that rounding it changes nothing.
    """
    order_Q = np.argsort(difference_Q, kind="stable")
    sorted_Q = difference_Q[order_Q]
    gain_Q = np.cumsum((answered_Q - null_Q)[order_Q])
    is_last_Q = np.append(np.diff(sorted_Q) > 0, True)  # equal ones are answered together
    best = int(np.argmax(np.where(is_last_Q, gain_Q, -np.inf)))
    if gain_Q[best] <= 0:  # answer none
        return float(sorted_Q[0]) - 1
    return float(sorted_Q[best : best + 2].mean()) if best + 1 < sorted_Q.size else float(sorted_Q[best]) + 1


def answer_metric() -> Callable[[str, list[str]], tuple[float, float]]:
    """Return a function of a prediction and the right answers: exact match and F1, each 0 to 100.

    Raises:
        UserError: torchmetrics is not installed.
    """
    let_torchvision_load()
    try:
        from torchmetrics.functional.text import squad
    except ImportError:
        raise UserError("the scores of SQuAD need torchmetrics: pip install -e '.[squad]'") from None

    def measure(prediction: str, answers: list[str]) -> tuple[float, float]:
        target = {"answers": {"answer_start": [], "text": answers or [""]}, "id": ""}  # no answer is an empty one
        scores = squad({"prediction_text": prediction, "id": ""}, target)
        return float(scores["exact_match"]), float(scores["f1"])

    return measure
