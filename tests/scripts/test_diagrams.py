"""docs/diagrams is what scripts/draw_diagrams.py draws: the same files, words and lines, and each on the page."""

import re
import sys

import pytest
from running import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import draw_diagrams
import torch
from diagrams import features, tokens

FOLDER = REPOSITORY / "docs" / "diagrams"
PAGE = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw_diagrams.draw(tmp_path_factory.mktemp("diagrams"))


def shapes_and_words(svg):
    """What does not change with matplotlib's version: the words, and how many shapes of which colour there are."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg), sorted(re.findall(r"(?:fill|stroke): (#\w+)", svg))


def test_the_files_are_what_the_script_draws(drawn):
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in drawn}
    for path in drawn:
        committed = (FOLDER / path.name).read_text(encoding="utf-8")
        words, colors = shapes_and_words(committed)
        assert len(words) > 8 and len(colors) > 8, path.name
        assert (words, colors) == shapes_and_words(path.read_text(encoding="utf-8")), "run: scripts/draw_diagrams.py"


def test_each_is_on_the_page(drawn):
    assert re.findall(r"!\[[^\]]+\]\(diagrams/([\w-]+)\.svg\)", PAGE) == list(draw_diagrams.DRAWINGS)


def test_the_example_shows_what_the_page_says():
    switch, gshard = tokens.training_plan(1), tokens.training_plan(2)
    assert switch.dropped["capacity"] == 3 and switch.counts_E.tolist() == [2, 2, 0, 1]
    assert gshard.dropped["capacity"] == 1 and gshard.counts_E.max() == 4
    assert tokens.evaluation_plan(2).dropped["capacity"] == 0
    assert torch.bincount(torch.tensor(features.routed_features())).tolist() == [2, 2, 2, 2]
