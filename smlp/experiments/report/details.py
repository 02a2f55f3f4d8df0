"""Tables of what the models are (Table 5) and what they cost, and of the paper's beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smlp.experiments.report import paper
from smlp.experiments.report.runs import Experiment
from smlp.experiments.report.table import Cell, Column, Table, number, text

#: operations of a training step over those of a forward pass
FORWARD_AND_BACKWARD = 3
_MODELS = "experiment.json: models"
_FORWARD, _TRAINING = "forward_multiply_adds_millions_per_token", "training_multiply_adds_trillions"


def training_flops(flops_per_token: float, tokens: float) -> float:
    """Multiply-adds of a training: three forward passes' worth for each token."""
    return FORWARD_AND_BACKWARD * flops_per_token * tokens


def spread(experiment: Experiment) -> float:
    """Largest over smallest nominal cost of a token, less one."""
    costs = [model.flops_per_token for model in experiment.models]
    return max(costs) / min(costs) - 1


def details_table(experiment: Experiment) -> Table:
    """Table 5 for these models."""
    columns = [
        Column("model", "model", f"{_MODELS}.name"),
        Column("arch", "preset", f"{_MODELS}.arch"),
        Column("embed_dim", "embedding", f"{_MODELS}.config.embed_dim"),
        Column("ffn_dim", "hidden", f"{_MODELS}.config.ffn_dim"),
        Column("sparse", "sparse layers", f"{_MODELS}.config.num_sparse_layers"),
        Column("dense", "dense layers", f"{_MODELS}.config.num_dense_layers"),
        Column("heads", "heads", f"{_MODELS}.config.num_heads"),
        Column("experts", "experts", f"{_MODELS}.config.num_experts"),
        Column("parameters_millions", "parameters (M)", f"{_MODELS}.parameters.total"),
        Column(_FORWARD, "forward multiply-adds per token (M)", f"{_MODELS}.flops_per_token, by formula"),
        Column(_TRAINING, "multiply-adds of training (T)", "3 * flops_per_token * updates * tokens of an update"),
        Column("overrides", "changed from the preset", f"{_MODELS}.overrides"),
        Column("recipe", "options of training", f"{_MODELS}.recipe"),
    ]
    tuned = experiment.tuned or {}
    if tuned:
        columns.insert(-1, Column("tuned", f"tuned {tuned['option']}", "tuned.json: chosen"))
    rows = []
    for model, record in zip(experiment.models, experiment.settings["models"], strict=True):
        config = model.config
        flops = training_flops(model.flops_per_token, experiment.trained_tokens)
        rows.append(
            {
                "model": text(model.name),
                "arch": Cell(model.arch, f"`{model.arch}`", f"{_MODELS}.arch"),
                "embed_dim": number(config.embed_dim, "d", f"{_MODELS}.config"),
                "ffn_dim": number(config.ffn_dim, "d", f"{_MODELS}.config"),
                "sparse": number(config.num_sparse_layers, "d", f"{_MODELS}.config"),
                "dense": number(config.num_dense_layers, "d", f"{_MODELS}.config"),
                "heads": number(config.num_heads, "d", f"{_MODELS}.config"),
                "experts": number(
                    config.moe.num_experts if config.num_sparse_layers else 0, "d", f"{_MODELS}.config.num_experts"
                ),
                "parameters_millions": number(model.num_parameters / 1e6, ",.1f", f"{_MODELS}.parameters.total"),
                _FORWARD: number(model.flops_per_token / 1e6, ",.3f", f"{_MODELS}.flops_per_token"),
                _TRAINING: number(flops / 1e12, ",.3f", f"{_MODELS}.flops_per_token; updates; train.log: wpb"),
                "overrides": text(
                    ", ".join(f"{name}={value}" for name, value in (record.get("overrides") or {}).items()) or None,
                    f"{_MODELS}.overrides",
                ),
                **_tuned(tuned, model.name),
                "recipe": text(" ".join(record.get("recipe") or []) or None, f"{_MODELS}.recipe"),
            }
        )
    largest = experiment.settings.get("max_spread")
    allowed = "" if largest is None else f" ({largest:.2%} are allowed)"
    notes = [
        f"Nominal forward FLOPs per token differ by {spread(experiment):.2%}{allowed}. FLOPs of this report are "
        "multiply-adds, as in the paper; training counts three forward passes for a token. `--dry-run` says "
        "floating-point operations, as data sheets do: two for a multiply-add, and of what is causal only the half.",
    ]
    return Table("details", "The models", columns, rows, notes)


def _tuned(tuned: Mapping[str, Any], name: str) -> dict[str, Cell]:
    """The cell of a tuned option's value, where there is one."""
    chosen = tuned.get("chosen", {}).get(name)
    return {"tuned": text(str(chosen), f"tuned.json: chosen.{name}")} if chosen is not None else {}


def paper_details_table(experiment: Experiment) -> Table | None:
    """Rows of the paper's Table 5 for the models that are here; None without one."""
    names = {model.paper_name for model in experiment.models}
    columns = [
        Column("model", "paper's model", "Table 5"),
        Column("embed_dim", "embedding", "Table 5"),
        Column("ffn_dim", "hidden", "Table 5"),
        Column("sparse", "sparse layers", "Table 5"),
        Column("dense", "dense layers", "Table 5"),
        Column("heads", "heads", "Table 5"),
        Column("experts", "experts", "Table 5"),
        Column("parameters_billions", "parameters (B)", "Table 5 (its head says M)"),
        Column("tflops", "TFLOPs (multiply-adds) of 2 x 1024 tokens", "Table 5"),
        Column("gpus", "GPUs", "Table 5"),
    ]
    source = f"{paper.SOURCE}, Table 5"
    rows = [
        {
            "model": text(paper.NAMES[name], source),
            "embed_dim": number(row.embed_dim, "d", source),
            "ffn_dim": number(row.ffn_dim, "d", source),
            "sparse": number(row.sparse_layers, "d", source),
            "dense": number(row.dense_layers, "d", source),
            "heads": number(row.heads, "d", source),
            "experts": number(row.experts, "d", source),
            "parameters_billions": number(row.parameters / 1e9, ".2f", source),
            "tflops": number(row.flops, ".1f", source),
            "gpus": number(row.gpus, "d", source),
        }
        for name, row in paper.TABLE_5.items()
        if name in names
    ]
    return Table("details-paper", "The paper's large models (Table 5)", columns, rows) if rows else None
