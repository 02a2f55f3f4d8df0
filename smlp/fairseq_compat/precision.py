"""Precisions that this machine cannot train in."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch

from smlp.errors import UserError


def apply() -> None:
    from fairseq.trainer import Trainer

    build_trainer = Trainer.__init__

    @functools.wraps(build_trainer)
    def trainer_init(self: Trainer, cfg: Any, *rest: Any, **kw: Any) -> None:
        if not isinstance(cfg, argparse.Namespace):
            check_half_precision(cfg, torch.cuda.is_available() and not cfg.common.cpu)
        build_trainer(self, cfg, *rest, **kw)

    Trainer.__init__ = trainer_init


def check_half_precision(cfg: Any, has_cuda: bool) -> None:
    """Raise ``UserError`` for fp16 training without a GPU.

    fairseq's fp16 optimiser keys its flat parameters by CUDA device and creates a CUDA tensor at the first overflow of
    the loss scale, so on a CPU it fails at once or, with the variants, some time later.
    """
    common = cfg.common
    if common.fp16 and not common.tpu and not has_cuda:
        flag = "--memory-efficient-fp16" if common.memory_efficient_fp16 else "--fp16"
        raise UserError(f"{flag} trains on a GPU only and this run uses the CPU: leave it out, or use --bf16 instead")
