"""Describe checkpoints (``smlp checkpoint info``) and find damage in them (``smlp checkpoint verify``)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from smlp.checkpoint.content import damaged_moment, moment_fault
from smlp.checkpoint.export import digest_problem, read_safetensors
from smlp.checkpoint.index import INDEX_KEY, ExpertIndex, Part, size_problem
from smlp.checkpoint.lazy import LazyTensor
from smlp.checkpoint.load import tokenizer_of
from smlp.checkpoint.opened import Checkpoint, fit_problems, open_checkpoint
from smlp.checkpoint.parts import open_part
from smlp.checkpoint.torch_file import existing_file, named_error, read_structure, record_problem
from smlp.errors import UserError
from smlp.files import is_safetensors

_SIZES = ("max_tokens", "vocab_size", "embed_dim", "ffn_dim", "num_dense_layers", "num_sparse_layers")


def problems_of(path: str | Path) -> list[str]:
    """Return what is wrong with a checkpoint, one sentence each.

    All its bytes are read and compared with their checksums, and all weights and moments are looked at.
    """
    problems = file_problems(path)
    if not problems:
        try:
            checkpoint = open_checkpoint(path)
            problems = fit_problems(checkpoint, reads_weights=True) or _moment_problems(checkpoint)
            if checkpoint.is_export:
                tokenizer_of(checkpoint)
        except UserError as error:
            problems = [str(error)]
    return problems


def open_intact(path: str | Path) -> Checkpoint:
    """Open a checkpoint after verifying it.

    Raises:
        UserError: the first problem found.
    """
    for problem in problems_of(path):
        raise UserError(problem)
    return open_checkpoint(path)


def file_problems(path: str | Path) -> list[str]:
    """Return what is wrong with the bytes of the files, one sentence each."""
    try:
        path = existing_file(path)
        if is_safetensors(path):
            read_safetensors(path)
            problem = digest_problem(path)
            return [problem] if problem else []
        content = read_structure(path)
        problems = _record_problems(path)
        if isinstance(content, dict) and INDEX_KEY in content:
            index = ExpertIndex.from_plain(content[INDEX_KEY], path)
            problems += [problem for part in index.parts if (problem := _part_problem(path, index, part))]
        return problems
    except UserError as error:
        return [str(error)]
    except OSError as error:
        return [f"cannot read {error.filename or path}: {error.strerror}"]


def _moment_problems(checkpoint: Checkpoint) -> list[str]:
    """Return which moments cannot be used, one sentence each; --fp16 flattens those of all parameters into one."""
    moments = checkpoint.optimizer or {}
    names = [checkpoint.prefix + name for name, _ in checkpoint.trained] if len(moments) > 1 else []
    return [
        damaged_moment(checkpoint.path, moment, names[number] if number < len(names) else f"number {number}", fault)
        for number, of_parameter in moments.items()
        for moment, value in of_parameter.items()
        if isinstance(value, LazyTensor)
        and (fault := next((found for piece in value.pieces() if (found := moment_fault(moment, piece))), None))
    ]


def _record_problems(path: Path) -> list[str]:
    """Return which records are damaged or, if none is, why torch cannot read the file.

    Torch also reads fields of the archive that no checksum covers.
    """
    if problem := record_problem(path):
        return [problem]
    try:
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnicodeEncodeError:  # its name, which torch cannot open, is not UTF-8
        return []
    except Exception as error:
        return [f"{path} is damaged: torch cannot read it ({named_error(error)})"]
    return []


def _part_problem(path: Path, index: ExpertIndex, part: Part) -> str | None:
    problem = size_problem(path, part)
    if problem:
        return problem
    file = path.parent / part.file
    try:
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        open_part(path, index, part, compare=False)
        if digest == part.sha256:
            return None
        damaged = _record_problems(file)
    except UserError as error:
        return str(error)
    changed = f"{file} is damaged: its SHA-256 is {digest}, the index says {part.sha256}"
    return f"{(damaged or [changed])[0]} (experts {part.experts()} of {path})"


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return facts about a checkpoint as plain values.

    Returns:
        ``path``, ``kind`` (one file, parts or export), ``arch``, ``num_updates``, ``epoch`` (None for an export),
        ``params`` (``total``, ``experts``), ``dtypes``, ``settings`` (sizes only), ``layout``
        (``world_size``, ``group_size``), ``optimizer`` (name and moments, or None), ``files`` (``file``, ``bytes``,
        ``experts``), ``bytes`` of all of them.
    """
    state, config, index = checkpoint.state, checkpoint.config, checkpoint.index
    model, cfg = state["model"], state["cfg"]
    parameters = {name for name, _ in checkpoint.skeleton.named_parameters(prefix=checkpoint.prefix.removesuffix("."))}
    experts = set(checkpoint.expert_names)
    distributed = cfg.get("distributed_training") or {}
    parts = index.parts if index else ()
    files: list[dict[str, Any]] = [
        {"file": checkpoint.path.name, "bytes": checkpoint.path.stat().st_size, "experts": None},
        *({"file": part.file, "bytes": part.num_bytes, "experts": list(part.expert_ids)} for part in parts),
    ]
    return {
        "path": str(checkpoint.path),
        "kind": "export" if checkpoint.is_export else "one file" if index is None else "parts",
        "arch": checkpoint.arch,
        "num_updates": checkpoint.num_updates,
        "epoch": None if checkpoint.is_export else _epoch(state),
        "params": {
            "total": sum(tensor.numel for name, tensor in model.items() if name in parameters),
            "experts": sum(tensor.numel for name, tensor in model.items() if name in experts),
        },
        "dtypes": sorted({str(model[name].dtype).removeprefix("torch.") for name in parameters & model.keys()}),
        "settings": {
            **{name: getattr(config, name) for name in _SIZES},
            "num_experts": config.num_experts if config.num_sparse_layers else 0,
        },
        "layout": {
            "world_size": index.world_size if index else distributed.get("distributed_world_size"),
            "group_size": index.group_size if index else 1,
        },
        "optimizer": _optimizer(checkpoint),
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
    }


