"""fairseq's trainer with what this package adds to it: each method is a moment in the life of a run.

What a method needs besides a few lines is in the modules that it calls.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from fairseq.logging import progress_bar
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.trainer import Trainer
from torch import Tensor, nn

from smlp.checkpoint.content import PLATEAU
from smlp.criterions.choice import check_criterion
from smlp.errors import UserError
from smlp.fairseq_compat.batches import batch_seeds, real_batches_last, seed_generators
from smlp.fairseq_compat.changed_settings import check_constants, compare_optimizers, compare_with, constants
from smlp.fairseq_compat.core import core_of
from smlp.fairseq_compat.data import check_ids, check_same_text
from smlp.fairseq_compat.divergence import diverged
from smlp.fairseq_compat.expert_saving import ExpertSaving
from smlp.fairseq_compat.experts import adapt_optimizer, experts_of, norm_with_experts
from smlp.fairseq_compat.loading import (
    check_averages,
    check_moments,
    check_seen_by_all,
    check_weights_of,
    reading_moments,
    said_in_one_sentence,
    warn_of_lost_updates,
)
from smlp.fairseq_compat.needs import check_best_metric, has_averages
from smlp.fairseq_compat.parameter_groups import divide_steps
from smlp.fairseq_compat.plateaus import plateau_of, restore_plateau
from smlp.fairseq_compat.profiling import UpdateProfiler
from smlp.fairseq_compat.records import (
    DIGEST,
    UpdateRecord,
    check_own_files,
    check_record,
    digest,
    digest_of,
    write_environment,
)
from smlp.fairseq_compat.settings import check_half_precision, check_same_on_all_ranks, check_settings
from smlp.fairseq_compat.speed import FLOPS, DataClock, log_speed, measured_rate, model_flops
from smlp.fairseq_compat.startup import keep_freed_memory
from smlp.fairseq_compat.stopping import leave_if_asked, stop_signals
from smlp.parallel.spans import REDUCTION, span
from smlp.text.tokenizer_files import RECORD, record_of

logger = logging.getLogger(__name__)

_RECORDS = ("data_order_file", "update_times_file", "environment_file")


def apply() -> None:
    """Let fairseq make this trainer wherever it makes its own; other subclasses of fairseq's get this one as a base."""

    def new(kind: type[Trainer], *args: Any, **kw: Any) -> Trainer:
        if kind is Trainer:
            kind = SparseTrainer
        elif not issubclass(kind, SparseTrainer):
            kind = type(kind.__name__, (kind, SparseTrainer), {})
        return object.__new__(kind)

    Trainer.__new__ = new


