"""Refuse options that need something missing: a library, a GPU, a file, another option, another kind of task."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smlp.checkpoint.torch_file import read_structure
from smlp.criterions.choice import OURS, made_by
from smlp.errors import UserError
from smlp.fairseq_compat.replacing import replacing
from smlp.files import check_folder, is_missing, regular_file

#: fairseq's own criterions that can train a language model
_CRITERIONS = (
    *("cross_entropy", "label_smoothed_cross_entropy", "label_smoothed_cross_entropy_with_alignment"),
    *("adaptive_loss", "vocab_parallel_cross_entropy"),
)
#: names that these criterions and ours log in validation
_METRICS = ("loss", "nll_loss", "ppl", "accuracy", "total", "n_correct", "wps", "wpb", "bsz", "num_updates")
_LIBRARIES = {"lamb": "apex", "cpu_adam": "deepspeed"}  # required by optimizers
_EPOCHS = re.compile(r"\d{1,7}(-\d{1,7}|(,\d{1,7})*)")  # or updates: a range, or numbers
_DRAWN_BY = {"tensorboard_logdir": "tensorboard", "wandb_project": "wandb"}  # required by logs; fairseq only warns


def apply() -> None:
    from fairseq.data import data_utils

    @replacing(data_utils, "raise_if_valid_subsets_unintentionally_ignored")
    def raise_if_valid_subsets_unintentionally_ignored(find_ignored: Any, cfg: Any) -> None:
        try:
            find_ignored(cfg)
        except ValueError as error:
            raise UserError(
                f"the data directory {cfg.task.data} has more files to validate on than --valid-subset "
                f"{cfg.dataset.valid_subset} names: give --combine-valid-subsets or --ignore-unused-valid-subsets"
            ) from error


def check_best_metric(trainer: Any) -> None:
    """Refuse a ``--best-checkpoint-metric`` that a validation batch has not logged.

    Raises:
        UserError: the message names the metric and those that are logged.
    """
    from fairseq.logging import metrics

    logged, name = list(metrics.get_active_aggregators())[-1], trainer.cfg.checkpoint.best_checkpoint_metric
    if name not in logged and name != "num_updates" and not hasattr(trainer.task, "post_validate"):
        raise UserError(
            f"--best-checkpoint-metric {name} is not among what validation measures: "
            f"{', '.join(key for key in logged if not key.startswith('_'))}"
        )


def check_tools(args: Any) -> None:
    """Refuse options for tools that are missing or cannot do it, as soon as fairseq has read the command line.

    Args:
        args: the options of any of fairseq's tools.

    Raises:
        UserError: the message names the option.
    """
    from fairseq.data.plasma_utils import PYARROW_AVAILABLE

    if getattr(args, "use_plasma_view", False) and not PYARROW_AVAILABLE:
        raise UserError("--use-plasma-view needs pyarrow.plasma, which current versions of pyarrow lack: leave it out")
    post_process = getattr(args, "post_process", None)
    if hasattr(args, "context_window") and post_process not in (None, "subword_nmt", "@@ "):  # of fairseq-eval-lm
        raise UserError(
            f"--post-process {post_process} is not for fairseq-eval-lm, which joins only @@ pieces: smlp eval-lm "
            "counts words of any tokenizer"
        )
    if getattr(args, "profile", False) and not torch.cuda.is_available():
        raise UserError("--profile is for nvprof and needs a GPU: --profile-updates N profiles N updates anywhere")


def check_needs(cfg: Any, num_ranks: int, has_cuda: bool) -> None:
    """Refuse, before anything is built, options that fairseq would refuse only in the middle of its start.

    Args:
        cfg: fairseq's configuration.
        num_ranks: W.
        has_cuda: whether the ranks run on GPUs.

    Raises:
        UserError: the message names the option.
    """
    if cfg.model is None:
        return  # no training
    if sys.flags.optimize:
        assertion = "one of which saves checkpoint_last.pt"
        raise UserError(f"python -O leaves out the assertions of fairseq, {assertion}: unset PYTHONOPTIMIZE")
    _check_names(cfg)
    _check_logs(cfg.common)
    _check_devices(cfg, num_ranks, has_cuda)
    _check_optimizer(cfg.optimizer, has_cuda)
    _check_schedule(cfg.lr_scheduler)
    _check_criterion(cfg)
    _check_languages(cfg.task)
    _check_files(cfg)


def _check_names(cfg: Any) -> None:
    """Refuse names that are not registered; ``fairseq-hydra-train`` accepts any."""
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    known = {name: REGISTRIES[name]["registry"] for name in ("optimizer", "lr_scheduler", "criterion")}
    known |= {"task": TASK_REGISTRY, "model": {**MODEL_REGISTRY, **ARCH_MODEL_REGISTRY}}
    for group, table in known.items():
        given = getattr(cfg, group)
        name = given if isinstance(given, str) else getattr(given, "_name", None)
        if name not in table:
            raise UserError(
                f"there is no {group.replace('_', ' ')} {name!r}" if name else f"there is no {group} to train with"
            )


def _check_logs(common: Any) -> None:
    for name, library in _DRAWN_BY.items():
        if getattr(common, name) and not _is_installed(library):
            raise UserError(f"--{name.replace('_', '-')} needs {library}: pip install -e '.[logs]'")
    if common.tensorboard_logdir and "://" not in common.tensorboard_logdir:
        check_folder(common.tensorboard_logdir, "--tensorboard-logdir", "the logs")


def _check_devices(cfg: Any, num_ranks: int, has_cuda: bool) -> None:
    common, distributed = cfg.common, cfg.distributed_training
    if common.tpu and not _is_installed("torch_xla"):
        raise UserError("--tpu needs torch_xla, which is not installed: leave it out")
    for name in ("memory_efficient_bf16", *(("bf16", "fp16") if has_cuda else ())):
        if common.amp and getattr(common, name):
            raise UserError(f"--amp and --{name.replace('_', '-')} are both given: choose one of the two")
    suffix = cfg.checkpoint.checkpoint_suffix
    if "/" in suffix or "\0" in suffix:
        raise UserError(f"--checkpoint-suffix {suffix!r} is a part of the names of checkpoints, and holds no /")
    keeps = (f"keep_{those}" for those in ("interval_updates", "last_epochs", "best_checkpoints"))
    sign = next((sign for sign in suffix if sign in r"\^$*+?{}[]|()"), None)
    if sign and any(getattr(cfg.checkpoint, keep) > 0 for keep in keeps):  # fairseq's pattern has it as it is
        raise UserError(f"--checkpoint-suffix {suffix!r} holds {sign}, with which fairseq finds no old checkpoints")
    if "_" in suffix and cfg.checkpoint.keep_best_checkpoints > 0:  # fairseq reads the value behind the last _
        raise UserError(f"--checkpoint-suffix {suffix!r} holds _, with which --keep-best-checkpoints fails: use -")
    if cfg.checkpoint.write_checkpoints_asynchronously:
        raise UserError(
            "--write-checkpoints-asynchronously writes damaged checkpoints, from memory that is freed: leave it out"
        )
    if distributed.cpu_offload and distributed.ddp_backend != "fully_sharded":
        raise UserError(f"--cpu-offload needs --ddp-backend fully_sharded, got {distributed.ddp_backend}")
    if distributed.ddp_backend == "fully_sharded" and num_ranks == 1:
        raise UserError(
            "--ddp-backend fully_sharded divides the parameters among ranks, but this run has only one: leave it out"
        )
    if distributed.zero_sharding != "none" and num_ranks == 1:
        raise UserError(
            f"--zero-sharding {distributed.zero_sharding} divides the optimizer state among ranks, but this run has "
            "only one: leave it out"
        )
    if getattr(distributed, "pipeline_model_parallel", False):
        raise UserError("--pipeline-model-parallel is for fairseq's pipelines of translation models: leave it out")
    for option, given in (("--train-subset", cfg.dataset.train_subset), ("--valid-subset", cfg.dataset.valid_subset)):
        if not all(map(str.strip, given.split(","))):
            raise UserError(f"{option} {given!r} names no split of the data in one place")
    if cfg.dataset.combine_valid_subsets and cfg.dataset.valid_subset != "valid":
        raise UserError(
            f"--combine-valid-subsets reads valid, valid1, ... as one: leave out --valid-subset "
            f"{cfg.dataset.valid_subset}, or --combine-valid-subsets"
        )


def _check_optimizer(optimizer: Any, has_cuda: bool) -> None:
    from fairseq.optim.fused_adam import get_fused_adam_class

    name = getattr(optimizer, "_name", None)
    library = _LIBRARIES.get(name)
    if library is not None and not _is_installed(library):
        raise UserError(f"--optimizer {name} needs {library}, which is not installed: give another one, such as adam")
    if name == "composite" and not optimizer.groups:
        raise UserError(
            "--optimizer composite needs groups, which only a configuration of fairseq-hydra-train can give it"
        )
    if name == "adam" and optimizer.fp16_adam_stats and (get_fused_adam_class() is None or not has_cuda):
        raise UserError("--fp16-adam-stats needs a GPU and the fused Adam of apex: leave it out")
    if name == "adafactor" and optimizer.relative_step:
        raise UserError(
            "--relative-step sets a learning rate of its own, and fairseq always gives it --lr: leave it out"
        )
    if name == "adafactor" and optimizer.warmup_init:
        raise UserError("--warmup-init needs --relative-step, which fairseq cannot give: leave it out")


def _check_schedule(schedule: Any) -> None:
    if getattr(schedule, "_name", None) == "cosine" and schedule.min_lr > max(schedule.lr):
        raise UserError(f"--min-lr {schedule.min_lr:g} is above --lr {max(schedule.lr):g}")
    if getattr(schedule, "_name", None) != "manual":
        return
    for option in ("epoch2lr", "update2lr"):
        given = getattr(schedule, option, "{}")
        try:
            rates = ast.literal_eval(given.replace(" ", ""))
            is_right = all(_EPOCHS.fullmatch(key) and float(value) >= 0 for key, value in rates.items())
        except (ValueError, TypeError, SyntaxError, AttributeError):
            is_right = False
        if not is_right:
            raise UserError(
                f"--{option} must be a dictionary of learning rates by number, numbers or range, such as "
                f"\"{{'1-3': 0.1, '4': 0.01}}\", got {given!r}"
            )


def _check_criterion(cfg: Any) -> None:
    if getattr(cfg.task, "_name", None) != "language_modeling":
        return
    name, metric = getattr(cfg.criterion, "_name", None), cfg.checkpoint.best_checkpoint_metric
    author = made_by(name)
    if name == "composite_loss":  # it would take each sequence for an output, and divide the loss by their number
        raise UserError("--criterion composite_loss is for models of several outputs: leave it out")
    if (author == "fairseq" and name not in _CRITERIONS) or (author == "smlp" and name != OURS):
        raise UserError(f"--criterion {name} is for another task than language_modeling: leave it out")
    if name == "adaptive_loss" and not getattr(cfg.model, "adaptive_softmax_cutoff", None):
        raise UserError("--criterion adaptive_loss needs a model with --adaptive-softmax-cutoff")
    if name == "vocab_parallel_cross_entropy":
        raise UserError(
            "--criterion vocab_parallel_cross_entropy needs Megatron, which fairseq does not include: leave it out"
        )
    measured = list(_METRICS)
    if name in ("cross_entropy", OURS) and not cfg.optimization.sentence_avg:
        measured.remove("nll_loss")  # in validation it is the loss, which has that name
    if author in ("fairseq", "smlp") and metric not in measured:
        raise UserError(
            f"--best-checkpoint-metric {metric} is not measured by {name}: give one of "
            f"{', '.join(one for one in measured if one in ('loss', 'nll_loss', 'ppl'))}"
        )


def _check_languages(task: Any) -> None:
    """Refuse data of one language for fairseq's task of several, which reads a folder for each."""
    if getattr(task, "_name", None) != "multilingual_language_modeling" or not Path(task.data.split(":")[0]).is_dir():
        return
    folder = Path(task.data.split(":")[0])
    found = {path.name for path in folder.iterdir() if path.is_dir()}
    wanted = set(task.langs.split(",")) if task.langs else found
    if not found or not wanted <= found:
        raise UserError(
            f"--task multilingual_language_modeling needs a folder of data for each language, and {folder} has "
            f"{f'none for {sorted(wanted - found)[0]!r}' if wanted else 'none'}: give --task language_modeling"
        )


