"""Running the harness's tasks on a model."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import lm_eval
from lm_eval.tasks import TaskManager

from smlp.errors import UserError
from smlp.evaluation.lm_eval.model import HarnessModel, TooLongRecords
from smlp.evaluation.lm_eval.tasks import write_local_task
from smlp.evaluation.zeroshot.evaluate import for_each_task
from smlp.evaluation.zeroshot.readers import READERS

#: no network, too few examples, a mistake in somebody's task
_THEIRS = (OSError, ValueError, AssertionError, ImportError, LookupError, ArithmeticError, jinja2.TemplateError)


def evaluate(
    model: HarnessModel,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    skip_too_long: bool = False,
) -> dict[str, Any] | None:
    """The harness's results, with every sample; None on all ranks but the first.

    They also have ``num_truncated`` and ``num_partly_scored``: records that had to give way, see :class:`HarnessModel`;
    and by task ``num_skipped``, records left out as too long, and ``num_repeated``, those in an official file again.

    Args:
        model: to be evaluated.
        tasks: names.
        data_dir: where the official files of the six zero-shot tasks are: those of them that are asked for are read
            from there, with the harness's prompts and rules; others come from where the harness has them from.
        include_path: folder with more tasks (YAML).
        num_fewshot: solved examples before each record; None for the tasks' own number.
        limit: only the first records of each task.
        skip_too_long: leave records out with a continuation that the context cannot hold.

    Raises:
        UserError: the harness has no such task, or a file is missing or malformed.
    """
    local = [name for name in tasks if data_dir is not None and name in READERS]
    with tempfile.TemporaryDirectory(prefix="smlp-lm-eval-") as folder:
        num_repeated = for_each_task(
            local, lambda name: write_local_task(name, data_dir, folder, with_training=bool(num_fewshot))
        )
        paths = [folder] if include_path is None else [folder, str(include_path)]
        manager = TaskManager(include_path=paths, include_defaults=False)
        if not set(tasks) <= set(manager.all_tasks):  # only now its own: thousands of files
            manager = TaskManager(include_path=paths, include_defaults=True)
        unknown = sorted(set(tasks) - set(manager.all_tasks))
        if unknown:
            raise UserError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
        if limit is not None and limit < model.team.size:
            raise UserError(f"--limit {limit} leaves some of the {model.team.size} ranks without a record")

        def run(**selection: Any) -> dict[str, Any] | None:
            model.num_truncated = model.num_partly_scored = 0
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
        except _THEIRS as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"lm-evaluation-harness cannot run {', '.join(tasks)} ({type(error).__name__}: {reason}); --data-dir "
                "or --include-path has tasks read local files"
            ) from error
        counts = model.team.gather((model.num_truncated, model.num_partly_scored))
        if found is not None:
            found["num_truncated"], found["num_partly_scored"] = map(sum, zip(*counts, strict=True))
            found["num_skipped"] = dict(sorted(Counter(task for task, _ in skipped).items()))
            found["num_repeated"] = {name: count for name, count in num_repeated.items() if count}
        return found


def _without(
    skipped: frozenset[tuple[str, int]], tasks: Mapping[str, Any], limit: int | None, num_ranks: int
) -> dict[str, list[int]]:
    """The records of each task that are evaluated, by number.

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
