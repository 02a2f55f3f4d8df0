"""MLP-Mixer and gMLP for images. Modules are named as timm's are, and serve timm as models.

Letters: ``B`` images, ``I`` side of an image, ``S`` tokens, ``C`` channels, ``D`` hidden width over tokens, ``F`` over
channels, ``G`` groups, ``K`` classes, ``g`` patches of side ``P`` along a side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smlp.config.settings import require
from smlp.nn.blocks import SpatialGatingUnit
from smlp.nn.layers import Dropout, FeedForward, Linear, MaskedLinear
from smlp.nn.state import ForwardContext
from smlp.ops import ACTIVATION_FUNCTIONS, activated_halves, linear, token_linear
from smlp.ops.fast_paths import skips_dropped
from smlp.vision.presets import ImageConfig
from smlp.wide_sparse.layers import Permutation

#: timm's names of the ways of pooling; "" returns all tokens
_POOLS = {"mean": "avg", "cls": "token"}


class DropPath(nn.Module):
    """Add a residual branch; in training drop it for some images, and scale it for the others so that the mean stays.

    What is dropped is not computed on a CPU. On a GPU, and in a compiled model, it is computed and masked: there, the
    number of images that are kept is not known in advance.

    Args:
        probability: that an image's branch is dropped.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x_BSC: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``x + branch(x)``, (B, S, C), or ``x + branch(x) / (1 - p)`` for the images that keep it."""
        if not self.training or self.probability == 0:
            return x_BSC + branch(x_BSC)
        share = 1 - self.probability
        kept_B = x_BSC.new_empty(x_BSC.size(0)).bernoulli_(share)
        if skips_dropped(x_BSC):
            index_b = kept_B.nonzero().squeeze(1)
            added_bSC = branch(x_BSC[index_b]).to(x_BSC.dtype)  # autocast computes it in bf16
            return x_BSC.index_add(0, index_b, added_bSC, alpha=1 / share)
        return torch.addcmul(x_BSC, branch(x_BSC), kept_B.view(-1, 1, 1), value=1 / share)

    def extra_repr(self) -> str:
        return f"probability={self.probability:.4g}"


class Stem(nn.Module):
    """Map each patch to a token, in raster order.

    A convolution, computed as the product that it is, whose result has the tokens' layout.
    """

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.img_size = config.img_size
        self.proj = nn.Conv2d(config.in_chans, config.embed_dim, config.patch_size, config.patch_size)

    def forward(self, x_BcII: Tensor) -> Tensor:
        """Map (B, channels, I, I) to (B, S, C)."""
        height, width = x_BcII.shape[2:]
        require(
            height == width == self.img_size,
            f"images of {height} x {width} pixels, but the model is for {self.img_size} x {self.img_size}",
        )
        weight_C_cPP, patch = self.proj.weight.flatten(1), self.proj.kernel_size[0]
        x_BcgPgP = x_BcII.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
        return linear(x_BcgPgP.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2), weight_C_cPP, self.proj.bias)


