"""The ``smlp`` command: finds the subcommand, runs it, and turns its errors into one line and an exit status.

A subcommand is a module with

    DESCRIPTION, EPILOG        its help text above and below the options; the epilog has examples
    add_options(parser)        declares its options
    run(args) -> int           does the work and returns the exit status

If its arguments belong to another program, it has ``PASS_THROUGH = True`` and ``USAGE`` instead of options: everything
after its name, apart from ``--help``, is passed on unchanged as the list ``args.arguments``. Other commands find the
whole command line in ``args.words``, in case they have to start it again. A module with ``refuse(message)`` raises an
error of its own for options that it does not know. Modules are imported only when they are called, so that
``smlp --help`` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from smlp import __version__
from smlp.cli.interrupts import interrupted_after_imports
from smlp.config.plugins import fault
from smlp.errors import TRACEBACK, ParallelError, UserError, one_line, out_of_memory, torch_refuses, unexpected
from smlp.launch.machine import let_waiting_threads_sleep
from smlp.launch.stop_signals import EXIT_INTERRUPTED

# name: (module, one line for `smlp --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("smlp.cli.train", "train a model: fairseq-train with this package loaded"),
    "eval-lm": ("smlp.cli.eval_lm", "perplexity of a checkpoint per token, per word and per byte"),
    "zeroshot": ("smlp.cli.zeroshot", "accuracy on six tasks: COPA, PIQA, StoryCloze, Winogrande, HellaSwag, ReCoRD"),
    "lm-eval": ("smlp.cli.lm_eval", "run any task of lm-evaluation-harness"),
    "generate": ("smlp.cli.generate", "continue a prompt"),
    "serve": ("smlp.cli.serve", "OpenAI's completions endpoint for a checkpoint, and a page to try it"),
    "checkpoint": ("smlp.cli.checkpoint", "inspect, verify, merge, split, import, average and upcycle checkpoints"),
    "export": ("smlp.cli.export", "write a checkpoint as a folder for Hugging Face transformers"),
    "leak-test": ("smlp.cli.leak_test", "check that no later token changes an earlier prediction"),
    "compare": ("smlp.cli.compare", "compare models at equal FLOPs from one file: train, score, report"),
    "finetune": ("smlp.cli.finetune", "fine-tune an encoder over a grid, with several seeds; report the medians"),
    "flops": ("smlp.cli.flops", "parameters and FLOPs of a model, by formula and counted"),
    "match": ("smlp.cli.match", "settings of every model family for the same FLOPs per token"),
    "costs": ("smlp.cli.costs", "show where the time of an update goes, layer by layer"),
    "plot": ("smlp.cli.plot", "pictures of a checkpoint: spatial filters, what goes to which expert"),
    "data": ("smlp.cli.data", "prepare training data: fetch, clean, dedup, sample, tokenizer, binarize, inspect"),
    "vision": ("smlp.cli.vision", "images: train and evaluate MLP-Mixer and gMLP with timm's parts"),
    "wide-sparse": ("smlp.cli.wide_sparse", "models as wide, sparse MLPs: connections, singular values, similarity"),
    "examples": ("smlp.cli.examples", "write recipes, experiments and Slurm scripts to a folder"),
    "doctor": ("smlp.cli.doctor", "check versions, devices and speed on this machine"),
    "completion": ("smlp.cli.completion", "print a script with which a shell completes commands and options"),
    "user-dir": ("smlp.cli.user_dir", "print the directory to give to fairseq's --user-dir"),
}

_SHOWN = 300  # most characters of a file name in a message
EXIT_FAILURE = 1
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run ``smlp ARGV`` and return its exit status."""
    let_waiting_threads_sleep()
    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _checked_and_dispatched(words))


