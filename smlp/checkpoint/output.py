"""Write checkpoints in one file, in parts or as an export; average the weights of several."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from smlp.checkpoint.export import export_of, safetensors_library, write_export
from smlp.checkpoint.index import (
    INDEX_KEY,
    PARTS_FOLDER,
    ExpertIndex,
    describe_tensors,
    folders_of_parts,
    new_token,
    part_file,
    remove_unused_parts,
    size_problem,
)
from smlp.checkpoint.lazy import are_equal, mean, rows_of
from smlp.checkpoint.load import check_beside, dictionary_record, text_files, written_beside
from smlp.checkpoint.opened import Checkpoint
from smlp.checkpoint.parts import detach, write_part
from smlp.checkpoint.torch_file import write_torch_file
from smlp.config import differences, flatten
from smlp.config.ignored_settings import OF_THE_START, ignored_settings
from smlp.errors import UserError
from smlp.files import check_writable, is_safetensors, missing_folders, not_writable, remove_empty, write_whole
from smlp.text.tokenizer_files import DICTIONARY, RECORD, TOKENIZER_FILES

#: settings that may change while a model is trained
_OF_TRAINING = {
    *("dropout", "expert_dropout", "attention_dropout", "load_balance_weight", "router_z_weight", "router_jitter"),
    *("router_freeze", "base_shuffle", "base_warmup", "base_offset_rate", "loss_free_rate", "second_expert"),
    *("capacity_factor", "eval_capacity_factor", "drop_order"),
    *OF_THE_START,
}

# names of fairseq's checkpoints; they are ordered by the number in the group
_EPOCH = re.compile(r"checkpoint(\d+)\.pt")
_UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")
# names of folders of parts
_PARTS = re.compile(r"update_\d+_[0-9a-f]{8}")


def check_target(target: str | Path, inputs: Sequence[str | Path], force: bool) -> Path:
    """Return the path to write to.

    Raises:
        UserError: the file exists and ``force`` is not given, it is one of the inputs or a part of a checkpoint, an
            input would lose its experts, it has the name of a dictionary or tokenizer, or it cannot be written.
    """
    target = Path(target)
    if target.name in (DICTIONARY, *TOKENIZER_FILES):
        raise UserError(f"{target} has the name of a dictionary or tokenizer file: write to another file")
    if target.parent.is_dir():
        check_writable(target)
    elif problem := not_writable(target.parent):
        raise UserError(f"cannot write {target}: {problem}")
    if target.exists():
        if any(os.path.samefile(target, path) for path in inputs if os.path.exists(path)):
            raise UserError(f"{target} is an input: write to another file")
        folder = target.resolve().parent  # in no folder experts/ where that is a link
        if _PARTS.fullmatch(folder.name):
            raise UserError(f"{target} belongs to checkpoints with experts in {folder}: write to another file")
        if not force:
            raise UserError(f"{target} exists: --force overwrites it")
        # what it has in parts is removed once it is written over, but for the parts of the ``*.pt`` beside it
        is_link = (target.parent / PARTS_FOLDER).is_symlink()  # then they stay
        parts = set() if is_link else {folder.resolve() for folder in _parts_of(target)}
        for path in map(Path, inputs if parts else ()):
            is_beside = path.suffix == ".pt" and os.path.samefile(path.parent, target.parent)
            if not is_beside and parts & {folder.resolve() for folder in _parts_of(path)}:
                raise UserError(f"{target} has its experts in the files of the input {path}: write to another file")
    return target


_P = ParamSpec("_P")
_Write = Callable[Concatenate[Checkpoint, Path, _P], None]


def _leaving_nothing(write: _Write[_P]) -> _Write[_P]:
    """Remove folders that a function has made for its target if it fails; files it removes itself."""

    @functools.wraps(write)
    def whole(checkpoint: Checkpoint, target: Path, *args: _P.args, **kw: _P.kwargs) -> None:
        new = missing_folders(target)
        try:
            write(checkpoint, target, *args, **kw)
        except BaseException:
            remove_empty(new)
            raise

    return whole


@_leaving_nothing
def write_one_file(checkpoint: Checkpoint, target: Path) -> None:
    """Write a fairseq checkpoint in one file and, if it comes from an export, its dictionary and tokenizer beside it.

    Raises:
        UserError: it cannot be written, its name is that of an export, or another dictionary or tokenizer lies there.
    """
    if target.suffix != ".pt":
        raise UserError(f"{target}: a checkpoint to train from must end in .pt, as those of fairseq do")
    check_beside(checkpoint.files, target.parent)
    _make_folder(target)
    before = _parts_of(target)
    content = _recorded(checkpoint)
    with written_beside(checkpoint.files, target):
        write_whole(target, lambda file: write_torch_file(file, content))
    remove_unused_parts(target.parent, before)


@_leaving_nothing
def write_in_parts(checkpoint: Checkpoint, target: Path, num_parts: int) -> None:
    """Write a fairseq checkpoint with its experts in ``num_parts`` files.

    Raises:
        UserError: there are no experts, ``num_parts`` does not divide them, the optimizer's state does not fit, or a
            file cannot be written. Nothing is left behind then.
    """
    names = checkpoint.expert_names
    if not names:
        raise UserError(f"{checkpoint.path} ({checkpoint.arch}) has no experts: there is nothing to split")
    num_experts = checkpoint.config.num_experts
    if num_parts < 1 or num_experts % num_parts:
        raise UserError(f"{num_experts} experts cannot be split into {num_parts} parts: give a divisor of their number")
    if target.suffix != ".pt":
        raise UserError(f"{target} must end in .pt, as checkpoints of fairseq do")
    _check_optimizer(checkpoint)
    check_beside(checkpoint.files, target.parent)
    before = _parts_of(target)
    state = _copied(_recorded(checkpoint))
    positions, token, size = checkpoint.positions, new_token(), num_experts // num_parts
    tensors = detach(state, names, positions)
    ids = [tuple(range(first, first + size)) for first in range(0, num_experts, size)]
    files = [part_file(checkpoint.num_updates, token, own) for own in ids]
    new = missing_folders(target.parent / files[0])
    try:
        parts = [
            write_part(target.parent, file, token, own, {key: rows_of(tensor, own) for key, tensor in tensors.items()})
            for file, own in zip(files, ids, strict=True)
        ]
        index = ExpertIndex(
            token=token,
            num_experts=num_experts,
            world_size=num_parts,
            group_size=num_parts,
            parts=tuple(parts),
            tensors=describe_tensors(tensors),
            positions=positions,
        )
        content = {**state, INDEX_KEY: index.to_plain()}
        with written_beside(checkpoint.files, target):
            write_whole(target, lambda file: write_torch_file(file, content))
        # A run that trains in this folder may have removed the parts before the new checkpoint referred to them.
        for part in parts:
            if problem := size_problem(target, part):
                target.unlink()
                raise UserError(f"{problem}; if a run is training in {target.parent}, write to another folder")
    except BaseException:
        folder = (target.parent / files[0]).parent
        if folder not in _parts_of(target):  # an interruption may come when all is written
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(new)
        raise
    remove_unused_parts(target.parent, before)


def _parts_of(target: Path) -> set[Path]:
    """Return the folders of parts of what lies at ``target`` now."""
    with contextlib.suppress(Exception):  # nothing, or no checkpoint
        return folders_of_parts(target)
    return set()


def _check_optimizer(checkpoint: Checkpoint) -> None:
    """Raise ``UserError`` if the optimizer's state is not kept by parameter."""
    moments, shapes = checkpoint.optimizer, [tuple(parameter.shape) for _, parameter in checkpoint.trained]
    if moments is None:
        return
    last = len(shapes) + checkpoint.num_criterion_parameters
    for number, of_parameter in moments.items():
        if len(shapes) <= number < last:
            continue
        for moment, value in of_parameter.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and (number >= len(shapes) or shape[0] != shapes[number][0]):
                raise UserError(
                    f"the optimizer state in {checkpoint.path} does not match the {len(shapes)} parameters that the "
                    f"model trains ({moment} {number} has shape {shape}), as with --fp16, which joins "
                    "them, or adafactor, which keeps means: give --no-optimizer"
                )