class UntiedLinear(nn.Module):
    """A linear map of its own for each channel, (B, C, inputs) to (B, C, outputs)."""

    def __init__(self, num_channels: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(num_channels, outputs))

    def forward(self, x_BCi: Tensor) -> Tensor:
        return torch.baddbmm(self.bias.unsqueeze(1), x_BCi.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


class TokenMLP(nn.Module):
    """``W2 act(W1 x + b1) + b2`` over the tokens of each channel (Tolstikhin et al., 2021, supplement, listing 1).

    Variants of section A.1: "untied" has a network for each channel; "grouped" lets one see G neighbouring channels at
    once, as one vector of length G*S; "views" does the same after linear maps, without bias, from C to G times C/G
    features. Where tokens in and out differ, the model is a pyramid.

    Args:
        config: of the model.
        tokens_in, tokens_out: S before and after.
    """

    def __init__(self, config: ImageConfig, tokens_in: int, tokens_out: int) -> None:
        super().__init__()
        inputs, outputs = (tokens * config.token_groups for tokens in (tokens_in, tokens_out))
        self.groups = config.token_groups
        self.is_untied = config.token_mixing == "untied"
        self.views = None
        if config.token_mixing == "views":
            self.views = nn.Linear(config.embed_dim, config.embed_dim, bias=False)
        if self.is_untied:
            self.fc1: nn.Module = UntiedLinear(config.embed_dim, inputs, config.token_dim)
            self.fc2: nn.Module = UntiedLinear(config.embed_dim, config.token_dim, outputs)
        else:
            self.fc1, self.fc2 = Linear(inputs, config.token_dim), Linear(config.token_dim, outputs)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S', C)."""
        if self.groups == 1 and self.views is None:
            return self._mixed(x_BSC)
        # a view is a run of C/G features; a group is G neighbours, feature j of which stands first
        if self.views is not None:
            x_BGSc = self.views(x_BSC).unflatten(2, (self.groups, -1)).transpose(1, 2)
        else:
            x_BGSc = x_BSC.unflatten(2, (-1, self.groups)).permute(0, 3, 1, 2)
        x_BGSc = self._mixed(x_BGSc.flatten(1, 2)).unflatten(1, (self.groups, -1))
        return (x_BGSc.transpose(1, 2) if self.views is not None else x_BGSc.permute(0, 2, 3, 1)).flatten(2)

    def _mixed(self, x_BSC: Tensor) -> Tensor:
        if self.is_untied:
            return self.fc2(self.activation(self.fc1(x_BSC.transpose(1, 2)))).transpose(1, 2)
        hidden_BDC = self.activation(token_linear(x_BSC, self.fc1.weight, self.fc1.bias))
        return token_linear(hidden_BDC, self.fc2.weight, self.fc2.bias)


class TokenLayer(nn.Module):
    """``act(W x)`` over each channel's tokens, without bias: an S-Mixer's (Hayase and Karakida, 2024, S.3, S.7)."""

    def __init__(self, tokens_in: int, tokens_out: int, activation: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens_out, tokens_in))
        self.activation = ACTIVATION_FUNCTIONS[activation]

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S', C)."""
        return self.activation(self.weight @ x_BSC)


class ChannelLayer(nn.Module):
    """``act(x V)``, without bias: an S-Mixer's (Hayase and Karakida, 2024, S.3, S.8)."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__()
        self.fc = Linear(channels, channels, bias=False)
        self.activation = ACTIVATION_FUNCTIONS[activation]

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C)."""
        return self.activation(self.fc(x_BSC))


