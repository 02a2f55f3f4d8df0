"""Run the tasks of lm-evaluation-harness on a model, six of them on their official files.

The harness would fetch its copies of the six zero-shot tasks from the network. With a data folder, its prompts and
rules stay and only the source of the records is replaced. ReCoRD is defined here, because the harness's version cannot
be loaded without the package ``transformers``: prompts are the harness's (:mod:`smlp.evaluation.zeroshot.templates`),
exact match and F1 those of the official script.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import lm_eval
import numpy as np
import yaml
from datasets.exceptions import DatasetsError
from lm_eval.tasks import TaskManager

import smlp
from smlp.errors import UserError
from smlp.evaluation.lm_eval.model import HarnessModel, TooLongRecords
from smlp.evaluation.zeroshot.evaluate import for_each_task
from smlp.evaluation.zeroshot.readers import (
    READERS,
    RecordItem,
    distinct,
)
from smlp.evaluation.zeroshot.rules import best_f1, exact_match
from smlp.evaluation.zeroshot.templates import example

#: missing network, too few examples, an error in a user's task
_THEIRS = (
    *(OSError, ValueError, AssertionError, ImportError, LookupError, ArithmeticError),
    *(jinja2.TemplateError, DatasetsError),
)
_OURS = str(Path(smlp.__file__).parent)  # where errors of other kinds are bugs


#: by our name, the file of the harness's task in its folder of tasks
_DEFINITIONS = {
    "copa": "super_glue/copa/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "storycloze": "storycloze/storycloze_2016.yaml",
    "winogrande": "winogrande/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
}


#: configuration of ReCoRD for the harness
_RECORD: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("f1", "em")],
    "metadata": {"version": 2.0},
}


def evaluate(
    model: HarnessModel,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    skip_too_long: bool = False,
) -> dict[str, Any] | None:
    """Return the harness's results, with every sample; None on all ranks but the first.

    The results also hold ``num_truncated``, ``num_partly_scored`` and ``num_without_token`` (see :class:`HarnessModel`)
    and, by task, ``num_skipped``, records left out as too long, and ``num_repeated``, records that an official file
    repeats.

    Args:
        model: to be evaluated.
        tasks: names.
        data_dir: folder of the official files of the six zero-shot tasks. Those among ``tasks`` are read from there,
            with the harness's prompts and rules; other tasks come from the harness's own sources.
        include_path: folder with more tasks (YAML).
        num_fewshot: solved examples before each record; None for the tasks' own number.
        limit: only the first records of each task.
        skip_too_long: leave out records with a continuation that the context cannot hold.

    Raises:
        UserError: the harness has no such task, or a file is missing or malformed.
    """
    local = [name for name in tasks if data_dir is not None and name in READERS]
    with tempfile.TemporaryDirectory(prefix="smlp-lm-eval-") as folder:
        num_repeated = for_each_task(
            local, lambda name: write_local_task(name, data_dir, folder, with_training=bool(num_fewshot))
        )
        paths = [folder] if include_path is None else [folder, str(include_path)]
        manager = _tasks_in(paths, include_defaults=False)
        # the harness' own tasks are thousands of files; a group may name some of them
        if not set(tasks) <= set(manager.all_tasks) - set(manager.all_groups):
            manager = _tasks_in(paths, include_defaults=True)
        unknown = sorted(set(tasks) - set(manager.all_tasks))
        if unknown:
            _check_yaml(paths[1:])
            raise UserError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
        if limit is not None and limit < model.team.size:
            raise UserError(f"--limit {limit} leaves some of the {model.team.size} ranks without a record")

        def run(**selection: Any) -> dict[str, Any] | None:
            model.num_truncated = model.num_partly_scored = model.num_without_token = 0
            return lm_eval.simple_evaluate(
                model,
                tasks=list(tasks),
                num_fewshot=num_fewshot,
                task_manager=manager,
                bootstrap_iters=1000,
                log_samples=True,
                **selection,
            )

        skipped: frozenset[tuple[str, int]] = frozenset()
        try:
            try:
                found = run(limit=limit)
            except TooLongRecords as error:
                if not skip_too_long:
                    raise
                skipped = error.records
                found = run(samples=_without(skipped, manager.load(list(tasks))["tasks"], limit, model.team.size))
        except UserError:
            raise
        except Exception as error:
            inside = traceback.extract_tb(error.__traceback__)[2:]  # of this function and run
            if not isinstance(error, _THEIRS) and any(frame.filename.startswith(_OURS) for frame in inside):
                raise
            first: BaseException = error
            while first.__cause__ is not None:  # such as a full disk, on which datasets writes copies
                first = first.__cause__
            reason = (str(first).strip() or type(first).__name__).splitlines()[0]
            is_of_data = isinstance(error, OSError) or any("datasets" in Path(one.filename).parts for one in inside)
            is_local = bool(local) or include_path is not None
            remedy = "; --data-dir or --include-path has tasks read local files" if is_of_data and not is_local else ""
            raise UserError(
                f"lm-evaluation-harness cannot run {', '.join(tasks)} ({type(first).__name__}: {reason}){remedy}"
            ) from error
        names = ("num_truncated", "num_partly_scored", "num_without_token")
        counts = model.team.gather([getattr(model, name) for name in names])
        if found is not None:
            found |= dict(zip(names, map(sum, zip(*counts, strict=True)), strict=True))
            found["num_skipped"] = dict(sorted(Counter(task for task, _ in skipped).items()))
            found["num_repeated"] = {name: count for name, count in num_repeated.items() if count}
        return found


def _tasks_in(paths: Sequence[str], include_defaults: bool) -> TaskManager:
    """Let the harness read the definitions of tasks in some folders, and its own if asked.

    Raises:
        UserError: it cannot; the message names the last folder, the only one that is the user's.
    """
    try:
        return TaskManager(include_path=list(paths), include_defaults=include_defaults)
    except Exception as error:  # any error in a user's YAML; no code of this package runs here
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(
            f"lm-evaluation-harness cannot read the tasks in {paths[-1]} ({type(error).__name__}: {reason})"
        ) from error


def _check_yaml(folders: Sequence[str]) -> None:
    """Refuse definitions of tasks that are no YAML, which the harness passes over without a word."""
    for path in sorted(file for folder in folders for file in Path(folder).rglob("*.yaml")):
        try:
            yaml.compose(path.read_bytes())
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _without(
    skipped: frozenset[tuple[str, int]], tasks: Mapping[str, Any], limit: int | None, num_ranks: int
) -> dict[str, list[int]]:
    """Return the records of each task that are evaluated, by number.

    Raises:
        UserError: too few are left of a task for every rank to have one.
    """
    kept = {}
    for name, task in tasks.items():
        numbers = range(len(task.eval_docs))[:limit]
        kept[name] = [number for number in numbers if (name, number) not in skipped]
        if len(kept[name]) < num_ranks:
            raise UserError(f"{name}: {len(kept[name])} of {len(numbers)} records fit the model's context")
    return kept


def write_local_task(name: str, data_dir: str | Path, folder: str | Path, with_training: bool = False) -> int:
    """Write a task for the harness to include: its configuration (YAML) and the records as it wants them (JSONL).

    Args:
        name: a key of ``READERS``.
        data_dir: where the official files are.
        folder: to write to, and to give to the harness as ``include_path``.
        with_training: whether few-shot examples will be needed.

    Returns:
        How many lines of the scored split repeat another one; each record is written once.

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
        records = distinct(lines)
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
        lines.append(f"process_results: !function {__name__}.process_results")
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return num_repeated["validation"]


