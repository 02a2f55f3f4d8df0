"""Cross-entropy with auxiliary losses, a prefix that does not count, and the router-health record."""

# No `from __future__ import annotations` here: fairseq reads the types of an option's field, not their names.

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Optional

from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from omegaconf import II
from torch import Tensor, nn

from smlp.criterions.choice import OURS
from smlp.criterions.router_health import LOGGED, REALISED, HealthRecorder, LiveFigures
from smlp.fairseq_compat.core import core_of, prefix_of
from smlp.fairseq_compat.records import Journal
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext
from smlp.ops import token_losses
from smlp.parallel.spans import HEALTH, whole_span

logger = logging.getLogger(__name__)

HEALTH_FILE = "router_health.jsonl"
_SUMS = "router_sums"
_AUX = "aux_"


@dataclass
class MoECrossEntropyConfig(CrossEntropyCriterionConfig):
    """Options of the criterion; those without a help text are settings of other parts of fairseq."""

    # fairseq understands typing.Optional but not `|`
    router_health_file: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": f"file for the router-health record, JSON lines (default: SAVE_DIR/{HEALTH_FILE})"},
    )
    log_interval: int = II("common.log_interval")
    save_dir: str = II("checkpoint.save_dir")
    no_save: bool = II("checkpoint.no_save")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")  # noqa: UP045


