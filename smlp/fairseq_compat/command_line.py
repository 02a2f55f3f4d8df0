"""Run ``fairseq-train`` inside this process with this package as its plug-in, or only read its command line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import smlp
from smlp.errors import UserError
from smlp.fairseq_compat.arguments import option_value
from smlp.launch.ranks import check_local_rank


def package_dir() -> str:
    """Return the directory of this package, spelt as Python imported it (fairseq compares the text)."""
    return os.path.abspath(smlp.__path__[0])


def load_plugin() -> None:
    """Register this package's models and tasks with fairseq, as ``--user-dir`` would.

    fairseq scans a plug-in's folders only if it imports the package itself; here the package is imported already.

    Raises:
        UserError: LOCAL_RANK, which fairseq reads when it is imported, is no number.
    """
    from smlp.fairseq_compat.logs import quiet_known_warnings
    from smlp.fairseq_compat.startup import without_unused_imports

    check_local_rank(os.environ)
    quiet_known_warnings()  # must precede the import of fairseq, which also warns
    with without_unused_imports():
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


def training_configuration(arguments: list[str], settings: Mapping[str, Any] | None = None) -> Any:
    """Return fairseq's complete configuration for a command line of ``fairseq-train``; nothing is made or started.

    Args:
        arguments: the command line.
        settings: of a file, from which the command line comes; it leaves out those that are false or nothing.

    Raises:
        UserError: an option is wrong, also one that is left out, or ranks cannot start as it says.
    """
    load_plugin()
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from smlp.fairseq_compat.processes import settle_ranks

    with _command_line(arguments):
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser))
        settle_ranks(cfg)
    check_left_out(parser, settings or {})
    return cfg


def check_left_out(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> None:
    """Refuse settings of a file that are false or nothing, and so no option of its command line, but should be one.

    Raises:
        UserError: the parser does not know the option, or a value that is false is not that of a flag.
    """
    known = {option: action for action in parser._actions for option in action.option_strings}
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if (value is None or value is False) and option not in known:
            raise UserError(f"unrecognized arguments: {option}")
        if value is False and known[option].nargs != 0:
            raise UserError(f"{option} takes a value, not false: in YAML, off and no are false, too")


def run_training(arguments: list[str], around: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Run ``fairseq-train ARGUMENTS`` in this process.

    Args:
        arguments: its command line.
        around: called with fairseq's complete configuration, this process's rank included; training runs in the context
            that it returns. Meanwhile, no other run may use the save-dir.

    Raises:
        UserError: among others, for arguments that fairseq's parser refuses.
    """
    load_plugin()
    from fairseq.distributed import utils as distributed_utils
    from fairseq_cli import train

    from smlp.fairseq_compat.processes import settle_ranks
    from smlp.fairseq_compat.saving import own_save_dir

    call_main = distributed_utils.call_main

    def call_with_plugin(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
        settle_ranks(cfg)
        with own_save_dir(cfg, main), around(cfg):
            call_main(cfg, functools.partial(_main_with_plugin, main), **kwargs)

    with _command_line(arguments), _replaced(distributed_utils, "call_main", call_with_plugin):
        train.cli_main()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Make this process look like ``fairseq-train ARGUMENTS``, with mistakes in them as one sentence."""

    def usage_error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        # argparse would print fairseq's 200 lines of options before the reason
        raise UserError(f"{message} (smlp train --help shows an example)")

    with (
        _replaced(sys, "argv", ["fairseq-train", *_with_user_dir(arguments)]),
        _replaced(argparse.ArgumentParser, "error", usage_error),
    ):
        yield


def _main_with_plugin(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
    """Run fairseq's main function in a process that it spawned, one for each GPU.

    Such a process starts with nothing registered, and importing this very function keeps fairseq from scanning the
    plug-in.
    """
    load_plugin()
    return main(cfg, **kwargs)


def _with_user_dir(arguments: list[str]) -> list[str]:
    """Return the arguments with ``--user-dir`` naming this package, unless they name another plug-in.

    Raises:
        UserError: they name no directory, or another one called like this package, which Python cannot import beside
            it.
    """
    directory = package_dir()
    given = option_value(arguments, "--user-dir")
    if given is None:
        return ["--user-dir", directory, *arguments]
    if os.path.realpath(given) == os.path.realpath(directory):
        return [*arguments, "--user-dir", directory]  # the last --user-dir counts
    if Path(given).name == Path(directory).name:
        raise UserError(
            f"--user-dir {given} is not the package that this command belongs to ({directory}): leave --user-dir out"
        )
    import fairseq

    # fairseq searches these places
    if not any((folder / given).is_dir() for folder in (Path(), *Path(fairseq.__file__).parents[:2])):
        raise UserError(f"there is no folder {given}, which --user-dir names")
    return arguments
