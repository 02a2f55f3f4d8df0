"""Read an experiment's folder: models, runs, and what is missing of each.

The folder's files are described in docs/compare.md. Only experiment.json must exist.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smlp.config import ModelConfig, unflatten
from smlp.errors import UserError
from smlp.evaluation.curves import TrainingCurve, curve_of, log_records
from smlp.evaluation.perplexity import of_nats
from smlp.experiments import json_files
from smlp.experiments.folder import DONE
from smlp.experiments.json_files import read_json_or_note, read_lines_and_note
from smlp.experiments.report.timeline import TrainingTime, logged_seconds, missing_update, read_timeline, training_lines
from smlp.experiments.spec import MASKED

MISSING = "missing"


@dataclass(frozen=True)
class Model:
    """A model of the experiment."""

    name: str
    folder: str
    #: one of :data:`smlp.costs.match.FAMILIES`, or None
    family: str | None
    arch: str
    config: ModelConfig
    #: multiply-adds of the forward pass, by formula
    flops_per_token: float
    #: of the whole model, all experts included
    num_parameters: float

    @property
    def num_experts(self) -> int:
        """Experts of a sparse layer; 0 in a dense model."""
        return self.config.num_experts if self.config.num_sparse_layers else 0

    @property
    def paper_name(self) -> str | None:
        """The name of this model in :mod:`smlp.experiments.report.paper`."""
        return "switch_lm_enlarged" if "enlarged" in self.arch else self.family


@dataclass(frozen=True)
class RunResult:
    """The training of a model with one seed, as far as it is recorded."""

    model: Model
    seed: int
    folder: Path
    #: the state in run.json, or ``missing``
    state: str
    #: last log line of a failed run
    message: str | None
    #: files that are missing or damaged
    notes: tuple[str, ...]
    #: content of run.json
    record: Mapping[str, Any]
    curve: TrainingCurve
    timeline: TrainingTime | None
    #: fairseq's training time in seconds, from the log
    logged_seconds: float | None
    #: training lines of the log, by update
    lines: Mapping[int, Mapping[str, Any]]
    #: lines of router_health.jsonl
    health: tuple[Mapping[str, Any], ...]
    #: digest of the data, by update
    order: Mapping[int, int]
    scores: Mapping[str, Any] | None
    zeroshot: Mapping[str, Any] | None
    #: lines of environment.jsonl, one for each start
    environments: tuple[Mapping[str, Any], ...]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    @property
    def is_done(self) -> bool:
        return self.state == DONE

    @property
    def last_update(self) -> int:
        """The last update in the log and the data order; 0 if neither has one."""
        points = self.curve.train[-1:] + self.curve.valid[-1:]
        return max([0, *(point.num_updates for point in points), *self.order])


@dataclass(frozen=True)
class Results:
    """The contents of an experiment's folder."""

    folder: Path
    settings: Mapping[str, Any]
    models: tuple[Model, ...]
    runs: tuple[RunResult, ...]
    environment: Mapping[str, Any]
    data: Mapping[str, Any]
    tuned: Mapping[str, Any] | None
    speed: Mapping[str, Any] | None
    #: problems with files of the whole experiment
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.settings.get("title") or self.settings.get("name") or self.folder.name

    @property
    def seeds(self) -> list[int]:
        return list(self.settings["seeds"])

    @property
    def updates(self) -> int:
        return self.settings["updates"]

    @property
    def tokens_per_update(self) -> int:
        return self.settings["tokens_per_update"]

    @cached_property
    def mean_update_tokens(self) -> float:
        """The mean number of tokens that an update was trained on.

        Models that predict every position log it; without one, it is ``tokens_per_update``.
        """
        return self._mean_tokens(self.runs)

    def mean_tokens_of(self, seed: int) -> float:
        """The mean number of tokens that an update of one seed's runs was trained on."""
        return self._mean_tokens([run for run in self.runs if run.seed == seed])

    def _mean_tokens(self, runs: Sequence[RunResult]) -> float:
        lines = [run.timeline for run in runs if run.is_done and not run.model.config.prefix_tokens]
        means = [line.mean_tokens for line in lines if line is not None and line.mean_tokens]
        return statistics.fmean(means) if means else float(self.tokens_per_update)

    @property
    def trained_tokens(self) -> float:
        """The tokens that a whole run was trained on."""
        return self.updates * self.mean_update_tokens

    @property
    def subsets(self) -> list[str]:
        """The validation sets; the curves are of the first."""
        return list(self.settings.get("evaluation_subsets") or ["valid"])

    @property
    def split(self) -> str:
        """What the first of :attr:`subsets` is called in headings."""
        return "validation" if self.subsets[0].startswith("valid") else self.subsets[0]

    @property
    def is_masked(self) -> bool:
        """Return whether the models restore masked tokens; otherwise they predict next ones."""
        return self.settings.get("task") == MASKED

    @property
    def has_prefix(self) -> bool:
        """Return whether some model leaves the beginning of a block unpredicted."""
        return any(model.config.prefix_tokens for model in self.models)

    @cached_property
    def _by_model(self) -> dict[str, list[RunResult]]:
        return {model.name: [run for run in self.runs if run.model is model] for model in self.models}

    def done(self, model: Model) -> list[RunResult]:
        """Return a model's finished runs, by seed."""
        return [run for run in self._by_model[model.name] if run.is_done]

    def drawn(self, model: Model) -> list[RunResult]:
        """Return the runs that a model's curves show: the finished ones, or, without any, those with validations."""
        return self.done(model) or [run for run in self._by_model[model.name] if run.curve.valid]

    def of_text(self, subset: str, what: str) -> float | None:
        """Return ``words_per_token`` or ``bytes`` of a validation set; None if its text is not known."""
        return (self.data.get("splits", {}).get(subset) or {}).get(what)


