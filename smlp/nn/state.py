"""State that accompanies the activations through one forward pass.

Letters: ``B`` sequences, ``n`` new tokens, ``m`` all tokens up to now, ``T`` the model's context, ``C`` features,
``N`` routed items (tokens, or features of a sequence), ``E`` experts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from smlp.errors import UserError

Class = TypeVar("Class", bound=type)


def pytree(cls: Class) -> Class:
    """Register a dataclass whose instances torch may take apart and put together again; a class decorator.

    Wrappers such as ``DistributedDataParallel(static_graph=True)`` and FSDP look with ``torch.utils._pytree`` for the
    tensors that a module returns, and find none in a dataclass that is not registered. Do not register a class through
    which modules pass values to each other, such as :class:`ForwardContext`: values written into the copy that a
    wrapper makes would be lost.
    """
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(instance: Any) -> tuple[list[Any], None]:
        return [getattr(instance, name) for name in names], None

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[KeyEntry, Any]], None]:
        return [(GetAttrKey(name), getattr(instance, name)) for name in names], None

    def unflatten(values: Iterable[Any], _: None) -> Any:
        return cls(*values)

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


class DecodingState:
    """A cache of values of earlier positions for token-mixing modules, so that no earlier token is recomputed.

    Pass one object to successive calls of the decoder, each with the next tokens only.

    Args:
        capacity: positions to have room for; by default the model's context.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        #: positions seen so far, the same for all sequences of the batch
        self.length = 0
        #: cached values of positions, (B, ..., room, C); the first ``length`` are filled
        self._buffers: dict[Any, Tensor] = {}
        #: cached values of whole sequences, (B, ...)
        self._values: dict[Any, Tensor] = {}

    @property
    def num_seqs(self) -> int | None:
        """Return B, or None before the first tokens."""
        kept = self._some_tensor()
        return None if kept is None else kept.size(0)

    def check(self, num_seqs: int, num_new: int) -> None:
        """Refuse tokens (B, n) that do not continue these sequences.

        Raises:
            UserError: the number of sequences differs, or there is no room for so many positions.
        """
        own = self.num_seqs
        if own not in (None, num_seqs):
            raise UserError(f"a decoding state of {own} sequences cannot be continued with {num_seqs}")
        if self.capacity is not None and self.length + num_new > self.capacity:
            raise UserError(
                f"a decoding state with room for {self.capacity} positions cannot take {num_new} tokens after "
                f"{self.length}: give a larger capacity"
            )

    def append(self, key: Any, x_BnC: Tensor, max_tokens: int) -> Tensor:
        """Keep (B, n, C) as the key's next positions; return all of them so far, (B, m, C).

        There may be more axes between B and n; values that are read by head should be stored by head.

        Raises:
            UserError: earlier positions were read by another model, of which ``key`` is no part.
        """
        *leading, num_new, width = x_BnC.shape
        end = self.length + num_new
        buffer_BTC = self._buffers.get(key)
        if buffer_BTC is None:
            if self.length:
                raise UserError(f"a decoding state of {self.length} positions belongs to the model that read them")
            room = max_tokens if self.capacity is None else min(self.capacity, max_tokens)
            buffer_BTC = x_BnC.new_empty(*leading, room, width)
            self._buffers[key] = buffer_BTC
        buffer_BTC[..., self.length : end, :] = x_BnC
        return buffer_BTC[..., :end, :]

    def keep(self, key: Any, value_B: Tensor) -> None:
        """Keep one value for each sequence, (B, ...), such as a decision that later positions must follow."""
        self._values[key] = value_B

    def kept(self, key: Any) -> Tensor | None:
        """Return what :meth:`keep` was given, or None."""
        return self._values.get(key)

    def reorder(self, index_B: Tensor) -> None:
        """Keep only the sequences at ``index_B`` (any length, repeats allowed), in that order."""
        chosen = self.select(index_B)
        self._buffers, self._values = chosen._buffers, chosen._values

    def select(self, index_B: Tensor, capacity: int | None = None) -> DecodingState:
        """Return a new state with the sequences at ``index_B`` (any length, repeats allowed), in that order.

        Args:
            index_B: indices of sequences, (B,).
            capacity: positions to have room for, at least ``length``; by default as before.
        """
        chosen = DecodingState(self.capacity if capacity is None else capacity)
        chosen.length = self.length
        for key, buffer_BTC in self._buffers.items():
            *leading, room, width = buffer_BTC.shape[1:]
            own_BTC = buffer_BTC.new_empty(index_B.numel(), *leading, room if capacity is None else capacity, width)
            filled = (..., slice(self.length), slice(None))
            own_BTC[filled] = buffer_BTC[filled].index_select(0, index_B)
            chosen._buffers[key] = own_BTC
        chosen._values = {key: value_B.index_select(0, index_B) for key, value_B in self._values.items()}
        return chosen

    def clone(self) -> DecodingState:
        """Return an independent copy, to continue one prompt in several ways."""
        kept = self._some_tensor()
        num_seqs, device = (0, None) if kept is None else (kept.size(0), kept.device)
        return self.select(torch.arange(num_seqs, device=device))

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodingState:
        """Return :meth:`clone`: the keys are the model's own layers, of which a copy would be no key."""
        return self.clone()

    def _some_tensor(self) -> Tensor | None:
        """Return any one of the cached tensors, to read the batch size from; None before the first tokens."""
        return next(itertools.chain(self._buffers.values(), self._values.values()), None)