@_leaving_nothing
def write_exported(
    checkpoint: Checkpoint,
    target: Path,
    dictionary: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a self-contained export, in the format of safetensors if the name ends in ``.safetensors``.

    Raises:
        UserError: it cannot be written, or there is no dictionary that fits.
    """
    as_safetensors = is_safetensors(target)
    if not as_safetensors and target.suffix != ".pt":
        raise UserError(f"{target}: an export must end in .safetensors or .pt")
    if as_safetensors:
        safetensors_library()  # fail now if it is missing: the export could not be read on this machine
    files = text_files(checkpoint, dictionary, tokenizer)
    export = export_of(checkpoint.state, checkpoint.config, checkpoint.num_updates, files)
    _make_folder(target)
    before = _parts_of(target)
    write_whole(target, lambda file: write_export(file, export, as_safetensors))
    remove_unused_parts(target.parent, before)


def _make_folder(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot make {target.parent}: {getattr(error, 'strerror', error)}") from error


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state as far as :func:`~smlp.checkpoint.parts.detach` changes it."""
    copy = {**state, "model": dict(state["model"])}
    optimizer = state.get("last_optimizer_state")
    if optimizer:
        copy["last_optimizer_state"] = {**optimizer, "state": dict(optimizer["state"])}
    return copy


def _recorded(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state to write, in which an export's dictionary, which was inside it, is recorded."""
    if not checkpoint.is_export or (record := dictionary_record(checkpoint)) is None:
        return checkpoint.state
    return {**checkpoint.state, "extra_state": {**checkpoint.state["extra_state"], RECORD: record}}


def averaged(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """Return a checkpoint with the mean of the weights and everything else of the first, but no optimizer and no moving
    averages (``--store-ema``), which would belong to other weights.

    Weights are summed in float64.

    Raises:
        UserError: two checkpoints are of different models; the message names both and the tensor.
    """
    first = checkpoints[0]
    models = [checkpoint.state["model"] for checkpoint in checkpoints]
    for checkpoint in checkpoints[1:]:
        _check_alike(first, checkpoint)
    weights = {
        name: mean([model[name] for model in models]) if tensor.dtype.is_floating_point else tensor
        for name, tensor in models[0].items()
    }
    state = {**first.state, "model": weights}
    state.pop("last_optimizer_state", None)
    if isinstance(extra := state.get("extra_state"), dict):
        state["extra_state"] = {name: value for name, value in extra.items() if not name.startswith("ema")}
    return Checkpoint(first.path, state, first.config, files=first.files, is_export=first.is_export)


def _check_alike(first: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = first.state["model"], other.state["model"]
    without = {*_OF_TRAINING, *ignored_settings(other.config, flatten(first.config))}
    names = [name for name in differences(other.config, first.config) if name not in without]
    values = {name: [flatten(one.config).get(name) for one in (first, other)] for name in names}
    values["add_bos_token"] = [bool(one.state["cfg"]["model"].get("add_bos_token")) for one in (first, other)]
    for name, (one, another) in values.items():
        if one != another:
            raise UserError(
                f"{first.path} and {other.path} are of different models: {name} is {one} in one and {another} in the "
                "other"
            )
    if None not in (records := [dictionary_record(one) for one in (first, other)]) and records[0] != records[1]:
        raise UserError(f"{first.path} and {other.path} have different dictionaries")
    different = sorted(ours.keys() ^ theirs.keys())
    if different:
        raise UserError(
            f"{first.path} and {other.path} are of different models: {len(different)} tensors are in one of the two "
            f"only, the first being {different[0]}"
        )
    for name, tensor in ours.items():
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {t.shape}" for t in (tensor, theirs[name])]
        if kinds[0] != kinds[1]:
            raise UserError(f"{name} is {kinds[0]} in {first.path} and {kinds[1]} in {other.path}")
    for name, tensor in ours.items():
        if not tensor.dtype.is_floating_point and not are_equal(tensor, theirs[name]):
            raise UserError(f"{name} is not the same in {first.path} and {other.path}, and integers cannot be averaged")


def last_checkpoints(folder: str | Path, count: int, by_update: bool, upper_bound: int | None = None) -> list[Path]:
    """Return the newest checkpoints of a training run, the newest first.

    Args:
        folder: of the run.
        count: number of checkpoints.
        by_update: take those of updates (``checkpoint_E_U.pt``) instead of epochs (``checkpointE.pt``).
        upper_bound: last epoch or update to take.

    Raises:
        UserError: there are fewer checkpoints.
    """
    folder, pattern = Path(folder), _UPDATE if by_update else _EPOCH
    if count < 1:
        raise UserError(f"the number of checkpoints to average must be at least 1, got {count}")
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no folder {folder}") from None
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from None
    numbered = [(int(match[1]), folder / name) for name in names if (match := pattern.fullmatch(name))]
    within = sorted((n, path) for n, path in numbered if upper_bound is None or n <= upper_bound)
    if len(within) < count:
        what = "checkpoint_EPOCH_UPDATE.pt" if by_update else "checkpointEPOCH.pt"
        bound = "" if upper_bound is None else f" up to {upper_bound}"
        raise UserError(f"{folder} has {len(within)} checkpoints {what}{bound}, not {count}")
    return [path for _, path in within[::-1][:count]]
