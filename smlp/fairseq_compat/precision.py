"""Command-line arguments that fairseq turns into something this machine cannot do."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import sys
from typing import Any

import torch

from smlp.errors import UserError
from smlp.fairseq_compat.arguments import option_value
from smlp.registry import ARCHITECTURES


def apply() -> None:
    from fairseq import options
    from fairseq.trainer import Trainer

    parse = options.parse_args_and_arch
    build_trainer = Trainer.__init__

    @functools.wraps(parse)
    def parse_args_and_arch(
        parser: argparse.ArgumentParser, input_args: list[str] | None = None, *rest: Any, **kw: Any
    ):
        check_arch(sys.argv[1:] if input_args is None else input_args)
        parsed = parse(parser, input_args, *rest, **kw)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        # fairseq reads --bf16 as "on a TPU", on every machine, and then fails for want of torch_xla.
        if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
            args.tpu = False
        return parsed

    @functools.wraps(build_trainer)
    def trainer_init(self: Trainer, cfg: Any, *rest: Any, **kw: Any) -> None:
        if not isinstance(cfg, argparse.Namespace):
            check_half_precision(cfg, torch.cuda.is_available() and not cfg.common.cpu)
        build_trainer(self, cfg, *rest, **kw)

    options.parse_args_and_arch = parse_args_and_arch
    Trainer.__init__ = trainer_init


def check_arch(argv: list[str]) -> None:
    """Raise ``UserError`` with the closest name for an unknown ``--arch``; argparse would print pages of usage."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    arch = option_value(argv, "--arch", "-a")
    if arch is None or arch in ARCH_MODEL_REGISTRY:
        return
    close = difflib.get_close_matches(arch, ARCH_MODEL_REGISTRY, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "fairseq-train --help lists them"
    raise UserError(
        f"--arch {arch!r} is not among the {len(ARCH_MODEL_REGISTRY)} known architectures; {hint}{ARCHITECTURES.hint}"
    )


def check_half_precision(cfg: Any, has_cuda: bool) -> None:
    """Raise ``UserError`` for fp16 training without a GPU.

    fairseq's fp16 optimiser keys its flat parameters by CUDA device and creates a CUDA tensor at the first overflow of
    the loss scale, so on a CPU it fails at once or, with the variants, some time later.
    """
    common = cfg.common
    if common.fp16 and not common.tpu and not has_cuda:
        flag = "--memory-efficient-fp16" if common.memory_efficient_fp16 else "--fp16"
        raise UserError(f"{flag} trains on a GPU only and this run uses the CPU: leave it out, or use --bf16 instead")
