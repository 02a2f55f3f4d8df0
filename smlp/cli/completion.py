"""``smlp completion``: a script with which a shell completes commands, options and file names."""

from __future__ import annotations

import argparse

from smlp.errors import UserError

DESCRIPTION = "print a script with which a shell completes commands, options and file names"
EPILOG = """examples:
  smlp completion bash > ~/.local/share/bash-completion/completions/smlp
  smlp completion zsh > ~/.zfunc/_smlp          (a folder of your fpath)

The script holds the options as they are in this version, so nothing is imported while you type. Options of fairseq's
own, which smlp train takes as well, are not among them. Needs the extra completion (pip install -e '.[completion]').
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise UserError("completion scripts are made by shtab: pip install -e '.[completion]'") from None
    from smlp.cli.main import whole_parser

    parser = whole_parser()
    for action in _actions(parser):
        if action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a parser and of its subcommands."""
    found: list[argparse.Action] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for one in action.choices.values() for inner in _actions(one)]
        else:
            found.append(action)
    return found
