"""Going on from a checkpoint with other settings of the model: one line says which.

fairseq says nothing where the parameters fit, and Switch's fit GShard, or four heads of attention eight.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

from omegaconf import open_dict

from smlp.checkpoint.opened import check_is_ours, config_of
from smlp.checkpoint.torch_file import read_structure
from smlp.config import ModelConfig, differences, flatten
from smlp.config.ignored_settings import ignored_settings
from smlp.errors import UserError

logger = logging.getLogger(__name__)

#: what a trained model does not depend on: how it began, and how it is computed
_WITHOUT_EFFECT = {
    *("embed_init_std", "spatial_init_scale", "spatial_bias_init", "centroid_init_gain"),
    *("checkpoint_activations", "overlap_chunks"),
}
#: what made a part of a trained model that a checkpoint brings along: the table of hash routing
_BROUGHT_ALONG = ("hash_kind", "hash_seed")


def compare_with(filename: str, trainer: Any, now: ModelConfig) -> None:
    """Say what a trainer that has loaded a checkpoint does differently from here on; nothing if all is the same.

    Args:
        filename: of the checkpoint.
        trainer: of one of this package's models. Its options get what made the tables that the checkpoint brings
            along, so that they are in the checkpoints to come.
        now: the configuration of the model.
    """
    try:
        state = read_structure(filename)
        check_is_ours(state, filename)
        then = config_of(state, filename)
    except UserError:  # another package's model, or it is not to be understood
        return
    _keep_brought_along(trainer, then, now, filename)
    changed = changed_settings(then, now)
    if changed is not None and trainer.is_data_parallel_master:
        logger.warning(f"{filename} was trained with {changed}")


def changed_settings(then: ModelConfig, now: ModelConfig) -> str | None:
    """What a model was trained with and what it goes on with, where that makes another model of it; None if nothing."""
    before, after = flatten(then), flatten(now)
    without = {*_WITHOUT_EFFECT, *ignored_settings(now, before)}
    names = [name for name in differences(now, then) if name not in (*without, *_BROUGHT_ALONG)]
    if not names:
        return None
    values = [", ".join(f"{name}={some.get(name)}" for name in names) for some in (before, after)]
    return f"{values[0]}; this run goes on with {values[1]}"


def _keep_brought_along(trainer: Any, then: ModelConfig, now: ModelConfig, filename: str) -> None:
    """Writes down, for the checkpoints to come, what the tables of this one were made with; says what has no effect."""
    if not then.moe.router == now.moe.router == "hash" or not then.num_sparse_layers:
        return
    made_with = {name: getattr(then.moe, name) for name in _BROUGHT_ALONG}
    unused = {name: value for name in made_with if (value := getattr(now.moe, name)) != made_with[name]}
    if not unused:
        return
    options = trainer.cfg.model
    with nullcontext() if isinstance(options, Namespace) else open_dict(options):
        for name in unused:
            setattr(options, name, made_with[name])
    if trainer.is_data_parallel_master:
        shown = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in unused.items())
        logger.warning(f"{shown} has no effect: tokens go to experts by the table that {filename} brings along")
