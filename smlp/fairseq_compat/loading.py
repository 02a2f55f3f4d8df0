"""Refuse missing, damaged and unfitting checkpoints in one sentence; fairseq prints a traceback or starts anew."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import open_dict
from torch import nn

from smlp.checkpoint.content import (
    SHAPED_MOMENTS,
    damaged_moment,
    embedding_name,
    moment_fault,
    moment_problems,
    older_settings,
    progress_problems,
)
from smlp.checkpoint.export import is_export
from smlp.checkpoint.index import PARTS_FOLDER
from smlp.checkpoint.load import dictionary_of
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.parts import attach
from smlp.checkpoint.torch_file import (
    OtherClassError,
    check_records,
    existing_file,
    is_archive,
    read_structure,
    record_problem,
)
from smlp.config.registry import ARCHITECTURES
from smlp.errors import UserError
from smlp.fairseq_compat.divergence import damaged_weights
from smlp.fairseq_compat.plateaus import forget_validations
from smlp.fairseq_compat.replacing import replacing
from smlp.fairseq_compat.saving import remove_leftovers
from smlp.fairseq_compat.stopping import DEFAULT_RESTORE_FILE, leave_if_done, without_suffix
from smlp.files import check_writable, is_missing
from smlp.text.tokenizer import Vocabulary
from smlp.text.tokenizer_files import DICTIONARY, SENTENCES, SPECIAL_SYMBOLS, record_in

logger = logging.getLogger(__name__)

#: errors due to a checkpoint's content, as opposed to memory, disks and other ranks
_OF_UNFITTING = (ValueError, TypeError, LookupError, AttributeError)


def apply() -> None:
    from fairseq import checkpoint_utils
    from fairseq.checkpoint_utils import get_maybe_sharded_checkpoint_filename as name_in_shards
    from fairseq.utils import split_paths

    @replacing(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(load_to_cpu: Any, path: str, *rest: Any, **kw: Any) -> dict[str, Any]:
        check_file(path)
        try:
            state = load_to_cpu(path, *rest, **kw)
        except Exception as error:  # unpickling arbitrary bytes can raise anything
            if isinstance(error, pickle.UnpicklingError) and (other := _other_class(path)):
                raise UserError(other) from error
            if _is_refused_type(error) or not Path(path).is_file():
                raise
            raise UserError(exported(path) or _without_a_model(path) or damaged(path, error)) from error
        if not isinstance(state.get("model"), dict):
            raise UserError(f"{path} is not a fairseq checkpoint: it has no 'model' among its {len(state)} entries")
        check_arch_of(state, path)
        attach(state, path)
        if embedding_name(state["model"]) is not None and (state.get("cfg") or {}).get("model"):
            with open_dict(state["cfg"]):
                state["cfg"]["model"].update(older_settings(state))
        for problem in moment_problems(state, path) if _reads_moments.get() else ():
            raise UserError(problem)
        return state

    @replacing(checkpoint_utils, "load_model_ensemble_and_task")
    def load_model_ensemble_and_task(
        load_ensemble: Any,
        filenames: list[str],
        arg_overrides: dict[str, Any] | None = None,
        task: Any = None,
        strict: bool = True,
        suffix: str = "",
        num_shards: int = 1,
        state: Any = None,
    ) -> Any:
        # In scoring and generation, ranks have different numbers of batches and lengths, so each holds all experts.
        overrides = {"expert_parallel_size": 1, **(arg_overrides or {})}
        if None in filenames:
            raise UserError("no checkpoint to load: give one with --path")
        _suffix.set(suffix)
        paths = [name_in_shards(name, suffix, 0, num_shards) for name in filenames]
        try:
            models, cfg, task = load_ensemble(filenames, overrides, task, strict, suffix, num_shards, state)
        except OSError as error:
            if "Model file not found" not in str(error):
                raise
            path = str(error).partition(": ")[2]
            if not is_missing(path):  # in a folder that may not be entered
                existing_file(path)
            raise UserError(missing(path)) from error
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise UserError(unfitting(", ".join(paths), error)) from error
        # a task has its options as the one or the other
        if data := getattr(getattr(task, "args", None) or task.cfg, "data", None):
            for path in filter(os.path.isfile, paths):
                check_dictionary_of(path, split_paths(data)[0], cfg.model, may_differ=False)
        return models, cfg, task

    @replacing(checkpoint_utils, "load_checkpoint")
    def load_checkpoint(resume: Any, cfg: Any, trainer: Any, **kw: Any) -> Any:
        forget_validations()
        _suffix.set(trainer.checkpoint_suffix)
        path = check_restore_file(cfg, trainer)
        data = getattr(trainer.cfg.task, "data", None)
        if path is not None and data:
            check_dictionary_of(path, split_paths(data)[0], trainer.cfg.model)
        if trainer.data_parallel_rank == 0 and not cfg.no_save:
            for leftover in remove_leftovers(cfg.save_dir):
                logger.info(f"removed {leftover}, which an interrupted process left half-written")
        resumed = resume(cfg, trainer, **kw)
        if resumed[0] is not None:
            leave_if_done(trainer)
        lowest, rate = trainer.cfg.optimization.stop_min_lr, trainer.get_lr()
        if rate <= lowest and trainer.get_num_updates() == 0:  # fairseq would say that it is done
            raise UserError(
                f"--stop-min-lr {lowest} ends the training before its first update, whose learning rate is {rate}: "
                "lower it, or begin with a higher rate (such as with --warmup-init-lr)"
            )
        return resumed


#: whether the optimizer's state of the checkpoint that is loaded will be used
_reads_moments: contextvars.ContextVar[bool] = contextvars.ContextVar("reads_moments", default=False)
#: --checkpoint-suffix of what this process loads
_suffix: contextvars.ContextVar[str] = contextvars.ContextVar("suffix", default="")


@contextlib.contextmanager
def reading_moments(are_used: bool) -> Iterator[None]:
    """Refuse checkpoints whose moments are damaged inside the block, if they are used."""
    token = _reads_moments.set(are_used)
    try:
        yield
    finally:
        _reads_moments.reset(token)


@contextlib.contextmanager
def said_in_one_sentence(filename: str) -> Iterator[None]:
    """Explain errors of fairseq's trainer while it loads a checkpoint inside the block.

    Raises:
        UserError: the checkpoint does not fit; fairseq hides the reason.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = error.__context__
        if isinstance(reason, UserError):
            raise reason from None
        if isinstance(reason, RuntimeError) and "loading state_dict" in str(reason):
            raise UserError(unfitting(filename, reason)) from error
        if isinstance(error, AssertionError) and "does not match; please reset" in str(error):
            raise UserError(other_optimizer(filename, str(error))) from error
        cause = reason if "Cannot load model" in str(error) else error
        if not isinstance(cause, _OF_UNFITTING):
            raise
        raise UserError(not_resumable(filename, cause)) from error


