"""``--environment-file FILE``: where and with what a run was trained, a line of JSON for each start."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

import torch

from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of
from smlp.launch.environment import environment


def apply() -> None:
    from fairseq.trainer import Trainer

    build_trainer = Trainer.__init__

    @functools.wraps(build_trainer)
    def trainer_init(self: Trainer, *args: Any, **kw: Any) -> None:
        build_trainer(self, *args, **kw)
        if core_of(self.get_model()) is not None and self.data_parallel_rank == 0:
            name = getattr(self.cfg.model, "environment_file", None)
            if name is not None:
                write(Path(name), self.device, self.data_parallel_world_size)

    Trainer.__init__ = trainer_init


def write(path: Path, device: torch.device, world_size: int) -> None:
    """Adds a line.

    Args:
        path: the file.
        device: of rank 0; the others are taken to be alike.
        world_size: number of ranks.

    Raises:
        UserError: the file cannot be written.
    """
    record = {
        "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        **environment(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise UserError(f"--environment-file {path} cannot be written: {error.strerror}") from None
