"""Writes docs/commands.md: every command and option, from the parsers themselves.

    python scripts/command_reference.py

The page is put together from the parsers' contents, not from what argparse prints: that depends on the width of the
terminal and on the version of Python.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from smlp.cli.main import COMMANDS, command_parser
from smlp.config.presets import PRESETS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

INTRODUCTION = """# Commands and options

Written by `python scripts/command_reference.py` from the command-line parsers; do not edit. `smlp COMMAND --help`
prints the same at the terminal. A command ends with status 0 if all went well; a mistake in the input is one sentence
on standard error and status 1 (a missing option: the usage and status 2). Other statuses are listed with their command.
"""
ADDED = """## Options that this package adds to fairseq

`fairseq-train --user-dir smlp --task language_modeling --arch ARCH` and `smlp train` take all of fairseq's options and
those below. The architecture ([presets.md](presets.md)) sets those that are not given. The options of the model before
`--expert-parallel-size` are settings of `smlp.build(ARCH, ...)` too; the others are about the run.
"""
# An option's name in a sentence, not within a word or an address.
_OPTION_IN_TEXT = re.compile(r"(?<![\w/-])(--[a-zA-Z][\w-]*)")
_MARKUP = re.compile(r"([\\`*<>\[\]|])")


def shown(action: argparse.Action, short: bool = False) -> str:
    """Return an option or argument as one writes it: ``-o, --output OUT`` (short: ``-o OUT``), ``PATH [PATH ...]``."""
    flags = ", ".join(action.option_strings[:1] if short else action.option_strings)
    if action.nargs == 0:
        return flags
    name = action.metavar
    if name is None and action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    if name is None:
        name = {int: "N", float: "X"}.get(action.type, action.dest.upper().replace("_", "-"))
    names = name if isinstance(name, tuple) else (name,) * (action.nargs if isinstance(action.nargs, int) else 1)
    values = " ".join(names)
    values = {"?": f"[{values}]", "*": f"[{values} ...]", "+": f"{values} [{values} ...]"}.get(action.nargs, values)
    return f"{flags} {values}".strip()


def sentence(text: str) -> str:
    """Return a help text as Markdown, with the options in it as code."""
    escaped = _MARKUP.sub(r"\\\1", " ".join(text.split()))
    return _OPTION_IN_TEXT.sub(r"`\1`", escaped)


def help_of(action: argparse.Action, prog: str) -> str:
    """Return the help text with its ``%(default)s`` and the like filled in."""
    facts = {**vars(action), "prog": prog}
    facts["choices"] = ", ".join(map(str, action.choices or ()))
    return sentence((action.help or "") % facts)


def option_lines(actions: list[argparse.Action], prog: str) -> list[str]:
    """Return a list item for each option that is not hidden."""
    lines = []
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        needed = " (required)" if action.required and action.option_strings else ""
        text = help_of(action, prog)
        lines.append(f"- `{shown(action)}`{needed}{': ' if text else ''}{text}")
    return lines


def usage(parser: argparse.ArgumentParser) -> str:
    """Return a command's usage: required options, arguments, and ``[options]`` for the rest."""
    if parser.usage:
        return parser.usage % {"prog": parser.prog}
    needed = [action for action in parser._actions if action.required or not action.option_strings]
    optional = [action for action in parser._actions if action not in needed and action.dest != "help"]
    words = [shown(action, short=True) for action in sorted(needed, key=lambda action: not action.option_strings)]
    return " ".join([parser.prog, *words, *(["[options]"] if optional else [])])


def text_block(text: str) -> list[str]:
    """Return text as it stands: examples and tables of a help page."""
    return ["```text", *(line.rstrip() for line in text.strip("\n").splitlines()), "```", ""]


def describe(parser: argparse.ArgumentParser, summary: str, above: str | None) -> Iterator[str]:
    """Yield the section of one command, without the commands below it.

    Args:
        parser: its parser.
        summary: one line about it, where the parser says nothing.
        above: the text under the examples of the command that it belongs to, which is not repeated.
    """
    depth = "#" * (len(parser.prog.split()))
    yield from (f"{depth} {parser.prog}", "")
    description = (parser.description or summary).strip("\n")
    if re.search(r"^  ", description, re.M):  # laid out by hand
        yield from text_block(description)
    else:
        for paragraph in description.split("\n\n"):
            text = sentence(paragraph).rstrip(".") + "."
            yield from (text if text.startswith("fairseq-") else text[:1].upper() + text[1:], "")
    yield from ("```text", usage(parser), "```", "")
    for group in parser._action_groups:
        lines = option_lines(group._group_actions, parser.prog)
        if lines:
            if group.title not in ("positional arguments", "options"):
                yield from (f"{sentence(group.title or '')}:", "")
            yield from (*lines, "")
    if parser.epilog and parser.epilog != above:
        yield from text_block(parser.epilog % {"prog": parser.prog} if "%(prog)" in parser.epilog else parser.epilog)


def walk(parser: argparse.ArgumentParser, summary: str, above: str | None = None) -> Iterator[str]:
    """Yield the sections of a command and of all commands below it."""
    yield from describe(parser, summary, above)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                yield from walk(child, summaries[name], parser.epilog)


def added_options() -> Iterator[str]:
    """Yield what the plug-in adds to fairseq's command line."""
    from smlp.fairseq_compat.command_line import load_plugin

    load_plugin()
    from smlp.criterions.moe_cross_entropy import MoECrossEntropyCriterion
    from smlp.models.language_model import SparseMLPLanguageModel

    yield ADDED
    yield from ("`--arch` is one of " + ", ".join(f"`{name}`" for name in PRESETS) + ".", "")
    parts = [
        ("Model", "any `--arch` above", SparseMLPLanguageModel),
        ("Criterion", "`--criterion moe_cross_entropy`, the default for these models", MoECrossEntropyCriterion),
    ]
    for title, condition, owner in parts:
        parser = argparse.ArgumentParser(prog="fairseq-train")
        owner.add_args(parser)
        yield from (f"### {title}", "", f"With {condition}:", "", *option_lines(parser._actions, parser.prog), "")


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "| command | what it does |", "|---|---|"]
    lines += [f"| [`smlp {name}`](#smlp-{name}) | {sentence(summary)} |" for name, (_, summary) in COMMANDS.items()]
    lines.append("")
    for name, (_, summary) in COMMANDS.items():
        lines += walk(command_parser(name), summary)
    lines += added_options()
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=f"Writes {PAGE.relative_to(PAGE.parents[1])} anew.").parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
