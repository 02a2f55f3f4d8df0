"""What is in a checkpoint, as plain values."""

from __future__ import annotations

from typing import Any

from smlp.checkpoint.lazy import LazyTensor
from smlp.checkpoint.opened import Checkpoint


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Facts about a checkpoint.

    Returns:
        ``path``, ``kind`` (one file, parts or export), ``arch``, ``num_updates``, ``epoch`` (None for an export),
        ``params`` (``total``, ``experts``), ``dtypes``, ``settings`` (those that tell sizes), ``layout``
        (``world_size``, ``group_size``), ``optimizer`` (name and moments, or None), ``files`` (``file``, ``bytes``,
        ``experts``), ``bytes`` of all of them.
    """
    state, config, index = checkpoint.state, checkpoint.config, checkpoint.index
    model, cfg = state["model"], state["cfg"]
    parameters = {name for name, _ in checkpoint.skeleton.named_parameters(prefix="decoder.core")}
    experts = set(checkpoint.expert_names)
    distributed = cfg.get("distributed_training") or {}
    files: list[dict[str, Any]] = [
        {"file": checkpoint.path.name, "bytes": checkpoint.path.stat().st_size, "experts": None}
    ]
    if index is not None:
        files += [
            {"file": part.file, "bytes": part.num_bytes, "experts": list(part.expert_ids)} for part in index.parts
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
            "max_tokens": config.max_tokens,
            "vocab_size": config.vocab_size,
            "embed_dim": config.embed_dim,
            "ffn_dim": config.ffn_dim,
            "num_dense_layers": config.num_dense_layers,
            "num_sparse_layers": config.num_sparse_layers,
            "num_experts": config.moe.num_experts if config.num_sparse_layers else 0,
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
    names = {key for of_parameter in moments.values() for key, value in of_parameter.items() if _is_moment(value)}
    return {"name": history[-1].get("optimizer_name"), "moments": sorted(names)}


def _is_moment(value: Any) -> bool:
    return isinstance(value, LazyTensor) and len(value.shape) > 0


def as_text(facts: dict[str, Any]) -> str:
    """The same as lines for a person."""
    params, sizes, layout = facts["params"], facts["settings"], facts["layout"]
    dtypes, optimizer = ", ".join(facts["dtypes"]), facts["optimizer"]
    of_experts = f", {params['experts']:,} of them in {sizes['num_experts']} experts" if params["experts"] else ""
    blocks = f"{sizes['num_dense_layers']} dense + {sizes['num_sparse_layers']} sparse blocks"
    epoch = "" if facts["epoch"] is None else f", epoch {facts['epoch']}"
    ranks = f"{layout['world_size'] or '?'} ranks"
    where = {
        "one file": f"one file, of a run with W = {ranks}",
        "parts": f"experts in {len(facts['files']) - 1} parts, written by W = {ranks}, P = {layout['group_size']}",
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
