"""Image folders for timm's loaders: checked before the work begins, and with damaged files named.

The layout is that of ImageNet and of ``smlp vision data``: ``DIR/train/CLASS/IMAGE``, ``DIR/validation/CLASS/IMAGE``.
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import FastCollateMixup, ImageDataset, create_dataset, create_loader
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key

from smlp.errors import UserError, one_line
from smlp.files import regular_file

# names that timm takes for one another
_ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "eval", "evaluation"),
}

_MOST_SIDES = 1000  # how often the shorter side of a picture may go into the longer one
_UNREAD = {".avif", ".bmp", ".gif", ".heic", ".jp2", ".tif", ".tiff", ".webp"}  # images that timm passes over


class NamedImages(ImageDataset):
    """timm's dataset, except that an unreadable image is an error; timm replaces it by its neighbour."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not os.path.isfile(path := self.reader.filename(index, absolute=True)):
            regular_file(path, "image")  # says what it is: reading a named pipe would wait for ever
        try:
            file, target = self.reader[index]
            with file, Image.open(file, formats=_formats()) as opened:
                short, long = sorted(opened.size)
                if long > _MOST_SIDES * short:  # the longer one would grow with the shorter
                    raise UserError(f"{path} has {opened.size[0]:,} x {opened.size[1]:,} pixels: remove or replace it")
                if opened.mode[0] in "IF":  # Pillow would clip its pixels to 0 to 255
                    raise UserError(f"{path} has {opened.mode} pixels, not 8 bits: convert it, or leave it out")
                image = opened.convert(self.input_img_mode)
        except UserError:
            raise
        except Exception as error:  # Pillow's SyntaxError, struct.error, DecompressionBombError, ...
            raise UserError(f"{path} cannot be opened as an image ({error}): remove or replace it") from None
        with said_by_timm(f"--aa and the other options of augmentation, on {path}"):
            return self.transform(image), target


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return Pillow's formats, without PostScript: Pillow has Ghostscript run the program in it."""
    Image.init()
    return tuple(sorted(set(Image.ID) - {"EPS"}))


@contextmanager
def said_by_timm(options: str) -> Iterator[None]:
    """Turn timm's and torch's errors about the values of options into one sentence.

    Raises:
        UserError: it names the options and what was raised.
    """
    try:
        yield
    except UserError:
        raise
    except (AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"timm does not take {options}: {type(error).__name__} {one_line(error)}".rstrip()) from None


def split_folder(data_dir: str, split: str) -> Path:
    """Return the folder of a split.

    Raises:
        UserError: it does not exist. (timm would take ``data_dir`` itself, so training and validation would share it.)
    """
    names = next((names for names in _ALIASES.values() if split in names), ())
    for name in dict.fromkeys((split, *names)):
        if (Path(data_dir) / name).is_dir():
            return Path(data_dir) / name
    raise UserError(f"--data-dir {data_dir} has no folder {split}: each split is a folder with one folder a class")