def check_seen_by_all(path: str) -> None:
    """Refuse a checkpoint that only some ranks can see; fairseq would wait forever. A collective.

    Raises:
        UserError: the message names the file and the ranks.
    """
    from fairseq.file_io import PathManager

    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, PathManager.isfile(path))
    if any(seen) and not all(seen):
        missing = [rank for rank, is_there in enumerate(seen) if not is_there]
        raise UserError(
            f"ranks {missing} do not see {path}, the others do: --save-dir and --restore-file must be on a disk that "
            "all nodes share"
        )


def check_moments(path: str, trainer: Any) -> None:
    """Compare the moments that an optimizer has loaded with its parameters, and warn of parameters without any.

    Args:
        path: of the checkpoint.
        trainer: that has read it.

    Raises:
        UserError: a moment has another shape than its parameter, or NaN, or is infinite or a negative square; the
            message names the parameter.
    """
    # --zero-sharding os: this rank's part of the parameters is in the optimizer inside fairscale's
    part = getattr(trainer.optimizer.optimizer, "optim", None)
    moments = (part or trainer.optimizer.optimizer).state
    if not moments:
        return
    names = {parameter: name for name, parameter in trainer.get_model().named_parameters()}
    learnt = [parameter for group in (part or trainer.optimizer).param_groups for parameter in group["params"]]
    without = []
    for number, parameter in enumerate(learnt):
        name = names.get(parameter, f"number {number}")
        if not moments.get(parameter):
            without.append(name)
            continue
        for kind in SHAPED_MOMENTS & moments[parameter].keys():
            shape = getattr(moments[parameter][kind], "shape", None)
            if shape != parameter.shape:
                raise UserError(
                    f"{path} is damaged, or has a longer context or another --num-classes: {kind} of parameter {name} "
                    f"is {list(shape or ())}, the parameter {list(parameter.shape)}; --reset-optimizer starts with "
                    "new moments"
                )
        for kind, value in moments[parameter].items():
            if torch.is_tensor(value) and (fault := moment_fault(kind, value)):
                raise UserError(damaged_moment(path, kind, name, fault))
    if without:
        logger.warning(
            f"{path} has no optimizer state for {len(without)} of {len(learnt)} parameters, {', '.join(without[:3])}"
            f"{', ...' if len(without) > 3 else ''}: their moments start from zero"
        )


