"""Records of the six tasks, and readers of their official files under the names and splits of their release.

Texts are raw. Labels may be numbers or text, and columns may have the names that Hugging Face gave them.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.evaluation.zeroshot.files import (
    find,
    has_one,
    json_lines,
    label_lines,
    label_of,
    labels_beside,
    labels_path,
    read_text,
    readable_labels,
    text_of,
)


@dataclass(frozen=True)
class CopaItem:
    """Choice of plausible alternatives (Roemmele et al., 2011)."""

    id: str
    premise: str
    choices: tuple[str, str]
    #: "cause" or "effect": relation of the choices to the premise
    question: str
    gold: int


@dataclass(frozen=True)
class PiqaItem:
    """Physical common sense (Bisk et al., 2020)."""

    id: str
    goal: str
    solutions: tuple[str, str]
    gold: int


@dataclass(frozen=True)
class StoryClozeItem:
    """Endings of stories of four sentences (Mostafazadeh et al., 2016)."""

    id: str
    sentences: tuple[str, str, str, str]
    endings: tuple[str, str]
    gold: int


@dataclass(frozen=True)
class WinograndeItem:
    """Winograd schemas (Sakaguchi et al., 2020); the sentence has one blank, ``_``."""

    id: str
    sentence: str
    options: tuple[str, str]
    gold: int


@dataclass(frozen=True)
class HellaSwagItem:
    """Endings of everyday scenes (Zellers et al., 2019); ``ctx_b``, unfinished, follows ``ctx_a`` or is empty."""

    id: str
    activity: str
    ctx_a: str
    ctx_b: str
    endings: tuple[str, str, str, str]
    gold: int


@dataclass(frozen=True)
class RecordItem:
    """Entities of a news text that fill ``@placeholder`` in a query (Zhang et al., 2018)."""

    id: str
    passage: str
    query: str
    #: distinct texts of all mentions, in the order of the passage
    entities: tuple[str, ...]
    #: correct texts, a subset of ``entities``
    answers: tuple[str, ...]


Item = CopaItem | PiqaItem | StoryClozeItem | WinograndeItem | HellaSwagItem | RecordItem


def without_id(item: Item) -> Item:
    """Return the content of a record without its id, for comparisons."""
    return dataclasses.replace(item, id="")


def distinct(found: Iterable[Item]) -> list[Item]:
    """Return the records, each once, in their order: a repeated one with the same id says nothing more about a
    model."""
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Reader:
    """Reads one task.

    ``read(data_dir, split)`` returns the records of a split in the order of the file.
    """

    name: str
    #: file names of each split; the first split is the one for zero-shot scoring
    splits: dict[str, tuple[str, ...]]
    folders: tuple[str, ...]
    #: address of the files
    source: str
    parse: Callable[[Path], list[Item]]
    #: splits for few-shot examples, in order of preference
    priming: tuple[str, ...] = ("train",)

    def read(self, data_dir: str | Path, split: str | None = None) -> list[Item]:
        """Return the records of a split; by default of the one for zero-shot scoring.

        Raises:
            UserError: no such split, or a file is missing, malformed or without answers; the message names it.
        """
        split = next(iter(self.splits)) if split is None else split
        if split not in self.splits:
            raise UserError(f"{self.name} has no split {split!r}: choose from {', '.join(self.splits)}")
        path = find(Path(data_dir), self.folders, self.splits[split], self.source)
        records = self.parse(path)
        if not records:
            raise UserError(f"{path} has no records")
        return records

    def files(self, data_dir: str | Path) -> list[Path]:
        """Return the files of all splits that are there, and those with the answers to them."""
        folder = Path(data_dir)
        there = [names for names in self.splits.values() if has_one(folder, self.folders, names)]
        records = [find(folder, self.folders, names, self.source) for names in there]
        return records + [labels for path in records if (labels := readable_labels(path))]

    def priming_split(self, data_dir: str | Path) -> str:
        """Return the best existing split for priming, or the best of all if none exists."""
        for split in self.priming:
            if has_one(Path(data_dir), self.folders, self.splits[split]):
                return split
        return self.priming[0]


def _copa(path: Path) -> list[Item]:
    found = []
    for place, record in json_lines(path):
        question = text_of(record, "question", place)
        if question not in ("cause", "effect"):
            raise UserError(f"{place}: 'question' must be cause or effect, found {question!r}")
        choices = text_of(record, "choice1", place), text_of(record, "choice2", place)
        gold = label_of(record.get("label"), (0, 1), "label", place)
        identity = str(record.get("idx", len(found)))
        found.append(CopaItem(identity, text_of(record, "premise", place), choices, question, gold))
    return found


def _piqa(path: Path) -> list[Item]:
    records = list(json_lines(path))
    labels = labels_beside(path)
    if labels is None:
        raise UserError(f"{labels_path(path)} is missing: it has the answers to {path}")
    golds = label_lines(labels, len(records), (0, 1), path)
    return [
        PiqaItem(
            str(record.get("id", number)),
            text_of(record, "goal", place),
            (text_of(record, "sol1", place), text_of(record, "sol2", place)),
            gold,
        )
        for number, ((place, record), gold) in enumerate(zip(records, golds, strict=True))
    ]


def _winogrande(path: Path) -> list[Item]:
    records = list(json_lines(path))
    labels = labels_beside(path)
    beside = None if labels is None else label_lines(labels, len(records), (1, 2), path)
    found = []
    for number, (place, record) in enumerate(records):
        sentence = text_of(record, "sentence", place)
        if sentence.count("_") != 1:
            raise UserError(f"{place}: 'sentence' must have one blank (_), found {sentence.count('_')}")
        answer = record.get("answer")
        if beside is not None:
            if answer not in (None, "") and label_of(answer, (1, 2), "answer", place) != beside[number]:
                raise UserError(f"{place}: 'answer' is {answer}, but {labels} has {beside[number]}")
            answer = beside[number]
        gold = label_of(answer, (1, 2), "answer", place) - 1
        options = text_of(record, "option1", place), text_of(record, "option2", place)
        if not all(option.strip() for option in options):  # the rest of the sentence would be scored all the same
            raise UserError(f"{place}: 'option{1 + bool(options[0].strip())}' is empty")
        found.append(WinograndeItem(str(record.get("qID", number)), sentence, options, gold))
    return found


def _hellaswag(path: Path) -> list[Item]:
    found = []
    for place, record in json_lines(path):
        endings = record.get("endings")
        if not isinstance(endings, list) or len(endings) != 4 or not all(isinstance(one, str) for one in endings):
            raise UserError(f"{place}: 'endings' must be a list of 4 texts, found {endings!r}")
        ctx_a, ctx_b = text_of(record, "ctx_a", place), record.get("ctx_b") or ""  # finished scenes have none
        if "ctx_b" not in record and record.get("ctx", ctx_a) != ctx_a:
            raise UserError(f"{place}: 'ctx_b' is missing, and 'ctx' goes on after 'ctx_a'")
        found.append(
            HellaSwagItem(
                str(record.get("ind", len(found))),
                text_of(record, "activity_label", place),
                ctx_a,
                text_of({"ctx_b": ctx_b}, "ctx_b", place),
                tuple(endings),
                label_of(record.get("label"), range(4), "label", place),
            )
        )
    return found


def _each_row(rows: csv.DictReader, path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num + 1}: not a table ({error}); is a quote left open?") from None


def _storycloze(path: Path) -> list[Item]:
    content = read_text(path)
    header = content.partition("\n")[0]
    # released as CSV; fairseq users convert it to TSV without quotes
    if "\t" in header:
        rows = csv.DictReader(io.StringIO(content), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.DictReader(io.StringIO(content))
    found = []
    for row in _each_row(rows, path):
        place = f"{path}, line {rows.line_num}"
        if None in row:
            raise UserError(f"{place}: {len(row[None])} more columns than the header has")
        sentences = tuple(text_of(row, (f"InputSentence{n}", f"input_sentence_{n}"), place) for n in (1, 2, 3, 4))
        endings = tuple(text_of(row, (f"RandomFifthSentenceQuiz{n}", f"sentence_quiz{n}"), place) for n in (1, 2))
        answer = row.get("AnswerRightEnding", row.get("answer_right_ending"))
        gold = label_of(answer, (1, 2), "AnswerRightEnding", place) - 1
        identity = text_of(row, ("InputStoryid", "story_id"), place)
        found.append(StoryClozeItem(identity, sentences, endings, gold))
    return found


def _record(path: Path) -> list[Item]:
    found = []
    for place, record in json_lines(path):
        if isinstance(record.get("passage"), str):  # Hugging Face's format: one query per line
            entities, answers = _list_of(str, record, "entities", place), _list_of(str, record, "answers", place)
            identity = str(record.get("idx", len(found)))
            found.append(
                _record_item(identity, record["passage"], text_of(record, "query", place), entities, answers, place)
            )
            continue
        passage = record.get("passage")
        if not isinstance(passage, dict):
            raise UserError(f"{place}: 'passage' must be an object with 'text' and 'entities'")
        words = text_of(passage, "text", place)
        entities = [_span(words, span, "entities", place) for span in _list_of(dict, passage, "entities", place)]
        questions = _list_of(dict, record, "qas", place)
        if not questions:
            raise UserError(f"{place}: 'qas' {'has no query' if 'qas' in record else 'is missing'}")
        for question in questions:
            answers = [_span(words, span, "answers", place) for span in _list_of(dict, question, "answers", place)]
            identity = str(question.get("idx", len(found)))
            found.append(_record_item(identity, words, text_of(question, "query", place), entities, answers, place))
    return found


def _record_item(
    identity: str, passage: str, query: str, entities: list[str], answers: list[str], place: str
) -> RecordItem:
    if query.count("@placeholder") != 1:
        raise UserError(f"{place}: 'query' must have one @placeholder, found {query.count('@placeholder')}")
    if not answers:
        raise UserError(f"{place}: 'answers' is missing: a split without answers cannot be scored")
    if not all(entity.strip() for entity in entities):
        raise UserError(f"{place}: an entity is empty")
    strange = [answer for answer in answers if answer not in entities]
    if strange:
        raise UserError(f"{place}: the answer {strange[0]!r} is not among the {len(entities)} entities")
    return RecordItem(identity, passage, query, tuple(dict.fromkeys(entities)), tuple(dict.fromkeys(answers)))


def _span(words: str, span: dict[str, Any], name: str, place: str) -> str:
    """Return the text of a span, whose end is its last character."""
    start, end = span.get("start"), span.get("end")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end < len(words):  # excludes booleans
        raise UserError(f"{place}: {name!r} has the span {start} to {end} in a passage of {len(words)} characters")
    return words[start : end + 1]


def _list_of(kind: type, record: dict[str, Any], name: str, place: str) -> list[Any]:
    value = record.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise UserError(f"{place}: {name!r} must be a list of {'texts' if kind is str else 'objects'}")
    return value


_SUPERGLUE = "the SuperGLUE benchmark (super.gluebenchmark.com)"
_CLOZE = "cloze_test_{}__{} - cloze_test_ALL_{}"


def _cloze_names(part: str, season: str, end: str = "") -> tuple[str, ...]:
    name = _CLOZE.format(part, season, part) + end
    return (f"{name}.csv", f"{name}.tsv")


READERS = {
    reader.name: reader
    for reader in (
        Reader(
            "copa",
            {"val": ("val.jsonl",), "train": ("train.jsonl",)},
            ("copa",),
            _SUPERGLUE,
            _copa,
        ),
        Reader(
            "piqa",
            {"valid": ("valid.jsonl", "dev.jsonl"), "train": ("train.jsonl",)},
            ("piqa", "physicaliqa-train-dev"),
            "yonatanbisk.com/piqa",
            _piqa,
        ),
        Reader(
            "storycloze",
            {
                "test2016": _cloze_names("test", "spring2016"),
                "val2016": _cloze_names("val", "spring2016"),
                "val2018": _cloze_names("val", "winter2018", " - 1 - 1"),
            },
            ("storycloze", "story_cloze"),
            "its authors on request (cs.rochester.edu/nlp/rocstories)",
            _storycloze,
            ("val2016",),
        ),
        Reader(
            "winogrande",
            {
                "dev": ("dev.jsonl",),
                **{f"train_{size}": (f"train_{size}.jsonl",) for size in ("xs", "s", "m", "l", "xl", "debiased")},
            },
            ("winogrande", "winogrande_1.1"),
            "winogrande.allenai.org (winogrande_1.1.zip)",
            _winogrande,
            ("train_xl", "train_l", "train_m", "train_s", "train_xs"),
        ),
        Reader(
            "hellaswag",
            {"val": ("hellaswag_val.jsonl",), "train": ("hellaswag_train.jsonl",)},
            ("hellaswag",),
            "github.com/rowanz/hellaswag",
            _hellaswag,
        ),
        Reader(
            "record",
            {"val": ("val.jsonl",), "train": ("train.jsonl",)},
            ("record",),
            _SUPERGLUE,
            _record,
        ),
    )
}
