"""Refuse, at the start and with a remedy, options that cannot work on this machine or with spread experts."""

from __future__ import annotations

import ast
import atexit
import math
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from smlp.config import ModelConfig, flatten
from smlp.config.own_settings import own_fields
from smlp.config.presets import config_of, num_experts_of
from smlp.costs.memory import check_training
from smlp.errors import UserError
from smlp.fairseq_compat.limits import check_numbers
from smlp.fairseq_compat.needs import check_needs
from smlp.fairseq_compat.replacing import replacing
from smlp.fairseq_compat.saving import own_save_dir
from smlp.files import check_folder
from smlp.parallel import ExpertLayout

#: optimizers that treat every element of a parameter alike, so that expert placement does not matter
_POINTWISE = ("adam", "adamax", "adadelta", "adagrad", "nag", "sgd", "cpu_adam")
#: options that hold two numbers in one string: an example, and the limit of both
_PAIRS = (
    ("adam_betas", "(0.9, 0.98)", 1),
    ("adamax_betas", "(0.9, 0.999)", 1),
    ("lamb_betas", "(0.9, 0.999)", 1),
    ("adafactor_eps", "(1e-30, 1e-3)", math.inf),
)
_SHOWN = 3  # most options in a message
_are_compared = False  # the options of all ranks, in this process
#: options that each machine may have its own value of
_OF_MACHINE = (
    *("data", "user_dir", "save_dir", "checkpoint_suffix"),
    *("num_workers", "num_workers_valid", "data_buffer_size", "device_id", "nprocs_per_node", "heartbeat_timeout"),
    *("log_file", "log_format", "tensorboard_logdir", "wandb_project", "azureml_logging", "aim_repo"),
    *("aim_run_hash", "no_progress_bar", "reset_logging", "plasma_path", "empty_cache_freq", "suppress_crashes"),
    *("profile", "profile_dir", "profile_updates"),
)
#: options that choose what a group of a configuration is for
_KINDS = {"model": "arch", **{name: name for name in ("task", "criterion", "optimizer", "lr_scheduler")}}
_BACKENDS = ("legacy_ddp", "no_c10d", "pytorch_ddp", "c10d")


def apply() -> None:
    # Called within fairseq-hydra-train's main function, which fills in defaults and then starts the training.
    train = sys.modules.get("fairseq_cli.train")
    if train is None or not HydraConfig.initialized():
        return
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # hydra would print part of a traceback and exit
    from fairseq.dataclass import utils

    until_exit = ExitStack()
    atexit.register(until_exit.close)

    @replacing(utils, "merge_with_parent")
    def merge_untyped(merge_with_parent: Any, dataclass: Any, cfg: Any, *args: Any, **kw: Any) -> Any:
        # In the second job of a multirun, a part whose name is one of ours still has the type of fairseq's default,
        # such as cross_entropy, and this package is there already.
        if OmegaConf.get_type(cfg) is not dict:
            parent, cfg = cfg._get_parent(), OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
            cfg._set_parent(parent)
        return merge_with_parent(dataclass, cfg, *args, **kw)

    @replacing(train, "add_defaults")
    def checked_add_defaults(add_defaults: Any, cfg: Any) -> None:
        try:
            add_defaults(cfg)
            check_before_start(cfg, cfg.distributed_training.distributed_world_size)
        except OmegaConfBaseException as error:
            raise UserError(f"the configuration cannot be read: {str(error).partition(chr(10))[0]}") from error
        until_exit.enter_context(own_save_dir(cfg, train.main))


def check_before_start(cfg: Any, num_ranks: int, has_cuda: bool | None = None, is_here: bool = True) -> None:
    """Refuse, before anything is built, what cannot work on these ranks.

    Args:
        cfg: fairseq's configuration.
        num_ranks: W.
        has_cuda: whether the ranks run on GPUs; by default, whether this process would.
        is_here: whether they run on this machine, whose memory must hold the model then.

    Raises:
        UserError: the message names the option.
    """
    if has_cuda is None:
        has_cuda = torch.cuda.is_available() and not cfg.common.cpu
    if OmegaConf.is_dict(cfg) and OmegaConf.is_missing(cfg, "model"):
        raise UserError("there is no model to train: give its architecture")
    settle_context(cfg.model, cfg.task)
    _check_given(cfg)
    check_numbers(_by_option(cfg))  # check here too: fairseq-hydra-train parses no command line
    check_needs(cfg, num_ranks, has_cuda)
    check_backend(cfg, has_cuda)
    check_profiling(cfg)
    _check_log_file(cfg)
    check_pairs(cfg)
    _check_overrides(cfg)
    _check_beginning(cfg)
    _check_output_dictionary(cfg)
    num_experts = num_experts_of(cfg.model)
    asked = getattr(cfg.model, "expert_parallel_size", None)
    group_size = ExpertLayout(num_experts, num_ranks, 0, asked).group_size if num_experts else 1
    if group_size > 1:
        check_settings(cfg)
    # the dictionary is not loaded yet, but hardly matters to whether the model fits into memory
    config = config_of(cfg.model, vocab_size=2)
    if config is not None:
        _settle_own_settings(cfg.model, config)
    if config is not None and config.shares_of_training and not cfg.optimization.max_update:
        name, share = next(iter(config.shares_of_training.items()))
        raise UserError(
            f"--{name.replace('_', '-')} {share} is a share of the training run: give its length with --max-update"
        )
    if config is not None and is_here and not has_cuda and getattr(cfg.optimizer, "_name", None) == "adam":
        check_training(config, group_size)


