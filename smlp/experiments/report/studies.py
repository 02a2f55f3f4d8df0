"""Tables of the paper's smaller comparisons, for experiments with their models: heads, routing, gMLP-MoE, tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from smlp.evaluation.zeroshot.report import TABLE_6
from smlp.experiments.report import paper
from smlp.experiments.report.machine import differing
from smlp.experiments.report.paper import closest_to_paper, is_of_the_paper
from smlp.experiments.report.quality import AFTER_PREFIX, ALL, perplexity_cell
from smlp.experiments.report.results import Model, Results, RunResult
from smlp.experiments.report.speed import mean_over
from smlp.experiments.report.table import MODEL_COLUMN, Column, Table, amount, label, origin

#: settings in zeroshot.json that may differ between runs: they change no answer
_OF_EACH_RUN = ("model", "is_leaky", "data_dir", "batch_tokens", "spread_experts")


def head_groups(results: Results) -> list[list[Model]]:
    """Return groups of two or more models that differ in ``num_heads`` alone, each ordered by that number."""
    groups: dict[object, list[Model]] = {}
    for model in results.models:
        groups.setdefault(repr(replace(model.config, num_heads=1)), []).append(model)
    return [
        sorted(group, key=lambda model: model.config.num_heads)
        for group in groups.values()
        if len({model.config.num_heads for model in group}) > 1
    ]


def smlp_beside_heads(results: Results) -> Model | None:
    """Return the sMLP that Figure 4 draws with models of different heads; None if it is one of them, or missing."""
    model, groups = closest_to_paper(results, "smlp"), head_groups(results)
    if model is None or not groups or not is_of_the_paper(model):
        return None
    return None if any(model in group for group in groups) else model


def masked_table(results: Results) -> Table | None:
    """Make Table 3 of Liu et al., 2021; None if fewer than two of its models were run."""
    subset = results.subsets[0]
    found = [(paper.GMLP_TABLE_3.get(model.arch.removesuffix("_tiny")), model) for model in results.models]
    rows = []
    for printed, model in sorted((pair for pair in found if pair[0] is not None), key=lambda pair: pair[0]):
        rows.append(
            {
                "model": label(model.name),
                "paper": amount(printed, ".2f", f"{paper.GMLP_SOURCE}, Table 3"),
                "per_token": perplexity_cell(results, model, subset, ALL),
            }
        )
    columns = [
        MODEL_COLUMN,
        Column("paper", "the paper's perplexity", f"{paper.GMLP_SOURCE}, Table 3"),
        Column("per_token", "here", f"scores.json: exp(subsets.{subset}.nll_all)"),
    ]
    notes = [
        "Perplexities are those of masked tokens. The paper's models have 92 to 112 million parameters and were "
        "trained on 33 billion tokens. The order of the models can be compared, with that difference of scale in mind, "
        "but the numbers cannot."
    ]
    return Table("gmlp-table-3", "Table 3 of the gMLP paper", columns, rows, notes) if len(rows) > 1 else None


def heads_table(results: Results) -> Table | None:
    """Make the table for Figure 4; None if no two models differ in heads alone."""
    subset = results.subsets[0]
    columns = [
        MODEL_COLUMN,
        Column("heads", "heads", "experiment.json: models.config.num_heads"),
        Column("parameters_millions", "parameters (M)", "experiment.json: models.parameters.total"),
        Column("per_token", "perplexity per token", f"scores.json: exp(subsets.{subset}.nll_all)"),
        Column("after_prefix", "after the prefix", f"scores.json: exp(subsets.{subset}.nll_after_prefix)"),
    ]
    rows = []
    beside = smlp_beside_heads(results)
    for model in [model for group in head_groups(results) for model in group] + [beside] * (beside is not None):
        row = {
            "model": label(model.name),
            "heads": amount(model.config.num_heads, "d", "experiment.json: models.config.num_heads"),
            "parameters_millions": amount(
                model.num_parameters / 1e6, ",.2f", "experiment.json: models.parameters.total"
            ),
            "per_token": perplexity_cell(results, model, subset, ALL),
        }
        if results.has_prefix:
            row["after_prefix"] = perplexity_cell(results, model, subset, AFTER_PREFIX)
        rows.append(row)
    return Table("heads", "Number of heads (Figure 4)", columns, rows, [paper.FIGURE_4]) if rows else None


def routed_variants(results: Results) -> list[Model]:
    """Return the sMLP models if they have at least two kinds of feature routing."""
    found = [
        model for model in results.models if model.config.num_sparse_layers and model.config.sparse_block == "smlp"
    ]
    return found if len({model.config.feature_routing for model in found}) > 1 else []


def variants_table(results: Results) -> Table | None:
    """Make the table for Figure 7; None if there are no two kinds of feature routing."""
    subset = results.subsets[0]
    columns = [
        MODEL_COLUMN,
        Column("routing", "features are routed", "experiment.json: models.config.feature_routing"),
        Column("per_token", "per token, all positions", f"scores.json: exp(subsets.{subset}.nll_all)"),
        Column("after_prefix", "per token, after the prefix", f"scores.json: exp(subsets.{subset}.nll_after_prefix)"),
    ]
    rows = [
        {
            "model": label(model.name),
            "routing": label(model.config.feature_routing, "experiment.json: models.config.feature_routing"),
            "per_token": perplexity_cell(results, model, subset, ALL),
            "after_prefix": perplexity_cell(results, model, subset, AFTER_PREFIX),
        }
        for model in routed_variants(results)
    ]
    notes = [
        paper.FIGURE_7,
        "Partial and leaky routing predict nothing within the prefix, so only the last column compares the same "
        "positions. Leaky routing sees the tokens to be predicted, so its perplexity does not measure a language "
        "model.",
    ]
    return (
        Table("feature-routing", "Deterministic, partial and leaky (Figure 7)", columns, rows, notes) if rows else None
    )


def moe_models(results: Results) -> list[Model]:
    """Return the gMLP closest to the paper's and the gMLP-MoE models by number of experts; empty without a gMLP-MoE."""
    dense = closest_to_paper(results, "gmlp_lm")
    sparse = [model for model in results.models if model.family == "gmlp_moe"]
    return [dense] * (dense is not None) + sorted(sparse, key=lambda model: model.num_experts) if sparse else []