def check_weights_of(path: str, model: Any) -> None:
    """Refuse weights that are not finite, with which training would end at its first update or never learn.

    Args:
        path: of the checkpoint.
        model: that has loaded it.

    Raises:
        UserError: the message names the first of them.
    """
    if problem := damaged_weights(model):
        raise UserError(f"{path} is damaged, or its training had diverged: it was written {problem}")


def check_averages(path: str, averages: Mapping[str, Any], model: nn.Module, may_lack: bool = False) -> None:
    """Refuse averages of ``--store-ema`` that are not whole; fairseq takes what there is.

    Args:
        path: of the checkpoint.
        averages: in it.
        model: that has loaded them.
        may_lack: whether the model may have parameters that the checkpoint's did not have.

    Raises:
        UserError: a parameter is missing or not finite; the message names it.
    """
    names = [] if may_lack else [name for name, _ in model.named_parameters()]
    lacking = next((f"without {name}" for name in names if name not in averages), "")
    if problem := lacking or damaged_weights(model):
        raise UserError(
            f"{path} is damaged: it has averages {problem}; without --store-ema, training goes on from its weights"
        )


def warn_of_lost_updates(path: str, trainer: Any) -> None:
    """Warn of a checkpoint without the optimizer's state, after which fairseq counts updates from 0."""
    then, now = trainer._optim_history[-1]["num_updates"], trainer.get_num_updates()
    if then != now and trainer.is_data_parallel_master:
        logger.warning(
            f"{path} was written after {then:,} updates without the optimizer's state: moments, the schedule and "
            f"--max-update begin with update {now}"
        )


