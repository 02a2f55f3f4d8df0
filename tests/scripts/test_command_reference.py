"""docs/commands.md is what its script writes, whatever the terminal, and nothing is missing from it."""

import argparse
import dataclasses
import importlib.util
import re

import pytest
from running import REPOSITORY, run_python

from smlp.cli.main import COMMANDS
from smlp.config import SETTINGS
from smlp.config.presets import FROM_TASK

SPEC = importlib.util.spec_from_file_location("command_reference", REPOSITORY / "scripts" / "command_reference.py")
command_reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(command_reference)
PAGE = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_page_is_what_the_script_writes(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert command_reference.page() == PAGE, "run: python scripts/command_reference.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_argparse_shows_is_on_the_page(name):
    section = re.search(rf"^## smlp {name}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]

    def check(parser):
        shown = re.findall(r"^  +(-{1,2}[\w-]+)", parser.format_help().split("examples:")[0], re.M)
        for option in set(shown) - {"-h"}:
            assert option in section, option
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    assert f"### {child.prog}\n" in section
                    check(child)

    check(command_reference.command_parser(name))


def test_every_setting_of_a_model_is_on_the_page():
    added = PAGE[PAGE.index("## Options that this package adds to fairseq") :]
    for setting in set(SETTINGS) - set(FROM_TASK):
        assert f"- `--{setting.replace('_', '-')}" in added, setting


def test_what_a_parser_says_becomes_markdown():
    parser = argparse.ArgumentParser(prog="tool", description="does *things*")
    parser.add_argument("inputs", nargs="+", metavar="IN", help="what to read")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="with --limit, half of <it>")
    parser.add_argument("--limit", type=int, default=3, help="%(prog)s stops here (default: %(default)s)")
    parser.add_argument("--kind", choices=("a", "b"), help="one of %(choices)s")
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    assert list(command_reference.describe(parser, "", None)) == [
        *("# tool", "", r"Does \*things\*.", "", "```text", "tool -o DIR IN [IN ...] [options]", "```", ""),
        *("- `IN [IN ...]`: what to read", ""),
        r"- `-o, --out DIR` (required): with `--limit`, half of \<it\>",
        *("- `--limit N`: tool stops here (default: 3)", "- `--kind {a,b}`: one of a, b", ""),
    ]


def shown_commands(markdown):
    """The words of each ``smlp ...`` command in blocks of code, continued lines joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```", markdown, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\$ |srun (?:-\S+ +)*)?smlp ([a-z].*)", line.split(" # ")[0]):
                yield match[1].split()


def test_options_for_those_who_come_from_elsewhere_exist():
    """The right columns of docs/migrating.md."""
    from fairseq.optim.adam import FairseqAdamConfig
    from fairseq.optim.lr_scheduler.cosine_lr_scheduler import CosineLRScheduleConfig

    words = "--user-dir smlp --task language_modeling --arch smlp_tiny --help"
    done = run_python("-m", "fairseq_cli.train", *words.split())
    fields = [*dataclasses.fields(FairseqAdamConfig), *dataclasses.fields(CosineLRScheduleConfig)]
    known = {f"--{field.name.replace('_', '-')}" for field in fields}  # not shown by --help
    known |= set(re.findall(r"--[a-z][\w-]+", done.stdout)) | set(re.findall(r"`(?:[^`]*, )?(--[a-z][\w-]+)", PAGE))
    page = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")]
    named = {option for cell in cells for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", cell)}
    assert len(named) > 40 and named <= known, named - known


def test_commands_in_the_pages_have_options_that_exist():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    checked = 0
    for path in pages:
        if path.name == "commands.md":
            continue
        for name, *words in shown_commands(path.read_text(encoding="utf-8")):
            if name == "train":  # all of fairseq's options
                continue
            section = re.search(rf"^## smlp {name}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]
            for option in (word for word in words if re.match(r"--?[a-z]", word)):
                known = rf"^- `(?:[^`]*, )?{re.escape(option)}(?![\w-])"
                assert re.search(known, section, re.M), (path.name, name, option)
                checked += 1
    assert checked > 100