def settle_context(options: Any, task: Any) -> None:
    """Write the task's longest sequence into an encoder's options if they lack it, so that checkpoints keep it.

    Args:
        options: of the model.
        task: the task's options.
    """
    if getattr(options, "max_positions", 0) is None:
        longest = getattr(task, "max_positions", None) or getattr(task, "tokens_per_sample", None)
        write_options(options, {"max_positions": longest})


def _settle_own_settings(options: Any, config: ModelConfig) -> None:
    """Write the settings of the router and blocks themselves into the options that lack them: the code of a plug-in,
    and with it the defaults, may change after a checkpoint was written."""
    own = own_fields()
    settings = {name: value for name, value in flatten(config).items() if name in own}
    write_options(options, {name: value for name, value in settings.items() if getattr(options, name, None) is None})


def write_options(options: Any, values: Mapping[str, Any]) -> None:
    """Write values into the options of a model, task, ..., by name; checkpoints keep them."""
    with nullcontext() if isinstance(options, Namespace) else open_dict(options):
        for name, value in values.items():
            setattr(options, name, value)


def _by_option(cfg: Any) -> dict[str, Any]:
    """Return the values of all groups of a configuration, by the options' names."""
    values: dict[str, Any] = {}
    for group in cfg.values():
        if isinstance(group, Namespace):
            values |= vars(group)
        elif OmegaConf.is_dict(group):
            values |= OmegaConf.to_container(group)
    return values | {option: getattr(cfg[group], "_name", None) for group, option in _KINDS.items()}


def check_same_on_all_ranks(cfg: Any) -> None:
    """Refuse ranks that were started with different options: their copies of the model would drift apart. A collective.

    It does nothing in one process, and when it is called again.

    Raises:
        UserError: the message names the options, the rank and both values.
    """
    global _are_compared
    if _are_compared or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _are_compared = True
    given = _by_option(cfg)
    own = {
        name: str(value)
        for name, value in given.items()
        if name not in _OF_MACHINE and not name.startswith(("distributed_", "_")) and not name.endswith("_file")
    }
    for name in ("restore_file", "finetune_from_model", "continue_once"):  # each machine may have its own copy
        own[name] = str(given.get(name)).rpartition("/")[2]
    own["data_order_file"] = "a file" if given.get("data_order_file") else "None"  # all ranks add to what one writes
    options: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(options, own)
    for rank, other in enumerate(options):
        names = [name for name in sorted(options[0].keys() | other.keys()) if options[0].get(name) != other.get(name)]
        if names:
            names = [name for name in names if name in _KINDS.values()] or names  # each kind has options of its own
            shown = ", ".join(
                f"--{name.replace('_', '-')} {other.get(name)} where rank 0 has {options[0].get(name)}"
                for name in names[:_SHOWN]
            )
            raise UserError(f"rank {rank} has {shown}: start all ranks with the same options")


def _check_given(cfg: Any) -> None:
    """Refuse to train without data, an optimizer or a size of batches; fairseq has no default for them."""
    if cfg.model is None:
        return  # no training: evaluation without --path
    if not getattr(cfg.task, "data", True):
        raise UserError("there is no data to train on: give the folder that fairseq-preprocess made")
    if cfg.optimizer is None:
        raise UserError("there is no optimizer to train with: give --optimizer, such as --optimizer adam")
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        raise UserError("there is no size for the batches: give --batch-size or --max-tokens")


def check_backend(cfg: Any, has_cuda: bool) -> None:
    """Refuse what needs GPUs if there are none.

    Raises:
        UserError: the message names the option.
    """
    backend = cfg.distributed_training.ddp_backend
    if backend in ("fully_sharded", "slowmo") and not has_cuda:
        raise UserError(f"--ddp-backend {backend} needs GPUs, and this run uses none: give --ddp-backend legacy_ddp")


def check_profiling(cfg: Any) -> None:
    """Refuse a profile of no updates, or one that cannot be written.

    Raises:
        UserError: the message names the option.
    """
    num_updates, folder = (getattr(cfg.model, name, None) for name in ("profile_updates", "profile_dir"))
    if num_updates is not None and num_updates < 1:
        raise UserError(f"--profile-updates must be at least 1, got {num_updates}")
    if folder is None:
        return
    if num_updates is None:
        raise UserError(f"--profile-dir {folder} has no effect without --profile-updates (smlp train: --profile)")
    check_folder(folder, "--profile-dir", "the profiles")


