"""Answer wrong command lines in one sentence; fairseq prints pages of usage or a traceback, or misreads them."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from smlp.config.registry import ARCHITECTURES
from smlp.errors import UserError
from smlp.fairseq_compat.arguments import has_option, option_value
from smlp.fairseq_compat.limits import check_numbers
from smlp.fairseq_compat.needs import check_tools
from smlp.fairseq_compat.replacing import replacing

_PRINT_USAGE = argparse.ArgumentParser.error
_MANDATORY = "???"  # hydra's default for required options; fairseq passes it to argparse like any other
_OF_LANGUAGE_MODELS = ("tokens_per_sample", "max_target_positions", "add_bos_token")


def _truth(text: str) -> bool:
    """Read true or false, in capitals or not; fairseq reads only Python's own True and False."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return values[text.lower()]


# Options that default to another option's value have no type, and are read much later.
_UNTYPED: dict[str, Callable[[str], Any]] = {
    "batch_size_valid": int,
    "max_tokens_valid": int,
    "total_num_update": float,
    "update_epoch_batch_itr": _truth,
}


def apply() -> None:
    from fairseq import options
    from fairseq.dataclass import utils

    @replacing(options, "parse_args_and_arch")
    def parse_args_and_arch(
        parse: Any,
        parser: argparse.ArgumentParser,
        input_args: list[str] | None = None,
        *rest: Any,
        modify_parser: Callable[[argparse.ArgumentParser], None] | None = None,
        **kw: Any,
    ) -> Any:
        def modify(modified: argparse.ArgumentParser) -> None:
            for action in modified._actions:
                if action.default == _MANDATORY:
                    action.default, action.required = None, True
                if action.type is None:
                    action.type = _UNTYPED.get(action.dest)
            if modify_parser is not None:
                modify_parser(modified)

        words = sys.argv[1:] if input_args is None else input_args
        is_validation = _tool() in ("fairseq-validate", "validate")  # for which fairseq has no default
        if is_validation and not has_option(words, "--task", "-h", "--help"):
            raise UserError("there is no task: give that of the checkpoint, such as --task language_modeling")
        check_arch(words, is_needed=any("--max-update" in action.option_strings for action in parser._actions))
        check_task(words, parser.get_default("task"))
        check_precision(words)
        if argparse.ArgumentParser.error is _PRINT_USAGE:  # the smlp command replaces it
            parser.error = usage_error
        parsed = parse(parser, input_args, *rest, modify_parser=modify, **kw)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        # fairseq takes --bf16 to mean "on a TPU" on every machine, and then fails because torch_xla is missing.
        if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
            args.tpu = False
        # Documented to default to --max-update, but fairseq passes None if it is not given.
        if getattr(args, "total_num_update", 0) is None:
            args.total_num_update = args.max_update
        if is_validation and getattr(args, "batch_size", 0) is None and getattr(args, "max_tokens", 0) is None:
            raise UserError("there is no size for the batches: give --batch-size or --max-tokens")
        check_numbers(vars(args))
        check_tools(args)
        return parsed

    replacing(utils, "eval_str_list")(_number_list)


def usage_error(message: str) -> NoReturn:
    """Raise what is wrong with a command line; argparse would print all options, some 200 lines, before it.

    Raises:
        UserError: always.
    """
    raise UserError(f"{message} ({_tool()} --help lists the options)")


def _tool() -> str:
    return Path(sys.argv[0]).name.removesuffix(".py").replace("_", "-")


def check_arch(argv: list[str], is_needed: bool) -> None:
    """Raise ``UserError`` with the closest name for an unknown ``--arch``; argparse would print pages of usage."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    arch = option_value(argv, "--arch", "-a")
    if arch is None and is_needed and not {"-h", "--help"} & set(argv):
        raise UserError("there is no model to train: give --arch")
    if arch is None or arch in ARCH_MODEL_REGISTRY:
        return
    close = difflib.get_close_matches(arch, ARCH_MODEL_REGISTRY, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "fairseq-train --help lists them"
    raise UserError(
        f"--arch {arch!r} is not among the {len(ARCH_MODEL_REGISTRY)} known architectures; {hint}{ARCHITECTURES.hint}"
    )


def check_precision(argv: list[str]) -> None:
    """Raise ``UserError`` if both half precisions are given; fairseq's message would be about TPUs."""
    fp16, bf16 = (
        next((word for word in argv if word in (f"--{kind}", f"--memory-efficient-{kind}")), None)
        for kind in ("fp16", "bf16")
    )
    if fp16 and bf16:
        raise UserError(f"{fp16} and {bf16} are both given: choose one of the two")


def check_task(argv: list[str], default: str | None) -> None:
    """Raise ``UserError`` for a language model with a task of another kind, such as the default, translation."""
    from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    arch = option_value(argv, "--arch", "-a")
    task = option_value(argv, "--task") or default
    if arch is None or not issubclass(ARCH_MODEL_REGISTRY[arch], FairseqLanguageModel):
        return
    # fairseq's tasks of language models declare their options; of others' tasks nothing is known
    unknown = () if getattr(TASK_REGISTRY.get(task), "__module__", "").startswith("fairseq.") else _OF_LANGUAGE_MODELS
    options = getattr(TASK_DATACLASS_REGISTRY.get(task), "__dataclass_fields__", unknown)
    if any(name not in options for name in _OF_LANGUAGE_MODELS):
        raise UserError(f"--arch {arch} is a language model, but --task is {task}: give --task language_modeling")


def _number_list(read: Callable[..., Any], text: Any, x_type: type = float) -> Any:
    """Read an option of one or more numbers as fairseq does, but say what is expected if it is something else."""
    try:
        values = read(text, x_type)
        if x_type is int and isinstance(text, str) and any(value % 1 for value in read(text, float)):
            values = []
    except (ValueError, TypeError, SyntaxError, OverflowError):
        values = []
    if values == [] and x_type in (int, float):
        kind = "whole number" if x_type is int else "number"
        raise argparse.ArgumentTypeError(f"expected a {kind}, or several with commas between them, got {text!r}")
    return values
