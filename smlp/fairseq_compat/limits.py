"""Refuse numbers that fairseq cannot work with: one table of the lowest and highest value of each option.

fairseq divides by some of them, hands others to libraries that refuse them deep inside, and takes the rest without a
word: ``--batch-size 0`` is one batch of the whole corpus. Options of this package's own models are checked by
:mod:`smlp.config`.
"""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from smlp.errors import UserError
from smlp.fairseq_compat.replacing import replacing
from smlp.launch.machine import num_cores

_LARGEST = 2**63 - 1  # largest count of fairseq's compiled code
_INT32 = 2**31 - 1
MOST_SEED = 2**32 - 2**20  # numpy's seeds end at 2^32 - 1, and fairseq adds the epoch


class Limit(NamedTuple):
    """The lowest and the highest value that an option may have, and a remark for the message."""

    lowest: float
    highest: float = _LARGEST
    why: str = ""


_POSITIVE, _NOT_NEGATIVE, _ABOVE_ZERO, _SHARE = Limit(1), Limit(0), Limit(sys.float_info.min), Limit(0, 1)
_OR_OFF = Limit(-1, why="-1 switches it off")

#: limits by option, named as a Python attribute; for lists, limits of each number
LIMITS: dict[str, Limit] = {
    # batches
    "batch_size": Limit(1, why="without it, --max-tokens alone makes the batches"),
    "batch_size_valid": _POSITIVE,
    "max_tokens": Limit(1, why="without it, --batch-size alone makes the batches"),
    "max_tokens_valid": _POSITIVE,
    "required_batch_size_multiple": Limit(1, _INT32),
    "required_seq_len_multiple": _POSITIVE,
    "tokens_per_sample": Limit(1, _INT32),
    "max_target_positions": Limit(1, _INT32),
    "max_positions": Limit(1, _INT32),
    # of the task squad
    "doc_stride": Limit(1, _INT32),
    "max_query_length": Limit(1, _INT32),
    "max_answer_length": Limit(1, _INT32),
    "no_answer_threshold": Limit(-_LARGEST),
    # of the task masked_lm
    "random_token_prob": _SHARE,
    "leave_unmasked_prob": _SHARE,
    "mask_multiple_length": Limit(1, 2**16),
    "mask_stdev": Limit(0, 2**16),
    "update_freq": _POSITIVE,
    "curriculum": _NOT_NEGATIVE,
    "num_shards": _POSITIVE,
    "shard_id": _NOT_NEGATIVE,
    # loading of data
    "num_workers": Limit(0, max(64, 16 * num_cores()), f"each is a process, and this machine has {num_cores()} cores"),
    "data_buffer_size": _NOT_NEGATIVE,
    # random numbers
    "seed": Limit(0, MOST_SEED),
    "fixed_validation_seed": Limit(0, MOST_SEED),
    # intervals of logging, validation, saving and stopping
    "log_interval": _POSITIVE,
    "validate_interval": _POSITIVE,
    "validate_interval_updates": _NOT_NEGATIVE,
    "validate_after_updates": _NOT_NEGATIVE,
    "max_valid_steps": _NOT_NEGATIVE,
    "save_interval": _POSITIVE,
    "save_interval_updates": _NOT_NEGATIVE,
    "keep_interval_updates": _OR_OFF,
    "keep_interval_updates_pattern": _OR_OFF,
    "keep_last_epochs": _OR_OFF,
    "keep_best_checkpoints": _OR_OFF,
    "patience": _OR_OFF,
    "checkpoint_shard_count": _POSITIVE,
    "max_epoch": Limit(0, why="0 is no limit"),
    "max_update": Limit(0, why="0 is no limit"),
    "stop_time_hours": Limit(0, why="0 is no limit"),
    "stop_min_lr": Limit(-_LARGEST),
    # optimizers
    "lr": Limit(0, sys.float_info.max),
    "clip_norm": Limit(0, math.inf, "0 clips nothing"),
    "weight_decay": _NOT_NEGATIVE,
    "spatial_weight_decay": _NOT_NEGATIVE,
    "spatial_lr_factor": _NOT_NEGATIVE,
    "adam_eps": _ABOVE_ZERO,
    "adamax_eps": _ABOVE_ZERO,
    "adadelta_eps": _ABOVE_ZERO,
    "adadelta_rho": _SHARE,
    "lamb_eps": _NOT_NEGATIVE,
    "momentum": _SHARE,
    "beta1": _SHARE,
    "clip_threshold": _NOT_NEGATIVE,
    "decay_rate": Limit(-_LARGEST, 0),
    # schedules of the learning rate
    "warmup_updates": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "hold_steps": _NOT_NEGATIVE,
    "decay_steps": _NOT_NEGATIVE,
    "warmup_init_lr": Limit(-1, why="-1 is fairseq's default"),
    "min_lr": _NOT_NEGATIVE,
    "max_lr": _NOT_NEGATIVE,
    "end_learning_rate": _NOT_NEGATIVE,
    "init_lr_scale": _NOT_NEGATIVE,
    "final_lr_scale": _ABOVE_ZERO,
    "phase_ratio": _SHARE,
    "total_num_update": _NOT_NEGATIVE,
    "lr_period_updates": Limit(-1, why="-1 is --max-update"),
    "lr_deacy_period": _POSITIVE,
    "lr_decay": _SHARE,
    "lr_shrink": _NOT_NEGATIVE,
    "lr_threshold": _NOT_NEGATIVE,
    "lr_patience": _NOT_NEGATIVE,
    "t_mult": _POSITIVE,
    "power": _NOT_NEGATIVE,
    "force_anneal": _NOT_NEGATIVE,
    # precision
    "fp16_init_scale": _POSITIVE,
    "fp16_scale_window": _POSITIVE,
    "fp16_scale_tolerance": _SHARE,
    "min_loss_scale": _NOT_NEGATIVE,
    "threshold_loss_scale": _NOT_NEGATIVE,
    "amp_batch_retries": _NOT_NEGATIVE,
    "amp_init_scale": _POSITIVE,
    "amp_scale_window": _POSITIVE,
    "empty_cache_freq": _NOT_NEGATIVE,
    # ranks
    "distributed_world_size": _POSITIVE,
    "distributed_rank": _NOT_NEGATIVE,
    "distributed_port": Limit(-1, 2**16 - 1, "-1 is none"),
    "device_id": _NOT_NEGATIVE,
    "bucket_cap_mb": _POSITIVE,
    "heartbeat_timeout": _OR_OFF,
    "all_gather_list_size": _POSITIVE,
    "model_parallel_size": Limit(1, 1, "more need a library that fairseq does not include"),
    "nprocs_per_node": _POSITIVE,
    "pipeline_chunks": _NOT_NEGATIVE,
    "localsgd_frequency": _POSITIVE,
    "slowmo_momentum": _SHARE,
    "block_lr": _NOT_NEGATIVE,
    "block_momentum": _SHARE,
    "global_sync_iter": _POSITIVE,
    "warmup_iterations": _NOT_NEGATIVE,
    # moving averages
    "ema_decay": _SHARE,
    "ema_start_update": _NOT_NEGATIVE,
    "ema_update_freq": _POSITIVE,
    # fairseq's own criterions and language models
    "label_smoothing": _SHARE,
    "ignore_prefix_size": _NOT_NEGATIVE,
    "dropout": _SHARE,
    "attention_dropout": _SHARE,
    "activation_dropout": _SHARE,
    "relu_dropout": _SHARE,
    "adaptive_softmax_dropout": _SHARE,
    "decoder_layerdrop": _SHARE,
    "decoder_embed_dim": _POSITIVE,
    "decoder_input_dim": _POSITIVE,
    "decoder_output_dim": _POSITIVE,
    "decoder_ffn_embed_dim": _POSITIVE,
    "decoder_layers": _NOT_NEGATIVE,
    "decoder_attention_heads": _POSITIVE,
    "adaptive_softmax_factor": _ABOVE_ZERO,
    "adaptive_input_factor": _ABOVE_ZERO,
    "character_embedding_dim": _POSITIVE,
    "char_embedder_highway_layers": _NOT_NEGATIVE,
    "quant_noise_pq": _SHARE,
    "quant_noise_scalar": _SHARE,
    "quant_noise_pq_block_size": _POSITIVE,
    "min_params_to_wrap": _NOT_NEGATIVE,
    "base_layers": _NOT_NEGATIVE,
    "base_sublayers": _POSITIVE,
}