class SparseTrainer(Trainer):
    """Trains models whose experts may be spread over ranks, and records what a run did.

    Models of other packages are trained as by fairseq's own: for them, signals stop a run, batches of ids outside of
    the dictionary are refused, and what goes wrong is said in one sentence.
    """

    def __init__(self, cfg: Any, task: Any, model: nn.Module, criterion: Any, quantizer: Any = None) -> None:
        #: the decoder, if the model is this package's; otherwise None
        self.core = core_of(model)
        #: None if every rank holds all experts
        self.experts = experts_of(model)
        self.profiler: UpdateProfiler | None = None
        self.data_order: UpdateRecord | None = None
        self.update_times: UpdateRecord | None = None
        self._num_tokens = 0
        #: set on rank 0 while the ranks save together
        self.expert_saving: ExpertSaving | None = None
        self.train_iterator: Any = None
        #: batches for validation on the text of training
        self._on_training_text: Any = None
        #: whether any rank had been asked to stop at the last reduction over ranks
        self.stop_agreed = False
        #: constants of the optimizer by the command line
        self._asked_of_optimizer: dict[str, Any] = {}
        self._update_just_done = self._metric_checked = self._is_in_step = False
        if not isinstance(cfg, Namespace):
            self._settle(cfg, model)
        super().__init__(cfg, task, model, criterion, quantizer)
        #: None if freed memory goes back to where it came from
        self._kept_memory = None if self.cuda else keep_freed_memory()
        if self.core is not None:
            self._train_micro_batch, task.train_step = task.train_step, self.train_micro_batch
            self._prepare_options()

    def _settle(self, cfg: Any, model: nn.Module) -> None:
        """Refuse settings that cannot work, and choose the layout of gradients that experts need."""
        check_same_on_all_ranks(cfg)  # in processes that fairseq spawned, nothing has compared them yet
        if self.experts is not None:
            check_settings(cfg)
        if self.core is not None:
            check_criterion(getattr(cfg.criterion, "_name", None), self.core.config)
            if model.experts.names:
                # A flat copy of all parameters cannot distinguish experts, and its moments would fit no other layout.
                cfg.common.fp16_no_flatten_grads = True
        has_cuda = torch.cuda.is_available() and not cfg.common.cpu
        check_half_precision(cfg, has_cuda)
        if cfg.common.amp and not has_cuda:
            logger.warning("--amp has no effect on a CPU: this run trains in float32")

    def _build_ema(self) -> None:
        super()._build_ema()
        if self._ema is not None:  # whole numbers, such as tables of ids, are copied: they have no average
            state = self._model.state_dict()
            whole = {name for name, value in state.items() if torch.is_tensor(value) and not value.is_floating_point()}
            self._ema.skip_keys = whole | set(self._ema.skip_keys)

    def _prepare_options(self) -> None:
        """Prepare what the options of the model ask for: records, a profile, compiled blocks."""
        options = self.cfg.model
        if self.data_parallel_rank == 0:
            named = {f"--{name.replace('_', '-')}": getattr(options, name, None) for name in _RECORDS}
            named["--router-health-file"] = getattr(self.cfg.criterion, "router_health_file", None)
            for option, path in named.items():
                if path is not None:
                    check_record(Path(path), option)
            check_own_files(named | {"--router-health-file": getattr(self._criterion, "health_path", None)})
        if getattr(options, "data_order_file", None) is not None:
            self.data_order = UpdateRecord(options.data_order_file, "record of the data's order")
        if getattr(options, "update_times_file", None) is not None:
            self.update_times = UpdateRecord(options.update_times_file, "record of the updates' times")
        if getattr(options, "environment_file", None) is not None and self.data_parallel_rank == 0:
            write_environment(Path(options.environment_file), self.device, self.data_parallel_world_size)
        if getattr(options, "profile_updates", None):
            self.profiler = UpdateProfiler(self)
        if getattr(options, "compile", False):
            for block in self.core.blocks:  # one by one: equal blocks share what is compiled
                block.compile()

    def _build_optimizer(self) -> None:
        """Build the optimizer so that it takes the state of all experts and averages the gradients of spread ones."""
        try:
            super()._build_optimizer()
        except ValueError as error:
            if not str(error).startswith("Unsupported optimizer"):
                raise
            name, kind = self.cfg.optimizer._name, "bf16" if self.cfg.common.memory_efficient_bf16 else "fp16"
            raise UserError(f"--optimizer {name} cannot train with --memory-efficient-{kind}: give --{kind}") from None
        if self.core is not None:
            model = self.get_model()
            adapt_optimizer(self._optimizer, model, model.experts)
            learnt = [p for p in (*self.model.parameters(), *self.criterion.parameters()) if p.requires_grad]
            divide_steps(self._optimizer, self.core, learnt, self.cfg.model)
        self._asked_of_optimizer = constants(self._optimizer)

    def load_checkpoint(
        self,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: dict[str, Any] | None = None,
        reset_meters: bool = False,
    ) -> Any:
        """Load any checkpoint on any layout; say what this run does differently from the one that wrote it.

        Raises:
            UserError: ranks do not see the file, or it does not fit.
        """
        if self.data_parallel_world_size > 1:
            check_seen_by_all(filename)
        with said_in_one_sentence(filename), reading_moments(not reset_optimizer), self._first_averages(filename):
            extra_state = super().load_checkpoint(
                filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
            )
        if self.get_num_updates():
            _replace_later_points(self.get_num_updates())
        if self.cfg.ema.store_ema:  # fairseq counts updates between two steps of the averages from 0 in each process
            self.ema.update_freq_counter = self.get_num_updates() % max(self.cfg.ema.ema_update_freq, 1)
            if "ema" in (extra_state or {}):
                # a model that is fine-tuned may have parts that the checkpoint lacks
                check_averages(filename, extra_state["ema"], self.ema.get_model(), may_lack=reset_optimizer)
        if extra_state is not None and not reset_optimizer:
            warn_of_lost_updates(filename, self)
            restore_plateau(self, extra_state, reset_meters, reset_lr_scheduler, optimizer_overrides)
        if self._optimizer is not None:
            check_constants(filename, self, self._asked_of_optimizer)
            check_moments(filename, self)
        if extra_state is not None:
            check_weights_of(filename, self.get_model())
        if self.core is not None and extra_state is not None:
            compare_with(filename, self, self.core.config)
            if self._optimizer is not None:
                compare_optimizers(filename, self, self._asked_of_optimizer)
        return extra_state

    @contextmanager
    def _first_averages(self, filename: str) -> Iterator[None]:
        """Let averages begin after the block if the checkpoint that it loads has none.

        fairseq would copy them from weights that it has just deleted.
        """
        settings, begin = self.cfg.ema, False
        if settings.store_ema and Path(filename).is_file():
            with suppress(UserError):  # of other packages' models, with classes of their own: fairseq reads it
                begin = not has_averages(filename)
        if not begin:
            yield
            return
        settings.store_ema = False
        try:
            yield
        finally:
            settings.store_ema = True
        self._build_ema()
        if settings.ema_seed_model is None:
            logger.info(f"{filename} has no averages: those of --store-ema begin with its weights")

    def get_train_iterator(self, *args: Any, **kw: Any) -> Any:
        """Get ready for signals before fairseq builds the first data loader, and keep the position in the data."""
        stop_signals.prepare()
        self.task.trained_split = self.cfg.dataset.train_subset
        self.task.adds_epoch_to_seed = self.cfg.dataset.update_ordered_indices_seed
        self.train_iterator = super().get_train_iterator(*args, **kw)
        if self.data_parallel_world_size > 1:  # those of validation have been loaded before
            for split, text in getattr(self.task, "texts", {}).items():
                check_same_text(text, split)
        return self.train_iterator

    def get_valid_iterator(self, subset: str, disable_iterator_cache: bool = False) -> Any:
        """Keep the position in the data if a run is validated on the text that it is trained on.

        fairseq keeps one iterator for each dataset, so that validation moved that of training, to the next epoch.
        """
        if subset != self.cfg.dataset.train_subset:
            return super().get_valid_iterator(subset, disable_iterator_cache)
        dataset = self.task.dataset(subset)
        if self._on_training_text is None or self._on_training_text.dataset is not dataset:
            self._on_training_text = super().get_valid_iterator(subset, disable_iterator_cache=True)
            dataset.set_epoch(self.train_iterator.epoch)
        return self._on_training_text

    def train_step(self, samples: list, raise_oom: bool = False) -> Any:
        """Do one update: forward and backward pass of all micro-batches, sums over ranks, optimizer, log.

        Raises:
            NaNError: numbers are no longer finite.
        """
        stop_signals.install()
        if self.core is not None:
            measured_rate(self)  # measure once, outside the updates' time
            place = (self.data_parallel_rank, self.data_parallel_world_size)
            self._seeds = batch_seeds(self.cfg.common.seed, self.get_num_updates(), *place)
            self.core.follow(self.get_num_updates() / (self.cfg.optimization.max_update or inf))
            self.core.forget_loads()  # of an update that failed
        # If a rank continued alone after running out of memory, the others would wait for its tokens.
        raise_oom = raise_oom or self.experts is not None
        if self._is_in_step:  # after an overflow of --amp, fairseq repeats the update from within
            return super().train_step(real_batches_last(samples), raise_oom)
        num_updates, start = self.get_num_updates(), time.perf_counter()
        self._is_in_step = True
        try:
            with self.profiler.one_update(samples) if self.profiler is not None else nullcontext():
                result = super().train_step(real_batches_last(samples), raise_oom)
        except FloatingPointError as error:
            norms = self._grad_norm_buf
            if norms is not None and torch.isfinite(norms).all():  # all ranks' norms differ, but are finite
                raise
            raise diverged(self, f"update {self.get_num_updates() + 1}", error) from error
        finally:
            self._is_in_step = False
        if self._kept_memory is not None:
            self._kept_memory.after_update()
        seconds, waited = time.perf_counter() - start, DataClock.log()
        self._update_just_done = True
        if self.update_times is not None and self.data_parallel_rank == 0 and self.get_num_updates() > num_updates:
            times = {"seconds": round(seconds, 6), "data_seconds": round(waited, 6)}
            self.update_times.add(self.get_num_updates(), tokens=self._num_tokens, **times)
        return result

    def set_num_updates(self, num_updates: int) -> None:
        """Count an update and, if it was just done, move the offsets of routers: averages of ``--store-ema`` follow."""
        if self._is_in_step and self.core is not None:
            self.core.adjust_offsets(self.get_model().experts.ranks.world)
        super().set_num_updates(num_updates)

    def _prepare_sample(self, sample: Any, *rest: Any, **kw: Any) -> Any:
        """Bring a batch to the device, if its ids are in the dictionary."""
        if isinstance(self.task, LanguageModelingTask | MaskedLMTask):
            check_ids(sample, len(self.task.source_dictionary))
        return super()._prepare_sample(sample, *rest, **kw)

    def train_micro_batch(
        self, sample: Any, model: nn.Module, *args: Any, ignore_grad: bool = False, **kw: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Do the task's ``train_step`` with this batch's own random numbers; count operations and tokens seen.

        ``ignore_grad`` is for a batch that only keeps the ranks together: it draws no seed and counts for nothing.
        """
        if not ignore_grad:
            seed_generators(next(self._seeds))
        loss, sample_size, logging_output = self._train_micro_batch(sample, model, *args, ignore_grad=ignore_grad, **kw)
        if ignore_grad:  # such batches come first, see real_batches_last
            self.core.forget_loads()
        logging_output = {**logging_output, FLOPS: 0.0 if ignore_grad else model_flops(self.core, sample)}
        if self.data_order is not None:
            tokens_Bn = sample["net_input"]["src_tokens"]
            is_seen = 0 if ignore_grad else 1
            logging_output[DIGEST] = is_seen * digest(tokens_Bn, self.task.source_dictionary.pad())
        return loss, sample_size, logging_output

    def _aggregate_logging_outputs(self, logging_outputs: list, *sums: Any, ignore: bool = False) -> Any:
        """Sum statistics over ranks, and with them the wish to stop.

        Signals reach ranks at different times: what counts is the sum, which all of them see after the same update.
        """
        asked = int(stop_signals.received is not None)
        with span(REDUCTION):  # faster ranks wait for the others here
            logging_outputs, (*sums, asked) = super()._aggregate_logging_outputs(
                logging_outputs, *sums, asked, ignore=ignore
            )
        self.stop_agreed = bool(asked > 0)
        return logging_outputs, sums

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Clip by the norm of all gradients, those of experts on other ranks included; return the norm."""
        if self.experts is None:
            return super().clip_grad_norm(clip_norm)
        aggregate = norm_with_experts(self.optimizer, self.experts.ranks)
        return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=aggregate)

    def _reduce_and_log_stats(self, logging_outputs: Any, sample_size: Any, grad_norm: Any = None) -> Any:
        """Log an update or a validation batch; of an update also its speed, memory and data."""
        result = super()._reduce_and_log_stats(logging_outputs, sample_size, grad_norm)
        if logging_outputs and FLOPS in logging_outputs[0]:  # not in validation
            log_speed(self, logging_outputs)
            if self.update_times is not None:
                self._num_tokens = sum(int(output.get("ntokens", 0)) for output in logging_outputs)
            if self.data_order is not None and self.data_parallel_rank == 0:
                self.data_order.add(self.get_num_updates(), digest=digest_of(logging_outputs))
        return result

    @property
    def _start_time(self) -> float:
        """When the measured time began, on a clock that nobody sets: fairseq's own may jump over --stop-time-hours."""
        return self._began

    @_start_time.setter
    def _start_time(self, _: float) -> None:
        self._began = time.monotonic()

    def _local_cumulative_training_time(self) -> float:
        return time.monotonic() - self._start_time + self._previous_training_time

    def cumulative_training_time(self) -> float:
        """Return the seconds, or exit: fairseq asks when an update is logged, before it validates or saves."""
        if self._update_just_done:
            self._update_just_done = False
            leave_if_asked(self)
        return super().cumulative_training_time()

    def valid_step(self, sample: Any, raise_oom: bool = False) -> Mapping[str, Any]:
        """Compute the loss of a validation batch; leave after it if a signal asked for that.

        Raises:
            NaNError: numbers are no longer finite.
        """
        when = f"validation after update {self.get_num_updates()}"
        try:
            result = super().valid_step(sample, raise_oom)
        except FloatingPointError as error:
            raise diverged(self, when, error) from error
        if not self._metric_checked:
            check_best_metric(self)
            self._metric_checked = True
        leave_if_asked(self)
        loss = float(result["loss"])  # the same on all ranks
        if result["sample_size"] and not isfinite(loss):
            raise diverged(self, when, FloatingPointError(f"the loss is {loss}"))
        return result

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> str | None:
        """Save a checkpoint; spread experts only while all ranks save (:mod:`smlp.fairseq_compat.expert_saving`)."""
        if (dictionary := getattr(self.task, "source_dictionary", None)) is not None:
            extra_state[RECORD] = record_of(dictionary.symbols)
        extra_state[PLATEAU] = plateau_of(self)
        if self.experts is None:
            return super().save_checkpoint(filename, extra_state)
        if self.expert_saving is None:  # after an error that other ranks may not know of
            logger.warning(f"{filename} is not written: it would lack the experts of the other ranks")
            return None
        return self.expert_saving.save(filename, extra_state)


def _replace_later_points(num_updates: int) -> None:
    """Let TensorBoard hide what an earlier run has written after these updates, which this one does again."""
    if progress_bar.SummaryWriter is not None:
        progress_bar.SummaryWriter = partial(progress_bar.SummaryWriter, purge_step=num_updates + 1)
