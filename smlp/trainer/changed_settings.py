"""Going on from a checkpoint with other settings of the model: one line says which.

fairseq says nothing where the parameters fit, and Switch's fit GShard, or four heads of attention eight.
"""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from omegaconf import open_dict

from smlp.checkpoint.content import check_is_ours, config_of
from smlp.config import ModelConfig, differences, flatten
from smlp.config.ignored_settings import ignored_settings
from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of

logger = logging.getLogger(__name__)

#: what a trained model does not depend on: how it began, and how it is computed
_WITHOUT_EFFECT = {
    *("embed_init_std", "spatial_init_scale", "spatial_bias_init", "centroid_init_gain"),
    "checkpoint_activations",
}
#: what made a part of a trained model that a checkpoint brings along: the table of hash routing
_BROUGHT_ALONG = ("hash_kind", "hash_seed")
#: configurations of the checkpoints that are read while a trainer loads one
_read: ContextVar[list[ModelConfig]] = ContextVar("_read")


def apply() -> None:
    from fairseq import checkpoint_utils
    from fairseq.trainer import Trainer

    read = checkpoint_utils.load_checkpoint_to_cpu
    load = Trainer.load_checkpoint

    @functools.wraps(read)
    def load_checkpoint_to_cpu(path: str, *rest: Any, **kw: Any) -> dict[str, Any]:
        state = read(path, *rest, **kw)
        configs = _read.get(None)
        if configs is not None and (config := _config_in(state, path)) is not None:
            configs.append(config)
        return state

    @functools.wraps(load)
    def load_checkpoint(self: Trainer, filename: str, *rest: Any, **kw: Any) -> Any:
        configs: list[ModelConfig] = []
        token = _read.set(configs)
        try:
            extra_state = load(self, filename, *rest, **kw)
        finally:
            _read.reset(token)
        core = core_of(self.get_model())
        if core is not None and configs:
            _keep_brought_along(self, configs[0], core.config, filename)
            changed = changed_settings(configs[0], core.config)
            if changed is not None and self.is_data_parallel_master:
                logger.warning(f"{filename} was trained with {changed}")
        return extra_state

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu
    Trainer.load_checkpoint = load_checkpoint


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


def _config_in(state: Mapping[str, Any], path: str) -> ModelConfig | None:
    """The configuration of one of this package's models; None of another, or if it is not to be understood."""
    try:
        check_is_ours(state, path)
        return config_of(state, path)
    except UserError:
        return None
