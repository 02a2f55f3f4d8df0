"""Figures with a point for each model: final perplexity, speed, heads, feature routing, gMLP-MoE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from smlp.experiments.report import paper
from smlp.experiments.report.draw_curves import Style
from smlp.experiments.report.quality import AFTER_PREFIX, perplexity
from smlp.experiments.report.results import Model, Results
from smlp.experiments.report.speed import logged_tokens_per_second, timed_tokens_per_second
from smlp.experiments.report.studies import head_groups, moe_models, smlp_beside_heads
from smlp.experiments.report.table import Estimate
from smlp.plots.drawing import entry, legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: opacity of an interval that is drawn as a band
_BAND = 0.15
_HEAD_LINES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))


def _final(results: Results, models: Sequence[Model]) -> list[tuple[Model, Estimate]]:
    """Return the final perplexity of the models that have one, best first."""
    found = [(model, perplexity(results, model, results.subsets[0], AFTER_PREFIX)) for model in models]
    return sorted(((model, one) for model, one in found if one), key=lambda pair: pair[1].mean)


def _positions(results: Results) -> str:
    return "perplexity per token" + (" after the prefix" if results.has_prefix else "")


def draw_final(results: Results, models: Sequence[Model], styles: dict[str, Style], title: str) -> Figure | None:
    """Draw the final perplexity of each model with its interval and its seeds; None if no model has finished."""
    found = _final(results, models)
    if not found:
        return None
    figure = new_figure(7.5, 1.5 + 0.36 * len(found), title)
    axes = figure.subplots()
    for row, (model, one) in enumerate(found):
        style = styles[model.name]
        seeds = list(one.samples.values())
        axes.plot(seeds, [row + 0.22] * len(seeds), "|", color=style.colour, markersize=7, markeredgewidth=1.2)
        _point(axes, one.mean, row, style, xerr=one.half)
    axes.set_yticks(range(len(found)), [model.name for model, _ in found], parse_math=False)
    axes.set_ylim(len(found) - 0.5, -0.6)
    _finish(axes, f"{results.split} {_positions(results)}: mean, 95 % interval; strokes: the seeds", "", grid="x")
    return figure


def draw_quality_and_speed(results: Results, styles: dict[str, Style]) -> Figure | None:
    """Draw final perplexity against tokens per second; None if fewer than two models have both."""
    timed = results.speed is not None
    points = []
    for model, one in _final(results, results.models):
        logged = logged_tokens_per_second(results, model)
        speed = timed_tokens_per_second(results, model) if timed else logged and logged.mean
        if speed:
            points.append((model, one, speed))
    if len(points) < 2:
        return None
    figure = new_figure(7.5, 4.4, "Quality and speed of training: best at the lower right")
    axes = figure.subplots()
    for model, one, speed in points:
        _point(axes, speed, one.mean, styles[model.name], yerr=one.half, label=entry(model.name))
    where = "alone on the machine (speed.json)" if timed else "in the training log, without evaluation"
    _finish(axes, f"tokens per second, {where}", f"{results.split} {_positions(results)}")
    axes.margins(0.08)
    legend(figure, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def draw_heads(results: Results, styles: dict[str, Style]) -> Figure | None:
    """Draw Figure 4: final perplexity against the number of heads, with sMLP's as a horizontal line and its interval.

    None if no models differ in the number of heads alone.
    """
    groups = [[(model, one) for model, one in _final(results, group)] for group in head_groups(results)]
    groups = [sorted(group, key=lambda pair: pair[0].config.num_heads) for group in groups if len(group) > 1]
    if not groups:
        return None
    figure = new_figure(7.0, 4.2, "Number of heads (the paper's Figure 4)")
    axes = figure.subplots()
    labels = [entry(paper.NAMES.get(group[0][0].family or "", group[0][0].name)) for group in groups]
    for place, group in enumerate(groups):
        marker, line = _HEAD_LINES[place % len(_HEAD_LINES)]
        axes.errorbar(
            [model.config.num_heads for model, _ in group],
            [one.mean for _, one in group],
            yerr=[one.half or 0.0 for _, one in group],
            **{"marker": marker, "linestyle": line, "color": styles[group[0][0].name].colour, "capsize": 3},
            label=labels[place] if labels.count(labels[place]) == 1 else f"{labels[place]}: {group[0][0].name}, ...",
        )
    beside = smlp_beside_heads(results)
    for model, one in _final(results, [beside] if beside else []):
        colour = styles[model.name].colour
        label = entry(model.name) + f" ({_experts(model.num_experts)})"
        axes.axhline(one.mean, color=colour, linestyle=(0, (8, 3)), label=label)
        if one.half is not None:
            axes.axhspan(one.low, one.high, color=colour, alpha=_BAND, linewidth=0)
    heads = sorted({model.config.num_heads for group in groups for model, _ in group})
    axes.set_xscale("log", base=2)
    axes.set_xticks(heads, [str(count) for count in heads])
    axes.minorticks_off()
    _finish(axes, "heads", f"{results.split} {_positions(results)}")
    legend(figure, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def draw_moe(results: Results, styles: dict[str, Style]) -> Figure | None:
    """Draw Table 7, ours and the paper's: perplexity of gMLP and gMLP-MoE by experts; None for fewer than two."""
    found = sorted(_final(results, moe_models(results)), key=lambda pair: pair[0].num_experts)
    if len(found) < 2:
        return None
    figure = new_figure(8.0, 3.8, "Token-routed gMLP (the paper's Table 7)")
    here, printed = figure.subplots(1, 2, width_ratios=(max(len(found), 3), 3))
    for place, (model, one) in enumerate(found):
        _point(here, place, one.mean, styles[model.name], yerr=one.half)
    labels = [f"{model.name}\n{_experts(model.num_experts)}" for model, _ in found]
    here.set_xticks(range(len(found)), labels, fontsize=8, parse_math=False)
    _finish(here, "here", f"{results.split} {_positions(results)}".replace(" after", "\nafter"), "y")
    printed.plot(range(len(paper.TABLE_7)), list(paper.TABLE_7.values()), "o", color="0.3")
    names = [f"{'gMLP-MoE' if count else 'gMLP'}\n{_experts(count)}" for count in paper.TABLE_7]
    printed.set_xticks(range(len(names)), names, fontsize=8)
    _finish(printed, "the paper", "validation perplexity", "y")
    for axes in (here, printed):
        axes.margins(x=0.2, y=0.15)
    return figure


def _experts(count: int) -> str:
    return f"{count} experts" if count else "dense"


def _point(axes: Axes, x: float, y: float, style: Style, **more: Any) -> None:
    """Draw a point; ``xerr``, ``yerr`` and ``label`` are matplotlib's."""
    axes.errorbar(
        x,
        y,
        **{"color": style.colour, "marker": style.marker, "markersize": 7, "linestyle": "none"},
        **{"markeredgecolor": "white", "markeredgewidth": 0.5, "capsize": 3, "elinewidth": 1.2, **more},
    )


def _finish(axes: Axes, x_label: str, y_label: str, grid: Literal["both", "x", "y"] = "both") -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis=grid, alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
