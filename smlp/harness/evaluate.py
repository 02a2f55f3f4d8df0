"""Running the harness's tasks on a model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from smlp.errors import UserError
from smlp.harness.model import HarnessModel
from smlp.harness.tasks import write_local_task
from smlp.zeroshot.readers import READERS


def evaluate(
    model: HarnessModel,
    tasks: Sequence[str],
    data_dir: str | Path | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any] | None:
    """The harness's results, with every sample; None on all ranks but the first.

    Args:
        model: to be evaluated.
        tasks: names.
        data_dir: where the official files of the six zero-shot tasks are: those of them that are asked for are read
            from there, with the harness's prompts and rules; others come from where the harness has them from.
        include_path: folder with more tasks (YAML).
        num_fewshot: solved examples before each record; None for the tasks' own number.
        limit: only the first records of each task.

    Raises:
        UserError: the harness has no such task, or a file is missing or malformed.
    """
    local = [name for name in tasks if data_dir is not None and name in READERS]
    with tempfile.TemporaryDirectory(prefix="smlp-lm-eval-") as folder:
        for name in local:
            write_local_task(name, data_dir, folder, with_training=bool(num_fewshot))
        paths = [folder] if include_path is None else [folder, str(include_path)]
        manager = TaskManager(include_path=paths, include_defaults=False)
        if not set(tasks) <= set(manager.all_tasks):  # only now its own: thousands of files
            manager = TaskManager(include_path=paths, include_defaults=True)
        unknown = sorted(set(tasks) - set(manager.all_tasks))
        if unknown:
            raise UserError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
        return lm_eval.simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=True,
        )
