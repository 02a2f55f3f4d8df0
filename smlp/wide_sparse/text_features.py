"""Hidden features of trained language models, and their CKA on the same sequences: sMLP's blocks and masked ones.

Letters: ``S`` sequences, ``B`` of a batch, ``T`` context.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.inference.language_model import LanguageModel
from smlp.inference.masked import MaskedLanguageModel
from smlp.inference.scoring.candidates import drop_nothing
from smlp.nn.blocks import DenseBlock, SparseBlock
from smlp.nn.decoder import Decoder
from smlp.nn.stack import Stack
from smlp.wide_sparse.cka import Branch, compare_models, output_alone


def branches(model: Stack) -> dict[str, Branch]:
    """Return where the features that are added to skip connections come from, in the order of execution."""
    found: dict[str, Branch] = {}
    for index, block in enumerate(model.blocks):
        if isinstance(block, SparseBlock):
            parts = {f"{index}.mixing": (block.mixing, _added), f"{index}.experts": (block.token_moe, _first)}
            found |= dict(reversed(parts.items())) if block.tokens_first else parts
        elif isinstance(block, DenseBlock):
            found |= {
                f"{index}.mixing": (block.mixing, _added),
                f"{index}.feed-forward": (block.feed_forward, output_alone),
            }
        else:
            found[str(index)] = (block, lambda inputs, output: output[0] - inputs[0])
    return found


def _added(inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output - inputs[0]


def _first(inputs: object, output: Sequence[Any]) -> Tensor:
    return output[0]


def compare_language_models(
    models: Sequence[LanguageModel | MaskedLanguageModel],
    names: Sequence[str],
    tokens_N: Tensor,
    batch_size: int,
    batches: int | None = None,
) -> dict[str, Any]:
    """Return the CKA of the branches of two models on consecutive sequences of T tokens, each with the features of all
    its positions.

    Args:
        models, names: both models, with the same context and dictionary, and their files.
        tokens_N: a text in their tokens.
        batch_size: B; the last, smaller batch is left out.
        batches: how many to take; by default all.

    Returns:
        As :func:`smlp.wide_sparse.cka.compare_models`, with ``sequences`` for ``inputs``.

    Raises:
        UserError: the models differ in context or dictionary, norms are not before sublayers, or the text is too short.
    """
    configs = [model.core.config for model in models]
    if configs[0].max_tokens != configs[1].max_tokens:
        sizes = [config.max_tokens for config in configs]
        raise UserError(
            f"{names[0]} and {names[1]} must read as many tokens, got contexts of {sizes[0]} and {sizes[1]}"
        )
    if models[0].vocabulary.symbols != models[1].vocabulary.symbols:
        raise UserError(f"{names[0]} and {names[1]} have different dictionaries")
    for config, name in zip(configs, names, strict=True):
        _check_norms(config, name)
    T = configs[0].max_tokens
    x_ST = tokens_N[: len(tokens_N) // T * T].view(-1, T)
    if len(x_ST) < batch_size:
        raise UserError(f"the text has {len(x_ST)} sequences of {T} tokens, less than --batch-size {batch_size}")
    whole = (x_BT for x_BT in x_ST.split(batch_size) if len(x_BT) == batch_size)
    cores = [model.core.eval() for model in models]
    for core in cores:
        if isinstance(core, Decoder):
            drop_nothing(core)
    found = compare_models(cores, [branches(core) for core in cores], islice(whole, batches), names)
    found["sequences"] = found.pop("inputs")
    return found


def _check_norms(config: ModelConfig, name: str) -> None:
    if config.layer_norm == "after":
        raise UserError(f"{name} has its layer norms after the sublayers, so its skip connections are not plain sums")
