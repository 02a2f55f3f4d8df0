"""Which model of an experiment stands for one of the paper's, where it has several of a kind."""

from __future__ import annotations

from smlp.experiments.report import paper
from smlp.experiments.report.runs import Experiment, Model


def speaker(experiment: Experiment, name: str) -> Model | None:
    """The model that is most like the paper's: of its kind of experts, with most of them, then nearest in heads.

    Args:
        experiment: as read.
        name: the paper's model, a key of :data:`smlp.experiments.report.paper.NAMES`.

    Returns:
        the first of those that are equally like it, None where there is none; see :func:`is_of_the_paper`.
    """
    found = [model for model in experiment.models if model.paper_name == name]
    return max(found, key=_likeness, default=None)


def is_of_the_paper(model: Model) -> bool:
    """Whether it is what the paper means by the name: no single expert, no experts of our own making."""
    return model.config.moe.feature_experts == "gated" and model.num_experts != 1


def _likeness(model: Model) -> tuple[bool, int, int]:
    heads = abs(model.config.num_heads - paper.HEADS.get(model.paper_name or "", model.config.num_heads))
    return is_of_the_paper(model), model.num_experts, -heads