def _check_log_file(cfg: Any) -> None:
    """Refuse a log file that cannot be written, or is no text; fairseq opens it when it begins, and adds lines.

    Only the first rank writes. The others do not open the file, whose folder the first may not have made yet.
    """
    if cfg.distributed_training.distributed_rank:
        cfg.common.log_file = None
    if cfg.common.log_file is None:
        return
    path = Path(cfg.common.log_file).absolute()
    reason = None
    try:
        if not path.parent.is_dir():
            reason = f"there is no folder {path.parent}"
        elif path.exists() and not path.is_file():
            reason = "it is not a regular file"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "permission denied"
        elif path.exists() and os.access(path, os.R_OK):
            with path.open("rb") as file:
                reason = "it is not a text file" if b"\0" in file.read(16) else None  # a crash may add some
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"cannot write --log-file {cfg.common.log_file}: {reason}")


def _check_output_dictionary(cfg: Any) -> None:
    """Refuse a smaller output vocabulary for this package's models, which have one for input and output."""
    size = getattr(cfg.task, "output_dictionary_size", -1)
    if size >= 0 and hasattr(cfg.model, "num_sparse_layers"):
        raise UserError(
            f"--output-dictionary-size {size}: --arch {cfg.model._name} has one vocabulary for input and output; "
            "leave the option out"
        )


def check_pairs(cfg: Any) -> None:
    """Refuse options of an optimizer that should be two numbers and are not; fairseq evaluates them late.

    Raises:
        UserError: the message names the option.
    """
    for name, example, most in _PAIRS:
        given = getattr(cfg.optimizer, name, None)
        if not isinstance(given, str):
            continue
        try:
            first, second = map(float, ast.literal_eval(given))
            is_right = 0 <= first < most and 0 <= second < most
        except (ValueError, TypeError, SyntaxError):
            is_right = False
        if not is_right:
            limits = "from 0 to below 1" if most == 1 else "of at least 0"
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} must be two numbers {limits}, such as '{example}', got {given!r}")


def _check_overrides(cfg: Any) -> None:
    """Refuse overrides of an optimizer that are no dictionary; fairseq evaluates them when it loads a checkpoint."""
    given = cfg.checkpoint.optimizer_overrides
    try:
        overrides = ast.literal_eval(given)
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in overrides.values()]
        is_right = all(isinstance(number, (int, float)) for numbers in lists for number in numbers)
    except (ValueError, TypeError, SyntaxError, AttributeError):
        is_right = False
    if not is_right:
        raise UserError(
            f"--optimizer-overrides must be a dictionary of numbers, such as '{{\"lr\": [0.1]}}', got {given!r}"
        )


def _check_beginning(cfg: Any) -> None:
    """Refuse two checkpoints to start from, and resets with ``--finetune-from-model``, which takes weights alone."""
    given = cfg.checkpoint
    if given.finetune_from_model is None:
        return
    others = [f"--restore-file {given.restore_file}"] * (given.restore_file != "checkpoint_last.pt")
    resets = ("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader")
    others += [f"--{name.replace('_', '-')}" for name in resets if getattr(given, name)]
    if others:
        raise UserError(
            f"--finetune-from-model {given.finetune_from_model} and {others[0]} are both given: the first loads only "
            "the weights of a checkpoint; leave one of the two out"
        )


def check_settings(cfg: Any) -> None:
    """Refuse what would let experts diverge or be lost.

    Raises:
        UserError: the message names the option and what to give instead.
    """
    distributed, remedy = cfg.distributed_training, "or give --expert-parallel-size 1"
    optimizer = getattr(cfg.optimizer, "_name", None)
    if distributed.ddp_backend not in _BACKENDS:
        raise UserError(
            f"--ddp-backend {distributed.ddp_backend} treats the experts of different ranks as copies of each other: "
            f"give --ddp-backend legacy_ddp, {remedy}"
        )
    if optimizer is not None and optimizer not in _POINTWISE:
        raise UserError(
            f"--optimizer {optimizer} computes something over a whole parameter, which for experts would depend on "
            f"which ranks hold them: give --optimizer adam, {remedy}"
        )
    refused = {
        "--amp": (cfg.common.amp, "skips updates on single ranks", "--bf16"),
        "--zero-sharding": (distributed.zero_sharding != "none", "takes the ranks' experts for copies", "none of it"),
        "--use-bmuf": (cfg.optimization.use_bmuf, "averages the experts of different ranks", "none of it"),
        "--store-ema": (cfg.ema.store_ema, "would save the averages of one rank's experts", "none of it"),
    }
    for option, (is_given, reason, instead) in refused.items():
        if is_given:
            raise UserError(f"{option} {reason}, and experts are spread over ranks here: give {instead}, {remedy}")


def check_half_precision(cfg: Any, has_cuda: bool) -> None:
    """Raise ``UserError`` for fp16 training without a GPU.

    fairseq's fp16 optimiser keys its flat parameters by CUDA device and creates a CUDA tensor at the first overflow of
    the loss scale, so on a CPU it fails at once or, with the variants, some time later.
    """
    common = cfg.common
    if common.fp16 and not common.tpu and not has_cuda:
        flag = "--memory-efficient-fp16" if common.memory_efficient_fp16 else "--fp16"
        raise UserError(f"{flag} trains on a GPU only and this run uses the CPU: leave it out, or use --bf16 instead")
