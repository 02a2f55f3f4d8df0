"""``--profile-updates N``: N updates of a run under torch's profiler, a trace and a table of them.

Each rank writes its own three files, without waiting for others: ``profile.rank0.trace.json.gz`` (for chrome://tracing
and Perfetto), ``profile.rank0.json`` and ``profile.rank0.txt``. The first updates of the process are left out
(:data:`WARM_UP`). The profiler runs in the updates that it is to see and not between them, so that validation and
saving are neither slowed down nor recorded. Outside of those updates nothing is done.
"""

from __future__ import annotations

import functools
import json
import logging
import tempfile
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from smlp.costs.breakdown import Breakdown, as_text
from smlp.costs.recording import TraceFile, recording, trace_of, update_range
from smlp.errors import UserError
from smlp.fairseq_compat.core import core_of
from smlp.files import write_whole
from smlp.parallel.spans import REDUCTION, span
from smlp.trainer.speed import measured_rate, sizes_of, training_type

logger = logging.getLogger(__name__)

#: first updates of a process that do not count; the last of them is under the profiler, which takes its time to start
WARM_UP = 3


def apply() -> None:
    from fairseq.trainer import Trainer

    build_trainer = Trainer.__init__
    update = Trainer.train_step
    aggregate = Trainer._aggregate_logging_outputs

    @functools.wraps(build_trainer)
    def trainer_init(self: Trainer, *args: Any, **kw: Any) -> None:
        build_trainer(self, *args, **kw)
        self.update_profiler = None
        if core_of(self.get_model()) is not None and getattr(self.cfg.model, "profile_updates", None):
            self.update_profiler = UpdateProfiler(self)
            # However the process ends, what there is by then is written.
            Finalize(None, self.update_profiler.finish, exitpriority=10)

    @functools.wraps(update)
    def train_step(self: Trainer, samples: list, *args: Any, **kw: Any) -> Any:
        def do() -> Any:
            return update(self, samples, *args, **kw)

        return do() if self.update_profiler is None else self.update_profiler.run(do, samples)

    @functools.wraps(aggregate)
    def aggregate_logging_outputs(self: Trainer, *args: Any, **kw: Any) -> Any:
        # between the backward pass and the optimizer, and where ranks that are done sooner wait for the others
        with span(REDUCTION):
            return aggregate(self, *args, **kw)

    Trainer.__init__ = trainer_init
    Trainer.train_step = train_step
    Trainer._aggregate_logging_outputs = aggregate_logging_outputs


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

    def run(self, update: Callable[[], Any], samples: list) -> Any:
        """Does an update, under the profiler if it is one of those to be profiled; returns what it returns."""
        if self.is_over or self.is_running:  # fairseq may try an update again from inside
            return update()
        if self.num_seen < WARM_UP - 1:
            self.num_seen += 1
            return update()
        done, self.is_running = self.trainer.get_num_updates(), True
        try:
            with recording(self.core, self.trainer.device) as recorded, update_range(self.trainer.device):
                result = update()
        finally:
            self.is_running = False
        if self.trainer.get_num_updates() > done:  # not where numbers overflowed, and nothing was updated
            self.num_seen += 1
            if self.num_seen > WARM_UP:
                self._attempt(lambda: self._add(recorded, samples))
        return result

    def finish(self) -> None:
        """Writes and, on rank 0, prints what there is; the second time nothing."""
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
        with tempfile.TemporaryDirectory(prefix=f"profile.rank{self.rank}.", dir=self.folder) as folder:
            trace = trace_of(recorded, Path(folder) / "trace.json")
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
        write_whole(f"{path}.json", lambda file: file.write((json.dumps(report, indent=1) + "\n").encode()))
        write_whole(f"{path}.txt", lambda file: file.write(text.encode()))
        if self.rank == 0:
            logger.info(f"profile: {text}files: {path}.trace.json.gz, .json and .txt; so for each rank")

    def _attempt(self, action: Callable[[], None]) -> None:
        """Training goes on without a profile that cannot be written."""
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
