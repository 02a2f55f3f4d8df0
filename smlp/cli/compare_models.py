"""What ``smlp compare run`` and its dry run have in common: models, checks before anything is trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from smlp.errors import UserError
from smlp.experiments.experiment import Experiment, zeroshot_words
from smlp.experiments.folder import DONE, Folder
from smlp.experiments.plan import PlannedModel, Run, plan_models, spread_of


def check_zeroshot(experiment: Experiment, wants_files: bool = True) -> None:
    """Refuses, before anything is trained, tasks that could not be scored afterwards.

    Args:
        experiment: what the file says.
        wants_files: the folder of the tasks has to be there.

    Raises:
        UserError: there is no such folder or task.
    """
    wanted = experiment.evaluation
    if wanted.zeroshot_data is None:
        return
    from smlp.evaluation.zeroshot.readers import READERS

    unknown = [task for task in wanted.zeroshot_tasks if task not in (*READERS, "all")]
    if unknown:
        raise UserError(
            f"{experiment.path}: evaluate.zeroshot.tasks has {unknown[0]!r}; there are {', '.join(READERS)}"
        )
    _check_zeroshot_options(experiment)
    if wants_files and not wanted.zeroshot_data.is_dir():
        raise UserError(f"{experiment.path}: evaluate.zeroshot.data: there is no folder {wanted.zeroshot_data}")


def _check_zeroshot_options(experiment: Experiment) -> None:
    """By the command that will get them."""
    from smlp.cli import zeroshot

    def refuse(message: str) -> NoReturn:
        raise UserError(message)

    parser = zeroshot.add_parser(argparse.ArgumentParser().add_subparsers())
    parser.error = refuse
    wanted = experiment.evaluation
    words = ["--path", "checkpoint", "--data-dir", str(wanted.zeroshot_data), *zeroshot_words(wanted)]
    try:
        zeroshot.check(parser.parse_args(words))
    except UserError as error:
        raise UserError(f"{experiment.path}: evaluate.zeroshot: {error}") from None


def plan(experiment: Experiment, data: str, vocab_size: int) -> list[PlannedModel]:
    """The models, each from the configuration that fairseq builds of its options.

    Args:
        experiment: what the file says.
        data: argument DATA.
        vocab_size: of its dictionary.

    Raises:
        UserError: an option is wrong, or FLOPs differ too much.
    """
    from smlp.cli.dry_run import configuration_of
    from smlp.config.presets import config_of
    from smlp.fairseq_compat.settings import check_pairs

    def configure(words: list[str]) -> Any:
        budget = ["--max-update", str(experiment.updates)]  # which schedules of the rate are checked against
        cfg = configuration_of([data, "--task", "language_modeling", *words, *budget])
        check_pairs(cfg)
        return config_of(cfg.model, vocab_size)

    return plan_models(experiment, vocab_size, configure)


def not_done(folder: Folder, runs: Sequence[Run]) -> list[Run]:
    """Those that are not done."""
    return [run for run in runs if folder.run(run.folder).state()["state"] != DONE]


def print_models(experiment: Experiment, models: Sequence[PlannedModel]) -> None:
    """A line for each, and the budget."""
    from smlp.costs.formula import parameters

    width = max(len(model.name) for model in models)
    print(f"{'model':<{width}}  {'M multiply-adds per token':>25}  {'M parameters':>12}  architecture")
    for model in models:
        total = parameters(model.config, 1).total
        settings = " ".join(f"{name}={value}" for name, value in model.overrides.items())
        print(
            f"{model.name:<{width}}  {model.flops_per_token / 1e6:>25.3f}  {total / 1e6:>12.1f}  "
            f"{model.arch} {settings}".rstrip()
        )
    print(
        f"spread of the FLOPs {spread_of(list(models)):.2%}; {experiment.tokens:,} tokens for each model and seed "
        f"({experiment.updates:,} updates of {experiment.tokens_per_update:,})",
        flush=True,
    )


def num_gpus() -> int:
    """That this process may use."""
    import torch

    return torch.cuda.device_count()
