"""Runs one of fairseq's own command-line tools inside the ``smlp`` command, with this package loaded as its plug-in."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import smlp
from smlp.errors import UserError
from smlp.fairseq_compat.arguments import option_value


def package_dir() -> str:
    """The directory of this package, spelt as Python imported it (fairseq compares the text)."""
    return os.path.abspath(smlp.__path__[0])


def load_plugin() -> None:
    """Register this package's models and tasks with fairseq, as ``--user-dir`` would.

    fairseq scans a plug-in's folders only if it imports the package itself; here the package is imported already.
    """
    from smlp.fairseq_compat.logs import quiet_known_warnings
    from smlp.fairseq_compat.startup import without_statistics

    quiet_known_warnings()  # before fairseq is imported: its import warns too
    with without_statistics():
        import fairseq  # noqa: F401

    from fairseq import utils
    from fairseq.models import import_models
    from fairseq.tasks import import_tasks

    directory = package_dir()
    if not hasattr(utils.import_user_module, "memo"):
        utils.import_user_module.memo = set()
    utils.import_user_module.memo.add(directory)
    import_models(os.path.join(directory, "models"), "smlp.models")
    if os.path.isdir(os.path.join(directory, "tasks")):
        import_tasks(os.path.join(directory, "tasks"), "smlp.tasks")


def run_tool(
    tool: str,
    arguments: list[str],
    before: Callable[[Any], None] | None = None,
    look: Callable[[Any], None] | None = None,
) -> int:
    """Run ``fairseq-TOOL ARGUMENTS`` in this process.

    Args:
        tool: ``train``, ``eval_lm``, ...: a module of ``fairseq_cli``.
        arguments: its command line.
        before: called with fairseq's complete configuration, this process's rank included, before the tool starts;
            the save-dir is this run's by then.
        look: called with the same before anything is made or locked, by what ends here with an exception.

    Returns:
        0; a failure is an exception.

    Raises:
        UserError: among others, for arguments that fairseq's parser refuses.
    """
    load_plugin()
    from fairseq.distributed import utils as distributed_utils

    from smlp.fairseq_compat.processes import settle_ranks
    from smlp.fairseq_compat.saving import own_save_dir

    call_main = distributed_utils.call_main

    def call_with_plugin(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
        settle_ranks(cfg)
        if look is not None:
            look(cfg)
        with own_save_dir(cfg, main):
            if before is not None:
                before(cfg)
            call_main(cfg, functools.partial(_main_with_plugin, main), **kwargs)

    def usage_error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        # argparse would print fairseq's options, some 200 lines, before the reason
        raise UserError(f"{message} (smlp {tool.replace('_', '-')} --help shows an example)")

    command_line = ["fairseq-" + tool.replace("_", "-"), *_with_user_dir(arguments)]
    with (
        _replaced(sys, "argv", command_line),
        _replaced(distributed_utils, "call_main", call_with_plugin),
        _replaced(argparse.ArgumentParser, "error", usage_error),
    ):
        importlib.import_module(f"fairseq_cli.{tool}").cli_main()
    return 0


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _main_with_plugin(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
    """The tool's main function in a process that fairseq spawned, one for each GPU: such a process starts with nothing
    registered, and importing this very function keeps fairseq from scanning the plug-in."""
    load_plugin()
    return main(cfg, **kwargs)


def _with_user_dir(arguments: list[str]) -> list[str]:
    """The arguments with ``--user-dir`` naming this package, unless they name another plug-in.

    Raises:
        UserError: they name no directory, or another one called like this package, which Python cannot import beside
            it.
    """
    directory = package_dir()
    given = option_value(arguments, "--user-dir")
    if given is None:
        return ["--user-dir", directory, *arguments]
    if os.path.realpath(given) == os.path.realpath(directory):
        return [*arguments, "--user-dir", directory]  # the last one counts
    if Path(given).name == Path(directory).name:
        raise UserError(
            f"--user-dir {given} is not the package that this command belongs to ({directory}): leave --user-dir out"
        )
    import fairseq

    # fairseq looks for it in these places
    if not any((folder / given).is_dir() for folder in (Path(), *Path(fairseq.__file__).parents[:2])):
        raise UserError(f"there is no folder {given}, which --user-dir names")
    return arguments
