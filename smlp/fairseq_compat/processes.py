"""Several processes without a GPU per process: run as asked, or say what to type. Nothing trains alone unnoticed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from smlp.errors import UserError

_LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


def apply() -> None:
    from fairseq.distributed import utils as distributed_utils
    from fairseq.models import distributed_fairseq_model

    call_main = distributed_utils.call_main
    wrapper = distributed_fairseq_model.DistributedDataParallel

    @functools.wraps(call_main)
    def checked_call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
        settle_ranks(cfg)
        call_main(cfg, main, **kwargs)

    @functools.wraps(wrapper, updated=())
    def data_parallel(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        # fairseq names a CUDA device for every rank; torch accepts none for a model on the CPU.
        if not any(p.is_cuda for p in module.parameters()):
            kwargs.update(device_ids=None, output_device=None)
        return wrapper(module=module, **kwargs)

    distributed_utils.call_main = checked_call_main
    distributed_fairseq_model.DistributedDataParallel = data_parallel
    distributed_utils.all_gather_list = _all_gather_list_without_cuda(distributed_utils)


def settle_ranks(cfg: Any) -> None:
    """Fill in ``cfg.distributed_training`` from torchrun, and refuse what fairseq would start wrongly.

    Raises:
        UserError: several ranks are asked for in a way that cannot start them without a GPU each.
    """
    distributed = cfg.distributed_training
    has_cuda = torch.cuda.is_available() and not cfg.common.cpu
    training = cfg.common_eval.path is None
    launched = all(name in os.environ for name in _LAUNCHER_VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1

    wanted = training or distributed.distributed_world_size > 1
    if launched and wanted and distributed.distributed_init_method is None:
        # fairseq looks at torchrun's variables only if --distributed-world-size is above 1 (else every process trains
        # alone, into one directory), and divides by the number of GPUs.
        distributed.distributed_init_method = "env://"
        distributed.distributed_world_size = int(os.environ["WORLD_SIZE"])
        distributed.distributed_rank = int(os.environ["RANK"])
        distributed.device_id = int(os.environ.get("LOCAL_RANK", 0)) if has_cuda else 0
        distributed.distributed_no_spawn = True
    if has_cuda or cfg.common.tpu:
        return

    world_size = distributed.distributed_world_size
    if distributed.distributed_init_method is None and world_size > 1:
        raise UserError(
            f"--distributed-world-size {world_size} needs {world_size} GPUs and there are none: on CPUs start the "
            f"ranks with torchrun --nproc-per-node {world_size}, or start each one with --distributed-init-method, "
            "--distributed-rank and --distributed-no-spawn"
        )
    if distributed.distributed_init_method is not None and not distributed.distributed_no_spawn:
        # fairseq would spawn one process per GPU, that is none, and exit with status 0.
        raise UserError(
            "--distributed-init-method without a GPU needs --distributed-no-spawn, with one process for each rank "
            f"(--distributed-rank 0 to {world_size - 1})"
        )
    if distributed.distributed_init_method is not None and distributed.distributed_backend == "nccl":
        distributed.distributed_backend = "gloo"  # fairseq's default, nccl, exists for GPUs only


def _all_gather_list_without_cuda(distributed_utils: Any) -> Callable[..., list[Any]]:
    """``all_gather_list`` with its buffers in ordinary memory where there is no GPU.

    fairseq allocates them on the GPU. It looks for them as attributes of the function of this name, so presetting them
    is all that is needed.
    """
    original = distributed_utils.all_gather_list

    @functools.wraps(original)
    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        if not torch.cuda.is_available():
            group = distributed_utils.get_global_group() if group is None else group
            size = max_size * distributed_utils.get_world_size(group=group)
            all_gather_list._buffer = torch.zeros(size, dtype=torch.uint8)
            all_gather_list._cpu_buffer = torch.zeros(max_size, dtype=torch.uint8)
        return original(data, group=group, max_size=max_size)

    return all_gather_list