def read_results(folder: Path) -> Results:
    """Read a folder of ``smlp compare run``.

    Raises:
        UserError: there is no readable experiment.json, or its fields are not those of an experiment.
    """
    path = folder / "experiment.json"
    try:
        settings = json_files.read_json(path, json_files.EXPERIMENT)
    except UserError as error:
        raise UserError(f"{error}; name a folder that smlp compare run has made") from None
    try:
        models = tuple(_model(record) for record in settings["models"])
    except (TypeError, UserError) as error:
        raise UserError(f"{path} is not an experiment: {error}") from None
    notes: list[str] = []
    subset = (settings.get("evaluation_subsets") or ["valid"])[0]
    scored_as = {
        "prefix": max((model.config.prefix_tokens for model in models), default=0),
        "dtype": settings.get("evaluation_dtype", "fp32"),
    }
    runs = tuple(
        _run(folder, model, seed, subset, settings["updates"], scored_as)
        for model in models
        for seed in settings["seeds"]
    )
    shapes = {
        "environment": json_files.ENVIRONMENT,
        "data": json_files.DATA,
        "tuned": json_files.TUNED,
        "speed": json_files.SPEED,
    }
    read = {name: read_json_or_note(folder / f"{name}.json", notes, shape) for name, shape in shapes.items()}
    notes += [f"{name}.json is missing" for name in ("environment", "data") if not (folder / f"{name}.json").exists()]
    if settings.get("tuned_option") and any(run.is_done for run in runs) and not (folder / "tuned.json").exists():
        notes.append(f"tuned.json is missing: the tables do not show the {settings['tuned_option']} that was chosen")
    return Results(
        folder,
        settings,
        models,
        runs,
        read["environment"] or {},
        read["data"] or {},
        read["tuned"],
        read["speed"],
        tuple(notes),
    )


def _model(record: Mapping[str, Any]) -> Model:
    return Model(
        record["name"],
        record["folder"],
        record.get("family"),
        record["arch"],
        unflatten(record["config"]),
        float(record["flops_per_token"]),
        float(record["parameters"]["total"]),
    )


