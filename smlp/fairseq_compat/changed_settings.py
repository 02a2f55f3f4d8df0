"""Warn if training resumes from a checkpoint with other settings of the model or of its optimizer.

fairseq says nothing as long as the parameters fit; those of Switch fit GShard, and four heads of attention fit eight.
Of the optimizer's options it takes the learning rate from the command line, and all others from the checkpoint.
"""

from __future__ import annotations

import ast
import logging
import math
from typing import Any

from smlp.checkpoint.content import check_is_ours, recorded_config
from smlp.checkpoint.torch_file import read_structure
from smlp.config import ModelConfig, differences, flatten
from smlp.config.ignored_settings import OF_THE_START, ignored_settings
from smlp.errors import UserError
from smlp.fairseq_compat.settings import write_options

logger = logging.getLogger(__name__)

#: settings of the hash routing table, which is part of a checkpoint
_BROUGHT_ALONG = ("hash_kind", "hash_seed", "hash_tables")


def compare_with(filename: str, trainer: Any, now: ModelConfig) -> None:
    """Warn of settings that differ from those of the checkpoint that a trainer has loaded.

    Args:
        filename: of the checkpoint.
        trainer: of one of this package's models. Its options take over the settings of the checkpoint's hash tables,
            so that later checkpoints have them.
        now: the configuration of the model.
    """
    try:
        state = read_structure(filename)
        check_is_ours(state, filename)
    except UserError:  # another package's model
        return
    try:
        then = recorded_config(state, filename)
    except UserError as error:  # as of a plug-in that has changed since
        if trainer.is_data_parallel_master:
            logger.warning(f"{error}: this run continues with its own settings, which are not compared")
        return
    _keep_brought_along(trainer, then, now, filename)
    changed = changed_settings(then, now)
    if changed is not None and trainer.is_data_parallel_master:
        logger.warning(f"{filename} was trained with {changed}")


def changed_settings(then: ModelConfig, now: ModelConfig) -> str | None:
    """Return a clause with the changed settings that matter, before and after; None if there are none."""
    before, after = flatten(then), flatten(now)
    without = {*OF_THE_START, *ignored_settings(now, before)}
    names = [name for name in differences(now, then) if name not in (*without, *_BROUGHT_ALONG)]
    if not names:
        return None
    values = [", ".join(f"{name}={some.get(name)}" for name in names) for some in (before, after)]
    return f"{values[0]}; this run continues with {values[1]}"


def constants(optimizer: Any) -> dict[str, Any]:
    """Return the numbers of an optimizer that its schedule leaves alone, by name: betas, weight decay, ..."""
    group = optimizer.param_groups[0]
    numbers = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}


def check_constants(filename: str, trainer: Any, asked: dict[str, Any]) -> None:
    """Refuse constants of the optimizer, from a checkpoint or ``--optimizer-overrides``, with which it cannot work.

    Args:
        filename: of the checkpoint.
        trainer: that has loaded it.
        asked: :func:`constants` before loading.

    Raises:
        UserError: a constant is missing, of another kind or out of range, or an override names none.
    """
    overrides = ast.literal_eval(trainer.cfg.checkpoint.optimizer_overrides)
    known = {"lr", *asked}
    unknown = next((name for name in overrides if name not in known), None)
    if unknown is not None:
        raise UserError(f"--optimizer-overrides names {unknown!r}, and the optimizer has {', '.join(sorted(known))}")
    for group in trainer.optimizer.param_groups:
        for name, value in asked.items():
            problem = _problem_of(name, group.get(name), value)
            if problem is not None:
                origin = "--optimizer-overrides" if name in overrides else f"{filename} is damaged"
                raise UserError(f"{origin}: {name} of the optimizer is {group.get(name)!r:.60}, {problem}")


def _problem_of(name: str, loaded: Any, asked: Any) -> str | None:
    """Return what is wrong with a constant that was loaded; None if nothing is."""
    numbers, example = ([*some] if isinstance(some, (list, tuple)) else [some] for some in (loaded, asked))
    if isinstance(asked, bool):
        return f"not {asked}" if not isinstance(loaded, bool) or (name == "amsgrad" and loaded != asked) else None
    if not all(isinstance(number, (int, float)) for number in example):
        return None
    if len(numbers) != len(example) or not all(isinstance(number, (int, float)) for number in numbers):
        return f"which must be like {asked}"
    if not all(map(math.isfinite, numbers)):
        return "which must be finite"
    if name == "betas" and not all(0 <= number < 1 for number in numbers):
        return "which must be from 0 to below 1"
    if name == "eps" and len(numbers) == 1 and numbers[0] <= 0:
        return "which must be above 0"
    return "which must be at least 0" if name in ("eps", "weight_decay") and min(numbers) < 0 else None


def compare_optimizers(filename: str, trainer: Any, asked: dict[str, Any]) -> None:
    """Warn of constants of the optimizer that the checkpoint has put in place of those of the command line.

    Args:
        filename: of the checkpoint.
        trainer: that has loaded it.
        asked: :func:`constants` before loading.
    """
    overrides = ast.literal_eval(trainer.cfg.checkpoint.optimizer_overrides)
    left_out = {"lr_old", *overrides}  # the rate of NAG's last update
    now = {name: value for name, value in constants(trainer.optimizer).items() if name not in left_out}
    names = [name for name, value in now.items() if asked.get(name, value) != value]
    if names and trainer.is_data_parallel_master:
        kept, given = (", ".join(f"{name}={some[name]}" for name in names) for some in (now, asked))
        logger.warning(
            f"the optimizer continues with {kept} from {filename}, not with {given} from this command: to change that, "
            "give --optimizer-overrides"
        )


def _keep_brought_along(trainer: Any, then: ModelConfig, now: ModelConfig, filename: str) -> None:
    """Keep the settings of the checkpoint's hash tables in the trainer's options; warn of options without effect."""
    has_tables = then.router == now.router and all(some.router == "hash" or some.base_warmup for some in (then, now))
    if not has_tables or not then.num_sparse_layers:
        return
    made_with = {name: getattr(then, name) for name in _BROUGHT_ALONG}
    unused = {name: value for name in made_with if (value := getattr(now, name)) != made_with[name]}
    if not unused:
        return
    write_options(trainer.cfg.model, {name: made_with[name] for name in unused})
    if trainer.is_data_parallel_master:
        shown = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in unused.items())
        logger.warning(f"{shown} has no effect: the table in {filename} assigns tokens to experts")
