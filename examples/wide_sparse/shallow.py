"""Figure 2d: the error of ``Bc B2 ReLU(B1 x)`` on MNIST where B1 and B2 are Monarch matrices or Kronecker products.

    smlp vision data mnist --out data/mnist
    python examples/wide_sparse/shallow.py data/mnist                # 200 epochs, five seeds of each: 84 minutes
    python examples/wide_sparse/shallow.py data/mnist --epochs 10    # minutes

AdamW, cosine from 0.01 to 0, as in Hayase and Karakida, 2024 (C.1), which says nothing of batch, decay, bias and start:
here 128 images, 0.01, none, and variance 1 / inputs (Bc: torch's own start). Images stay in memory and are not
augmented.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from smlp.wide_sparse.layers import KroneckerLinear, MonarchLinear

LAYERS = {"monarch": MonarchLinear, "kronecker": KroneckerLinear}


def read_images(folder: Path) -> tuple[Tensor, Tensor]:
    """Return all images of a folder of classes, (N, rows, columns), standardised, and their labels, (N,)."""
    paths = sorted(folder.glob("*/*.png"))
    if not paths:
        raise SystemExit(f"{folder} has no CLASS/NAME.png: make it with smlp vision data mnist --out DIR")
    classes = sorted({path.parent.name for path in paths})
    pixels = np.stack([np.asarray(Image.open(path).convert("L"), dtype=np.float32) for path in paths])
    x_Nhw = torch.from_numpy(pixels)
    return (x_Nhw - x_Nhw.mean()) / x_Nhw.std(), torch.tensor([classes.index(path.parent.name) for path in paths])


def shallow_mlp(layer: str, rows: int, columns: int, num_classes: int) -> nn.Sequential:
    """Return ``Bc B2 ReLU(B1 x)`` of width rows * columns: (B, rows, columns) to (B, classes)."""
    first, second = (LAYERS[layer](rows, columns) for _ in range(2))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(rows * columns, num_classes, bias=False))


def error(model: nn.Module, x_Nhw: Tensor, y_N: Tensor) -> float:
    """Return the share of images that are classified wrongly, in percent."""
    with torch.no_grad():
        return 100 * (model(x_Nhw).argmax(1) != y_N).double().mean().item()


def train(layer: str, data: dict[str, tuple[Tensor, Tensor]], epochs: int, seed: int) -> tuple[float, float]:
    """Return the errors of a trained network on the images that it learnt and on the others."""
    torch.manual_seed(seed)
    (x_Nhw, y_N), held_out = data["train"], data["validation"]
    model = shallow_mlp(layer, x_Nhw.size(1), x_Nhw.size(2), int(y_N.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(y_N) // 128))
    for _ in range(epochs):
        for index_B in torch.randperm(len(y_N)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x_Nhw[index_B]), y_N[index_B]).backward()
            optimizer.step()
            schedule.step()
    return error(model, x_Nhw, y_N), error(model, *held_out)


def main() -> None:
    """Train both networks with every seed; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="folder of smlp vision data")
    parser.add_argument("--epochs", type=int, default=200, help="passes over the images (default: 200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of start and order")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}")
    data = {split: read_images(args.data / split) for split in ("train", "validation")}
    for seed in args.seeds:
        for layer in LAYERS:
            start = time.perf_counter()
            learnt, held_out = train(layer, data, args.epochs, seed)
            seconds = time.perf_counter() - start
            print(
                f"{layer} seed {seed}: error {held_out:.2f} % ({learnt:.2f} % in training), {seconds:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
