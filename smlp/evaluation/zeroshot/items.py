"""One record of each task, as its official release has it; texts are raw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CopaItem:
    """Choice of plausible alternatives (Roemmele et al., 2011)."""

    id: str
    premise: str
    choices: tuple[str, str]
    #: "cause" or "effect": what of the premise the choices are
    question: str
    gold: int


@dataclass(frozen=True)
class PiqaItem:
    """Physical common sense (Bisk et al., 2020)."""

    id: str
    goal: str
    solutions: tuple[str, str]
    gold: int


@dataclass(frozen=True)
class StoryClozeItem:
    """Endings of stories of four sentences (Mostafazadeh et al., 2016)."""

    id: str
    sentences: tuple[str, str, str, str]
    endings: tuple[str, str]
    gold: int


@dataclass(frozen=True)
class WinograndeItem:
    """Winograd schemas (Sakaguchi et al., 2020); the sentence has one blank, ``_``."""

    id: str
    sentence: str
    options: tuple[str, str]
    gold: int


@dataclass(frozen=True)
class HellaSwagItem:
    """Endings of everyday scenes (Zellers et al., 2019); ``ctx_b``, unfinished, follows ``ctx_a`` or is empty."""

    id: str
    activity: str
    ctx_a: str
    ctx_b: str
    endings: tuple[str, str, str, str]
    gold: int


@dataclass(frozen=True)
class RecordItem:
    """Entities of a news text that fill ``@placeholder`` in a query (Zhang et al., 2018)."""

    id: str
    passage: str
    query: str
    #: texts of all mentions, in the order of the passage, each text once
    entities: tuple[str, ...]
    #: texts that are right; each is one of ``entities``
    answers: tuple[str, ...]


Item = CopaItem | PiqaItem | StoryClozeItem | WinograndeItem | HellaSwagItem | RecordItem


def without_id(item: Item) -> Item:
    """What a record says, for comparisons."""
    return dataclasses.replace(item, id="")


def distinct(found: Iterable[Item]) -> list[Item]:
    """The records, each once, in their order: one that is there again with its id is the same, and tells nothing more
    about a model."""
    return list(dict.fromkeys(found))