def guarded(work: Callable[[], int | None]) -> int:
    """Do the work of a command or a script; return its exit status, after one sentence if it fails."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            # file names and generated text may contain characters that the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    _wait_for_children()
    try:
        status = work() or 0
        sys.stdout.flush()  # a closed pipe can still be handled here
        return status
    except (UserError, ParallelError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader is gone, and Python would report that again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:  # no permission, disk full, a name that is too long, ...
        name = str(error.filename or "input/output")
        return _failed(f"{name[:_SHOWN]}: {error.strerror or error}")
    except Exception as error:
        reason = str(error) if str(error).startswith("Symlink loop") else out_of_memory(error)  # the first is pathlib's
        reason = reason or torch_refuses(error) or fault(error)
        if reason is None and os.environ.get(TRACEBACK):
            raise
        return _failed(reason or f"{unexpected(error)} ({TRACEBACK}=1 shows where)")


def _checked_and_dispatched(words: list[str]) -> int:
    with interrupted_after_imports():
        _check_surroundings(words)
        return _dispatch(words)


def _wait_for_children() -> None:
    """Let the system keep how processes ended: if our parent ignores SIGCHLD, each would count as a success."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Replace closed standard streams (``>&-``) by empty ones; else the next file opened would take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the lowest free number is opened first
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _check_surroundings(words: list[str]) -> None:
    """Refuse a working folder that is gone, and names that the locale cannot encode: libraries fail on both."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the folder in which this command was started has been removed: cd to another one") from None
    encoding = sys.getfilesystemencoding()
    odd = None if encoding == "utf-8" else next((word for word in words if not word.isascii()), None)
    if odd is not None:
        raise UserError(f"{odd!r} is not ASCII, and file names are {encoding} here: set LC_ALL=C.UTF-8 or PYTHONUTF8=1")


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        parser = _overview()
        parser.parse_args(argv)  # --help and --version end here
        parser.print_help()
        return EXIT_FAILURE
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}; {hint}")

    module, top = _module_of(name), argparse.ArgumentParser(prog="smlp")
    _add_parser(top, name)
    if getattr(module, "PASS_THROUGH", False):
        wants_help = any(word in ("-h", "--help") for word in rest)
        args = top.parse_args([name, "--help"] if wants_help else [name])
        args.arguments = rest
    else:
        _refuse_empty(argv)
        args, unknown = top.parse_known_args(argv)
        if unknown:
            getattr(module, "refuse", top.error)(f"unrecognized arguments: {' '.join(unknown)}")
        args.words = argv
    return module.run(args)


def _refuse_empty(words: list[str]) -> None:
    """Refuse empty arguments, which a variable that is not set leaves behind; only a prompt may be empty."""
    for before, word in itertools.pairwise(words):
        option, equals, value = word.partition("=")
        if word == "" and before != "--prompt":
            raise UserError(f"the argument after {before} is empty: leave it out, or give a value")
        if option.startswith("--") and equals and not value and option != "--prompt":
            raise UserError(f"{option} is empty: leave it out, or give a value")


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of ``smlp NAME``."""
    return _add_parser(argparse.ArgumentParser(prog="smlp"), name)


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands."""
    top = argparse.ArgumentParser(prog="smlp", description="Sparse all-MLP language models on fairseq.")
    subparsers = top.add_subparsers(dest="command")
    for name in COMMANDS:
        _add_to(subparsers, name, help=COMMANDS[name][1])
    return top


def _add_parser(top: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    return _add_to(top.add_subparsers(dest="command", required=True), name)


def _add_to(subparsers: Any, name: str, **more: Any) -> argparse.ArgumentParser:
    module = _module_of(name)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        usage=getattr(module, "USAGE", None),
        description=module.DESCRIPTION,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser


def _module_of(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name][0])


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="smlp",
        usage="smlp [--version] COMMAND ...",
        description="Sparse all-MLP language models on fairseq.",
        epilog=f"commands:\n{table}\n\n'smlp COMMAND --help' shows the options of a command and an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"smlp {__version__}")
    return parser


def _failed(reason: str) -> int:
    """Print why the command failed, after everything that it has printed; return its exit status."""
    _flush_quietly()
    print(f"smlp: error: {one_line(reason)}", file=sys.stderr)
    return EXIT_FAILURE


def _flush_quietly() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
