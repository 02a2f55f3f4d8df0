"""Any checkpoint on any layout: weights and optimizer state of the experts that live on this rank."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of
from smlp.trainer.spread import SpreadExperts


def apply() -> None:
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager
    from fairseq.trainer import Trainer

    load = Trainer.load_checkpoint
    build_optimizer = Trainer._build_optimizer
    load_ensemble = checkpoint_utils.load_model_ensemble_and_task

    @functools.wraps(load)
    def load_checkpoint(self: Trainer, filename: str, *rest: Any, **kw: Any) -> Any:
        if self.data_parallel_world_size > 1:
            check_seen_by_all(filename, PathManager.isfile(filename))
        return load(self, filename, *rest, **kw)

    @functools.wraps(build_optimizer)
    def build_own_optimizer(self: Trainer) -> None:
        build_optimizer(self)
        model = self.get_model()
        if core_of(model) is None or not model.experts.names:
            return
        load_own, positions = self.optimizer.load_state_dict, model.experts.positions(model)

        def load_state_dict(state: dict[str, Any], *rest: Any, **kw: Any) -> None:
            load_own(own_optimizer_state(state, model.experts, positions), *rest, **kw)

        self.optimizer.load_state_dict = load_state_dict

    @functools.wraps(load_ensemble)
    def load_model_ensemble_and_task(
        filenames: list[str], arg_overrides: dict[str, Any] | None = None, *rest: Any, **kw: Any
    ) -> Any:
        # Scoring and generation: ranks have other numbers of batches and lengths, so each has all experts.
        overrides = {"expert_parallel_size": 1, **(arg_overrides or {})}
        return load_ensemble(filenames, overrides, *rest, **kw)

    Trainer.load_checkpoint = load_checkpoint
    Trainer._build_optimizer = build_own_optimizer
    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task


def check_seen_by_all(path: str, is_here: bool) -> None:
    """Refuses a checkpoint that only some ranks can see, with which fairseq would wait forever; a collective.

    Raises:
        UserError: the message names the file and the ranks.
    """
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, is_here)
    if any(seen) and not all(seen):
        missing = [rank for rank, is_there in enumerate(seen) if not is_there]
        raise UserError(
            f"ranks {missing} do not see {path}, the others do: --save-dir and --restore-file must be on a disk that "
            "all nodes share"
        )


def own_optimizer_state(state: dict[str, Any], experts: SpreadExperts, positions: dict[str, int]) -> dict[str, Any]:
    """The optimizer state for this rank's parameters, from one for all experts.

    Args:
        state: ``"state"`` by position of the parameter, and ``"param_groups"``.
        experts: of the model.
        positions: of the expert parameters, by name.
    """
    moments = dict(state["state"])
    for position in positions.values():
        if position in moments:
            moments[position] = {key: experts.cut_tensor(value) for key, value in moments[position].items()}
    return {**state, "state": moments}
