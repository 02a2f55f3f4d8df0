"""Speed and memory in fairseq's training log: ``mfu``, ``mem_gb`` and ``data_wait``.

docs/profiling.md defines them. ``mfu`` counts operations by :mod:`smlp.costs.formula`, and is measured over the same
time as fairseq's ``wps``; ``mem_gb`` is in units of 2^30 bytes, as fairseq's own ``gb_free``.
"""

from __future__ import annotations

import functools
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from fairseq.data.iterators import GroupedIterator
from fairseq.logging import metrics

from smlp.costs.formula import training_flops
from smlp.costs.matmul_rate import matmul_rate
from smlp.fairseq_compat.replacing import replacing
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder

logger = logging.getLogger(__name__)

#: entry of a micro-batch's logging output
FLOPS = "model_flops"
#: prefix of meters that are kept but not shown
_FLOPS_METER = "_model_flops"


class DataClock:
    """Measures which share of the time between updates a rank spends waiting for the next batches.

    A process has one clock, which starts with its first batch.
    """

    _waited = 0.0  # seconds since the last update
    _done: float | None = None  # end of the last update

    @classmethod
    def next_batches(cls, following: Callable[[Any], Any], batches: Any) -> Any:
        """Return the next batches by a method that does it, and count its time."""
        start = time.perf_counter()
        if cls._done is None:
            cls._done = start
        try:
            return following(batches)
        finally:
            cls._waited += time.perf_counter() - start

    @classmethod
    def log(cls) -> float:
        """Log the share, in percent, at the end of an update; return the seconds of waiting."""
        now = time.perf_counter()
        if cls._done is not None and now > cls._done:
            seconds = now - cls._done
            metrics.log_scalar("data_wait", 100 * cls._waited / seconds, weight=seconds, priority=1490, round=2)
        waited, cls._waited, cls._done = cls._waited, 0.0, now
        return waited


def apply() -> None:
    replacing(GroupedIterator, "__next__")(DataClock.next_batches)


def model_flops(core: Decoder | Encoder, sample: Any) -> float:
    """Return the operations of the model in the forward and backward pass of a micro-batch."""
    return sum(tokens * training_flops(core.config, length) for tokens, length in sizes_of([sample]))


def log_speed(trainer: Any, logging_outputs: Iterable[Mapping[str, Any]]) -> None:
    """Log ``mfu`` and ``mem_gb`` of an update whose micro-batches have their :data:`FLOPS` in the logging output."""
    metrics.log_speed(_FLOPS_METER, sum(output[FLOPS] for output in logging_outputs), priority=95)
    limit = measured_rate(trainer) * trainer.data_parallel_world_size
    metrics.log_derived("mfu", functools.partial(_percent_of, limit), priority=95)
    metrics.log_scalar("mem_gb", _peak_gigabytes(trainer), weight=0, priority=1500, round=3)


def sizes_of(samples: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the number of tokens and the sequence length of each micro-batch that has data."""
    return [(sample["ntokens"], sample["net_input"]["src_tokens"].size(1)) for sample in samples if sample]


def measured_rate(trainer: Any) -> float:
    """Return how many operations a second the trainer's device does in matrix products, in the dtype of training."""
    return _measured_once(trainer.device, training_type(trainer.cfg.common, trainer.cuda))


def training_type(common: Any, on_gpu: bool) -> torch.dtype:
    """Return the dtype of matrix products that these options of fairseq select."""
    if common.fp16 or (common.amp and on_gpu):  # --amp has no effect on CPUs
        return torch.float16
    return torch.bfloat16 if common.bf16 else torch.float32


@functools.cache
def _measured_once(device: torch.device, dtype: torch.dtype) -> float:
    rate = matmul_rate(device, dtype)
    name = str(dtype).removeprefix("torch.")
    logger.info(f"measured matmul rate: {rate / 1e9:.1f} GFLOP/s ({name}, {device.type}, each rank)")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # exclude the benchmark's matrices
    return rate


def _percent_of(limit: float, meters: Any) -> float:
    return float(f"{100 * float(meters[_FLOPS_METER].avg) / limit:.4g}")


def _peak_gigabytes(trainer: Any) -> float:
    if not trainer.cuda:
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    # fairseq has just logged the free memory and reset torch's counter
    used = trainer.cuda_env.total_memory_in_GB - metrics.get_meter("default", "gb_free").val
    trainer.peak_gigabytes = max(getattr(trainer, "peak_gigabytes", 0.0), used)
    return trainer.peak_gigabytes