def _epoch(state: dict[str, Any]) -> int | None:
    iterator = (state.get("extra_state") or {}).get("train_iterator") or {}
    return iterator.get("epoch")


def _optimizer(checkpoint: Checkpoint) -> dict[str, Any] | None:
    moments = checkpoint.optimizer
    if not moments:
        return None
    history = checkpoint.state.get("optimizer_history") or [{}]
    values = [pair for of_parameter in moments.values() for pair in of_parameter.items()]
    names = {name for name, value in values if isinstance(value, LazyTensor) and value.shape}
    return {"name": history[-1].get("optimizer_name"), "moments": sorted(names)}


def as_text(facts: dict[str, Any]) -> str:
    """Format the facts of :func:`summary` as lines of text."""
    params, sizes, layout = facts["params"], facts["settings"], facts["layout"]
    dtypes, optimizer = ", ".join(facts["dtypes"]), facts["optimizer"]
    of_experts = f", {params['experts']:,} of them in {sizes['num_experts']} experts" if params["experts"] else ""
    blocks = f"{sizes['num_dense_layers']} dense + {sizes['num_sparse_layers']} sparse blocks"
    epoch = "" if facts["epoch"] is None else f", epoch {facts['epoch']}"
    ranks, num_parts = layout["world_size"], len(facts["files"]) - 1
    where = {
        "one file": "one file" + (f", of a run with W = {ranks} ranks" if ranks else ""),
        "parts": f"experts in {num_parts} parts, as W = {ranks} ranks with P = {layout['group_size']} write them",
        "export": "export: weights, dictionary and tokenizer; no optimizer",
    }
    lines = [
        f"{facts['path']}: {facts['arch']}, {facts['num_updates']:,} updates{epoch}",
        f"  parameters  {params['total']:,}{of_experts}; {dtypes}",
        f"  model       T={sizes['max_tokens']}, H={sizes['embed_dim']}, F={sizes['ffn_dim']}, "
        f"V={sizes['vocab_size']}, {blocks}",
        f"  layout      {where[facts['kind']]}",
        f"  optimizer   {optimizer['name']} with {', '.join(optimizer['moments'])}"
        if optimizer
        else "  optimizer   no",
    ]
    width = max(len(file["file"]) for file in facts["files"])
    for file in facts["files"]:
        held = "" if file["experts"] is None else f"  experts {file['experts'][0]} to {file['experts'][-1]}"
        lines.append(f"  {file['file']:<{width}}  {file['bytes']:>16,} bytes{held}")
    return "\n".join(lines)
