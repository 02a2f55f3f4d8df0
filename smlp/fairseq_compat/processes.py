"""Start ranks as torchrun, srun or explicit options ask for, with and without GPUs, or refuse with what to type.

No process trains alone unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smlp.errors import ParallelError, UserError
from smlp.fairseq_compat.arguments import has_option
from smlp.fairseq_compat.lost_ranks import collective_timeout, limit_waiting, lost_rank
from smlp.fairseq_compat.replacing import replacing
from smlp.fairseq_compat.saving import own_save_dir
from smlp.fairseq_compat.settings import check_before_start, check_same_on_all_ranks
from smlp.fairseq_compat.stopping import stoppable
from smlp.launch.ranks import Place, device_index, has_terminal, place_of
from smlp.launch.slurm import tasks_of_job
from smlp.launch.team import leave

logger = logging.getLogger(__name__)

_WORLD_SIZE = "--distributed-world-size"


def apply() -> None:
    from fairseq.distributed import utils as distributed_utils
    from fairseq.models import distributed_fairseq_model

    wrapper = distributed_fairseq_model.DistributedDataParallel

    @replacing(distributed_utils, "call_main")
    def checked_call_main(call_main: Any, cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
        settle_ranks(cfg)
        if cfg.common_eval.path is None:
            check_before_start(cfg, cfg.distributed_training.distributed_world_size)
        with own_save_dir(cfg, main):
            _warn_of_idle_tasks(cfg)
            limit_waiting(collective_timeout(cfg.distributed_training.heartbeat_timeout))
            try:
                with stoppable(cfg):
                    call_main(cfg, main, **kwargs)
            except RuntimeError as error:
                is_of_worker = "DataLoader worker" in str(error) or str(error).startswith("Too many open files")
                if is_of_worker and "Too many open files" in str(error):
                    raise UserError(
                        "the processes that read batches need more open files than ulimit -n allows: raise it, or "
                        "give --num-workers 0"
                    ) from error
                if str(error).startswith("DataLoader worker"):
                    raise UserError(
                        f"a process that reads batches has ended ({error}): it may lack memory, room in /dev/shm or "
                        "open files; --num-workers 0 reads batches in the training process"
                    ) from error
                lost = None if isinstance(error, ParallelError) else lost_rank(error, cfg.distributed_training)
                if lost is None:
                    raise
                raise lost from error
            except Exception as error:
                if type(error).__module__.startswith("wandb."):
                    raise UserError(f"--wandb-project {cfg.common.wandb_project}: {error}") from error
                raise
            leave()

    @replacing(distributed_utils, "distributed_init")
    def checked_init(init: Any, cfg: Any) -> int:
        rank = init(cfg)
        if not isinstance(cfg, Namespace) and cfg.common_eval.path is None:
            check_same_on_all_ranks(cfg)  # before models with spread experts are built, for which ranks meet
        return rank

    @functools.wraps(wrapper, updated=())
    def data_parallel(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        # fairseq passes a CUDA device for every rank, which torch refuses for a model on the CPU.
        if not any(p.is_cuda for p in module.parameters()):
            kwargs.update(device_ids=None, output_device=None)
        return wrapper(module=module, **kwargs)

    def one_machine(distributed: Any, unused: Any) -> bool:
        # fairseq looks at Slurm's variables in batch scripts too, where no other process would ever come, and divides
        # by the number of GPUs. Tasks of srun have their ranks already when it gets here.
        distributed_utils._infer_single_node_init(distributed)
        return True

    distributed_utils._infer_slurm_init = one_machine
    distributed_fairseq_model.DistributedDataParallel = data_parallel
    _gather_without_cuda(distributed_utils)


def settle_ranks(cfg: Any) -> None:
    """Fill in ``cfg.distributed_training`` from torchrun or srun, and refuse what fairseq would start wrongly.

    Explicit options (``--distributed-init-method``) come first. A second call changes nothing.

    Raises:
        UserError: several ranks are asked for in a way that cannot start them, or does not say how many.
    """
    distributed = cfg.distributed_training
    has_cuda = torch.cuda.is_available() and not cfg.common.cpu
    if cfg.common.tpu:
        return
    is_given = _is_given(distributed)
    if "eval-lm" in Path(sys.argv[0]).name.replace("_", "-"):
        # with several ranks, fairseq would report rank 0's part as the whole
        if is_given and distributed.distributed_world_size > 1:
            raise UserError(f"fairseq-eval-lm scores in one process: leave {_WORLD_SIZE} out")
        distributed.distributed_world_size, distributed.distributed_init_method = 1, None
        return
    if distributed.distributed_init_method is None:
        if cfg.common.cpu and not is_given:
            distributed.distributed_world_size = 1  # the default is the number of GPUs even with --cpu
        place = place_of(os.environ, distributed.distributed_port, has_terminal())
        training = cfg.common_eval.path is None
        if place is not None and (training or distributed.distributed_world_size > 1):
            asked = distributed.distributed_world_size if is_given else None
            _take(distributed, place, asked, torch.cuda.device_count() if has_cuda else 0)

    rank, world_size = distributed.distributed_rank, distributed.distributed_world_size
    if not 0 <= rank < world_size:  # fairseq would let it train alone, as no writer
        raise UserError(f"--distributed-rank is {rank} and {_WORLD_SIZE} {world_size}: ranks count from 0")
    if has_cuda:
        _check_spawning(distributed)
        return
    if distributed.distributed_init_method is None and world_size > 1:
        raise UserError(
            f"{_WORLD_SIZE} {world_size} needs {world_size} GPUs and there are none: on CPUs start the ranks with "
            f"smlp train --nproc {world_size} or torchrun --nproc-per-node {world_size}, or start each one with "
            "--distributed-init-method, --distributed-rank and --distributed-no-spawn"
        )
    if distributed.distributed_init_method is not None and not distributed.distributed_no_spawn:
        # Without GPUs, fairseq would spawn no process at all and exit with status 0.
        raise UserError(
            "--distributed-init-method without a GPU needs --distributed-no-spawn, with one process for each rank "
            f"(--distributed-rank 0 to {world_size - 1})"
        )
    if distributed.distributed_init_method is not None and distributed.distributed_backend == "nccl":
        distributed.distributed_backend = "gloo"  # fairseq's default, nccl, exists for GPUs only


def _take(distributed: Any, place: Place, asked: int | None, visible: int) -> None:
    """Take a place among ranks that a launcher started, with ``visible`` GPUs (0 on CPUs).

    Raises:
        UserError: another number of ranks was ``asked`` for, or ranks would share a GPU.
    """
    # As in fairseq, if srun starts one task per machine, the task spawns a process per GPU.
    spawns = place.nodes_of_one_rank is not None and visible > 1 and not distributed.distributed_no_spawn
    world_size = place.world_size * visible if spawns else place.world_size
    if asked not in (None, world_size):
        gpus = f" with {visible} GPUs each" if spawns else ""
        raise UserError(
            f"{place.launcher} started {place.world_size} ranks{gpus}, but {_WORLD_SIZE} says {asked}: leave it out"
        )
    distributed.distributed_init_method = place.init_method
    distributed.distributed_world_size = world_size
    distributed.distributed_no_spawn = not spawns
    if spawns:
        distributed.distributed_rank = place.node * visible  # rank of the first process to spawn
        distributed.distributed_num_procs = visible
    else:
        distributed.distributed_rank = place.rank
        distributed.device_id = device_index(place, visible) if visible else 0


def _check_spawning(distributed: Any) -> None:
    """Raise ``UserError`` if fairseq would spawn more processes than there are GPUs."""
    wanted, present = distributed.distributed_world_size, torch.cuda.device_count()
    if distributed.distributed_init_method is None and wanted > present:
        raise UserError(
            f"{_WORLD_SIZE} {wanted}, but {present} GPUs are visible here: start one process for each GPU of all "
            "machines with srun or torchrun"
        )


def _is_given(distributed: Any) -> bool:
    """Return whether the number of ranks was asked for; by default it is the number of GPUs."""
    default = max(1, torch.cuda.device_count())
    return distributed.distributed_world_size != default or has_option(sys.argv, _WORLD_SIZE)


def _warn_of_idle_tasks(cfg: Any) -> None:
    if cfg.distributed_training.distributed_world_size > 1 or cfg.common_eval.path is not None:
        return
    with contextlib.suppress(UserError):  # what cannot be read is no reason to stop
        tasks = tasks_of_job(os.environ)
        if tasks is not None and tasks.world_size > 1:
            logger.warning(
                f"one process in a Slurm job of {tasks.world_size} tasks: start it with srun to use all of them"
            )


def _gather_without_cuda(distributed_utils: Any) -> None:
    """Let ``all_gather_list`` have its buffers in ordinary memory if there is no GPU.

    fairseq allocates them on the GPU, unless the function of this name has them as attributes.
    """

    @replacing(distributed_utils, "all_gather_list")
    def all_gather_list(original: Any, data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        if not torch.cuda.is_available():
            group = distributed_utils.get_global_group() if group is None else group
            size = max_size * distributed_utils.get_world_size(group=group)
            all_gather_list._buffer = torch.zeros(size, dtype=torch.uint8)
            all_gather_list._cpu_buffer = torch.zeros(max_size, dtype=torch.uint8)
        return original(data, group=group, max_size=max_size)
