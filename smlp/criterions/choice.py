"""Choose the criterion of a fairseq command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from smlp.config import ModelConfig
from smlp.config.presets import PRESETS, from_training_options
from smlp.errors import UserError

OURS = "moe_cross_entropy"
_DEFAULT = "cross_entropy"  # fairseq's
_OF_TASKS = {"masked_lm": "masked_lm", "sentence_prediction": "sentence_prediction", "squad": "span"}


def settle_criterion(args: Any, arch: str) -> None:
    """Replace fairseq's ``cross_entropy``, which knows neither auxiliary losses nor a prefix, by our criterion.

    If a model has neither, ours computes the same. An encoder gets the criterion of its task. ``args`` are fairseq's
    parsed options, those of the architecture filled in; without a criterion among them (tools that only evaluate)
    nothing is done.

    Raises:
        UserError: another criterion is asked for that would leave out a part of the model's loss, or count too much.
    """
    asked = getattr(args, "criterion", None)
    if PRESETS[arch].get("direction") == "bidirectional":
        if asked == _DEFAULT:
            args.criterion = _OF_TASKS.get(getattr(args, "task", None), _DEFAULT)
            _fill_in(args)
        elif asked == OURS:
            raise UserError(f"--criterion {OURS} is for language models, and --arch {arch} is an encoder: leave it out")
        elif asked is not None and not _fits(asked, getattr(args, "task", None)):
            raise UserError(f"--criterion {asked} does not fit --task {args.task}: leave it out")
    elif asked == _DEFAULT:
        args.criterion = OURS
    elif asked not in (None, OURS):
        # the dictionary is not loaded yet, and does not matter here
        reason = needs_ours(from_training_options(arch, vars(args), vocab_size=2, padding_idx=1))
        if reason:
            raise UserError(f"--criterion {asked} cannot train --arch {arch}: {reason}; leave --criterion out")


def made_by(name: str) -> str:
    """Return the package whose criterion has this name, such as fairseq."""
    from fairseq.criterions import CRITERION_REGISTRY

    return CRITERION_REGISTRY[name].__module__.partition(".")[0]


def _fits(name: str, task: str | None) -> bool:
    """Return whether a criterion may train an encoder: that of the task, or one of a plug-in."""
    wanted = _OF_TASKS.get(task or "")
    if wanted is None:  # a task of a plug-in
        return name not in _OF_TASKS.values()
    return name == wanted or made_by(name) not in ("fairseq", "smlp")


def _fill_in(args: Any) -> None:
    """Set the defaults of a criterion whose options were not read; fairseq's tasks ask for some of them."""
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY

    options = CRITERION_DATACLASS_REGISTRY.get(args.criterion)
    for field in () if options is None else dataclasses.fields(options):
        if not field.name.startswith("_") and not str(field.default).startswith("${"):
            vars(args).setdefault(field.name, field.default)


def check_criterion(name: str | None, config: ModelConfig) -> None:
    """Refuse another criterion for a model that needs ours, however it was chosen.

    ``fairseq-hydra-train`` fills in no architecture, so :func:`settle_criterion` does not see what it is given.

    Raises:
        UserError: the message names the criterion.
    """
    reason = needs_ours(config)
    if reason and name != OURS:
        raise UserError(f"the criterion {name} cannot train this model: {reason}; give criterion._name={OURS}")


def needs_ours(config: ModelConfig) -> str | None:
    """Return why a model must be trained with our criterion, as a clause; None if any will do."""
    prefix = config.prefix_tokens
    if prefix:
        return f"it would count the first {prefix} of {config.max_tokens} positions, which only choose experts"
    for loss in filter(None, (kind.auxiliary_loss(config) for kind in config.kinds)):
        return f"it would leave out the auxiliary loss of {loss}"
    return None
