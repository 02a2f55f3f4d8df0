"""All figures of a report and their captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smlp.experiments.report import paper
from smlp.experiments.report.draw_curves import draw_curves, draw_routing, horizontals, styles
from smlp.experiments.report.draw_points import draw_final, draw_heads, draw_moe, draw_quality_and_speed
from smlp.experiments.report.results import Results
from smlp.experiments.report.speed import TIMES, mean_curve
from smlp.experiments.report.studies import routed_variants
from smlp.plots.drawing import FORMATS, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = "figures"


@dataclass(frozen=True)
class Picture:
    """A figure that was written to files."""

    name: str
    title: str
    caption: str
    #: files and fields that the figure shows
    source: str

    def path(self, ending: str) -> str:
        """Return the path of the file with this ending, relative to the report."""
        return f"{FOLDER}/{self.name}.{ending}"


def write_figures(results: Results, to: Path) -> dict[str, Picture]:
    """Draw every figure that the results have data for and write it as PNG and SVG; return the figures by name."""
    found = {}
    for picture, figure in _all(results):
        if figure is not None:
            for ending in FORMATS:
                save(figure, to / picture.path(ending))
            found[picture.name] = picture
    return found


def _all(results: Results) -> Iterator[tuple[Picture, Figure | None]]:
    looks, subset = styles(results.models), results.subsets[0]
    split = results.split[:1].upper() + results.split[1:]
    some = [model for model in results.models if mean_curve(results, model)]
    of_paper = "" if results.is_masked else " (the paper's Figures 1 and 5)"
    titles = {
        "updates": f"{split} perplexity against updates{of_paper}",
        "time": f"{split} perplexity against training time{of_paper}",
        "flops": f"{split} perplexity against multiply-adds of training",
    }
    sources = {
        "updates": f"train.log: {subset}_num_updates, {subset}_loss",
        "time": f"train.log: {subset}_loss; {TIMES}",
        "flops": f"train.log: {subset}_loss; experiment.json: models.flops_per_token, tokens_per_update",
    }
    said = {"updates": [paper.FIGURE_1, paper.FIGURE_5_UPDATES], "time": [paper.FIGURE_1, paper.FIGURE_5_TIME]}
    if results.is_masked:
        said = {}
    band = (
        "The lines are means over seeds. With two or more seeds, the band is the 95 % interval (Student's t), which "
        "shows how much one training differs from the next. Judge differences between models seed by seed, in the "
        "summary."
    )
    if results.has_prefix:
        band += (
            " Models with a prefix are measured on their own positions here, so their lines cannot be compared with "
            "the others."
        )
    for across in horizontals(results):
        caption = " ".join([band, *said.get(across.key, [])])
        picture = Picture(f"perplexity-{across.key}", titles[across.key], caption, f"runs/*/{sources[across.key]}")
        yield picture, draw_curves(results, some, across, looks, picture.title) if some else None
    positions = " on the positions that all models predict" if results.has_prefix else ""
    scores = f"runs/*/scores.json: exp(subsets.{subset}.nll_after_prefix)"
    yield (
        Picture("final", f"{split} perplexity at the end", f"Final perplexity{positions}, best first.", scores),
        draw_final(results, results.models, looks, f"{split} perplexity at the end of training"),
    )
    speed = "speed.json" if results.speed else f"runs/*/{TIMES}"
    yield (
        Picture("quality-and-speed", "Quality and speed", f"Final perplexity{positions}.", f"{scores}; {speed}"),
        draw_quality_and_speed(results, looks),
    )
    yield (
        Picture(
            *("routing", "Routers in training"),
            "Pooled over layers, mean over seeds; models without a figure have no line (docs/router_health.md).",
            "runs/*/router_health.jsonl: pooled",
        ),
        draw_routing(results, looks),
    )
    heads = f"Bars and the band of sMLP are 95 % intervals over seeds. {paper.FIGURE_4}"
    yield Picture("heads", "Number of heads", heads, scores), draw_heads(results, looks)
    variants = routed_variants(results)
    own_looks = styles(variants, by_family=False)
    first = horizontals(results)[0]
    drawn = [model for model in variants if model in some]
    title = "Deterministic, partial and leaky routing of features (the paper's Figure 7)"
    yield (
        Picture(
            *("feature-routing", title),
            "Partial and leaky routing are measured after their prefix, deterministic routing on all positions; the "
            f"next figure compares the same positions. {paper.FIGURE_7}",
            f"runs/*/{sources['updates']}",
        ),
        draw_curves(results, drawn, first, own_looks, title) if drawn else None,
    )
    yield (
        Picture(
            *("feature-routing-final", "The same at the end, after the prefix"),
            "All models are measured on the same positions.",
            scores,
        ),
        draw_final(results, variants, own_looks, "Kinds of feature routing at the end, after the prefix"),
    )
    yield (
        Picture("gmlp-moe", "Token-routed gMLP", "Left: here; right: the paper's Table 7.", scores),
        draw_moe(results, looks),
    )