def moe_table(results: Results) -> Table | None:
    """Make the table for Table 7; None without a gMLP-MoE."""
    subset = results.subsets[0]
    columns = [
        MODEL_COLUMN,
        Column("experts", "experts", "experiment.json: models.config.num_experts"),
        Column("per_token", "perplexity per token", f"scores.json: exp(subsets.{subset}.nll_all)"),
        Column("after_prefix", "after the prefix", f"scores.json: exp(subsets.{subset}.nll_after_prefix)"),
        Column("paper", "paper, as many experts", f"{paper.SOURCE}, Table 7"),
    ]
    rows = []
    for model in moe_models(results):
        row = {
            "model": label(model.name),
            "experts": amount(model.num_experts, "d", "experiment.json: models.config.num_experts"),
            "per_token": perplexity_cell(results, model, subset, ALL),
            "paper": amount(paper.TABLE_7.get(model.num_experts), ".1f", f"{paper.SOURCE}, Table 7"),
        }
        if results.has_prefix:
            row["after_prefix"] = perplexity_cell(results, model, subset, AFTER_PREFIX)
        rows.append(row)
    notes = ["The paper's Table 7: gMLP 15.7, with 32 experts 17.2, with 64 experts 20.5."]
    return Table("gmlp-moe", "Token-routed gMLP (Table 7)", columns, rows, notes) if rows else None


