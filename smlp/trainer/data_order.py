"""``--data-order-file FILE``: what a run was trained on, update by update, as one number each.

A line of the file is ``{"update": n, "digest": d}``. The digest is a sum over the sequences of all micro-batches of all
ranks, padding left out, so that it does not depend on how the sequences of an update are dealt out; two runs that see
the same tokens in the same order have equal files, and otherwise the first line that differs names the update.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smlp.fairseq_compat.core import core_of
from smlp.files import Journal

#: what a micro-batch adds to its logging output
_DIGEST = "data_digest"
_PRIME = (1 << 31) - 1
_BASE = 1_103_515_245  # any large number below the prime


def apply() -> None:
    from fairseq.tasks.fairseq_task import FairseqTask
    from fairseq.trainer import Trainer

    build_trainer = Trainer.__init__
    micro_batch = FairseqTask.train_step
    log_stats = Trainer._reduce_and_log_stats

    @functools.wraps(build_trainer)
    def trainer_init(self: Trainer, *args: Any, **kw: Any) -> None:
        build_trainer(self, *args, **kw)
        self.data_order_journal = None
        if core_of(self.get_model()) is not None:
            self.task.records_data_order = getattr(self.cfg.model, "data_order_file", None) is not None

    @functools.wraps(micro_batch)
    def train_micro_batch(
        self: FairseqTask, sample: Any, model: Any, *args: Any, ignore_grad: bool = False, **kw: Any
    ) -> Any:
        loss, sample_size, logging_output = micro_batch(self, sample, model, *args, ignore_grad=ignore_grad, **kw)
        if getattr(self, "records_data_order", False):
            tokens = sample["net_input"]["src_tokens"]
            is_seen = 0 if ignore_grad else 1
            logging_output = {**logging_output, _DIGEST: is_seen * digest(tokens, self.source_dictionary.pad())}
        return loss, sample_size, logging_output

    @functools.wraps(log_stats)
    def reduce_and_log_stats(self: Trainer, logging_outputs: Any, sample_size: Any, grad_norm: Any = None) -> Any:
        result = log_stats(self, logging_outputs, sample_size, grad_norm)
        if logging_outputs and _DIGEST in logging_outputs[0] and self.data_parallel_rank == 0:
            update = self.get_num_updates()
            if self.data_order_journal is None:
                path = Path(self.cfg.model.data_order_file)
                self.data_order_journal = Journal(path, update - 1, "record of the data's order")
            total = sum(int(output[_DIGEST]) for output in logging_outputs)
            self.data_order_journal.append({"update": update, "digest": total % _PRIME})
        return result

    Trainer.__init__ = trainer_init
    FairseqTask.train_step = train_micro_batch
    Trainer._reduce_and_log_stats = reduce_and_log_stats


def digest(tokens_Bn: Tensor, pad: int) -> Tensor:
    """A number below 2^31 for a set of sequences (B, n), the same in any order of them and with any padding behind.

    On the device of the tokens; nothing waits for it.
    """
    kept_Bn = tokens_Bn.long() * (tokens_Bn != pad)
    powers_n = _powers(kept_Bn.size(1), tokens_Bn.device)
    row_B = (kept_Bn * powers_n % _PRIME).sum(dim=1) % _PRIME
    return (row_B * row_B % _PRIME).sum() % _PRIME  # a square, so that parts of rows cannot change places


@functools.lru_cache(maxsize=8)
def _powers(length: int, device: torch.device) -> Tensor:
    powers, power = [], 1
    for _ in range(length):
        powers.append(power)
        power = power * _BASE % _PRIME
    return torch.tensor(powers, device=device)