def check_arch_of(state: Mapping[str, Any], path: str) -> None:
    """Refuse a checkpoint of an architecture that a plugin registered, where the plugin is missing.

    Raises:
        UserError: the architecture is unknown.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY

    options = (state.get("cfg") or {}).get("model") or {}
    if "num_sparse_layers" in options and options["_name"] not in ARCH_MODEL_REGISTRY:
        raise UserError(f"{path} has an unknown architecture, {options['_name']!r}{ARCHITECTURES.hint}")


def check_file(path: str) -> None:
    """Refuse what is no file, or was changed since it was written, or would take more memory than it has bytes.

    What is missing, or in another format of torch, is left to fairseq.

    Raises:
        UserError: the message names the file and, of a damaged one, a neighbour that can be loaded.
    """
    if is_missing(path):
        return
    existing_file(path)
    if not is_archive(path):
        return
    try:
        check_records(path)
        structure = read_structure(path)
        problems = [f"{problem}; {remedy_for(path)}" for problem in _missing_entries(structure, path)]
        problems += progress_problems(structure, path)
    except OtherClassError:  # torch may know the class, or explains what to do
        return
    except UserError as error:
        problems = [f"{error}; {remedy_for(path)}"]
    for problem in problems:
        raise UserError(problem)


def _missing_entries(state: Any, path: str | Path) -> list[str]:
    """Return what fairseq lacks in a checkpoint with a configuration; older ones have other entries."""
    if not isinstance(state, Mapping) or not state.get("cfg") or not isinstance(state.get("model"), Mapping):
        return []
    lacking = [entry for entry in ("optimizer_history", "extra_state") if not state.get(entry)]
    if not lacking:
        return []
    return [f"{path} is damaged: it lacks {' and '.join(lacking)}, which every checkpoint of fairseq-train has"]


def check_restore_file(cfg: Any, trainer: Any) -> str | None:
    """Refuse a checkpoint to start from that is not there or is no file (fairseq would train from scratch without a
    word), and warn if the save-dir holds checkpoints but not the one that training resumes from.

    Returns:
        The checkpoint that training starts from; None for a run that begins.

    Raises:
        UserError: what ``--restore-file``, ``--finetune-from-model`` or ``--continue-once`` names is missing or no
            file, ``checkpoint_last.pt`` or ``checkpoint_best.pt`` is something other than a file, or ``experts`` is no
            folder.
    """
    from fairseq.file_io import PathManager

    suffix = trainer.checkpoint_suffix
    last, best = (Path(cfg.save_dir) / f"checkpoint_{name}{suffix}.pt" for name in ("last", "best"))
    saves = not getattr(cfg, "no_save", False) and getattr(trainer, "data_parallel_rank", 0) == 0
    if saves and not is_missing(best):
        check_writable(best)
    parts = Path(cfg.save_dir) / PARTS_FOLDER
    if getattr(trainer, "experts", None) is not None and not is_missing(parts) and not parts.is_dir():
        raise UserError(f"{parts} is no folder: checkpoints need it for the experts of each rank")
    named = {"--continue-once": getattr(cfg, "continue_once", None), "--finetune-from-model": cfg.finetune_from_model}
    if cfg.restore_file != DEFAULT_RESTORE_FILE:
        named = {"--restore-file": cfg.restore_file.replace(".pt", suffix + ".pt")}
    elif not is_missing(last):
        return str(existing_file(last))
    for option, path in named.items():
        if path is None:
            continue
        if not is_missing(path):
            return str(existing_file(path))
        if not PathManager.exists(path):
            raise UserError(f"{option}: {missing(path)}")
        return path
    if not cfg.no_last_checkpoints:
        newest = newest_loadable(last, suffix=suffix)
        if newest is not None:
            logger.warning(
                f"{last} does not exist: starting from scratch. To continue, use --restore-file "
                f"{without_suffix(newest, suffix)}"
            )
    return None


def check_dictionary_of(path: str, data: str | Path, model: Any, may_differ: bool = True) -> None:
    """Refuse a checkpoint whose dictionary has the same size as that of the data, but other symbols or another order:
    each weight of the embedding would stand for another symbol.

    The dictionary of a checkpoint is next to it, or with the data that it was trained on.

    Args:
        path: of the checkpoint.
        data: folder of the data to train on, or to score.
        model: options of the model, with ``other_dictionary`` if it is one of this package's. The difference from
            another package's model is only logged as a warning.
        may_differ: whether ``other_dictionary`` allows another dictionary, as in training.

    Raises:
        UserError: the message names both dictionaries and the first line that differs.
    """
    places = (Path(data), Path(data) / SENTENCES)
    ours = next((place / DICTIONARY for place in places if (place / DICTIONARY).is_file()), None)
    if ours is None or (difference := _difference(path, ours)) is None:
        return
    allowed = getattr(model, "other_dictionary", None)
    if allowed is False or (allowed and not may_differ):
        or_not = ", or give --other-dictionary if that is what you want" if may_differ else ""
        raise UserError(f"{difference}: binarise the data with the first one (fairseq-preprocess --srcdict){or_not}")
    logger.warning(difference)


def _difference(path: str, ours: Path) -> str | None:
    """Return how the dictionary of a checkpoint differs from another of its size; None if no difference is known."""
    state: Mapping[str, Any] = {}
    with contextlib.suppress(UserError):  # the problem is reported when it is read
        state = read_structure(path)
    record, theirs, now = record_in(state), dictionary_of(Path(path), state), Vocabulary.load(ours)
    # parameters already refuse a dictionary of another size
    if record is not None and record["symbols"] not in (len(now), len(now.with_mask())):
        return None
    if _is_of(now, state):
        return None
    then = None if theirs is None else Vocabulary.load(theirs)
    is_known = then is not None and (record is None or _is_of(then, state))
    if is_known and then.symbols != now.symbols and len(then) == len(now):
        pairs = list(zip(then.symbols, now.symbols, strict=True))
        place = next(place for place, (old, new) in enumerate(pairs) if old != new)
        return (
            f"{path} was trained with the dictionary {theirs}, and the data have {ours}, which differs from it from "
            f"line {place - len(SPECIAL_SYMBOLS) + 1} on ({pairs[place][0]!r} there, {pairs[place][1]!r} here)"
        )
    return record and f"{path} was trained with another dictionary than that of the data, {ours}"


def _is_of(dictionary: Vocabulary, state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint says that its model, of whatever kind, was trained with a dictionary."""
    return True in (dictionary.is_that_of(state), dictionary.with_mask().is_that_of(state))


def other_optimizer(path: str, said: str) -> str:
    """Return the message for a checkpoint with another optimizer or criterion."""
    what, then, now = re.match(r"(\w+) does not match.*\)\. (.*) vs (\w+)", said).groups()
    same = "--optimizer, --bf16 and --fp16" if what == "Optimizer" else "--criterion"
    return (
        f"{path} was trained with the {what.lower()} {then}, this run has {now}: give the {same} that it was trained "
        "with, or --reset-optimizer to start with new moments"
    )


def not_resumable(path: str, error: BaseException) -> str:
    """Return the message for a checkpoint whose parts are of another kind than this run's."""
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return (
        f"training cannot resume from {path} ({what}): its optimizer, schedule, meters or weights do not match "
        "this run's; --reset-optimizer, --reset-lr-scheduler and --reset-meters begin with new ones"
    )


