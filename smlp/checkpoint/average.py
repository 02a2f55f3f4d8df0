"""The mean of the weights of several checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from smlp.checkpoint.lazy import are_equal, mean
from smlp.checkpoint.opened import Checkpoint
from smlp.errors import UserError

# names that fairseq gives to checkpoints, and the number by which they are ordered
_EPOCH = re.compile(r"checkpoint(\d+)\.pt")
_UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")


def averaged(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """A checkpoint with the mean of the weights, summed in float64, and everything else of the first; no optimizer.

    Raises:
        UserError: two are not of the same model; the message names both and the tensor.
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
    return Checkpoint(first.path, state, first.config, files=first.files, is_export=first.is_export)


def _check_alike(first: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = first.state["model"], other.state["model"]
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
            raise UserError(f"{name} is not the same in {first.path} and {other.path}, and whole numbers have no mean")


def last_checkpoints(folder: str | Path, count: int, by_update: bool, upper_bound: int | None = None) -> list[Path]:
    """The newest checkpoints of a training run, the newest first.

    Args:
        folder: of the run.
        count: how many.
        by_update: those of updates (``checkpoint_E_U.pt``) rather than of epochs (``checkpointE.pt``).
        upper_bound: the last epoch or update to take.

    Raises:
        UserError: there are fewer.
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