@dataclass(frozen=True)
class Observation:
    """The decisions of a layer's router in one forward pass, for reports."""

    #: a smlp.moe.plan.RoutingPlan
    plan: Any
    #: routing scores (N, E), detached, or None where no scores are computed
    logits_NE: Tensor | None
    #: weight of each assignment (A,), or None where all are one
    weight_A: Tensor | None = None


@dataclass
class ForwardContext:
    """Padding, decoding state and routing decisions of one forward pass."""

    #: the input ids, (B, n)
    tokens_Bn: Tensor | None = None
    #: True at real tokens, (B, n), or None where there is no padding
    valid_Bn: Tensor | None = None
    #: None outside incremental decoding
    state: DecodingState | None = None
    #: routing decisions by layer; a layer that finds its own here reuses it, so that a block that is recomputed in the
    #: backward pass (activation checkpointing) routes as in the forward pass
    plans: dict[nn.Module, Any] = field(default_factory=dict)
    #: whether routers record their observations below
    observe: bool = False
    #: by layer (which has a ``name``), so that a recomputed block does not count twice
    observations: dict[nn.Module, Observation] = field(default_factory=dict)
    #: ids (B, n) and state of each group, if the batch is several groups of sequences concatenated to (1, N, C); only
    #: functions that mix tokens have to tell them apart, see :meth:`by_sequences`
    groups: tuple[ForwardContext, ...] = ()

    @property
    def _tokens(self) -> Tensor:
        assert self.tokens_Bn is not None, "the decoder sets it before the first block"
        return self.tokens_Bn

    @property
    def num_seqs(self) -> int:
        """Return B."""
        return self._tokens.size(0)

    @property
    def num_new_tokens(self) -> int:
        """Return n."""
        return self._tokens.size(1)

    @property
    def start(self) -> int:
        """Return the position of the first new token."""
        return 0 if self.state is None else self.state.length

    def remember(self, key: Any, x_BnC: Tensor, max_tokens: int) -> tuple[Tensor, int]:
        """Return all positions so far of a token-mixing module's input, and where the new ones start.

        There may be more axes, as in :meth:`DecodingState.append`.
        """
        if self.state is None:
            return x_BnC, 0
        return self.state.append(key, x_BnC, max_tokens), self.state.length

    def by_sequences(self, mix: Callable[..., Tensor], *inputs_BnC: Tensor) -> Tensor:
        """Return ``mix(*inputs_BnC, context)``, for a function that mixes the tokens of a sequence.

        Where the batch is groups of sequences of one length each, it is applied to one group after the other.

        Args:
            mix: maps (B, n, C) tensors and the context to (B, n, D).
            inputs_BnC: its inputs, or (1, N, C) with the sequences of all groups.
        """
        if not self.groups:
            return mix(*inputs_BnC, self)
        shapes = [group._tokens.shape for group in self.groups]
        parts = zip(*(x_1NC[0].split([shape.numel() for shape in shapes]) for x_1NC in inputs_BnC), strict=True)
        mixed = [
            mix(*(part.unflatten(0, shape) for part in own), group).flatten(0, 1)
            for own, shape, group in zip(parts, shapes, self.groups, strict=True)
        ]
        return torch.cat(mixed).unsqueeze(0)

    def observed(self, layer: nn.Module, observation: Observation) -> None:
        """Record an observation if observations are wanted."""
        if self.observe:
            self.observations[layer] = observation