def missing(path: str) -> str:
    """Return the message for a checkpoint that is missing, with the other files of its directory."""
    directory = Path(path).parent
    if not directory.is_dir():
        return f"no checkpoint at {path}: there is no directory {directory}"
    others = sorted(other.name for other in directory.glob("*.pt"))
    holds = f"the directory holds {', '.join(others[:5])}" if others else "the directory holds no .pt file"
    return f"no checkpoint at {path}: {holds}{', ...' if len(others) > 5 else ''}"


def exported(path: str) -> str | None:
    """Return the message for an export of ``smlp checkpoint merge --export``; None for another file."""
    try:
        if not (is_export(read_structure(path)) if is_archive(path) else open_checkpoint(path).is_export):
            return None
    except UserError:
        return None
    return (
        f"{path} is an export, which has weights alone: smlp checkpoint merge {path} -o CHECKPOINT.pt makes a "
        "checkpoint of it that fairseq reads"
    )


def _without_a_model(path: str) -> str | None:
    """Return the message for a whole file with another content, such as a checkpoint of images; None for another."""
    with contextlib.suppress(UserError):
        state = read_structure(path)
        found = state if isinstance(state, dict) else {}
        lacks = {"model": "model" not in found, "configuration": not {"cfg", "args"} & found.keys()}
        if any(lacks.values()):
            missing = " and no ".join(name for name, is_missing in lacks.items() if is_missing)
            return f"{path} is not a checkpoint of fairseq-train: it has no {missing}"
    return None


def damaged(path: str, error: BaseException) -> str:
    """Return the message for a file that is no complete checkpoint, with its size and a neighbour that loads."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: an offset outside the file
        return f"cannot read {path}: {error.strerror or error}"
    size, reason = Path(path).stat().st_size, type(error).__name__
    return f"{path} ({size:,} bytes) is truncated or not a checkpoint ({reason} while reading it); {remedy_for(path)}"


def remedy_for(path: str | Path) -> str:
    """Return what to do about a checkpoint that cannot be read."""
    suffix = _suffix.get()
    newest = newest_loadable(Path(path), compare=True, suffix=suffix)
    if newest is not None:
        named = f" {without_suffix(newest, suffix)}" if suffix else ""
        return f"{newest} can be loaded instead (--restore-file{named} to train on, --path{named} to evaluate)"
    return f"no other checkpoint*.pt in {Path(path).parent} can be loaded"


def unfitting(path: str, error: RuntimeError) -> str:
    """Return the message for a checkpoint of another model, from the first difference that torch reports."""
    lines = [line.strip() for line in str(error).splitlines()[1:]]
    sizes = re.compile(r"size mismatch for (\S+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)")
    for line in lines:
        if match := sizes.search(line):
            name, stored, built = match.groups()
            what = f"{name} is {stored} in the file and {built} in this model"
            return f"checkpoint {path} does not fit: {what}; the dictionary or the --arch settings differ"
    return f"checkpoint {path} does not fit this model: {lines[0] if lines else error}"


def _time_of(path: Path) -> float:
    """Return when a file was changed; before all others if a run has removed it meanwhile."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("-inf")


def newest_loadable(path: Path, compare: bool = False, suffix: str = "") -> Path | None:
    """Return the newest other ``checkpoint*.pt`` next to ``path`` that training can resume from, or None.

    Args:
        path: of a checkpoint.
        compare: whether all bytes of the other one are compared with its checksums.
        suffix: ``--checkpoint-suffix``, which the other one has, too.
    """
    others = [other for other in path.parent.glob("checkpoint*.pt") if other != path and other.stem.endswith(suffix)]
    for other in sorted(others, key=_time_of, reverse=True):
        try:
            state = read_structure(other)
            is_resumable = isinstance(state, dict) and isinstance(state.get("model"), dict)  # an export is not
            if not is_resumable or _missing_entries(state, other) or progress_problems(state, other):
                continue
            reader = attach(state, other, compare)
            for part in reader.index.parts if reader and compare else ():  # else the sizes tell
                reader.open(part)
            if moment_problems(state, other):
                continue
            if not compare or record_problem(other) is None:
                return other
        except UserError:
            continue
    return None


def _other_class(path: str) -> str | None:
    """Return the message for a file with objects of other classes than torch reads by itself; None for another one."""
    try:
        read_structure(path)
    except OtherClassError as error:
        return f"{error}: a plug-in that saved it can allow it with torch.serialization.add_safe_globals"
    except UserError:
        return None
    return None


def _is_refused_type(error: BaseException) -> bool:
    """Return whether torch read the file but refused a class in it; its own message says what to do."""
    return isinstance(error, pickle.UnpicklingError) and bool(re.search(r"Unsupported (global|class)", str(error)))
