"""Options of this package's fairseq models, and every preset as an architecture of one of them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Optional

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, register_model_architecture

from smlp.config import LEAKY_WARNING, ModelConfig, all_settings, presets
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import FROM_TASK, PRESETS, TASK_OPTIONS, from_training_options
from smlp.config.settings import help_of
from smlp.criterions.choice import settle_criterion
from smlp.fairseq_compat.profiling import WARM_UP

logger = logging.getLogger(__name__)

_OPTION_TYPES = {"int": int, "float": float, "float | None": float, "str": str, "bool": bool}


def option(name: str, kind: type, help_text: str, default: Any = None) -> tuple[str, Any, Any]:
    """Return a dataclass field for a command-line option; None stands for the architecture's value."""
    # fairseq understands typing.Optional but not `|`; flags are also None if not given
    option_type = Optional[kind] if default is None else kind  # noqa: UP045
    return name, option_type, dataclasses.field(default=default, metadata={"help": help_text})


MODEL_OPTIONS = [
    option(setting.name, _OPTION_TYPES[setting.type], help_of(setting))
    for name, setting in all_settings().items()
    if name not in FROM_TASK
]
RUN_OPTIONS = [
    option(
        "expert_parallel_size",
        int,
        "ranks that share one set of experts: 1 puts all experts on every rank (default: the largest number that "
        "divides both the ranks and the experts)",
    ),
    option(
        "profile_updates",
        int,
        f"profile this many updates after {WARM_UP} warm-up updates: a Chrome trace of each rank and a table of what "
        "each component of the model costs",
    ),
    option(
        "no_decay_norms",
        bool,
        "no weight decay for gains and biases: those of norms, linear layers and spatial projections, and scales of "
        "features",
        default=False,
    ),
    option(
        "compile",
        bool,
        "compile the blocks with torch.compile: on an H200 updates take 0.91 (dense Transformer) to 1.23 times (sMLP) "
        "as long, on a CPU 1.1 times (docs/torch.md)",
        default=False,
    ),
    option("spatial_lr_factor", float, "learning rate of spatial weights, as a multiple of --lr", default=1.0),
    option("spatial_weight_decay", float, "weight decay of spatial weights (default: that of --weight-decay)"),
    option("profile_dir", str, "folder for the profiles (default: the --save-dir)"),
    option("data_order_file", str, "write a line for each update to this file, with a digest of its tokens"),
    option(
        "update_times_file",
        str,
        "write a line for each update to this file, with its tokens, its seconds and the seconds of waiting for data",
    ),
    option(
        "environment_file",
        str,
        "add a line to this file at each start: versions, machine, ranks, git revision, plugins",
    ),
    option(
        "other_dictionary",
        bool,
        "continue from a checkpoint whose dictionary has the same size as that of the data, but other symbols or "
        "another order; by default this is refused",
        default=False,
    ),
]
assert {name for name, *_ in RUN_OPTIONS} == set(presets.RUN_OPTIONS)


def configuration(args: Any, dictionary: Any) -> ModelConfig:
    """Return the configuration that fairseq's options and a dictionary select; warn of options without effect.

    Raises:
        UserError: a value is out of range.
    """
    arch = getattr(args, "_name", None) or getattr(args, "arch", None)
    options = {name: getattr(args, name, None) for name in (*all_settings(), *TASK_OPTIONS)}
    config = from_training_options(arch, options, len(dictionary), dictionary.pad())
    if config.is_leaky:
        logger.warning(LEAKY_WARNING)
    for name, reason in ignored_settings(config, PRESETS.get(arch, {})).items():
        logger.warning("--%s has no effect: %s", name.replace("_", "-"), reason)
    return config


def _fill_in(args: Any, arch: str) -> None:
    """Fill in what the command line omits: the architecture's settings, and the criterion that it needs."""
    for name, value in PRESETS[arch].items():
        if name not in FROM_TASK and getattr(args, name, None) is None:
            setattr(args, name, value)
    settle_criterion(args, arch)


def register_architectures(model: str, is_bidirectional: bool) -> None:
    """Register the presets of encoders, or all others, as architectures of a fairseq model.

    Args:
        model: the name under which the fairseq model is registered.
        is_bidirectional: whether to register the presets of encoders.
    """
    for arch in PRESETS:
        if (PRESETS[arch].get("direction") == "bidirectional") != is_bidirectional:
            continue
        fill_in = functools.partial(_fill_in, arch=arch)
        if arch in ARCH_MODEL_REGISTRY:  # fairseq has registered an empty function under the model's own name
            ARCH_CONFIG_REGISTRY[arch] = fill_in
        else:
            register_model_architecture(model, arch)(fill_in)