def _definition(name: str) -> dict[str, Any]:
    if name == "record":
        return _RECORD
    return {"include": str(Path(lm_eval.__file__).resolve().parent / "tasks" / _DEFINITIONS[name])}


def _record(item: RecordItem) -> dict[str, Any]:
    """Return a record as the task above reads it."""
    written = example(item, "lm-eval")
    return {
        "prompt": written.choices[0].context,
        "choices": [choice.continuation for choice in written.choices],
        "gold": written.gold[0],
        "entities": [choice.bare for choice in written.choices],
        "answers": list(item.answers),
    }


#: records as the harness's tasks read them
_ROWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "copa": lambda item: {
        "premise": item.premise, "choice1": item.choices[0], "choice2": item.choices[1], "question": item.question,
        "label": item.gold,
    },
    "piqa": lambda item: {
        "goal": item.goal, "sol1": item.solutions[0], "sol2": item.solutions[1], "label": item.gold
    },
    "storycloze": lambda item: {
        **{f"input_sentence_{number}": text for number, text in enumerate(item.sentences, start=1)},
        **{f"sentence_quiz{number}": text for number, text in enumerate(item.endings, start=1)},
        "answer_right_ending": item.gold + 1,
    },
    "winogrande": lambda item: {
        "sentence": item.sentence, "option1": item.options[0], "option2": item.options[1], "answer": str(item.gold + 1)
    },
    "hellaswag": lambda item: {
        "activity_label": item.activity, "ctx_a": item.ctx_a, "ctx_b": item.ctx_b, "endings": list(item.endings),
        "label": str(item.gold),
    },
    "record": _record,
}  # fmt: skip


def process_results(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Return the F1 and exact match of the entity with the highest log-probability."""
    guess = doc["entities"][int(np.argmax([log_prob for log_prob, _ in results]))]
    return {"f1": best_f1(guess, doc["answers"]), "em": exact_match(guess, doc["answers"])}
