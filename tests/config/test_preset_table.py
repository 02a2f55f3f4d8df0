"""docs/presets.md is what its script writes, and its numbers are the paper's where no remark says otherwise."""

import importlib.util

import pytest
from running import REPOSITORY

from smlp.config.presets import PRESETS

SPEC = importlib.util.spec_from_file_location("preset_table", REPOSITORY / "scripts" / "preset_table.py")
preset_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(preset_table)


def test_the_page_is_what_the_script_writes():
    written = (REPOSITORY / "docs" / "presets.md").read_text(encoding="utf-8")
    assert written == preset_table.page(), "run: python scripts/preset_table.py"


def test_every_preset_has_a_row():
    rows = preset_table.presets_table()[2:] + preset_table.encoders_table()[2:]
    assert [row.split("`")[1] for row in rows] == list(PRESETS)


@pytest.mark.parametrize(("name", "printed", "flops", "where", "remark"), preset_table.MASKED)
def test_masked_language_models_are_as_large_as_the_papers(name, printed, flops, where, remark):
    without, params, work = preset_table.masked_quantities(name)
    assert round(params if where in ("Table 3", "Table 10") else without) == printed
    assert flops is None or abs(work / flops - 1) <= 0.01


@pytest.mark.parametrize(
    ("arch", "quantity", "printed", "where", "remark"),
    [row for row in preset_table.PAPER if row[-1] in (None, "labels", "smlp_large", "switch_lm")],
)
def test_the_papers_numbers_are_reproduced(arch, quantity, printed, where, remark):
    assert abs(preset_table.difference(arch, quantity, printed)) <= (0.01 if quantity == "FLOPs" else 0.001), where


def test_remarks_are_all_used():
    assert {remark for *_, remark in preset_table.PAPER if remark} == set(preset_table.remarks())