def apply() -> None:
    from fairseq.tasks.language_modeling import LanguageModelingTask

    @replacing(LanguageModelingTask, "build_model")
    def build_model(build: Any, self: LanguageModelingTask, *args: Any, **kw: Any) -> Any:
        try:
            return build(self, *args, **kw)
        except ValueError as error:
            _, unsupported, target = str(error).partition("Unsupported language modeling target: ")
            if not unsupported:
                raise
            raise UserError(
                f"--{target}-target: this model predicts the next token only; leave the option out"
            ) from error
        except RuntimeError as error:
            asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
            if asked is None:
                raise
            raise UserError(
                f"there is not enough memory for a tensor of {asked[1]} of the model: lower its widths, or "
                f"--tokens-per-sample {self.args.tokens_per_sample}"
            ) from error


def check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse options that are out of the limits of the table, and schedules that end in a division by zero.

    Args:
        values: of fairseq's options by their names as Python attributes; None and texts are left alone.

    Raises:
        UserError: the message names the option and the numbers.
    """
    for name, limit in LIMITS.items():
        given = values.get(name)
        if given is not None and not isinstance(given, (numbers.Real, str)) and len(given) == 0:
            raise UserError(f"--{name.replace('_', '-')} needs at least one number, got {given}")
        for value in given if isinstance(given, (list, tuple)) else [given]:
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if is_number and not limit.lowest <= value <= limit.highest:
                remark = f" ({limit.why})" if limit.why else ""
                raise UserError(f"--{name.replace('_', '-')} must be {_as_text(limit, value)}, got {value}{remark}")
    shard, num_shards = (values.get(name) for name in ("shard_id", "num_shards"))
    if None not in (shard, num_shards) and shard >= num_shards:
        raise UserError(f"--shard-id must be below --num-shards {num_shards}, got {shard}")
    for trouble in _of_schedule(values.get("lr_scheduler"), values):
        raise UserError(f"--lr-scheduler {values['lr_scheduler']} {trouble}")
    if {"mask_prob", "d2v2_multi"} <= values.keys():  # of the task masked_lm
        for trouble in _of_masking(values):
            raise UserError(trouble)


def _as_text(limit: Limit, value: float) -> str:
    if value < limit.lowest == -_LARGEST:
        return f"at least {-_LARGEST}"
    low = "above 0" if limit.lowest == sys.float_info.min else f"at least {limit.lowest:.0f}"
    if value > limit.highest == _LARGEST:
        return f"{low} and at most {_LARGEST}"
    if limit.highest == sys.float_info.max and not math.isfinite(value):
        return f"{low} and finite"
    if limit.highest in (_LARGEST, sys.float_info.max, math.inf):
        return "a finite number" if limit.lowest == -_LARGEST else low
    return f"at most {limit.highest:g}" if limit.lowest == -_LARGEST else f"from {limit.lowest} to {limit.highest}"


def _of_schedule(name: Any, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the combined numbers of a schedule, as the end of a sentence."""
    lr, warmup, updates = (values.get(option) for option in ("lr", "warmup_updates", "max_update"))
    lr = lr if isinstance(lr, (list, tuple)) else [lr]
    updates = updates or 0
    if name in ("cosine", "inverse_sqrt", "tri_stage", "triangular", "reduce_lr_on_plateau") and len(lr) > 1:
        yield f"takes one learning rate, and --lr has {len(lr)}: {','.join(map(str, lr))}"
    if name == "cosine" and values["lr_period_updates"] <= 0:
        if not updates:
            yield "needs --lr-period-updates, or --max-update to take it from"
        if warmup == updates:
            yield f"has no update left after --warmup-updates {warmup} of --max-update {updates}"
    if name == "pass_through":
        yield "is for optimizers with schedules of their own, which a command line cannot describe"
    if name == "inverse_sqrt" and warmup < 1:
        yield f"needs --warmup-updates of at least 1, got {warmup}"
    if name == "polynomial_decay" and not values.get("total_num_update"):
        yield "needs --total-num-update, or --max-update to take it from"
    if name == "tri_stage":
        ratio = values.get("phase_ratio")
        if ratio is not None:
            if len(ratio) != 3 or sum(ratio) != 1:
                total = f", whose sum is {sum(ratio)!r}"
                yield f"needs three numbers in --phase-ratio that add up to 1, got {tuple(ratio)}{total}"
            if int(updates * ratio[2]) < 1:
                yield f"has no update to decay in: --phase-ratio {tuple(ratio)} of --max-update {updates}"
        elif values["decay_steps"] < 1:
            yield "needs --decay-steps of at least 1, or --phase-ratio with --max-update"
    if name == "triangular":
        if values["lr_period_updates"] < 2:
            yield f"needs --lr-period-updates of at least 2, got {values['lr_period_updates']}"
        if values["max_lr"] <= lr[0]:
            yield f"needs a --max-lr above --lr {lr[0]}, got {values['max_lr']}"
    if name == "step" and min(lr) <= values["min_lr"]:
        yield f"needs a --lr above --min-lr {values['min_lr']}, got {min(lr)}"
    if name == "reduce_lr_on_plateau" and values["lr_shrink"] >= 1:
        yield f"needs an --lr-shrink below 1, got {values['lr_shrink']}"


def _of_masking(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the options of the task ``masked_lm``; fairseq only has assertions there."""
    if not 0 < values["mask_prob"] < 1:
        yield f"--mask-prob must be above 0 and below 1, got {values['mask_prob']}"
    random, kept, length = (values[name] for name in ("random_token_prob", "leave_unmasked_prob", "tokens_per_sample"))
    if random + kept > 1:
        yield f"--random-token-prob {random} and --leave-unmasked-prob {kept} are together more than 1"
    if length < 2:
        yield f"--tokens-per-sample must be at least 2, because each sample begins with <s>, got {length}"
    for option in ("mask_whole_words", "d2v2_multi", "skip_masking"):
        if values.get(option):
            yield f"--{option.replace('_', '-')} does not work with --task masked_lm of this fairseq: leave it out"