def has_averages(path: str) -> bool:
    """Return whether a checkpoint was written with ``--store-ema``."""
    state = read_structure(path)
    extra = state.get("extra_state") if isinstance(state, Mapping) else None
    return isinstance(extra, Mapping) and "ema" in extra


def _check_files(cfg: Any) -> None:
    if cfg.ema.store_ema and cfg.ema.ema_seed_model:
        if is_missing(cfg.ema.ema_seed_model):
            raise UserError(f"--ema-seed-model: there is no checkpoint {cfg.ema.ema_seed_model}")
        if not has_averages(cfg.ema.ema_seed_model):
            raise UserError(
                f"--ema-seed-model {cfg.ema.ema_seed_model} has no averages: give a checkpoint of a run with "
                "--store-ema"
            )
    config = cfg.common.quantization_config_path
    if config is not None:
        _check_quantization(config, cfg.optimization)


def _check_quantization(path: str, optimization: Any) -> None:
    import yaml
    from fairseq.quantization_utils import Quantizer

    regular_file(path, "file for --quantization-config-path")
    try:
        Quantizer(path, optimization.max_epoch, optimization.max_update)
    except AssertionError as error:
        raise UserError(f"--quantization-config-path {path}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, ZeroDivisionError) as error:
        raise UserError(
            f"--quantization-config-path {path} is not what fairseq reads, a YAML file of n_centroids, block_sizes and "
            f"layers_to_quantize ({type(error).__name__})"
        ) from None


def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
