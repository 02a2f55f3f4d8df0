"""Writing checkpoints with lazy tensors: in one file, in parts, or as an export."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smlp.checkpoint.export import export_of, safetensors_library, write_export
from smlp.checkpoint.index import INDEX_KEY, PARTS_FOLDER, ExpertIndex, describe_tensors, new_token, part_file
from smlp.checkpoint.lazy import rows_of
from smlp.checkpoint.opened import Checkpoint
from smlp.checkpoint.parts import detach, size_problem, write_part
from smlp.checkpoint.text_files import check_beside, text_files, write_beside
from smlp.checkpoint.torch_file import write_torch_file
from smlp.errors import UserError
from smlp.files import check_writable, write_whole


def check_target(target: str | Path, inputs: Sequence[str | Path], force: bool) -> Path:
    """Where to write; makes its folder.

    Raises:
        UserError: there is a file already and ``force`` is not given, or it is one of the inputs or a part of a
            checkpoint, or the folder cannot be made.
    """
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot make {target.parent}: {getattr(error, 'strerror', error)}") from error
    check_writable(target)
    if target.exists():
        if any(os.path.samefile(target, path) for path in inputs if os.path.exists(path)):
            raise UserError(f"{target} is what is read: write to another file")
        if target.resolve().parent.parent.name == PARTS_FOLDER:
            raise UserError(f"{target} belongs to checkpoints in {target.resolve().parents[2]}: write to another file")
        if not force:
            raise UserError(f"{target} exists: --force writes over it")
    return target


def write_one_file(checkpoint: Checkpoint, target: Path) -> None:
    """A fairseq checkpoint in one file; of an export also its dictionary and tokenizer, beside it.

    Raises:
        UserError: it cannot be written, or there is another dictionary or tokenizer beside it.
    """
    check_beside(checkpoint.files, target.parent)
    write_whole(target, lambda file: write_torch_file(file, checkpoint.state))
    write_beside(checkpoint.files, target.parent)


def write_in_parts(checkpoint: Checkpoint, target: Path, num_parts: int) -> ExpertIndex:
    """A fairseq checkpoint with its experts in files of their own.

    Returns:
        The index.

    Raises:
        UserError: there are no experts, ``num_parts`` does not divide them, the optimizer's state does not fit, or a
            file cannot be written; then nothing is left behind.
    """
    names = checkpoint.expert_names
    if not names:
        raise UserError(f"{checkpoint.path} ({checkpoint.arch}) has no experts: there is nothing to split")
    num_experts = checkpoint.config.moe.num_experts
    if num_parts < 1 or num_experts % num_parts:
        raise UserError(f"{num_experts} experts cannot be split into {num_parts} parts: give a divisor of their number")
    if target.suffix != ".pt":
        raise UserError(f"{target} must end in .pt, as checkpoints of fairseq do")
    check_optimizer(checkpoint)
    check_beside(checkpoint.files, target.parent)
    state = _copied(checkpoint.state)
    positions, token, size = checkpoint.positions, new_token(), num_experts // num_parts
    tensors = detach(state, names, positions)
    ids = [tuple(range(first, first + size)) for first in range(0, num_experts, size)]
    files = [part_file(checkpoint.num_updates, token, own) for own in ids]
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
        write_whole(target, lambda file: write_torch_file(file, content))
    except BaseException:
        shutil.rmtree((target.parent / files[0]).parent, ignore_errors=True)
        with contextlib.suppress(OSError):
            (target.parent / files[0]).parent.parent.rmdir()  # if it is empty
        raise
    write_beside(checkpoint.files, target.parent)
    # A run in this folder clears away parts that no checkpoint needed just now.
    for part in parts:
        if problem := size_problem(target, part):
            raise UserError(f"{problem}; if a run is training in {target.parent}, write to another folder")
    return index


def check_optimizer(checkpoint: Checkpoint) -> None:
    """Refuses a state of the optimizer that is not kept parameter by parameter.

    Raises:
        UserError: it is not; the message says what to do.
    """
    moments, shapes = checkpoint.optimizer, [tuple(p.shape) for p in checkpoint.skeleton.parameters()]
    if moments is None:
        return
    for number, of_parameter in moments.items():
        for moment, value in of_parameter.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and (number >= len(shapes) or shape[0] != shapes[number][0]):
                raise UserError(
                    f"the optimizer's state in {checkpoint.path} does not follow the model's {len(shapes)} parameters "
                    f"({moment} {number} has shape {shape}), as with --fp16, which joins them: give --no-optimizer"
                )


def write_exported(
    checkpoint: Checkpoint,
    target: Path,
    dictionary: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """A self-contained export, in safetensors if the name ends so.

    Raises:
        UserError: it cannot be written, or there is no fitting dictionary.
    """
    as_safetensors = target.suffix == ".safetensors"
    if as_safetensors:
        safetensors_library()  # nobody here could read what is written without it
    files = text_files(checkpoint, dictionary, tokenizer)
    export = export_of(checkpoint.state, checkpoint.config, checkpoint.num_updates, files)
    write_whole(target, lambda file: write_export(file, export, as_safetensors))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state from which tensors can be taken without changing the one given."""
    copy = {**state, "model": dict(state["model"])}
    optimizer = state.get("last_optimizer_state")
    if optimizer:
        copy["last_optimizer_state"] = {**optimizer, "state": dict(optimizer["state"])}
    return copy