def zeroshot_table(results: Results) -> Table | None:
    """Make the table for Table 6; None if no run has zero-shot scores."""
    scored = [run for model in results.models for run in results.done(model) if run.zeroshot]
    names = task_names(results)
    if not names:
        return None
    columns = [
        Column("model", "model", "experiment.json: models.name; the paper's Table 6"),
        *(
            Column(name, TABLE_6[name], f"zeroshot.json: tasks.{name}.accuracy, per cent; the paper's Table 6")
            for name in names
        ),
        Column("average", "average", f"mean of {', '.join(names)} (of all six tasks, also the paper's)"),
    ]
    rows = []
    for model in results.models:
        runs = [run for run in results.done(model) if run.zeroshot]
        if runs:
            row = {"model": label(model.name)}
            for name in names:
                read = partial(_accuracy, task=name, field="accuracy")
                row[name] = mean_over(runs, ".1f", "zeroshot.json", f"tasks.{name}.accuracy", read)
            average = partial(_average, tasks=names)
            row["average"] = mean_over(runs, ".1f", "zeroshot.json", "mean of tasks.*.accuracy", average)
            rows.append(row)
    row = {"model": label("chance", "zeroshot.json: tasks.*.chance")}
    for name in names:  # of the first run that has it
        run = next((run for run in scored if _accuracy(run, name, "chance") is not None), scored[0])
        source = origin([run], "zeroshot.json", f"tasks.{name}.chance")
        row[name] = amount(_accuracy(run, name, "chance"), ".1f", source)
    rows.append(row)
    families = {model.paper_name for model in results.models} | {"gpt3"}
    for family, row in paper.TABLE_6.items():
        if family in families:
            source = f"{paper.SOURCE}, Table 6"
            shown = [*names, "average"] if len(names) == len(TABLE_6) else names
            cells = {name: amount(row[name], ".1f", source) for name in shown}
            rows.append({"model": label(f"paper, large: {paper.NAMES[family]}", source)} | cells)
    sizes = {
        name: [(run.name, run.zeroshot["tasks"][name]["n"]) for run in scored if name in run.zeroshot["tasks"]]
        for name in names
    }
    counts = ", ".join(
        f"{TABLE_6[name]} {' or '.join(f'{n:,}' for n in sorted({n for _, n in found}))}"
        for name, found in sizes.items()
    )
    notes = [
        f"Accuracy in per cent; ± is over seeds. Records: {counts}. docs/zeroshot.md explains how tasks are scored."
    ]
    settings = {run.name: run.zeroshot.get("settings") or {} for run in scored}
    asked = dict.fromkeys(name for own in settings.values() for name in own if name not in _OF_EACH_RUN)
    facts = {name: [(run, own[name]) for run, own in settings.items() if name in own] for name in asked}
    facts |= {f"number of records of {TABLE_6[name]}": found for name, found in sizes.items()}
    notes += [
        f"**Runs did not answer with the same {name}: {said}.**"
        for name, found in facts.items()
        if (said := differing(found))
    ]
    return Table("zeroshot", "Zero-shot priming (Table 6)", columns, rows, notes)


def task_names(results: Results) -> list[str]:
    """Return the zero-shot tasks that some finished run has answered."""
    scored = [run for model in results.models for run in results.done(model) if run.zeroshot]
    return [name for name in TABLE_6 if any(name in run.zeroshot["tasks"] for run in scored)]


def mean_accuracies(results: Results, model: Model) -> dict[int, float | None]:
    """Return the mean accuracy over the tasks, in per cent, by seed; None for a run that lacks a task."""
    names = task_names(results)
    return {run.seed: _average(run, names) for run in results.done(model) if run.zeroshot}


def _accuracy(run: RunResult, task: str, field: str) -> float | None:
    """Return a field of a task in per cent."""
    share = (((run.zeroshot or {}).get("tasks") or {}).get(task) or {}).get(field)
    return None if share is None else 100 * share


def _average(run: RunResult, tasks: list[str]) -> float | None:
    found = [_accuracy(run, task, "accuracy") for task in tasks]
    return None if None in found else sum(found) / len(found)