def _diverged(scores: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a note for each validation set on which the trained model has no finite perplexity."""
    for subset, found in ((scores or {}).get("subsets") or {}).items():
        losses = (found.get(name) for name in ("nll_after_prefix", "nll_all"))
        for loss in losses:
            if loss is not None and not math.isfinite(of_nats(loss)):
                yield f"it diverged: its loss on {subset} is {loss:.3g} nats per token, so no table has its perplexity"
                break


def _run(out: Path, model: Model, seed: int, subset: str, updates: int, scored_as: Mapping[str, Any]) -> RunResult:
    folder = out / "runs" / f"{model.folder}-s{seed}"
    notes: list[str] = []
    record = read_json_or_note(folder / "run.json", notes, json_files.RUN) or {}
    state = record.get("state", "unknown") if folder.is_dir() else MISSING
    made_with = record.get("made_with") or {}
    for name, wanted in (("arch", model.arch), ("seed", seed)):
        if made_with.get(name, wanted) != wanted:
            notes.append(f"run.json is that of another run: {name} = {made_with[name]}, not {wanted}")
    if record.get("model", model.name) != model.name:
        notes.append(f"run.json is that of another run: model = {record['model']}, not {model.name}")
    log: list[dict[str, Any]] = []
    places = ("num_updates", "train_num_updates", f"{subset}_num_updates")
    if (folder / "train.log").is_file():
        try:
            log = log_records(folder / "train.log")
        except UserError as error:
            notes.append(str(error))
    ours = [record for record in log if all(0 <= int(record.get(name, 0)) <= updates for name in places)]
    if len(ours) < len(log):
        notes.append(
            f"{len(log) - len(ours)} lines of train.log do not count: their updates are not from 0 to {updates:,}"
        )
    log = ours
    lines = training_lines(log)
    times = read_lines_and_note(folder / "update_times.jsonl", notes, json_files.TIME_LINE)
    last_of_all = updates if state == DONE else 0
    timeline = read_timeline(times, lines, last_of_all)
    if missing := missing_update(times, last_of_all):
        notes.append(
            f"update_times.jsonl has no line of update {missing:,}, so its times are train.log's, in whole seconds"
        )
    order = read_lines_and_note(folder / "data_order.jsonl", notes, json_files.ORDER_LINE)
    if missing := missing_update(order, last_of_all):
        notes.append(f"data_order.jsonl has no line of update {missing:,}: the tokens of such updates are not compared")
    scores = read_json_or_note(folder / "scores.json", notes, json_files.SCORES)
    for name, value in scored_as.items():  # a model with a prefix was added, for example
        if scores is not None and scores.get(name, value) != value:
            notes.append(
                f"scores.json is left out: its {name} is {scores[name]}, not {value}; run smlp compare run again"
            )
            scores = None
    zeroshot = read_json_or_note(folder / "zeroshot.json", notes, json_files.ZEROSHOT)
    health = tuple(read_lines_and_note(folder / "router_health.jsonl", notes, json_files.HEALTH_LINE))
    environments = tuple(read_lines_and_note(folder / "environment.jsonl", notes, json_files.START))
    curve = curve_of(log, model.name, subset)
    if state == DONE:
        last = max([0, *(point.num_updates for point in (*curve.train, *curve.valid))])
        expected = ("train.log", "scores.json", "data_order.jsonl")
        notes += [f"{name} is missing" for name in expected if not (folder / name).is_file()]
        if log and timeline is None:
            notes.append("neither update_times.jsonl nor train.log says how long it trained")
        elif log and last < updates:
            notes.append(f"train.log ends at update {last:,} of {updates:,}")
        elif log and not any(record.get(f"{subset}_num_updates") == str(updates) for record in log):
            notes.append(f"train.log has no validation on {subset} at the last update")
    notes += _diverged(scores)
    return RunResult(
        model,
        seed,
        folder,
        state,
        record.get("message"),
        tuple(notes),
        record,
        curve,
        timeline,
        logged_seconds(log),
        lines,
        health,
        {line["update"]: line["digest"] for line in order},
        scores,
        zeroshot,
        environments,
    )