@register_criterion(OURS, dataclass=MoECrossEntropyConfig)
class MoECrossEntropyCriterion(CrossEntropyCriterion):
    """Negative log-likelihood of the tokens that count, plus, in training, ``sample_size`` times the auxiliary losses.

    Fairseq divides the gradient by the sum of all sample sizes: what is left of the auxiliary losses is their mean
    over micro-batches and ranks, weighted by sample size, whatever ``--update-freq`` and the number of ranks are.

    For models whose leading positions only choose experts (``prefix_tokens``), those positions are counted neither
    in the loss nor in ``ntokens`` and ``sample_size``. Without auxiliary losses and prefix, this is fairseq's
    ``cross_entropy``.
    """

    # Fairseq passes the summed logging outputs to a class method, which has no access to the instance. The instance
    # therefore leaves its recorder here after the observed forward passes, and `reduce_metrics` takes it in the same
    # update. This happens on all ranks, each of which keeps the choices of its own probe set.
    _reporting: ClassVar[HealthRecorder | None] = None

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        router_health_file: str | None,
        log_interval: int,
        save_dir: str,
        no_save: bool,
        tensorboard_logdir: str | None = None,
    ) -> None:
        super().__init__(task, sentence_avg)
        self.log_interval = log_interval
        self.health_path = Path(router_health_file) if router_health_file else Path(save_dir) / HEALTH_FILE
        if no_save and not router_health_file:
            self.health_path = None
        self.tensorboard_logdir = tensorboard_logdir
        self._recorder: HealthRecorder | None = None
        self._has_told_positions = False

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return loss (a sum), sample size and logging output; ``reduce=False`` gives the losses of single tokens."""
        decoder = core_of(model)
        context = self._observing_context(model, decoder, sample) if self.training and decoder is not None else None
        net_output = model(**sample["net_input"], **({} if context is None else {"context": context}))
        loss, sample_size, logging_output = self._likelihood(model, net_output, sample, reduce, prefix_of(model))

        aux_losses = _aux_losses(net_output) if self.training and reduce else {}
        if aux_losses:
            logging_output["nll_loss"] = loss.data
            for name, aux_loss in aux_losses.items():
                loss = loss + sample_size * aux_loss
                logging_output[_AUX + name] = sample_size * aux_loss.data
            logging_output["loss"] = loss.data
        if context is not None:
            with whole_span(HEALTH):
                logging_output[_SUMS] = self._recorder.sums(context)
            type(self)._reporting = self._recorder
        return loss, sample_size, logging_output

    def _likelihood(
        self, model: nn.Module, net_output: tuple[Tensor, Any], sample: dict[str, Any], reduce: bool, prefix: int
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return what fairseq's ``cross_entropy`` does, over the positions after the prefix."""
        target_Bn, num_tokens, num_seqs = sample["target"], sample["ntokens"], sample["target"].size(0)
        logging_output: dict[str, Any] = {"nsentences": num_seqs}
        if prefix:
            self._tell_positions(prefix, model.max_positions())
            target_Bn = target_Bn.clone()
            target_Bn[:, :prefix] = self.padding_idx
            is_token_Bn = target_Bn != self.padding_idx
            num_tokens, num_seqs = int(is_token_Bn.sum()), int(is_token_Bn.any(dim=1).sum())
        if core_of(model) is None:  # a fairseq model, whose outputs need not be logits
            loss, _ = self.compute_loss(model, net_output, sample, reduce=reduce)
        else:
            losses_Bn = token_losses(net_output[0], target_Bn, ignored=self.padding_idx)
            loss = losses_Bn.sum() if reduce else losses_Bn[:, prefix:].flatten()
        sample_size = num_seqs if self.sentence_avg else num_tokens
        logging_output |= {"loss": loss.data, "ntokens": num_tokens, "sample_size": sample_size}
        return loss, sample_size, logging_output

    def _tell_positions(self, prefix: int, max_tokens: int) -> None:
        if not self._has_told_positions:
            self._has_told_positions = True
            logger.info(
                f"counting positions {prefix} to {max_tokens - 1} of {max_tokens}: the first {prefix} choose experts"
            )

    def _observing_context(self, model: nn.Module, decoder: Decoder, sample: dict[str, Any]) -> ForwardContext | None:
        """Return a context that observes routing if fairseq logs the current update; else None."""
        done = model.num_updates
        if self._recorder is None:
            is_first = distributed_utils.get_global_rank() == 0
            journal = Journal(self.health_path, done, "router-health record") if self.health_path and is_first else None
            live = LiveFigures(self.tensorboard_logdir) if is_first else None
            self._recorder = HealthRecorder(decoder, sample["net_input"]["src_tokens"], journal, live)
        if self.log_interval < 1 or (done + 1) % self.log_interval:
            return None
        with whole_span(HEALTH):
            self._recorder.start(done + 1)
        return ForwardContext(observe=True)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the sums over all micro-batches and ranks; loss and perplexity to base 2, auxiliary losses to base e.

        Loss and ``nll_loss`` differ by the auxiliary losses; perplexity is that of ``nll_loss``. Where nothing counts
        (validation on rows that are all prefix), the values have no weight.
        """

        def total(key: str) -> Any:
            return sum(log.get(key, 0) for log in logging_outputs)

        def mean(key: str, count: Any) -> Any:
            return total(key) / (count or 1)

        sample_size, num_tokens = total("sample_size"), total("ntokens")
        aux_keys = [key for key in logging_outputs[0] if key.startswith(_AUX)] if logging_outputs else []
        metrics.log_scalar("loss", mean("loss", sample_size) / math.log(2), sample_size, round=3)
        if aux_keys or sample_size != num_tokens:
            likelihood = "nll_loss" if aux_keys else "loss"
            metrics.log_scalar("nll_loss", mean(likelihood, num_tokens) / math.log(2), num_tokens, round=3)
        metrics.log_derived(
            "ppl", lambda meters: utils.get_perplexity(meters["nll_loss" if "nll_loss" in meters else "loss"].avg)
        )
        for key in aux_keys:
            metrics.log_scalar(key.removeprefix(_AUX), mean(key, sample_size), sample_size, round=5)
        report: dict[str, float] = {}
        if any(_SUMS in log for log in logging_outputs):
            recorder, cls._reporting = cls._reporting, None
            report = recorder.report(total(_SUMS))
        for key, value in report.items():
            metrics.log_scalar(key, value, priority=600, round=3)
        _repeat_health(but=report)


def _repeat_health(but: Collection[str]) -> None:
    """Log the figures of the last record again, but for some: a meter without a value would be shown as None.

    It has none in an epoch without a record, and ``router_churn`` none in the first record of a resumed run.
    """
    active = metrics.get_active_aggregators()
    if not any(meters is metrics.get_meters("train_inner") for meters in active):
        return  # validation has its own
    for key in (*LOGGED, REALISED):
        if key in but:
            continue
        # "default" of a resumed run is the last checkpoint's, and not among the active ones
        known = (meters[key].val for meters in (*active, metrics.get_meters("default")) if key in meters)
        value = next((value for value in known if value is not None), None)
        if value is not None:
            metrics.log_scalar(key, value, weight=0, priority=600, round=3)


def _aux_losses(net_output: tuple[Tensor, Any]) -> dict[str, Tensor]:
    extra = net_output[1]
    return extra.get("aux_losses", {}) if isinstance(extra, dict) else {}
