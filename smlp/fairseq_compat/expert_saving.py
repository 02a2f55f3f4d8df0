"""Save checkpoints of spread experts: each rank of the first expert group writes its own, rank 0 everything else.

fairseq decides on rank 0 alone which files to write (``save_checkpoint`` of ``fairseq.checkpoint_utils``). The other
ranks wait for its orders: to write a part, or to stop because saving is done. The format is in
:mod:`smlp.checkpoint.parts`. If a rank cannot write, all ranks end with its message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smlp.checkpoint.index import (
    INDEX_KEY,
    ExpertIndex,
    Part,
    describe_tensors,
    new_token,
    part_file,
    remove_unused_parts,
)
from smlp.checkpoint.parts import detach, write_part
from smlp.errors import NaNError, ParallelError, UserError
from smlp.fairseq_compat.divergence import check_weights
from smlp.fairseq_compat.experts import SpreadExperts
from smlp.fairseq_compat.replacing import replacing

logger = logging.getLogger(__name__)

_DONE = "done"


def apply() -> None:
    from fairseq import checkpoint_utils

    @replacing(checkpoint_utils, "save_checkpoint")
    def save_checkpoint(save: Any, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
        experts = getattr(trainer, "experts", None)
        if (experts is None or cfg.no_save) and getattr(trainer, "core", None) is not None:
            check_weights(trainer)  # otherwise each rank does, when it writes
        if experts is None or cfg.no_save:
            path = save(cfg, trainer, epoch_itr, val_loss)
            if path is not None:  # it may have replaced a checkpoint in parts
                remove_unused_parts(cfg.save_dir)
            return path
        saving = ExpertSaving(trainer, experts)
        if trainer.data_parallel_rank > 0:
            save(cfg, trainer, epoch_itr, val_loss)  # only updates the best value
            saving.follow()
            return None
        trainer.expert_saving = saving
        try:
            path = save(cfg, trainer, epoch_itr, val_loss)
        except BaseException as error:
            saving.tell(UserError(saving.failure or f"rank 0 could not save: {error}"))
            raise
        finally:
            trainer.expert_saving = None
        remove_unused_parts(cfg.save_dir)
        saving.tell(_DONE)
        return path


class ExpertSaving:
    """One call of fairseq's ``save_checkpoint``, in which all ranks take part."""

    def __init__(self, trainer: Any, experts: SpreadExperts) -> None:
        self.trainer, self.experts = trainer, experts
        self.positions = experts.positions(trainer.get_model())
        #: why a rank could not write its part, with its number
        self.failure = ""

    def save(self, filename: str, extra_state: dict[str, Any]) -> str:
        """Write one checkpoint and return its path; called on rank 0.

        Raises:
            UserError: a rank cannot write its file.
        """
        from fairseq import checkpoint_utils, utils

        path, token = os.path.abspath(filename), new_token()
        logger.info(f"Saving checkpoint to {path}")
        self.tell((os.path.dirname(path), token))
        tensors, answers = self._write_own_part(os.path.dirname(path), token)
        self.failure = next((answer for answer in answers if isinstance(answer, str)), "")
        if self.failure:
            raise UserError(self.failure)
        parts = [answer for answer in answers if isinstance(answer, Part)]
        state = self.trainer.state_dict()
        detach(state, self.experts.names, self.positions)
        state = utils.move_to_cpu(state)
        state["extra_state"].update(extra_state)
        layout = self.experts.ranks.layout
        index = ExpertIndex(
            token=token,
            num_experts=layout.num_experts,
            world_size=layout.world_size,
            group_size=layout.group_size,
            parts=tuple(parts),
            tensors=tensors,
            positions=self.positions,
        )
        state[INDEX_KEY] = index.to_plain()
        checkpoint_utils.torch_persistent_save(state, filename)
        logger.info(f"Finished saving checkpoint to {path}, with experts in {len(parts)} files")
        return path

    def follow(self) -> None:
        """Follow the orders of rank 0 until it is done; called on the other ranks.

        Raises:
            UserError: a rank cannot write its file.
        """
        while True:
            (order,) = self._together(dist.broadcast_object_list, [None], src=0)
            if order == _DONE:
                return
            if isinstance(order, UserError):
                raise order
            self._write_own_part(*order)

    def tell(self, order: Any) -> None:
        """Send an order to the other ranks; called on rank 0."""
        self._together(dist.broadcast_object_list, [order], src=0)

    def _write_own_part(self, folder: str, token: str) -> tuple[dict[str, Any], list[Part | str | None]]:
        """Write the experts of this rank, if it is in the first expert group.

        Returns:
            Descriptions of the tensors; and for each rank its part, the reason why it failed, or None if it has none.
        """
        layout = self.experts.ranks.layout
        model, optimizer = self.trainer.get_model(), self.trainer.optimizer
        state: dict[str, Any] = {"model": model.state_dict()}
        if not self.trainer.cfg.checkpoint.no_save_optimizer_state:
            state["last_optimizer_state"] = optimizer.state_dict()
        tensors = detach(state, self.experts.names, self.positions)
        written: Part | str | None = None
        if layout.rank < layout.group_size:
            for key, tensor in tensors.items():
                if tensor.itemsize == 2:  # in float32, as fairseq saves 16-bit weights
                    tensors[key] = tensor.to("cpu", torch.float32)
            file = part_file(self.trainer.get_num_updates(), token, layout.expert_ids)
            try:
                check_weights(self.trainer)
                written = write_part(folder, file, token, layout.expert_ids, tensors)
            except NaNError as error:
                written = str(error)
            except UserError as error:
                written = f"rank {layout.rank}: {error}"
        answers = self._together(dist.all_gather_object, [None] * layout.world_size, written)
        return describe_tensors(tensors), answers

    def _together(self, collective: Callable[..., None], box: list[Any], *rest: Any, **kw: Any) -> list[Any]:
        """Run a collective that fills a list, and return the list."""
        try:
            collective(box, *rest, **kw)
        except RuntimeError as error:
            rank = self.experts.ranks.layout.rank
            raise ParallelError.lost(f"rank {rank}: saving a checkpoint", error) from error
        return box
