"""Whether the files of a checkpoint are intact, belong together, and hold the model that their configuration says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from smlp.checkpoint.checksums import record_problem
from smlp.checkpoint.export import PREFIX, digest_problem, read_safetensors
from smlp.checkpoint.index import INDEX_KEY, ExpertIndex, Part
from smlp.checkpoint.lazy import LazyTensor
from smlp.checkpoint.opened import Checkpoint, open_checkpoint
from smlp.checkpoint.parts import open_part, size_problem
from smlp.checkpoint.progress import moment_problems
from smlp.checkpoint.text_files import tokenizer_of
from smlp.checkpoint.torch_file import existing_file, read_structure
from smlp.errors import UserError

_SHOWN = 3  # tensors named in a sentence


def problems_of(path: str | Path) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; nothing if it is whole.

    All its bytes are read and compared with their checksums.
    """
    problems = file_problems(path)
    if not problems:
        try:
            checkpoint = open_checkpoint(path)
            problems = fit_problems(checkpoint)
            if checkpoint.is_export:
                tokenizer_of(checkpoint)
        except UserError as error:
            problems = [str(error)]
    return problems


def open_intact(path: str | Path) -> Checkpoint:
    """Opens a checkpoint that is whole.

    Raises:
        UserError: something is wrong: the first thing that is.
    """
    for problem in problems_of(path):
        raise UserError(problem)
    return open_checkpoint(path)


def file_problems(path: str | Path) -> list[str]:
    """What is wrong with the bytes of the files, one sentence each."""
    try:
        path = existing_file(path)
        if path.suffix == ".safetensors":
            read_safetensors(path)
            problem = digest_problem(path)
            return [problem] if problem else []
        content = read_structure(path)
        problems = _archive_problems(path)
        if isinstance(content, dict) and INDEX_KEY in content:
            index = ExpertIndex.from_plain(content[INDEX_KEY], path)
            problems += [problem for part in index.parts if (problem := _part_problem(path, index, part))]
        return problems
    except UserError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot read {error.filename or path}: {error.strerror}"]


def _archive_problems(path: Path) -> list[str]:
    """What is wrong with the records of a file, or why torch does not take it all the same."""
    problem = record_problem(path)
    return [problem] if problem else _unusable(path)


def _unusable(path: Path) -> list[str]:
    """Why torch does not take a file whose records are intact: it looks at fields that hold nothing of the content."""
    try:
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return [f"{path} is damaged: torch cannot read it ({type(error).__name__}: {reason})"]
    return []


def _part_problem(path: Path, index: ExpertIndex, part: Part) -> str | None:
    problem = size_problem(path, part)
    if problem:
        return problem
    file = path.parent / part.file
    digest = sha256_of(file)
    try:
        open_part(path, index, part, read_structure)
        if digest == part.sha256:
            return None
        damaged = _archive_problems(file)
    except UserError as error:
        return str(error)
    changed = f"{file} is damaged: its SHA-256 is {digest}, the index says {part.sha256}"
    return f"{(damaged or [changed])[0]} (experts {part.experts()} of {path})"


def fit_problems(checkpoint: Checkpoint) -> list[str]:
    """Where the tensors are not those of the model that the configuration describes, one sentence each."""
    path, skeleton = checkpoint.path, checkpoint.skeleton
    wanted = {PREFIX + name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    is_real = {PREFIX + name: tensor.is_floating_point() for name, tensor in skeleton.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.state["model"].items()}
    problems = []
    for what, names in (("lacks", wanted.keys() - found.keys()), ("has besides", found.keys() - wanted.keys())):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN]) + (" and others" if len(names) > _SHOWN else "")
            problems.append(f"{path} does not fit its configuration ({checkpoint.arch}): it {what} {shown}")
    problems += [
        f"{path} does not fit its configuration ({checkpoint.arch}): {name} has shape {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    problems += [
        f"{path} does not fit its configuration ({checkpoint.arch}): {name} is of {found_tensor.dtype}, no real numbers"
        for name, found_tensor in checkpoint.state["model"].items()
        if name in wanted and is_real[name] and not found_tensor.dtype.is_floating_point
    ]
    kinds = {tensor.dtype for tensor in checkpoint.state["model"].values() if tensor.dtype.is_floating_point}
    if len(kinds) > 1:
        problems.append(f"{path} has weights of several types: {', '.join(sorted(map(str, kinds)))}")
    problems += _moment_problems(checkpoint)
    return problems


def _moment_problems(checkpoint: Checkpoint) -> list[str]:
    """Moments of another shape than their parameter. Those of --fp16, which joins all parameters, are left alone."""
    problems = moment_problems(checkpoint.state, checkpoint.path)
    if problems:
        return problems
    parameters, moments = list(checkpoint.skeleton.named_parameters()), checkpoint.optimizer or {}
    if len(moments) == 1 and len(parameters) > 1:
        return []
    for number, of_parameter in moments.items():
        if number >= len(parameters):
            problems.append(f"{checkpoint.path} has an optimizer state of parameter {number} of {len(parameters)}")
            continue
        name, shape = parameters[number][0], tuple(parameters[number][1].shape)
        for moment, value in of_parameter.items():
            if isinstance(value, LazyTensor) and len(value.shape) == len(shape) and value.shape != shape:
                problems.append(f"{checkpoint.path}: {moment} of {name} has shape {value.shape}, not {shape}")
    return problems


def sha256_of(path: str | Path) -> str:
    """Of the bytes of a file."""
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
