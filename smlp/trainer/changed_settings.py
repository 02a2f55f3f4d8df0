"""Going on from a checkpoint with other settings of the model: one line says which.

fairseq says nothing where the parameters fit, and Switch's fit GShard, or four heads of attention eight.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from smlp.checkpoint.opened import check_is_ours, config_of
from smlp.config import ModelConfig, differences, flatten
from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of
from smlp.ignored_settings import ignored_settings

logger = logging.getLogger(__name__)

#: what a trained model does not depend on: how it began, and how it is computed
_WITHOUT_EFFECT = {
    *("embed_init_std", "spatial_init_scale", "spatial_bias_init", "centroid_init_gain"),
    *("checkpoint_activations", "overlap_chunks"),
}
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
        if core is not None and configs and self.is_data_parallel_master:
            changed = changed_settings(configs[0], core.config)
            if changed is not None:
                logger.warning(f"{filename} was trained with {changed}")
        return extra_state

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu
    Trainer.load_checkpoint = load_checkpoint


def changed_settings(then: ModelConfig, now: ModelConfig) -> str | None:
    """What a model was trained with and what it goes on with, where that makes another model of it; None if nothing."""
    before, after = flatten(then), flatten(now)
    without = {*_WITHOUT_EFFECT, *ignored_settings(now, before)}
    names = [name for name in differences(now, then) if name not in without]
    if not names:
        return None
    values = [", ".join(f"{name}={some.get(name)}" for name in names) for some in (before, after)]
    return f"{values[0]}; this run goes on with {values[1]}"


def _config_in(state: Mapping[str, Any], path: str) -> ModelConfig | None:
    """The configuration of one of this package's models; None of another, or if it is not to be understood."""
    try:
        check_is_ours(state, path)
        return config_of(state, path)
    except UserError:
        return None