class NormedSkip(nn.Module):
    """``LN(W x)`` over tokens: the skip connection where their number changes (Hayase and Karakida, 2024, S.15)."""

    def __init__(self, config: ImageConfig, tokens_in: int, tokens_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(tokens_in, tokens_out, bias=False)
        self.norm = nn.LayerNorm(config.embed_dim, config.norm_eps)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S', C)."""
        return self.norm(self.proj.weight @ x_BSC)


class MixerBlock(nn.Module):
    """``x + token MLP(LN(x))``, then ``x + channel MLP(LN(x))`` (Tolstikhin et al., 2021, supplement, listing 1).

    A token MLP that changes the number of tokens (a pyramid) has no residual; the paper prints none. In an S-Mixer each
    MLP is one layer. An RP-Mixer permutes all features before and after each of them: with random permutations P1 and
    P2, ``P2 J_c^T (I kron W) J_c P1`` is equation 19 with ``J1 = J_c P1``, which is as random as P1.
    """

    def __init__(
        self, config: ImageConfig, tokens: tuple[int, int], drop_paths: tuple[float, float], has_skip: bool = False
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, config.norm_eps)
        is_simple = config.block == "s_mixer"
        self.mlp_tokens = TokenLayer(*tokens, config.activation) if is_simple else TokenMLP(config, *tokens)
        self.drop_path1 = DropPath(drop_paths[0])
        self.norm2 = nn.LayerNorm(config.embed_dim, config.norm_eps)
        if is_simple:
            self.mlp_channels: nn.Module = ChannelLayer(config.embed_dim, config.activation)
        else:
            self.mlp_channels = FeedForward(config.embed_dim, config.ffn_dim, config.activation)
        self.drop_path2 = DropPath(drop_paths[1])
        self.skip = NormedSkip(config, *tokens) if has_skip else None
        self.is_residual = tokens[0] == tokens[1]
        self.orders = nn.ModuleList()
        if config.permutations == "random":
            sizes = [count * config.embed_dim for count in (*tokens, tokens[1], tokens[1])]
            self.orders.extend(Permutation.random(size) for size in sizes)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S', C)."""
        if self.skip is not None:
            x_BSC = self.skip(x_BSC) + self._mixed(self.norm1(x_BSC), self.mlp_tokens, 0)
        elif self.is_residual:
            x_BSC = self.drop_path1(x_BSC, lambda x: self._mixed(self.norm1(x), self.mlp_tokens, 0))
        else:
            x_BSC = self._mixed(self.norm1(x_BSC), self.mlp_tokens, 0)
        return self.drop_path2(x_BSC, lambda x: self._mixed(self.norm2(x), self.mlp_channels, 2))

    def _mixed(self, x_BSC: Tensor, network: nn.Module, first: int) -> Tensor:
        """Apply a network, in an RP-Mixer between the permutations ``first`` and ``first + 1``."""
        if not self.orders:
            return network(x_BSC)
        return self.orders[first + 1](network(self.orders[first](x_BSC)))


class SparseLayerBlock(nn.Module):
    """``x + act((M * W) LN(x))`` with a static mask M, over all features at once (Hayase and Karakida, 2024, S.16).

    With a hidden width it is ``x + (M2 * W2) act((M1 * W1) LN(x))`` (S.17, which names W2 twice). Where the width
    changes there is no ``x +``; the paper does not say how its first layer reaches the width.
    """

    def __init__(self, config: ImageConfig, inputs: int, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs, config.norm_eps)
        hidden = config.mlp_hidden
        self.layer = MaskedLinear(inputs, hidden or config.width, config.mask_density, bias=False)
        self.out = MaskedLinear(hidden, config.width, config.mask_density, bias=False) if hidden else None
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.drop_path = DropPath(drop_path)
        self.is_residual = inputs == config.width

    def forward(self, x_B1m: Tensor) -> Tensor:
        """Map (B, 1, inputs) to (B, 1, m)."""
        return self.drop_path(x_B1m, self._mixed) if self.is_residual else self._mixed(x_B1m)

    def _mixed(self, x_B1m: Tensor) -> Tensor:
        x_B1h = self.activation(self.layer(self.norm(x_B1m)))
        return x_B1h if self.out is None else self.out(x_B1h)


class ImageGatedMLP(nn.Module):
    """``V s(act(U x))`` with the spatial gating unit s over all tokens (Liu et al., 2021, equation 1)."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.embed_dim, config.ffn_dim)
        self.activation = config.activation
        self.gate = SpatialGatingUnit(
            config.ffn_dim // 2,
            config.num_tokens,
            config.spatial_init_scale / config.num_tokens,
            is_causal=False,
            norm_eps=config.gate_norm_eps,
        )
        self.fc2 = Linear(config.ffn_dim // 2, config.embed_dim)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C)."""
        return self.fc2(self.gate(*activated_halves(self.fc1(x_BSC), self.activation), ForwardContext()))


class ImageGatedBlock(nn.Module):
    """``x + V s(act(U LN(x)))`` (Liu et al., 2021, Figure 1)."""

    def __init__(self, config: ImageConfig, drop_path: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim, config.norm_eps)
        self.mlp_channels = ImageGatedMLP(config)
        self.drop_path = DropPath(drop_path)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C)."""
        return self.drop_path(x_BSC, lambda x: self.mlp_channels(self.norm(x)))


class ImageModel(nn.Module):
    """A classifier of images: stem, blocks, layer norm, pooling, head (the papers' input and output).

    Weights start as in listing 1: LeCun's truncated normal, zero biases, a head of zeros; those over tokens of a gMLP
    start near zero and their biases at one (Liu et al., 2021, section 2.1).

    Args:
        config: of the model.
    """

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.is_flat = config.block == "sparse_mlp"
        features = config.width if self.is_flat else config.embed_dim
        self.num_features = self.head_hidden_size = self.embed_dim = features
        self.global_pool = _POOLS[config.pool]
        self.grad_checkpointing = False
        self.stem = Stem(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim)) if config.pool == "cls" else None
        rates = config.drop_path_rates()
        blocks: list[nn.Module]
        if config.block in ("mixer", "s_mixer"):
            pairs = zip(rates[::2], rates[1::2], strict=True)
            blocks = [
                MixerBlock(config, *given, has_skip=config.mixed_tokens > 0 and layer == 0)
                for layer, given in enumerate(zip(config.tokens_of_layers(), pairs, strict=True))
            ]
        elif self.is_flat:
            inputs = [config.num_tokens * config.embed_dim] + [config.width] * (config.num_layers - 1)
            blocks = [SparseLayerBlock(config, *given) for given in zip(inputs, rates, strict=True)]
        else:
            blocks = [ImageGatedBlock(config, rate) for rate in rates]
        self.blocks = nn.ModuleList(blocks)
        # a sparse MLP has none before its head (Hayase and Karakida, 2024, A.2.5)
        self.norm = nn.Identity() if self.is_flat else nn.LayerNorm(config.embed_dim, config.norm_eps)
        self.representation = nn.Linear(config.embed_dim, config.embed_dim) if config.pool == "cls" else None
        self.head_drop = Dropout(config.drop_rate)
        self.head = self._new_head()
        self.apply(_start)
        _zero(self.head)

    def forward(self, x_BcII: Tensor) -> Tensor:
        """Return the logits (B, K) of images (B, channels, I, I)."""
        return self.forward_head(self.forward_features(x_BcII))

    def forward_features(self, x_BcII: Tensor) -> Tensor:
        """Return the normed tokens of the last block, (B, S, C); a class token comes first.

        A sparse MLP returns (B, 1, m).
        """
        x_BSC = self.stem(x_BcII)
        if self.is_flat:
            x_BSC = x_BSC.flatten(1).unsqueeze(1)
        if self.cls_token is not None:
            x_BSC = torch.cat([self.cls_token.expand(x_BSC.size(0), -1, -1), x_BSC], dim=1)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                x_BSC = checkpoint(block, x_BSC, use_reentrant=False)
            else:
                x_BSC = block(x_BSC)
        return self.norm(x_BSC)

    def forward_head(self, x_BSC: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits (B, K) of final tokens, or with ``pre_logits`` the input of the head."""
        if self.global_pool:
            x_BSC = x_BSC[:, 0] if self.cls_token is not None else x_BSC.mean(dim=1)
        if self.representation is not None:
            x_BSC = self.representation(x_BSC).tanh()
        x_BSC = self.head_drop(x_BSC)
        return x_BSC if pre_logits else self.head(x_BSC)

    # methods that timm's training script, optimizers and checkpoints call

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one of zeros for so many classes; 0 leaves it out.

        Raises:
            UserError: the model does not pool in this way.
        """
        if global_pool is not None:
            own = ("", _POOLS[self.config.pool])
            require(global_pool in own, f"global_pool must be one of {own} in this model, got {global_pool!r}")
            self.global_pool = global_pool
        weight = self.stem.proj.weight
        self.num_classes = num_classes
        self.head = self._new_head().to(weight.device, weight.dtype).train(self.training)
        _zero(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute each block again in the backward pass, which saves memory."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of names by which timm groups parameters into layers."""
        last = (r"^(?:norm|representation)", (99999,))
        return {"stem": r"^(?:stem|cls_token)", "blocks": [(r"^blocks\.(\d+)", None), last]}

    def no_weight_decay(self) -> set[str]:
        """Return the names of biases, which may have two axes here, and of the class token."""
        return {name for name, _ in self.named_parameters() if name.endswith((".bias", "cls_token"))}

    def _new_head(self) -> nn.Module:
        return nn.Linear(self.embed_dim, self.num_classes) if self.num_classes else nn.Identity()


def _start(module: nn.Module) -> None:
    """Set the initial weights of a layer: LeCun's normal, cut at two deviations, and zero biases."""
    if isinstance(module, MaskedLinear):
        module.start((module.density * module.weight.size(1)) ** -0.5)
    if isinstance(module, nn.Linear | nn.Conv2d | UntiedLinear | TokenLayer):
        fan_in = module.weight[0].numel() if isinstance(module, nn.Conv2d) else module.weight.size(-1)
        # 0.8796 is the deviation of a standard normal that is cut at two
        nn.init.trunc_normal_(module.weight, std=(std := fan_in**-0.5 / 0.87962566103423978), a=-2 * std, b=2 * std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def _zero(head: nn.Module) -> None:
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
