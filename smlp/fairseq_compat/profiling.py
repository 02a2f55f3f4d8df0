"""``--profile-updates N``: run N updates under torch's profiler, and write a trace and a table of them.

Each rank writes its own three files, without waiting for others: ``profile.rank0.trace.json.gz`` (for chrome://tracing
and Perfetto), ``profile.rank0.json`` and ``profile.rank0.txt``. The first updates of the process are left out
(:data:`WARM_UP`). The profiler runs only during the updates that it profiles, so that validation and saving are neither
slowed down nor recorded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from smlp.costs.breakdown import Breakdown, as_text
from smlp.costs.recording import TraceFile, recording, trace_of, update_range
from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of
from smlp.fairseq_compat.speed import measured_rate, sizes_of, training_type
from smlp.files import write_whole

logger = logging.getLogger(__name__)

#: warm-up updates of a process; the last one already runs under the profiler, which is slow to start
WARM_UP = 3


class UpdateProfiler:
    """Profiles the updates of one trainer.

    Args:
        trainer: fairseq's; of one of this package's models.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.core = core_of(trainer.get_model())
        self.asked = trainer.cfg.model.profile_updates
        self.rank, self.num_ranks = trainer.data_parallel_rank, trainer.data_parallel_world_size
        self.folder = Path(trainer.cfg.model.profile_dir or trainer.cfg.checkpoint.save_dir)
        self.trace = TraceFile(self.folder / f"profile.rank{self.rank}.trace.json.gz")
        self.breakdown: Breakdown | None = None
        self.num_seen = 0
        self.is_running = self.is_over = False
        # Write the profile however the process ends.
        Finalize(None, self.finish, exitpriority=10)

    @contextmanager
    def one_update(self, samples: list) -> Iterator[None]:
        """Run the block, which does an update, under the profiler if it is one of those to be profiled.

        Args:
            samples: micro-batches of the update on this rank.
        """
        if self.is_over or self.is_running:  # fairseq may retry an update from inside
            yield
            return
        if self.num_seen < WARM_UP - 1:
            self.num_seen += 1
            yield
            return
        done, self.is_running = self.trainer.get_num_updates(), True
        try:
            with recording(self.core, self.trainer.device) as recorded, update_range(self.trainer.device):
                yield
        finally:
            self.is_running = False
        if self.trainer.get_num_updates() > done:  # unless an overflow skipped the update
            self.num_seen += 1
            if self.num_seen > WARM_UP:
                self._attempt(lambda: self._add(recorded, samples))

    def finish(self) -> None:
        """Write the profile and, on rank 0, print it. Later calls do nothing."""
        if self.is_over:
            return
        self.is_over = True
        profiled = 0 if self.breakdown is None else self.breakdown.num_updates
        if profiled < self.asked and self.rank == 0:
            logger.warning(
                f"--profile-updates {self.asked}, but the run ended after {self.num_seen} updates, the first {WARM_UP} "
                f"of which warm up: {profiled or 'none'} {'was' if profiled == 1 else 'were'} profiled"
            )
        if profiled:
            self._attempt(self._write)

    def _add(self, recorded: Any, samples: list) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = trace_of(recorded, folder=self.folder)
        self.trace.add(trace)
        if self.breakdown is None:
            self.breakdown = Breakdown(self.core.config, measured_rate(self.trainer))
        self.breakdown.add(trace["traceEvents"], sizes_of(samples))
        if self.breakdown.num_updates == self.asked:
            self.finish()

    def _write(self) -> None:
        self.trace.close()
        report = {
            "rank": self.rank,
            "ranks": self.num_ranks,
            "device": self.trainer.device.type,
            "dtype": str(training_type(self.trainer.cfg.common, self.trainer.cuda)).removeprefix("torch."),
            "warm_up_updates": WARM_UP,
            "updates_asked_for": self.asked,
            **self.breakdown.as_json(),
        }
        text = f"{_headline(report)}\n{as_text(report)}\n"
        path = self.folder / f"profile.rank{self.rank}"
        write_whole(f"{path}.json", (json.dumps(report, indent=1) + "\n").encode())
        write_whole(f"{path}.txt", text.encode())
        if self.rank == 0:
            logger.info(f"profile: {text}files: {path}.trace.json.gz, .json and .txt; so for each rank")

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do something with files; if they cannot be written, warn and let training continue without a profile."""
        try:
            action()
        except (OSError, UserError) as error:
            self.is_over = True
            self.trace.discard()
            logger.warning(f"no profile: cannot write to {self.folder}: {error}")


def _headline(report: dict[str, Any]) -> str:
    updates, tokens = report["updates"], report["tokens"]
    return (
        f"rank {report['rank']} of {report['ranks']} on {report['device']} in {report['dtype']}; means of {updates} "
        f"update{'s' * (updates > 1)} of {tokens / updates:,.0f} tokens; limit: "
        f"{report['matmul_flops_per_second'] / 1e9:,.1f} GFLOP/s in a matrix product"
    )
