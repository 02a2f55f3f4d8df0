"""Settings of a benchmark run, and its models: the paper's shapes, with fewer layers and half the width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.config.presets import preset
from smlp.costs.formula import flops_per_token
from smlp.costs.match import Match, match
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext

#: the paper's models have 28 + 12 layers, H = 1024, F = 4096, T = 1024 and an expert per rank
WIDTH, HIDDEN, LENGTH, VOCABULARY, EXPERTS = 512, 2048, 1024, 4096, 4
LAYERS = {"num_dense_layers": 5, "num_sparse_layers": 2}
FULL_WIDTH = (1024, 4096)
FULL_SIZE = {"num_dense_layers": 28, "num_sparse_layers": 12}


@dataclass(frozen=True)
class Settings:
    """Device and effort of a run; ``scale`` divides all sizes, which only the tests use."""

    device: str = "cpu"
    quick: bool = False
    scale: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Return bf16 for a GPU and fp32 for a CPU."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def repeats(self) -> int:
        """Return how often each alternative is run."""
        if self.scale > 1:
            return 1
        return 5 if self.quick else 11

    @property
    def num_seqs(self) -> int:
        """Return the sequences of an update: on a GPU what one of the paper's 32 gets of its 512."""
        if self.scale > 1:
            return 1
        return 16 if self.device == "cuda" else 2 if self.quick else 4

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Return H, F and T of single layers: the paper's on a GPU."""
        return self.sized(*(FULL_WIDTH if self.device == "cuda" else (WIDTH, HIDDEN)), LENGTH)

    def tensor(self, *shape: int, learnt: bool = True) -> torch.Tensor:
        """Return a tensor of normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=learnt)

    def sized(self, *sizes: int) -> tuple[int, ...]:
        """Return the sizes, divided by ``scale``."""
        return tuple(max(size // self.scale, 1) for size in sizes)


def matched(settings: Settings, archs: list[str]) -> dict[str, Match]:
    """Return each architecture at the cost of sMLP: on a CPU a model for two cores, on a GPU the paper's small size."""
    gpu = settings.device == "cuda"
    width, hidden, length, vocabulary = settings.sized(WIDTH, HIDDEN, LENGTH, VOCABULARY)
    if gpu:
        (width, hidden), vocabulary = FULL_WIDTH, 51200
    shared = {"embed_dim": width, "max_tokens": length, "vocab_size": vocabulary}
    smlp = preset("smlp", ffn_dim=hidden, num_experts=EXPERTS, **shared, **(FULL_SIZE if gpu else LAYERS))
    target = flops_per_token(smlp)
    # the paper's GShard has two experts on a rank where the others have one
    return {
        arch: match(arch, target, overrides={**shared, "num_experts": 2 * EXPERTS if arch == "gshard_lm" else EXPERTS})
        for arch in archs
    }


def drawn(config: ModelConfig, settings: Settings) -> Decoder:
    """Return a model with random numbers that are drawn on the device, which takes no time for billions of weights."""
    with torch.device("meta"):
        model = Decoder(config)
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            values = torch.empty(tensor.shape, dtype=settings.dtype, device=settings.device).normal_(std=0.02)
            state[name] = values.add_(1) if "norm" in name and name.endswith("weight") else values
        else:  # the experts of a table
            state[name] = torch.randint(config.num_experts, tensor.shape, device=settings.device)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_()


def through(layer: nn.Module, x_BnH: Tensor, tokens_Bn: Tensor | None = None) -> Callable[[], Tensor]:
    """Return the forward pass of a layer or block with auxiliary losses, whose gradients are wanted too."""

    def run() -> Tensor:
        update_BnH, aux_losses = layer(x_BnH, ForwardContext(tokens_Bn=tokens_Bn))
        return update_BnH + sum(aux_losses.values())

    return run
