"""The tasks of GLUE (Wang et al., 2019): columns, labels and files of the official distribution, and their rows."""

from __future__ import annotations

import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.text_files import read_text
from smlp.errors import UserError
from smlp.files import number_of
from smlp.text.tokenizer_files import FILLER, MASK, SPECIAL_SYMBOLS

TRAIN, VALID, TEST = "train", "valid", "test"
_BINARY = ("0", "1")
_MSR_TRAIN, _MSR_TEST, _MSR_VALID_IDS = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv"
_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
_MOST_SCORE = 1e18  # a float32 holds its square, which is the loss


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task: the columns of its sentences and labels, and what fairseq needs to report its metric.

    The position of a label in ``labels`` is its class number, whatever the data. An empty tuple is regression; None
    means that any label is accepted (:func:`labels_of`).
    """

    columns: tuple[str, ...]  # of the one or two sentences
    label: str  # its column
    labels: tuple[str, ...] | None = ()
    files: dict[str, str] = field(default_factory=lambda: _FILES)  # by split; those of test may be missing
    header: tuple[str, ...] = ()  # of train and valid where the files have none
    score_range: tuple[float, float] = (-_MOST_SCORE, _MOST_SCORE)  # of regression
    leaves_out: bool = False  # whether malformed rows of train and valid are left out, as fairseq's own script does
    metric: str = "accuracy"  # fairseq's name
    report: str = ""  # the option that makes fairseq report it


TASKS = {
    "CoLA": GlueTask(
        ("sentence",), "label", _BINARY, header=("source", "label", "judgement", "sentence"), metric="mcc",
        report="--report-mcc",
    ),
    "SST-2": GlueTask(("sentence",), "label", _BINARY),
    "MRPC": GlueTask(
        ("#1 String", "#2 String"), "Quality", _BINARY, metric="acc_and_f1", report="--report-acc-and-f1"
    ),
    "STS-B": GlueTask(
        ("sentence1", "sentence2"), "score", score_range=(0, 5), metric="pearson_and_spearman",
        report="--report-pearson-and-spearman",
    ),
    "QQP": GlueTask(
        ("question1", "question2"), "is_duplicate", _BINARY, leaves_out=True, metric="acc_and_f1",
        report="--report-acc-and-f1",
    ),
    "MNLI": GlueTask(
        ("sentence1", "sentence2"), "gold_label", ("contradiction", "neutral", "entailment"),
        {
            "train": "train.tsv",
            "valid": "dev_matched.tsv",
            "valid1": "dev_mismatched.tsv",
            "test": "test_matched.tsv",
            "test1": "test_mismatched.tsv",
        },
    ),
    "QNLI": GlueTask(("question", "sentence"), "label", ("entailment", "not_entailment")),
    "RTE": GlueTask(("sentence1", "sentence2"), "label", ("entailment", "not_entailment")),
    "WNLI": GlueTask(("sentence1", "sentence2"), "label", _BINARY),
}  # fmt: skip


@dataclass(frozen=True)
class SplitFile:
    """The file of a split; ``ids``, if given, chooses its rows."""

    path: Path
    #: file of pairs of IDs: their rows are valid's, the others train's
    ids: Path | None = None


@dataclass
class Rows:
    """``texts[k]`` has the ``k``-th sentence of every row, ``labels`` the label of each, or is None without labels."""

    texts: list[list[str]]
    labels: list[str] | None
    left_out: Counter[str] = field(default_factory=Counter)  # rows, by reason


def files_in(folder: Path, task: GlueTask) -> dict[str, SplitFile]:
    """Return the files of a task's folder by split, as GLUE distributes them.

    Raises:
        UserError: there is no such folder, or a file for training or validation is missing.
    """
    if not folder.is_dir():
        raise UserError(f"--in {folder} is not a folder")
    if task is TASKS["MRPC"] and not (folder / _FILES[TRAIN]).exists() and (folder / _MSR_TRAIN).exists():
        ids = folder / _MSR_VALID_IDS
        if not ids.is_file():
            raise UserError(
                f"{folder} has {_MSR_TRAIN} but no {ids.name}: GLUE's list of the pairs in it that are for validation"
            )
        files = {TRAIN: SplitFile(folder / _MSR_TRAIN, ids), VALID: SplitFile(folder / _MSR_TRAIN, ids)}
        return {**files, TEST: SplitFile(folder / _MSR_TEST)} if (folder / _MSR_TEST).is_file() else files
    found = {split: SplitFile(folder / name) for split, name in task.files.items() if (folder / name).is_file()}
    missing = [name for split, name in task.files.items() if split not in found and not split.startswith(TEST)]
    if missing:
        raise UserError(f"{folder} has no {' and no '.join(missing)}")
    return found


def read_rows(file: SplitFile, task: GlueTask, split: str) -> Rows:
    """Read the rows of a split. A test split without the column of labels has none.

    Raises:
        UserError: a file is not UTF-8, a column is missing, a row has too few or too many, a sentence is empty, or a
            label is unknown; the message names file and line.
    """
    is_test = split.startswith(TEST)
    lines = [line.removesuffix("\r") for line in read_text(file.path).removesuffix("\n").split("\n")]
    has_header = is_test or not task.header
    names = lines[0].split("\t") if has_header else list(task.header)
    wanted = [*task.columns, *([task.label] if task.label in names or not is_test else [])]
    for name in wanted:
        if name not in names:
            raise UserError(f"{file.path} has no column {name!r}: its columns are {', '.join(map(repr, names)):.300}")
        if names.count(name) > 1:
            raise UserError(f"{file.path} has {names.count(name)} columns {name!r}")
    places = [names.index(name) for name in wanted]
    chosen = _chosen_ids(file, names)
    rows = Rows([[] for _ in task.columns], [] if task.label in wanted else None)
    for number, line in enumerate(lines[has_header:], start=1 + has_header):
        place, fields = f"{file.path}, line {number}", line.split("\t")
        is_whole = len(fields) == len(names)
        if is_whole and chosen is not None and (_pair_id(fields, names) in chosen) != (split == VALID):
            continue
        values = [fields[place].strip() for place in places] if is_whole else []
        problem = "" if is_whole else f"{len(fields)} columns instead of {len(names)}"
        problem = problem or next(
            ("an empty sentence" for value in values[: len(task.columns)] if _is_blank(value)), ""
        )
        if problem and task.leaves_out and not is_test:
            rows.left_out[f"rows of {split} left out: {problem}"] += 1
            continue
        if problem and not (task.leaves_out and is_whole):  # a test set keeps all its rows: predictions are in order
            raise UserError(f"{place}: {problem}")
        for texts, value in zip(rows.texts, values, strict=False):
            texts.append(value)
        if rows.labels is not None:
            _check_label(values[-1], task, place)
            rows.labels.append(values[-1])
    if not rows.texts[0]:
        raise UserError(f"{file.path} has no row for {split}")
    return rows


def labels_of(file: SplitFile, task: GlueTask) -> tuple[str, ...]:
    """Return the different labels of a file, sorted.

    Raises:
        UserError: as :func:`read_rows`, or there is only one.
    """
    found = tuple(sorted(set(read_rows(file, replace(task, labels=None), TRAIN).labels or ())))
    if len(found) < 2:
        raise UserError(f"{file.path}: all rows have the label {found[0]!r}")
    return found


def _chosen_ids(file: SplitFile, names: list[str]) -> set[tuple[str, str]] | None:
    if file.ids is None:
        return None
    for name in ("#1 ID", "#2 ID"):
        if name not in names:
            raise UserError(f"{file.path} has no column {name!r}: its columns are {', '.join(map(repr, names)):.300}")
    pairs = [line.split() for line in read_text(file.ids).splitlines() if line.strip()]
    for number, pair in enumerate(pairs, start=1):
        if len(pair) != 2:
            raise UserError(f"{file.ids}, line {number}: two IDs are expected, found {' '.join(pair)[:40]!r}")
    return {(first, second) for first, second in pairs}


def _pair_id(fields: list[str], names: list[str]) -> tuple[str, str]:
    return fields[names.index("#1 ID")].strip(), fields[names.index("#2 ID")].strip()


def _is_blank(text: str) -> bool:
    """Return whether no character can be seen."""
    return not any(sign.isprintable() and not sign.isspace() for sign in text)


def check_class(name: str, place: str) -> None:
    """Raise ``UserError`` for a class that a fairseq dictionary, which has one a line, cannot hold."""
    breaks = {"Cc", "Zl", "Zp"} & set(map(unicodedata.category, name))
    if breaks or _is_blank(name) or name.startswith(FILLER) or name in (*SPECIAL_SYMBOLS, MASK):
        raise UserError(f"{place}: {name!r} cannot be a label")


def _check_label(value: str, task: GlueTask, place: str) -> None:
    if task.labels:
        if value not in task.labels:
            raise UserError(f"{place}: the label is {value!r:.80}, not one of {', '.join(task.labels)}")
    elif task.labels is None:
        check_class(value, place)
    else:
        low, high = task.score_range
        number = number_of(value)
        if not low <= number <= high:
            raise UserError(f"{place}: the score is {value!r:.80}, not a number from {low:g} to {high:g}")