def open_split(data_dir: str, split: str, classes: list[str] | None, channels: int = 3) -> NamedImages:
    """Return the images of a split, without transforms.

    Args:
        data_dir, split: the folder is ``data_dir/split``.
        classes: names in the order of their labels; None for those of this folder.
        channels: 3, or 1 to read images as grey.

    Raises:
        UserError: the folder is missing, holds no images or no classes, or has a class that ``classes`` lacks.
    """
    folder = split_folder(data_dir, split)
    _check_links(folder)
    known = None if classes is None else {name: label for label, name in enumerate(classes)}
    kinds = set(get_img_extensions())
    try:
        reader = create_dataset("", root=str(folder), search_split=False, class_map=known).reader
    except RuntimeError:
        found = sorted(one.name for one in folder.iterdir() if one.is_dir())
        if classes is not None and (unknown := [name for name in found if name not in classes]):
            raise UserError(_unknown(folder, unknown, classes)) from None
        read = ", ".join(sorted(kinds))
        raise UserError(f"{folder} holds no images in folders of classes (timm reads {read})") from None
    if known is None:  # timm leaves names that differ only in case or leading zeros in no order that ranks share
        names = sorted(reader.class_to_idx, key=lambda name: (natural_key(name), name))
        if names != sorted(names, key=reader.class_to_idx.get):
            known = {name: label for label, name in enumerate(names)}
            reader = create_dataset("", root=str(folder), search_split=False, class_map=known).reader
    strange = sorted(path for path in folder.iterdir() if path.suffix.lower() in kinds and path.is_file())
    if strange or len(reader.class_to_idx) < 2:
        what = f"images without a class, such as {strange[0]}" if strange else "a single class"
        raise UserError(f"{folder} has {what}: the images of each class belong in a folder of its own")
    reader.samples.sort(key=lambda sample: (natural_key(sample[0]), sample[0]))  # on all ranks, as the classes
    found = [Path(path) for path, _ in reader.samples]
    if classes is not None:  # timm has left out those in folders without a class's name
        walked = ((place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
        found = [Path(place, name) for place, name in walked if Path(name).suffix.lower() in kinds]
    astray = [path for path in found if path.parent.parent != folder or path.parent.name[0] == "."]
    if astray:
        raise UserError(f"{astray[0]}: images belong in {folder}/CLASS, not in folders below, nor in hidden ones")
    if classes is not None and (unknown := {one.name for one in folder.iterdir() if one.is_dir()} - set(classes)):
        raise UserError(_unknown(folder, sorted(unknown), classes))
    return NamedImages(str(folder), reader=reader, input_img_mode="RGB" if channels == 3 else "L")


def _check_links(folder: Path) -> None:
    """Refuse links to folders inside of a class, and classes that are links to a folder above them.

    timm follows them, and two that lead upwards have 2^40 paths.
    """
    above = {folder.resolve(), *folder.resolve().parents}
    for one in folder.iterdir():
        if not one.is_dir():
            continue
        if one.is_symlink() and one.resolve() in above:
            raise UserError(f"{one} is a link to a folder above it: the images of each class belong in its folder")
        for place, names, _ in os.walk(one):
            if link := next((path for name in names if (path := Path(place, name)).is_symlink()), None):
                raise UserError(f"{link} is a link to a folder: images belong in {folder}/CLASS, not in folders below")


def warn_of_unread(dataset: NamedImages) -> None:
    """Print how many images of a split are of kinds that timm leaves out, if any are."""
    kinds = set(get_img_extensions())
    found = [path for path in Path(dataset.reader.root).glob("*/*") if path.suffix.lower() in _UNREAD - kinds]
    if found:
        print(
            f"smlp: warning: {len(found):,} images such as {min(found)} are left out: timm reads "
            f"{', '.join(sorted(kinds))}",
            file=sys.stderr,
        )


def class_names(dataset: NamedImages) -> list[str]:
    """Return the names of the classes in the order of their labels."""
    return sorted(dataset.reader.class_to_idx, key=dataset.reader.class_to_idx.get)


def _unknown(folder: Path, names: list[str], classes: list[str]) -> str:
    wanted = f"the {len(classes)} classes of training that have images"
    return f"{folder} has the class {names[0]}, which is not among {wanted}"


def training_loader(dataset: NamedImages, args: Namespace, config: dict[str, Any], device: torch.device) -> Any:
    """Return timm's training loader: augmentation, random erasing, mixup and CutMix as the options say.

    Workers start anew in each epoch, so that their random numbers follow from the seed and the epoch alone.

    Raises:
        UserError: the images do not fill one batch on every rank, or mixup is to pair an odd number of images.
    """
    if len(dataset) // args.world_size < args.batch_size:
        raise UserError(
            f"--batch-size {args.batch_size} on {args.world_size} rank(s) is more than the {len(dataset)} images of "
            f"{dataset.reader.root}"
        )
    mixes = args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None
    if mixes and args.batch_size % 2:
        raise UserError(f"--mixup and --cutmix pair the images of a batch: --batch-size {args.batch_size} is odd")
    if args.cutmix_minmax is not None:
        least, most = args.cutmix_minmax
        for side in config["input_size"][1:]:
            if int(side * least) == int(side * most):  # timm draws from the first up to, but without, the second
                raise UserError(
                    f"--cutmix-minmax {least:g} {most:g} is {int(side * least)} to {int(side * most)} pixels of {side}"
                    ": the second must be more"
                )
    collate = FastCollateMixup(
        mixup_alpha=args.mixup,
        cutmix_alpha=args.cutmix,
        cutmix_minmax=args.cutmix_minmax,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
        mode=args.mixup_mode,
        label_smoothing=args.smoothing,
        num_classes=args.num_classes,
    )
    loader = create_loader(
        dataset,
        input_size=config["input_size"],
        batch_size=args.batch_size,
        is_training=True,
        no_aug=args.no_aug,
        re_prob=args.reprob,
        re_mode=args.remode,
        re_count=args.recount,
        train_crop_mode=args.train_crop_mode,
        scale=args.scale,
        ratio=args.ratio,
        hflip=args.hflip,
        vflip=args.vflip,
        color_jitter=args.color_jitter,
        auto_augment=args.aa,
        interpolation=config["interpolation"] if args.no_aug else args.train_interpolation,
        mean=config["mean"],
        std=config["std"],
        num_workers=args.workers,
        distributed=args.distributed,
        collate_fn=collate if mixes else None,
        pin_memory=device.type == "cuda",
        device=device,
        persistent_workers=False,
    )
    if args.distributed:
        # timm leaves it at 0; torch adds the epoch, so that seed 1 has the orders of seed 2, each an epoch later
        loader.sampler.seed = args.seed
    return loader


def evaluation_loader(dataset: NamedImages, args: Namespace, config: dict[str, Any], device: torch.device) -> Any:
    """Return timm's loader for evaluation: resized and cropped from the centre, in order."""
    return create_loader(
        dataset,
        input_size=config["input_size"],
        batch_size=args.validation_batch_size or args.batch_size,
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
        num_workers=args.workers,
        distributed=args.distributed,
        pin_memory=device.type == "cuda",
        device=device,
        persistent_workers=False,
    )
