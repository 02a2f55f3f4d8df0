"""Forward and backward passes of image models, compared with timm's models of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from benchmarks import peers
from benchmarks.report import Row, compared
from benchmarks.settings import Settings
from benchmarks.timing import interleaved
from smlp.vision.model import ImageModel
from smlp.vision.presets import preset
from smlp.vision.weights import from_timm

SECTION = "Images, forward and backward"
IMAGES = 8
#: compiling all blocks would take minutes
COMPILED_BLOCKS = 2
#: the target of compiled models: equal, but for noise
EQUAL = 0.95
#: our model, timm's, and the target
MODELS = [("smlp_mixer_b16", "mixer_b16_224", 1.1), ("smlp_gmlp_s16", "gmlp_s16_224", 1.1)]


def rows(settings: Settings) -> Iterator[Row]:
    """Compare Mixer-B/16 and gMLP-S with timm's, with exact GELU and no stochastic depth, as timm has them.

    Both are measured without and with ``torch.compile``.
    """
    timm = peers.timm()
    if timm is None:
        return
    images, size = (1, 32) if settings.scale > 1 else (IMAGES, 224)
    blocks = 2 if settings.scale > 1 else None
    x_BcII = settings.tensor(images, 3, size, size, learnt=False)
    for name, peer, target in MODELS:
        theirs = timm.create_model(peer, img_size=size)
        ours = ImageModel(preset(name, img_size=size, activation="gelu", drop_path_rate=0.0))
        ours.load_state_dict(from_timm(theirs.state_dict()))
        if blocks:
            ours.blocks, theirs.blocks = ours.blocks[:blocks], theirs.blocks[:blocks]
        models = {"ours": ours, "theirs": theirs}
        for model in models.values():
            nn.init.normal_(model.head.weight, std=0.01)
            model.to(settings.device, settings.dtype).train()
        steps = {who: _passes(model, x_BcII) for who, model in models.items()}
        seconds = interleaved(steps, 3 if settings.quick else min(settings.repeats, 7), settings.device)
        what = f"{name}, {images} images of {size} x {size}"
        yield compared(SECTION, what, seconds["ours"], f"timm's {peer}", seconds["theirs"], target)
        if settings.quick:
            continue
        for model in models.values():
            model.blocks = model.blocks[:COMPILED_BLOCKS]
            model.compile(backend="inductor" if settings.scale == 1 else "eager")
        seconds = interleaved(steps, min(settings.repeats, 7), settings.device)
        what = f"{name}, {COMPILED_BLOCKS} blocks, compiled, {images} images"
        yield compared(SECTION, what, seconds["ours"], f"timm's {peer}, compiled", seconds["theirs"], EQUAL)


def _passes(model: nn.Module, x_BcII: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        model(x_BcII).float().square().sum().backward()

    return run
