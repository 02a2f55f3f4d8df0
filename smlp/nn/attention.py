"""Self-attention (Vaswani et al., 2017), causal or over all positions, by content and by distance.

Letters: ``B`` sequences, ``n`` new tokens, ``m`` all tokens up to now, ``H`` width, ``h`` heads, ``d`` width of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.nn.layers import Dropout, xavier_linear
from smlp.nn.state import ForwardContext
from smlp.ops import toeplitz_matrices

BUCKETS, _FARTHEST = 32, 128
_ROTARY_BASE = 10000.0


class RelativeBias(nn.Module):
    """A score for each distance between two positions, for each head (T5: Raffel et al., 2020, section 2.1).

    There are 32 buckets: one for each small distance, logarithmically wider ones up to distance 128, and the last for
    all larger distances. Without causality each direction has half of the buckets.

    Args:
        num_heads: h.
        is_causal: whether no position sees a later one.
    """

    def __init__(self, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, BUCKETS))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)
        self.is_causal = is_causal

    def forward(self, num_tokens: int) -> Tensor:
        """Return the scores (h, n, n) of n tokens, query by key."""
        bucket_L = relative_buckets(num_tokens, self.is_causal, self.weight.device)
        return toeplitz_matrices(self.weight[:, bucket_L], num_tokens)


def relative_buckets(num_tokens: int, is_causal: bool, device: torch.device | None = None) -> Tensor:
    """Return the buckets of the distances from -(n-1) to n-1 (key minus query), (2n-1,); causal: 0 for later keys."""
    distance_L = torch.arange(1 - num_tokens, max(num_tokens, 1), device=device)
    buckets = BUCKETS if is_causal else BUCKETS // 2
    exact = buckets // 2
    far_L = (-distance_L).clamp(min=0) if is_causal else distance_L.abs()
    share_L = (far_L.clamp(min=1).float() / exact).log() / math.log(_FARTHEST / exact)
    shared_L = (exact + (share_L * (buckets - exact)).long()).clamp(max=buckets - 1)
    bucket_L = torch.where(far_L < exact, far_L, shared_L)
    return bucket_L if is_causal else bucket_L + (distance_L > 0) * buckets


def rotate(x_Bhnd: Tensor, start: int) -> Tensor:
    """Turn features i and i + d/2 of position t by t / 10000^(2i/d) (rotary positions: Su et al., 2021, equation 34).

    The product of a query and a key that are turned so depends on their distance, not on where they are.

    Args:
        x_Bhnd: queries or keys, (B, h, n, d), d even.
        start: t of the first position.
    """
    half, device = x_Bhnd.size(3) // 2, x_Bhnd.device
    dtype = torch.promote_types(x_Bhnd.dtype, torch.float32)
    rate_d = _ROTARY_BASE ** (torch.arange(half, device=device, dtype=dtype) / -half)
    position_n = torch.arange(start, start + x_Bhnd.size(2), device=device, dtype=dtype)
    angle_nd = position_n[:, None] * rate_d
    cos_nd, sin_nd = angle_nd.cos().to(x_Bhnd.dtype), angle_nd.sin().to(x_Bhnd.dtype)
    first, second = x_Bhnd.chunk(2, dim=3)
    return torch.cat((first * cos_nd - second * sin_nd, second * cos_nd + first * sin_nd), dim=3)


class SelfAttention(nn.Module):
    """Multi-head self-attention. In a causal model no position sees a later one; no token sees padding.

    In a causal model padding stands on the right, so that no real token could see it.

    Args:
        config: of the model.
        width: of queries, keys and values, a multiple of the heads; by default H.
        num_heads: h; by default those of the model.
        out_dim: width of the output; by default H.
        scores: "content" (queries times keys), "rotary" (the same, both turned by their positions), "relative" (plus a
            bias for each distance) or "relative_only" (the bias alone: there are no queries and keys).
    """

    def __init__(
        self,
        config: ModelConfig,
        width: int | None = None,
        num_heads: int | None = None,
        out_dim: int | None = None,
        scores: str = "content",
    ) -> None:
        super().__init__()
        width = config.embed_dim if width is None else width
        self.num_heads = config.num_heads if num_heads is None else num_heads
        self.max_tokens = config.max_tokens
        self.is_causal = not config.is_bidirectional
        self.has_content = scores != "relative_only"
        self.is_rotary = scores == "rotary"
        self.dropout = Dropout(config.attention_dropout)
        self.proj_in = xavier_linear(config.embed_dim, (3 if self.has_content else 1) * width)
        self.proj_out = xavier_linear(width, config.embed_dim if out_dim is None else out_dim)
        self.relative = None
        if scores in ("relative", "relative_only"):
            self.relative = RelativeBias(self.num_heads, self.is_causal)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        """Map (B, n, H) to (B, n, O)."""
        return self.proj_out(context.by_sequences(self._mix, self.proj_in(x_BnH)))

    def weights(self, x_BnH: Tensor, context: ForwardContext) -> Tensor:
        """Return the weights with which each position sees each one, (B, h, n, n), query by key, for reports.

        Rows sum to 1. They are those of :meth:`forward` in evaluation, for whole sequences.
        """
        x_Bn3H = self.proj_in(x_BnH)
        mask = self._mask(x_Bn3H, 0, context.valid_Bn)
        if self.has_content:
            query, key, _ = x_Bn3H.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            if self.is_rotary:
                query, key = rotate(query, 0), rotate(key, 0)
            return _shares(query, key, mask)
        assert mask is not None, "attention without content scores has a bias"
        return mask.softmax(-1).expand(x_BnH.size(0), -1, -1, -1)

    def _mix(self, x_Bn3H: Tensor, context: ForwardContext) -> Tensor:
        """Map queries, keys and values (B, n, 3H), or values alone (B, n, H), to what each position sees, (B, n, H)."""
        num_parts = 3 if self.has_content else 1
        width = x_Bn3H.size(2) // (num_parts * self.num_heads)
        # (B, 3h, n, d): the cached keys of a head are contiguous, which makes a single query twice as fast
        heads = x_Bn3H.unflatten(2, (-1, width)).transpose(1, 2)
        if self.is_rotary:
            turned, value = heads.split([2 * self.num_heads, self.num_heads], dim=1)
            heads = torch.cat((rotate(turned, context.start), value), dim=1)
        if not self.has_content:
            value, start = context.remember(self, heads, self.max_tokens)
        elif context.state is None:  # cut once, so that gradients are joined once
            (query, key, value), start = heads.chunk(3, dim=1), 0
        else:
            query, key_value = heads.split([self.num_heads, 2 * self.num_heads], dim=1)
            key_value, start = context.remember(self, key_value, self.max_tokens)
            key, value = key_value.chunk(2, dim=1)
        dropout = self.dropout.rate
        if self.is_causal and self.relative is None and start == 0:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
            return mixed.transpose(1, 2).flatten(2)
        mask = self._mask(x_Bn3H, start, context.valid_Bn)
        if self.has_content:
            if torch.compiler.is_exporting():  # torch.onnx cannot reshape what torch's attention with a mask returns
                mixed = F.dropout(_shares(query, key, mask), dropout) @ value
            else:
                mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        else:
            assert mask is not None, "attention without content scores has a bias"
            shares = mask.softmax(-1).expand(value.size(0), -1, -1, -1)
            mixed = (F.dropout(shares, dropout) if dropout else shares) @ value  # each sequence loses its own
        return mixed.transpose(1, 2).flatten(2)

    def _mask(self, x_Bn3H: Tensor, start: int, valid_Bn: Tensor | None) -> Tensor | None:
        """Return a mask that broadcasts to (B, h, n, m), bool (visible keys) or float (to add); None if unmasked."""
        num_new = x_Bn3H.size(1)
        visible = _visible(num_new, start, x_Bn3H) if self.is_causal else None
        if valid_Bn is not None and not self.is_causal:
            visible = valid_Bn[:, None, None, :]
        if self.relative is None:
            return visible
        bias = self.relative(start + num_new)[:, start:].to(x_Bn3H.dtype)
        # a number: where all is padding, rows of infinities would be NaN, in gradients too
        return bias if visible is None else bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


def _shares(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(QK + mask), (B, h, n, m); a mask of bool says which keys are visible."""
    scores = query @ key.transpose(2, 3) / math.sqrt(key.size(3))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def _visible(num_new: int, start: int, like: Tensor) -> Tensor | None:
    """Return which tokens each new one sees, (n, m); None if it sees all of them, as a single new token does."""
    if num_new == 1:
        return None
    return torch.ones(num_new, start + num_new, dtype=torch.bool, device=like.device).tril(diagonal=start)
