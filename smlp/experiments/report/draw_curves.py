"""Figures with a line for each model: perplexity against updates, time and multiply-adds; routing against updates.

A family has the same colour in every experiment, unless several of its models are compared. Models of one colour differ
in line style, and all models in their marker, so that no two are told apart by colour alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smlp.experiments.report.details import training_flops
from smlp.experiments.report.health import pooled_curve
from smlp.experiments.report.results import Model, Results
from smlp.experiments.report.speed import averaged_runs, mean_curve, time_unit
from smlp.experiments.report.table import estimate
from smlp.plots.drawing import OKABE_ITO, entry, legend, new_figure, plain_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: opacity of all bands together, and the lowest and highest of one band
_BANDS, _FAINTEST, _DARKEST = 0.5, 0.04, 0.15
#: start of the right-hand panel, as a share of the training
LAST_SHARE = 0.5
_LARGE = ((1e18, "quintillion"), (1e15, "quadrillion"), (1e12, "trillion"), (1e9, "billion"))
_ROUTING = (
    ("drop_share", "dropped (%)", 100),
    ("load_cv", "CV of the experts' loads", 1),
    ("gate_entropy", "gate entropy (nats)", 1),
    ("churn", "churn between records (%)", 100),
)
_FAMILY_COLOURS = {
    "dense_lm": "black",
    "gmlp_lm": "blue",
    "gmlp_moe": "blue",
    "smlp": "vermillion",
    "smlp_partial": "vermillion",
    "smlp_leaky": "vermillion",
    "gshard_lm": "green",
    "switch_lm": "orange",
    "base_lm": "purple",
    "hash_lm": "sky",
}
_OTHER = "0.45"
#: most models of one colour, and of one family, that line styles and markers can distinguish
_MOST_OF_A_COLOUR, _MOST_OF_A_FAMILY = 4, 2
_MARKERS = "osD^vPX<>hp*d8"
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)))


@dataclass(frozen=True)
class Style:
    """The style of one model's line."""

    colour: str
    marker: str
    line: Any

    def line_options(self, points: int, size: float = 5.0) -> dict[str, Any]:
        """Return the options of ``Axes.plot``, with markers on at most about twelve of the points."""
        return {
            **{"color": self.colour, "linestyle": self.line, "linewidth": 1.5},
            **{"marker": self.marker, "markersize": size, "markevery": max(1, points // 12)},
            **{"markeredgecolor": "white", "markeredgewidth": 0.4},
        }


def styles(models: Sequence[Model], by_family: bool = True) -> dict[str, Style]:
    """Choose a style for each model, by name.

    Families keep their colours unless ``by_family`` is false, many models would share a colour, or a family has several
    models and there are colours for all.
    """
    colours = list(OKABE_ITO.values())
    families = Counter(model.family for model in models)
    shared = Counter(_FAMILY_COLOURS.get(model.family or "") for model in models)
    alike = len(models) <= len(colours) and max(families.values(), default=0) > _MOST_OF_A_FAMILY
    by_family = by_family and not alike and max(shared.values(), default=0) <= _MOST_OF_A_COLOUR
    found: dict[str, Style] = {}
    used: dict[str, int] = {}
    for place, model in enumerate(models):
        name = _FAMILY_COLOURS.get(model.family or "")
        colour = (OKABE_ITO[name] if name else _OTHER) if by_family else colours[place % len(colours)]
        line = _LINES[used.get(colour, 0) % len(_LINES)]
        used[colour] = used.get(colour, 0) + 1
        found[model.name] = Style(colour, _MARKERS[place % len(_MARKERS)], line)
    return found


@dataclass(frozen=True)
class Horizontal:
    """An axis for perplexity: a label with its unit, and the value of a model at an update."""

    key: str
    label: str
    value: Callable[[Model, int], float | None]


def horizontals(results: Results) -> list[Horizontal]:
    """Return the horizontal axes: updates, training time, multiply-adds."""
    flops = max(training_flops(model.flops_per_token, results.trained_tokens) for model in results.models)
    size, word = next((unit for unit in _LARGE if flops >= unit[0]), (1e6, "million"))
    totals = [run.timeline.at(run.last_update) for run in results.runs if run.timeline and run.last_update]
    unit, seconds = time_unit(totals)

    def time(model: Model, update: int) -> float | None:
        values = {run.seed: run.timeline.at(update) / seconds for run in results.drawn(model) if run.timeline}
        found = estimate(values)
        return found.mean if found else None

    return [
        Horizontal("updates", "updates", lambda model, update: float(update)),
        Horizontal("time", f"training time without evaluation ({unit})", time),
        Horizontal(
            "flops",
            f"{word} multiply-adds of training (3 x nominal forward)",
            lambda model, update: training_flops(model.flops_per_token, update * results.mean_update_tokens) / size,
        ),
    ]


def draw_curves(
    results: Results, models: Sequence[Model], across: Horizontal, styles: dict[str, Style], title: str
) -> Figure:
    """Draw the validation perplexity of models: the whole training on the left, its second half on the right."""
    figure = new_figure(10.5, 4.6, title)
    whole, end = figure.subplots(1, 2)
    shown = sorted(models, key=lambda model: -mean_curve(results, model)[-1].bits)
    opacity = min(max(_BANDS / len(shown), _FAINTEST), _DARKEST)
    lowest, highest = float("inf"), 0.0
    for model in shown:
        curve, style = mean_curve(results, model), styles[model.name]
        points = [(across.value(model, point.num_updates), point) for point in curve]
        points = [(x, point) for x, point in points if x is not None]
        first = LAST_SHARE * results.updates
        for axes, part in ((whole, points), (end, [pair for pair in points if pair[1].num_updates >= first])):
            if not part:
                continue
            x, y = [pair[0] for pair in part], [pair[1].perplexity for pair in part]
            axes.plot(x, y, label=_label(results, model), **style.line_options(len(x)))
            lows, highs = _band(results, model, [pair[1].num_updates for pair in part])
            if lows:
                axes.fill_between(x, lows, highs, color=style.colour, alpha=opacity, linewidth=0)
            if axes is end:
                lowest, highest = min(lowest, *y), max(highest, *y)
    _finish(whole, across.label, "the whole training, logarithmic")
    _log_ticks(whole)
    whole.set_ylabel(f"{results.split} perplexity per token")
    _finish(end, across.label, "the second half")
    if highest:
        margin = 0.06 * (highest - lowest) or 0.05 * highest
        end.set_ylim(lowest - margin, highest + margin)
    handles, labels = whole.get_legend_handles_labels()
    legend(figure, handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _label(results: Results, model: Model) -> str:
    name = entry(model.name)
    if model.config.prefix_tokens:
        name += "\n(after its prefix alone)"
    if not results.done(model):
        name += "\n(not finished)"
    return name


def _band(results: Results, model: Model, updates: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the ends of the 95 % interval over seeds at each validation; empty with one seed."""
    runs = averaged_runs(results, model)
    curves = {run.seed: {point.num_updates: point.perplexity for point in run.curve.valid} for run in runs}
    if len(curves) < 2:
        return [], []
    found = [estimate({seed: curve[update] for seed, curve in curves.items()}) for update in updates]
    return [max(one.low, 1.0) for one in found], [one.high for one in found]


def _finish(axes: Axes, label: str, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=label == "updates"))
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # leading digits of the ticks, dense enough to leave no large part of the axis without a tick
    digits = (1, 2, 5) if high / low > 20 else (1, 1.5, 2, 3, 5, 7) if high / low > 3 else (*range(1, 10), 1.2, 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=digits, numticks=15))
    axes.yaxis.set_major_formatter(plain_number)
    axes.yaxis.set_minor_locator(NullLocator())


def draw_routing(results: Results, styles: dict[str, Style]) -> Figure | None:
    """Draw the health of the routers against updates, pooled over layers, as the mean over seeds.

    Figures that are always zero are left out; None if none is left.
    """
    curves = {
        key: {model.name: points for model in results.models if (points := pooled_curve(results, model, key))}
        for key, _, _ in _ROUTING
    }
    panels = [panel for panel in _ROUTING if any(value for line in curves[panel[0]].values() for _, value in line)]
    if not panels:
        return None
    figure = new_figure(
        10.5, 3.4 if len(panels) <= 2 else 6.2, "Routers in training, pooled over layers, mean over seeds"
    )
    grid = figure.subplots(1 if len(panels) <= 2 else 2, min(len(panels), 2), squeeze=False).flatten()
    handles = {}
    for axes, (key, label, scale) in zip(grid, panels, strict=False):
        for name, points in curves[key].items():
            x, y = zip(*points, strict=True)
            style = styles[name]
            handles[name] = axes.plot(x, [scale * value for value in y], **style.line_options(len(x), 4.5))[0]
        if key != "gate_entropy":
            low, high = axes.get_ylim()
            axes.set_ylim(bottom=0, top=high if high > -low else 1)  # matplotlib centres zeros
        _finish(axes, "updates", label)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    order = [model.name for model in results.models if model.name in handles]
    named = [handles[name] for name in order], [entry(name) for name in order]
    legend(figure, *named, loc="outside right upper", frameon=False, fontsize=9)
    return figure
