"""The harness's own versions of the six zero-shot tasks, on the official files.

The harness would fetch its copies of the data from the network. Here its prompts and rules stay what they are, and
only where the records come from is replaced; for ReCoRD see :mod:`smlp.evaluation.lm_eval.record`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval

from smlp.evaluation.lm_eval import record
from smlp.evaluation.zeroshot import items
from smlp.evaluation.zeroshot.readers import READERS

#: name here: file of the harness's task, below its folder of tasks
_DEFINITIONS = {
    "copa": "super_glue/copa/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "storycloze": "storycloze/storycloze_2016.yaml",
    "winogrande": "winogrande/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
}


def _copa(item: items.CopaItem) -> dict[str, Any]:
    first, second = item.choices
    return {
        "premise": item.premise, "choice1": first, "choice2": second, "question": item.question, "label": item.gold
    }  # fmt: skip


def _piqa(item: items.PiqaItem) -> dict[str, Any]:
    return {"goal": item.goal, "sol1": item.solutions[0], "sol2": item.solutions[1], "label": item.gold}


def _storycloze(item: items.StoryClozeItem) -> dict[str, Any]:
    sentences = {f"input_sentence_{number}": text for number, text in enumerate(item.sentences, start=1)}
    endings = {f"sentence_quiz{number}": text for number, text in enumerate(item.endings, start=1)}
    return {**sentences, **endings, "answer_right_ending": item.gold + 1}


def _winogrande(item: items.WinograndeItem) -> dict[str, Any]:
    first, second = item.options
    return {"sentence": item.sentence, "option1": first, "option2": second, "answer": str(item.gold + 1)}


def _hellaswag(item: items.HellaSwagItem) -> dict[str, Any]:
    return {
        "activity_label": item.activity, "ctx_a": item.ctx_a, "ctx_b": item.ctx_b, "endings": list(item.endings),
        "label": str(item.gold),
    }  # fmt: skip


_ROWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "copa": _copa,
    "piqa": _piqa,
    "storycloze": _storycloze,
    "winogrande": _winogrande,
    "hellaswag": _hellaswag,
    "record": record.row,
}


def write_local_task(name: str, data_dir: str | Path, folder: str | Path, with_training: bool = False) -> int:
    """Writes a task for the harness to include: its configuration (YAML) and the records as it wants them (JSONL).

    Args:
        name: a key of ``READERS``.
        data_dir: where the official files are.
        folder: to write to, and to give to the harness as ``include_path``.
        with_training: whether few-shot examples will be wanted.

    Returns:
        How many lines of the split that is scored say the same as another one; each record is written once.

    Raises:
        UserError: an official file is missing or malformed.
    """
    reader, folder = READERS[name], Path(folder).resolve()
    splits = {"validation": next(iter(reader.splits))}
    if with_training:
        splits["train"] = reader.priming_split(data_dir)
    files, num_repeated = {}, {}
    for split, official in splits.items():
        path = folder / f"{name}-{split}.jsonl"
        lines = reader.read(data_dir, official)
        records = items.distinct(lines)
        num_repeated[split] = len(lines) - len(records)
        rows = map(_ROWS[name], records)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files[split] = str(path)
    configuration = {
        **_definition(name),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        "validation_split": "validation",
        "training_split": "train" if with_training else None,
        "test_split": None,
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in configuration.items()]  # JSON is YAML
    if name == "record":
        lines += [f"{key}: !function {function}" for key, function in record.FUNCTIONS.items()]
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return num_repeated["validation"]


def _definition(name: str) -> dict[str, Any]:
    if name == "record":
        return record.CONFIGURATION
    return {"include": str(Path(lm_eval.__file__).resolve().parent / "tasks" / _DEFINITIONS[name])}
