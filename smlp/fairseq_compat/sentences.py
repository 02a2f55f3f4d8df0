"""Fine-tuning with fairseq's task ``sentence_prediction``: check data and options, and mend GLUE's metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.fairseq_compat.replacing import replacing
from smlp.files import number_of, read_text
from smlp.text.binarized import check_recorded, check_recorded_file, open_tokens
from smlp.text.tokenizer_files import DICTIONARY, FILLER, MASK

_REPORTS = ("report_acc_and_f1", "report_mcc", "report_pearson_and_spearman")
_CORRELATIONS = ("pearson", "spearmanr", "corr")
_MAKE = "make the data with 'smlp data glue'"


def apply() -> None:
    """Check data before they are used, and mend the metrics.

    ``--report-mcc`` and its like end on several ranks, because fairseq then sums lists of predictions with numbers.
    They are gathered instead. ``--report-pearson-and-spearman`` ends at a batch of one row, whose correlation fairseq
    also computes; it is nan there. Numbers that do not vary have a correlation of 0, as with ``--report-mcc``.
    """
    from fairseq.criterions import sentence_prediction
    from fairseq.tasks.sentence_prediction import SentencePredictionTask

    @replacing(SentencePredictionTask, "setup_task")
    def checked_setup(setup: Any, cls: type, cfg: Any, **kw: Any) -> Any:
        check_dictionaries(cfg)
        task = setup(cls, cfg, **kw)
        for name in ("init_token", "separator_token"):
            token = getattr(cfg, name)
            if token is not None and not 0 <= token < len(task.dictionary):
                raise UserError(
                    f"--{name.replace('_', '-')} {token}: the dictionary has the ids 0 to {len(task.dictionary) - 1}"
                )
        return task

    @replacing(SentencePredictionTask, "load_dataset")
    def checked_load(load: Any, self: Any, split: str, combine: bool = False, **kw: Any) -> Any:
        check_rows(self, split)
        return load(self, split, combine=combine, **kw)

    @replacing(sentence_prediction, "pearson_and_spearman")
    def pearson_and_spearman(correlate: Any, preds: Any, labels: Any) -> dict[str, float]:
        if len(preds) < 2:
            return dict.fromkeys(_CORRELATIONS, math.nan)
        if np.ptp(preds) == 0 or np.ptp(labels) == 0:  # scipy gives nan, with which no run and no checkpoint compares
            return dict.fromkeys(_CORRELATIONS, 0.0)
        return correlate(preds, labels)

    @replacing(sentence_prediction.SentencePredictionCriterion, "__init__")
    def checked_init(init: Any, self: Any, cfg: Any, task: Any) -> None:
        init(self, cfg, task)
        check_reports(cfg, task)

    def logging_outputs_can_be_summed(self: Any) -> bool:
        return self.training or not self.keep_pred_and_targ

    sentence_prediction.SentencePredictionCriterion.logging_outputs_can_be_summed = logging_outputs_can_be_summed


def check_reports(cfg: Any, task: Any) -> None:
    """Refuse metrics that cannot be computed from the labels, whose names fairseq reads as numbers.

    Args:
        cfg: of the criterion.
        task: with the labels.

    Raises:
        UserError: the message names the option.
    """
    asked = next((name for name in _REPORTS if getattr(cfg, name)), None)
    if asked is None:
        return
    option = f"--{asked.replace('_', '-')}"
    if cfg.regression_target:
        if asked != _REPORTS[-1]:
            raise UserError(f"{option} is of labels: with --regression-target, give --report-pearson-and-spearman")
        return
    labels = labels_of(task.label_dictionary)[: task.cfg.num_classes]
    try:
        numbers = set(map(np.int64, map(int, labels)))
    except (ValueError, OverflowError):
        numbers = set()
    needed, is_met = "labels that are whole numbers of at most 64 bits", bool(numbers)
    if cfg.report_acc_and_f1:
        needed, is_met = "two labels, 1 and another number", len(numbers) <= 2 and 1 in numbers
    if not is_met:
        path = Path(task.cfg.data) / "label" / DICTIONARY
        raise UserError(f"{option} needs {needed}, but {path} has {', '.join(labels):.80}")


def labels_of(dictionary: Any) -> list[str]:
    """Return the labels of a dictionary, which fairseq-preprocess fills up and to which the task adds ``<mask>``."""
    labels = dictionary.symbols[dictionary.nspecial :]
    return [label for label in labels if label != MASK and not label.startswith(FILLER)]


def check_dictionaries(cfg: Any) -> None:
    """Refuse missing and damaged dictionaries, and ``--num-classes`` without a number.

    Raises:
        UserError: the message names the file or the option.
    """
    from smlp.fairseq_compat.data import check_dictionary

    for name in ("input0",) if cfg.regression_target else ("input0", "label"):
        path = Path(cfg.data) / name / DICTIONARY
        if not path.is_file():
            hint = "; of numbers to predict, add --regression-target" if name == "label" else ""
            raise UserError(f"there is no file {path}: {_MAKE}{hint}")
        check_dictionary(path.parent)
    if cfg.num_classes < 1:
        raise UserError("--num-classes is missing: the number of labels, or 1 with --regression-target")


def check_rows(task: Any, split: str) -> None:
    """Refuse split files that are missing or damaged, differ in their numbers of rows or contradict ``--num-classes``.

    A split named ``test...`` may lack labels.

    Raises:
        UserError: the message names the files.
    """
    folder, cfg = Path(task.cfg.data), task.cfg
    rows = {f"input0/{split}": _read(folder / "input0" / split, len(task.dictionary))[0]}
    if (folder / "input1").is_dir():
        rows[f"input1/{split}"] = _read(folder / "input1" / split, len(task.dictionary))[0]
    name = f"label/{split}.label" if cfg.regression_target else f"label/{split}"
    path = folder / (name if cfg.regression_target else f"{name}.idx")
    if not path.is_file() and split.startswith("test"):
        return
    if not path.is_file():
        hint = f" (--regression-target reads {path.suffix} files)" if cfg.regression_target else ""
        raise UserError(f"there is no file {path}{hint}: {_MAKE}")
    if cfg.regression_target:
        check_recorded_file(path)
        lines = read_text(path, "latin-1").splitlines()
        rows[name] = len(lines)
        for number, line in enumerate(lines, start=1):
            check_numbers(line.split(), cfg.num_classes, f"{path}, line {number}")
    else:
        rows[name], largest = _read(folder / name, len(task.label_dictionary))
        num_classes = largest + 1 - task.label_dictionary.nspecial
        if num_classes > cfg.num_classes:
            raise UserError(f"--num-classes {cfg.num_classes}, but {folder / name}.bin has {num_classes} classes")
        num_labels = len(labels_of(task.label_dictionary))
        if num_labels < cfg.num_classes:
            raise UserError(
                f"--num-classes {cfg.num_classes}, but {folder / 'label' / DICTIONARY} has {num_labels} labels"
            )
    if len(set(rows.values())) > 1:
        numbers = ", ".join(f"{name} has {number}" for name, number in rows.items())
        raise UserError(f"the files of {folder} differ in their numbers of rows: {numbers}")


def check_numbers(words: list[str], count: int, place: str) -> None:
    """Refuse a line that does not hold ``count`` finite numbers.

    Raises:
        UserError: the message names the line.
    """
    numbers = [number_of(word) for word in words]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise UserError(f"{place}: {count} numbers are expected (--num-classes), found {' '.join(words)[:80]!r}")


def _read(prefix: Path, vocab_size: int) -> tuple[int, int]:
    """Return the number of rows, and the largest id."""
    if not Path(f"{prefix}.idx").is_file():
        raise UserError(f"there is no file {prefix}.idx: {_MAKE}")
    files = open_tokens(prefix)
    check_recorded(prefix)
    return len(files.lengths), max(int(piece.max()) for piece in files.pieces(vocab_size))
