"""Speed and memory in fairseq's training log: ``mfu`` and ``mem_gb``.

``mfu``, in percent: operations of the model in the forward and backward pass (:mod:`smlp.costs.formula`) a second
of wall time, over what all ranks could do in matrix products. It is measured over the same time as fairseq's ``wps``.
``mem_gb``: most memory held so far by rank 0, in units of 2^30 bytes as fairseq's own ``gb_free``: tensors on its GPU,
or the process's resident set where it computes on CPUs.
"""

from __future__ import annotations

import functools
import logging
import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch
from fairseq.logging import metrics

from smlp.costs.formula import training_flops
from smlp.costs.matmul_rate import matmul_rate
from smlp.fairseq_compat.core import core_of

logger = logging.getLogger(__name__)

#: what a micro-batch adds to its logging output
_FLOPS = "model_flops"
#: meters whose names begin like this are kept but not shown
_FLOPS_METER = "_model_flops"


def apply() -> None:
    from fairseq.tasks.fairseq_task import FairseqTask
    from fairseq.trainer import Trainer

    update = Trainer.train_step
    micro_batch = FairseqTask.train_step
    log_stats = Trainer._reduce_and_log_stats

    @functools.wraps(update)
    def train_step(self: Trainer, *args: Any, **kw: Any) -> Any:
        if core_of(self.get_model()) is not None:
            measured_rate(self)  # once, and in no update's time
        return update(self, *args, **kw)

    @functools.wraps(micro_batch)
    def train_micro_batch(
        self: FairseqTask, sample: Any, model: Any, *args: Any, ignore_grad: bool = False, **kw: Any
    ) -> Any:
        loss, sample_size, logging_output = micro_batch(self, sample, model, *args, ignore_grad=ignore_grad, **kw)
        core = core_of(model)
        if core is not None:
            flops = sum(tokens * training_flops(core.config, length) for tokens, length in sizes_of([sample]))
            logging_output = {**logging_output, _FLOPS: 0.0 if ignore_grad else flops}
        return loss, sample_size, logging_output

    @functools.wraps(log_stats)
    def reduce_and_log_stats(self: Trainer, logging_outputs: Any, sample_size: Any, grad_norm: Any = None) -> Any:
        result = log_stats(self, logging_outputs, sample_size, grad_norm)
        if logging_outputs and _FLOPS in logging_outputs[0]:  # not in validation, which leaves them out
            metrics.log_speed(_FLOPS_METER, sum(output[_FLOPS] for output in logging_outputs), priority=95)
            limit = measured_rate(self) * self.data_parallel_world_size
            metrics.log_derived("mfu", functools.partial(_percent_of, limit), priority=95)
            metrics.log_scalar("mem_gb", _peak_gigabytes(self), weight=0, priority=1500, round=3)
        return result

    Trainer.train_step = train_step
    FairseqTask.train_step = train_micro_batch
    Trainer._reduce_and_log_stats = reduce_and_log_stats


def sizes_of(samples: Iterable[Any]) -> list[tuple[int, int]]:
    """Tokens, and length of the sequences, of micro-batches; those without data are left out."""
    return [(sample["ntokens"], sample["net_input"]["src_tokens"].size(1)) for sample in samples if sample]


def measured_rate(trainer: Any) -> float:
    """Operations a second of matrix products on the trainer's device in the type that it trains in."""
    return _measured_once(trainer.device, training_type(trainer.cfg.common, trainer.cuda))


def training_type(common: Any, on_gpu: bool) -> torch.dtype:
    """The type of the numbers in matrix products, from fairseq's options."""
    if common.fp16 or (common.amp and on_gpu):  # on CPUs --amp changes nothing
        return torch.float16
    return torch.bfloat16 if common.bf16 else torch.float32


@functools.cache
def _measured_once(device: torch.device, dtype: torch.dtype) -> float:
    rate = matmul_rate(device, dtype)
    name = str(dtype).removeprefix("torch.")
    logger.info(f"measured matmul rate: {rate / 1e9:.1f} GFLOP/s ({name}, {device.type}, each rank)")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the matrices are no part of training
    return rate


def _percent_of(limit: float, meters: Any) -> float:
    return float(f"{100 * float(meters[_FLOPS_METER].avg) / limit:.4g}")


def _peak_gigabytes(trainer: Any) -> float:
    if not trainer.cuda:
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    # fairseq has just logged what the update left free, and set torch's counter back
    used = trainer.cuda_env.total_memory_in_GB - metrics.get_meter("default", "gb_free").val
    trainer.peak_gigabytes = max(getattr(trainer, "peak_gigabytes", 0.0), used)
    return trainer.peak_gigabytes
