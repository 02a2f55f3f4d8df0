"""Tables of perplexity: at the end of training, and against a baseline seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from smlp.errors import UserError
from smlp.evaluation.perplexity import of_nats
from smlp.experiments.report.details import data_orders
from smlp.experiments.report.results import Model, Results, RunResult
from smlp.experiments.report.table import (
    EMPTY,
    MODEL_COLUMN,
    Cell,
    Column,
    Estimate,
    Table,
    amount,
    estimate,
    label,
    log_ratios,
    mean_cell,
    origin,
)

ALL, AFTER_PREFIX = "nll_all", "nll_after_prefix"


def score(run: RunResult, subset: str, field: str) -> float | None:
    """Return a field of scores.json for a validation set."""
    return (((run.scores or {}).get("subsets") or {}).get(subset) or {}).get(field)


def bits_per_byte(results: Results, model: Model, subset: str, field: str) -> Cell:
    """Return the mean loss in bits for each byte of the text.

    It is empty for masked language models, which predict a part of the tokens, and if data.json has no number of bytes.
    """
    size = None if results.is_masked else results.of_text(subset, "bytes")
    found = {}
    for run in results.done(model):
        nll, tokens = score(run, subset, field), score(run, subset, "tokens")
        found[run.seed] = nll * tokens / size / math.log(2) if nll is not None and tokens and size else None
    mean = estimate(found)
    if mean is None:
        return EMPTY
    runs = [run for run in results.done(model) if run.seed in mean.samples]
    formula = f"subsets.{subset}, {field} * tokens / bytes of data.json / ln 2"
    return mean_cell(mean, ".4f", origin(runs, "scores.json", formula))


def perplexity(results: Results, model: Model, subset: str, field: str, per_word: bool = False) -> Estimate | None:
    """Return the perplexity per token or per word over the seeds of the finished runs; None if no run has it."""
    found = {}
    for run in results.done(model):
        nll = score(run, subset, field)
        if per_word and nll is not None:
            tokens, words = score(run, subset, "tokens"), score(run, subset, "words")
            nll = nll * tokens / words if tokens and words else None
        found[run.seed] = None if nll is None else of_nats(nll)
    return estimate(found)


def perplexity_cell(results: Results, model: Model, subset: str, field: str, per_word: bool = False) -> Cell:
    """Return :func:`perplexity` as a cell."""
    found = perplexity(results, model, subset, field, per_word)
    if found is None:
        return EMPTY
    runs = [run for run in results.done(model) if run.seed in found.samples]
    formula = f"exp({field} * tokens / words)" if per_word else f"exp({field})"
    return mean_cell(found, ",.1f" if per_word else ",.2f", origin(runs, "scores.json", f"subsets.{subset}, {formula}"))


def baselines(results: Results, names: Sequence[str] = ()) -> list[Model]:
    """Return the models that others are compared with: those asked for, or the first dense Transformer and first gMLP.

    Raises:
        UserError: a name is not one of the models.
    """
    by_name = {model.name: model for model in results.models}
    for name in names:
        if name not in by_name:
            raise UserError(f"--baseline {name}: the experiment's models are {', '.join(by_name)}")
    if names:
        return [by_name[name] for name in dict.fromkeys(names)]
    firsts = [
        next((model for model in results.models if model.family == family), None) for family in ("dense_lm", "gmlp_lm")
    ]
    return [model for model in firsts if model is not None] or list(results.models[:1])


def difference(results: Results, model: Model, baseline: Model, subset: str) -> tuple[Estimate | None, Cell]:
    """Return how much higher a model's perplexity is than a baseline's, on the positions that all models predict.

    Returns:
        the differences of log-perplexity by seed, and the cell in per cent; None and ``EMPTY`` without a common seed.
    """
    found = [perplexity(results, one, subset, AFTER_PREFIX) for one in (model, baseline)]
    logs = log_ratios(*(one.samples for one in found)) if all(found) else None
    field = f"subsets.{subset}.{AFTER_PREFIX}, exp(difference) - 1 of the runs with the same seed"
    return by_seed(logs, results, (model, baseline), "scores.json", field)


def by_seed(
    logs: Estimate | None, results: Results, models: Sequence[Model], file: str, field: str
) -> tuple[Estimate | None, Cell]:
    """Return differences of logarithms between two models, by seed, with their cell in per cent.

    Args:
        logs: of :func:`smlp.experiments.report.table.log_ratios`.
        results: of an experiment.
        models: the two.
        file, field: where the numbers of a run are.
    """
    if logs is None:
        return None, EMPTY
    runs = [run for model in models for run in results.done(model) if run.seed in logs.samples]
    return logs, percent_cell(logs, origin(runs, file, field))


_MOST_LOG = 700.0  # a float holds its exponential


def percent_cell(logs: Estimate, source: str, kind: str = "seed") -> Cell:
    """Return the cell of differences of logarithms, by seed or by round of a timer, in per cent with its interval."""
    low, high = (None, None) if logs.half is None else (_percent(logs.low), _percent(logs.high))
    samples = {name: _percent(value) for name, value in logs.samples.items()}
    return Cell(_percent(logs.mean), percent_text(logs.mean, logs.half), source, low, high, samples, kind)


def percent_text(log: float, half: float | None) -> str:
    """Return a difference of logarithms in per cent, with the interval of ``half`` on both sides."""
    best, *ends = (
        f"{value:+.1f}" if value < 1e7 else f"{value:+.0e}"  # of seeds that diverged
        for value in map(_percent, (log,) if half is None else (log, log - half, log + half))
    )
    return f"{best} %" + (f" [{', '.join(ends)}]" if ends else "")


def _percent(log: float) -> float:
    return 100 * math.expm1(min(log, _MOST_LOG))


def quality_table(results: Results, subset: str, compared_with: Sequence[Model]) -> Table:
    """Make the table of perplexity on a validation set at the end of training."""
    prefix = results.has_prefix
    columns = [
        MODEL_COLUMN,
        Column("seeds", "seeds", "number of finished runs with a score"),
        Column("per_token", "per token", f"scores.json: exp(subsets.{subset}.nll_all), all positions"),
        Column("per_word", "per word", f"scores.json: exp(nll_all * tokens / words) of subsets.{subset}"),
        Column(
            "bits_per_byte",
            "bits per byte",
            f"scores.json: nll_all * tokens / ln 2 of subsets.{subset}, over the bytes of data.json",
        ),
        Column(
            "after_prefix",
            "per token, after the prefix",
            f"scores.json: exp(subsets.{subset}.nll_after_prefix), the positions that every model predicts",
        ),
        Column(
            "after_prefix_per_word",
            "per word, after the prefix",
            f"scores.json: exp(nll_after_prefix * tokens / words) of subsets.{subset}, words of the whole text",
        ),
        *(
            Column(
                f"against_{baseline.name}",
                f"against {baseline.name}",
                f"scores.json: mean over common seeds of the difference of subsets.{subset}.nll_after_prefix to "
                f"{baseline.name}'s, as per cent of perplexity; 95 % interval of the paired differences (Student's t)",
            )
            for baseline in compared_with
        ),
    ]
    rows = []
    for model in results.models:
        after = perplexity(results, model, subset, AFTER_PREFIX)
        row = {
            "model": label(model.name),
            "seeds": amount(len(after.samples) if after else 0, "d", "run.json: state; scores.json"),
            "per_token": perplexity_cell(results, model, subset, ALL),
            "per_word": perplexity_cell(results, model, subset, ALL, per_word=True),
            "bits_per_byte": bits_per_byte(results, model, subset, ALL),
        }
        if prefix:
            row["after_prefix"] = perplexity_cell(results, model, subset, AFTER_PREFIX)
            row["after_prefix_per_word"] = perplexity_cell(results, model, subset, AFTER_PREFIX, per_word=True)
        for baseline in compared_with:
            if baseline is not model:
                row[f"against_{baseline.name}"] = difference(results, model, baseline, subset)[1]
        rows.append(row)
    is_compared = any(row.get(f"against_{one.name}", EMPTY) is not EMPTY for row in rows for one in compared_with)
    notes = _notes(results, subset, is_compared)
    return Table(f"quality-{subset}", f"Perplexity on `{subset}` at the end", columns, rows, notes)


def _notes(results: Results, subset: str, is_compared: bool) -> list[str]:
    paired = (
        'Runs with the same seed saw the same data, so the columns "against" compare seed by seed; judge differences '
        "between models by these."
    )
    if not all(one.agrees for one in data_orders(results)):
        paired = 'The columns "against" compare seed by seed, but not all runs with the same seed saw the same data.'
    notes = [f"± and brackets are 95 % intervals (Student's t) over seeds. {paired}"]
    if not is_compared:
        notes = ["± is the 95 % interval (Student's t) over seeds."]
    if results.has_prefix:
        positions = max(model.config.prefix_tokens for model in results.models)
        names = [model.name for model in results.models if model.config.prefix_tokens]
        verb = "predict" if len(names) > 1 else "predicts"
        notes.append(
            f"{_listed(names)} {verb} nothing within the first {positions} of "
            f"{results.settings['tokens_per_sample']} positions. The columns after the prefix, and the comparisons, "
            "count only the other positions, for every model."
        )
    if results.of_text(subset, "words_per_token") is None:
        notes.append(f"data.json has no number of words for `{subset}`, so there are no numbers per word.")
    return notes


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
