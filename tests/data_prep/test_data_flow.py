"""Streams, documents, parts and workers of ``smlp data``."""

import contextlib
import errno
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import pytest
from running import REPOSITORY

from data_prep.flow import documents, limits, running, streams
from data_prep.flow.documents import Defect, Loss, ReadSettings, Record, read
from data_prep.flow.manifest import SETTINGS, STATE, Counts, PartResult, is_whole, read_manifest, write_manifest
from data_prep.flow.options import run_of
from data_prep.flow.parts import FilePart, find_files, plan_parts, report_left_out, unique_name
from data_prep.flow.running import Report, StepRun, begin, is_done, locked, run_parts
from data_prep.flow.streams import DamagedFile, json_line, open_stream, sha256_of, write_bytes, write_stream
from data_prep.flow.workers import PartFailed
from smlp import __version__
from smlp.errors import UserError

SUFFIXES = ["", ".gz", ".zst", ".xz", ".bz2"]


def documents_in(path, reading):
    return read(FilePart.whole(path), reading)


def write(path, content):
    with write_stream(path) as (stream, _):
        stream.write(content)
    return path


def texts(pieces):
    return [piece.text if isinstance(piece, Record) else piece for piece in pieces]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_streams_come_back_and_are_the_same_bytes_each_time(tmp_path, suffix):
    content = b"line of text\n" * 200_000
    first, second = (write(tmp_path / f"{name}.txt{suffix}", content) for name in "ab")
    with open_stream(first) as stream:
        assert stream.read() == content
    assert first.read_bytes() == second.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_file_that_breaks_off_gives_what_came_before(tmp_path, suffix):
    rows = b"".join(
        json.dumps({"text": f"{number} {os.urandom(200).hex()}"}).encode() + b"\n" for number in range(5000)
    )
    path = write(tmp_path / f"a.jsonl{suffix}", rows)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    pieces = list(documents_in(path, ReadSettings()))
    records = [piece for piece in pieces if isinstance(piece, Record)]
    assert 1000 < len(records) < 5000
    assert [piece.text for piece in records] == [json.loads(row)["text"] for row in rows.splitlines()[: len(records)]]
    assert [piece.reason for piece in pieces if isinstance(piece, Loss)] == ["cut off by damage"]
    problems = [piece.problem for piece in pieces if isinstance(piece, Defect)]
    assert problems == ["damaged: it breaks off", "1 document lost where it breaks off"]


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_files_of_several_streams(tmp_path, suffix):
    """Also with the padding that .xz allows between them; what is no stream, or a damaged one, is damage."""
    parts = [json.dumps({"text": f"{number} {os.urandom(300).hex()}"}).encode() + b"\n" for number in range(200)]
    streams = [
        write(tmp_path / f"{name}{suffix}", b"".join(some)).read_bytes()
        for name, some in (("one", parts[:90]), ("two", parts[90:]))
    ]
    path = tmp_path / f"a.jsonl{suffix}"
    paddings = (b"", b"\0" * 4, b"\0" * (1 << 21)) if suffix in (".xz", ".bz2", ".gz") else (b"",)
    for padding in paddings:
        path.write_bytes(padding.join([*streams, b""]))
        assert texts(documents_in(path, ReadSettings())) == [json.loads(part)["text"] for part in parts]
    damaged = bytes([*streams[1][:1], streams[1][1] ^ 0x40, *streams[1][2:]])
    for second in (damaged, b"no stream at all, and longer than any header of one " * 9, streams[1][:-9]):
        path.write_bytes(streams[0] + second)
        pieces = list(documents_in(path, ReadSettings()))
        assert len([piece for piece in pieces if isinstance(piece, Record)]) >= 90
        assert any(isinstance(piece, Defect) and "damaged" in piece.problem for piece in pieces)


def test_a_file_that_is_not_compressed_at_all(tmp_path):
    for suffix in SUFFIXES[1:]:
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(b"just text\n\nmore")
        with pytest.raises(DamagedFile, match=f"a.txt{suffix}"), open_stream(path) as stream:
            stream.read()
        assert [type(piece) for piece in documents_in(path, ReadSettings())] == [Loss, Defect, Defect]


def test_every_line_is_utf_8():
    row = {"text": "é half \ud800 of a pair"}
    assert json.loads(json_line(row).decode("utf-8")) == row and b"\\ud800" in json_line(row)
    assert json_line({"text": "é"}) == '{"text": "é"}\n'.encode()


def test_numbers_that_json_lacks_become_strings():
    row = json.loads('{"text": "é \\ud800", "score": [1e999, -1e999, 1.5], "more": {"n": NaN}}')
    found = json.loads(json_line(row), parse_constant=pytest.fail)
    assert found == {"text": "é \ud800", "score": ["inf", "-inf", 1.5], "more": {"n": "nan"}}


def test_rows_that_are_nested_deep(tmp_path):
    """Python reads deeper ones than it may be able to write."""
    path = tmp_path / "a.jsonl"
    rows = ['{"text": "t", "n": ' + "[" * depth + number + "]" * depth + "}" for depth in (499, 500) for number in "1"]
    rows.insert(1, rows[0].replace("1]", "1e999]"))
    path.write_text("\n".join([*rows, '{"text": "' + "[{" * 900 + '"}']) + "\n")
    pieces = list(documents_in(path, ReadSettings()))
    assert [type(piece) for piece in pieces] == [Record, Record, Loss, Record, Defect]
    assert pieces[2].reason == "nested deeper than 500 levels"
    assert b'[["inf"]]' in pieces[1].line()
    path.write_text("[" * 200_000 + "]" * 200_000)
    assert next(documents_in(path, ReadSettings())).reason == "nested deeper than 500 levels"


def test_a_mark_at_the_start_is_no_part_of_the_first_document(tmp_path):
    for name, content in (("a.txt", b"0123456789"), ("a.jsonl", b'{"text": "0123456789"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content + b"\r\n")
        reading = ReadSettings(max_bytes=len(content), documents_of_text="line")
        assert [piece.text for piece in documents_in(tmp_path / name, reading)] == ["0123456789"]
        shorter = ReadSettings(max_bytes=len(content) - 1, documents_of_text="line")
        assert isinstance(next(documents_in(tmp_path / name, shorter)), Loss)


def test_errors_of_a_disk_name_the_file_that_is_read(tmp_path):
    for name in ("a.txt", "a.txt.gz", "a.txt.bz2"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # a file that cannot be read
        for method in ("readline", "read"):
            with open_stream(tmp_path / name) as stream, pytest.raises(OSError, match="error") as caught:
                getattr(stream, method)()
            assert caught.value.filename == str(tmp_path / name)
    for stop in (None, 5):
        with pytest.raises(OSError, match="error") as caught:
            sha256_of(tmp_path / "a.txt", stop=stop)
        assert caught.value.filename == str(tmp_path / "a.txt")


def test_a_write_that_fails_leaves_nothing_under_the_name(tmp_path):
    path = tmp_path / "a.txt.gz"
    with pytest.raises(ZeroDivisionError), write_stream(path) as (stream, _):
        stream.write(b"half")
        raise ZeroDivisionError
    assert not path.exists()


def test_json_lines_with_every_kind_of_bad_line(tmp_path):
    path = tmp_path / "web.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one", "id": "x7", "source": "wiki", "url": "u"}\n'
        b'\xef\xbb\xbf{"text": "two"}\n'  # as cat makes it of two files
        b"not json\n\n"
        b'{"body": "no text"}\n'
        b'{"text": 5}\n'
        b'{"text": "\xff\xfe"}\n'
        b'{"text": "\xed\xa0\xbd"}\n' + b'{"text": "' + b"a" * 100 + b'"}\n' + b'{"text": "last"}'
    )
    pieces = list(documents_in(path, ReadSettings(max_bytes=90)))
    assert pieces[0] == Record("one", "x7", "wiki", {"url": "u"})
    assert [piece.reason for piece in pieces if isinstance(piece, Loss)] == [
        "not JSON",
        "no text in field 'text'",
        "no text in field 'text'",
        "not UTF-8",
        "not UTF-8",  # half of a surrogate pair
        "longer than 90 bytes",
    ]
    assert [(piece.problem, piece.where) for piece in pieces if isinstance(piece, Defect)] == [
        ("1 document not JSON", str(path)),
        ("2 documents no text in field 'text'", str(path)),
        ("2 documents not UTF-8", str(path)),
        ("1 document longer than 90 bytes", str(path)),
    ]
    assert pieces[1].text == "two"
    last = pieces[8]
    assert last.text == "last" and last.source == "web" and last.id.startswith("web.jsonl:")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("blank", ["a b\nc", "d", "e"]),
        ("line", ["a b", "c", "d", "e"]),
        ("file", ["a b\nc\n\n\nd\n\ne"]),
    ],
)
def test_documents_of_plain_text(tmp_path, mode, expected):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\na b\r\nc\n\n \nd\n\ne\n")
    found = [text.replace("\n \n", "\n\n") for text in texts(documents_in(path, ReadSettings(documents_of_text=mode)))]
    assert found == expected


def test_a_long_line_is_one_lost_document_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\nbefore\n" + b"x" * 5000 + b"\nafter\n\ntwo\n\n" + b"y\n" * 600 + b"\nthree\n")
    pieces = list(documents_in(path, ReadSettings(max_bytes=1000)))
    assert [piece.text for piece in pieces if isinstance(piece, Record)] == ["one", "two", "three"]
    assert [type(piece) for piece in pieces] == [Record, Loss, Record, Loss, Record, Defect]


def test_empty_files_are_said_to_be_empty(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.txt").write_text("\n\n")
    assert texts(documents_in(tmp_path / "a.jsonl", ReadSettings())) == [
        Defect("empty file", str(tmp_path / "a.jsonl"))
    ]
    assert texts(documents_in(tmp_path / "b.txt", ReadSettings())) == [
        Defect("no document in it", str(tmp_path / "b.txt"))
    ]
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "c.parquet")
    assert texts(documents_in(tmp_path / "c.parquet", ReadSettings())) == [
        Defect("no document in it", str(tmp_path / "c.parquet"))
    ]
    assert texts(documents_in(tmp_path / "c.parquet", ReadSettings(text_field="body"))) == [
        Defect("no column 'body': text", str(tmp_path / "c.parquet"))
    ]


@pytest.mark.parametrize("mode", ["blank", "line", "jsonl"])
def test_parts_of_a_large_file_hold_each_document_once(tmp_path, mode):
    """Whatever the cuts: in lines, at line ends, in runs of empty lines, in parts without any document."""
    lengths = [1, 40, 3, 3, 200, 1, 1, 17, 90, 2] * 4
    documents = [f"{number}:" + "x" * length for number, length in enumerate(lengths)]
    if mode == "jsonl":
        path, content = tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in documents)
    elif mode == "line":
        path, content = tmp_path / "a.txt", "\n".join(documents)
    else:
        path = tmp_path / "a.txt"
        documents = [f"{text}\nsecond {text}" for text in documents]
        content = "\n\n" + "".join(text + "\n" * (2 + index % 3) for index, text in enumerate(documents))
    path.write_text(content)
    reading = ReadSettings(documents_of_text="line" if mode == "line" else "blank")
    for part_bytes in [1, 2, 3, 7, 10, 50, 111, 1000, 10_000]:
        parts = plan_parts(find_files([path], [".jsonl", ".txt"]), part_bytes)
        assert len({part.name for part in parts}) == len(parts) == -(-len(content.encode()) // part_bytes)
        found = [piece.text for part in parts for piece in read(part, reading)]
        assert found == documents, part_bytes
        if part_bytes == 1:
            continue
        assert len(parts) > 1 or part_bytes > 500


def test_parts_beyond_number_are_refused_before_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.flow.parts.MOST_PARTS", 3)
    (tmp_path / "a.txt").write_bytes(b"a" * 31)
    found = find_files([tmp_path], [".txt"])
    with pytest.raises(UserError, match=r"a.txt has 31 bytes, which would be 4 parts.* at least 11 bytes"):
        plan_parts(found, 10)
    assert len(plan_parts(found, 11)) == 3


def test_parts_have_names_of_their_own(tmp_path):
    for name in [
        "x/a.txt",
        "x/a.jsonl",
        "y/a.txt.gz",
        "x/.hidden.txt",
        ".git/b.txt",
        "x/note.md",
        "y/removed.jsonl.gz",
        "z/a\nb.txt",
        "z/a b.txt",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    parts = plan_parts(find_files([tmp_path], [".txt", ".jsonl"]))
    assert [part.name for part in parts] == ["x--a", "x--a+2", "y--a", "y--removed", "z--a b", "z--a b+2"]
    with pytest.raises(UserError, match="read twice"):
        find_files([tmp_path, tmp_path / "x" / "a.txt"], [".txt"])
    (tmp_path / "x" / "link.txt").symlink_to("a.txt")
    with pytest.raises(UserError, match=r"x/a\.txt and \S+/x/link\.txt are one file, .*: remove the link"):
        find_files([tmp_path / "x"], [".txt"])
    with pytest.raises(UserError, match=r"holds no file that ends in \.parquet"):
        find_files([tmp_path], [".parquet"])
    with pytest.raises(UserError, match="no file or folder"):
        find_files([tmp_path / "nowhere"], [".txt"])
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt is not a regular file but a named pipe"):
        find_files([tmp_path / "pipe.txt"], [".txt"])


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("kind", ["blank", "line", "file"])
def test_a_document_may_be_exactly_as_long_as_the_limit(kind, end, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 10 + end)
    settings = ReadSettings(documents_of_text=kind, max_bytes=10)
    assert list(documents_in(path, settings)) == [Record("a" * 10, "a.txt:0", "a")]
    path.write_bytes(b"a" * 11 + end)
    assert Loss("longer than 10 bytes") in list(documents_in(path, settings))
    path.write_bytes(b"aaaa" + end + b"bbbbb" + end)
    assert all(isinstance(document, Record) for document in documents_in(path, settings))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "x" * 50], "title": ["A", "B", "C"]}), path)
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(path.read_bytes()))
    problem = "a .parquet file that is compressed as a whole: unpack it"
    assert list(documents_in(tmp_path / "a.parquet.gz", ReadSettings())) == [Defect(problem, f"{path}.gz")]
    pieces = list(documents_in(path, ReadSettings(max_bytes=40)))
    assert pieces[0] == Record("one", "a.parquet:0", "a", {"title": "A"})
    assert [piece.reason for piece in pieces[1:3]] == ["no text in field 'text'", "longer than 40 bytes"]
    assert texts(documents_in(path, ReadSettings(text_field="body"))) == [
        Defect("no column 'body': text, title", str(path)),
        Loss("no text in field 'body'", 3),
        Defect("3 documents no text in field 'body'", str(path)),
    ]
    too_late = pyarrow.array([0, 1 << 60, 0], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"text": ["one", "two", "three"], "date": too_late}), path)
    assert texts(documents_in(path, ReadSettings())) == ["one", "two", "three"]
    words = pyarrow.array([b"one", b"caf\xe9"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": words}), path)
    assert [getattr(piece, "reason", "") for piece in documents_in(path, ReadSettings())][:2] == [
        "",
        "no text in field 'text'",
    ]
    columns = {"text": ["one", "two"], "source": [b"caf\xc3\xa9", None], "id": [b"\xff", None]}
    columns |= {
        "n": [1, None],
        "x": [float("nan"), 0.5],
        "tags": [["a", None], []],
        "at": [{"day": date(2026, 1, 2)}, None],
        "map": pyarrow.array([[("k", 1), ("l", None)], None], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    }
    parquet.write_table(pyarrow.table(columns), path)
    first = {"n": 1, "x": "nan", "tags": ["a", None], "at": {"day": "2026-01-02"}, "map": [["k", 1], ["l", None]]}
    assert list(documents_in(path, ReadSettings())) == [
        Record("one", "\\xff", "café", first),
        Record("two", "a.parquet:1", "a", {"n": None, "x": 0.5, "tags": [], "at": None, "map": None}),
    ]
    table = pyarrow.table({"text": ["one", "another"]})
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"\7\0\0\0another", b"\7\0\0\0anotter"))
    assert "CRC" in next(piece.where for piece in documents_in(path, ReadSettings()) if isinstance(piece, Defect))
    path.write_bytes(b"no parquet")
    assert [piece.problem for piece in documents_in(path, ReadSettings())] == ["damaged: no parquet file"]


def test_an_error_of_the_disk_is_no_damage_of_a_parquet_file(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one"]}), path := tmp_path / "a.parquet")

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    for owner, name in ((parquet.ParquetFile, "iter_batches"), (parquet, "ParquetFile")):
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="Input/output error") as caught:
            list(documents_in(path, ReadSettings()))
        assert caught.value.filename == str(path)


def test_a_value_of_parquet_that_many_rows_mean_is_not_copied_for_each(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, sizes = tmp_path / "a.parquet", []
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 40, pyarrow.int32()), pyarrow.array(["x" * 5000]))
    parquet.write_table(pyarrow.table({"text": column}), path)
    whole = parquet.ParquetFile.iter_batches
    spied = lambda file, batch_size, **more: sizes.append(batch_size) or whole(file, batch_size, **more)  # noqa: E731
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", spied)
    monkeypatch.setattr(documents, "_PARQUET_BYTES", 20_000)
    assert len(texts(documents_in(path, ReadSettings()))) == 40
    assert sizes[0] <= 4


def test_a_row_of_parquet_with_millions_of_values_is_too_long(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", "b", "c"], "more": [[1], [0] * 100_000, [2]]})
    parquet.write_table(table, path := tmp_path / "a.parquet")
    assert path.stat().st_size < 5000
    monkeypatch.setattr(documents, "_PARQUET_BYTES", 20_000)
    first, long, last, _ = documents_in(path, ReadSettings(max_bytes=9000))
    assert (first.text, long.reason, last.text) == ("a", "longer than 9,000 bytes", "c")
    assert first.fields == {"more": [1]}

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(documents, "_plain", fail)
    with pytest.raises(MemoryError):  # no value that Python cannot have
        list(documents_in(path, ReadSettings()))


def test_two_columns_of_text_are_not_chosen_from(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path := tmp_path / "a.parquet")
    defect, loss, _ = documents_in(path, ReadSettings())
    assert defect.problem == loss.reason == "several columns 'text'"


def test_what_a_little_zstd_becomes_is_handed_out_in_pieces(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=3).compress(bytes(200 << 20)))
    tracemalloc.start()
    try:
        pieces = list(documents_in(path, ReadSettings(max_bytes=1000)))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert [type(piece) for piece in pieces] == [Loss, Defect]


def test_a_helper_is_replaced_where_a_document_takes_too_long_or_crashes_it():
    work = limits.Helper("fetch_data:answer", 0.3)
    try:
        failures = {"stall": "took more than 0.3 s", "crash": "crashed on it", "fill": "or ran out of memory"}
        for word, message in (*failures.items(), ("stall", "took more")):
            assert work("hello") == "HELLO"
            with pytest.raises(limits.DocumentFailed, match=message):
                work(word)
        with pytest.raises(RuntimeError, match="exit status 7"):
            work("leave")
        assert work("again") == "AGAIN"
    finally:
        work.close()


def test_a_helper_whose_parent_is_gone_says_nothing():
    words = limits.Helper("fetch_data:answer", 5)._words
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        assert process.stdout.read(1) == b"!"
        process.stdout.close()
        pickle.dump(("hello",), process.stdin)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def upper(part, out, log=None, trap=None):
    """A step for the tests: capitals; drops documents with an x."""
    if log:
        with open(log, "a") as file:
            file.write(f"{part.name}\n")
    if trap and trap in part.name:
        os.kill(os.getpid(), signal.SIGKILL)
    counts = Counts()
    with write_stream(out / f"{part.name}.jsonl.gz") as (stream, written):
        for piece in read(part, ReadSettings()):
            if "x" in piece.text:
                counts.drop("has an x")
                continue
            counts.keep()
            stream.write(Record(piece.text.upper(), piece.id, piece.source).line())
    return PartResult([written.row(out)], counts)


def run_upper(source, run, settings=None, restart=False, depends=None, **more):
    begin(run, "upper", settings or {}, restart)
    parts = plan_parts(find_files([source], [".txt"]), part_bytes=100)
    done = run_parts(run, "upper", parts, partial(upper, **more), depends)
    if done.results is None:
        return None
    return write_manifest(run.out, "upper", settings or {}, done.inputs, done.results)


def test_leftovers_go_but_not_what_a_command_is_writing(source, tmp_path):
    run = StepRun(tmp_path / "out", quiet=True)
    (left := run.out / STATE / "upper" / "a.host.1.partial").parent.mkdir(parents=True)
    left.touch()
    with write_stream(run.out / "manifest.json") as (stream, _):
        stream.write(b"{}")
        with locked(run):
            assert not left.exists()
    assert (run.out / "manifest.json").exists()


def test_commands_with_other_settings_that_begin_together(source, tmp_path, monkeypatch):
    """The second finds the first one's settings, and a first one whose work was thrown away does not go on."""
    first, second = (StepRun(tmp_path / "out", quiet=True) for _ in range(2))
    whole, said = running.write_bytes, []

    def other():
        with pytest.raises(UserError) as caught:
            begin(second, "upper", {"seed": 2})
        said.append(str(caught.value))

    def meanwhile(path, content):
        monkeypatch.setattr(running, "write_bytes", whole)
        thread.start()
        thread.join(0.05)
        return whole(path, content)

    thread = threading.Thread(target=other)
    monkeypatch.setattr(running, "write_bytes", meanwhile)
    begin(first, "upper", {"seed": 1})
    thread.join(30)
    assert "seed was 1, now 2" in said[0]
    begin(second, "upper", {"seed": 2}, restart=True)
    parts = plan_parts(find_files([source], [".txt"]))
    with pytest.raises(UserError, match=r"no longer holds the settings of this command: .* another one began there"):
        run_parts(first, "upper", parts, upper)
    assert run_parts(second, "upper", parts, upper).results


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(
            "\n\n".join(f"{name}{number}" + "x" * (number % 3 == 0) for number in range(40))
        )
    return folder


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_same_files_whatever_the_workers_and_shares(source, tmp_path):
    manifest = run_upper(source, StepRun(tmp_path / "one", quiet=True))
    assert manifest["counts"] == {"documents_in": 120, "kept": 78, "dropped": {"has an x": 42}, "other": {}}
    assert len(manifest["inputs"]) == len(manifest["outputs"]) > 5
    run_upper(source, StepRun(tmp_path / "two", workers=2, quiet=True))
    assert run_upper(source, StepRun(tmp_path / "shares", share=(0, 2), quiet=True)) is None
    run_upper(source, StepRun(tmp_path / "shares", share=(1, 2), quiet=True))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "shares")
    assert read_manifest(tmp_path / "one", "upper") == manifest


def test_what_is_done_is_not_done_again_and_what_changed_is(source, tmp_path):
    run, log = StepRun(tmp_path / "out", quiet=True), tmp_path / "log"
    first = run_upper(source, run, log=str(log))
    log.write_text("")
    assert run_upper(source, run, log=str(log)) == first and not log.read_text()
    record = next((run.out / STATE).glob("*/a-00000.json"))
    kept = json.loads(record.read_text())
    damaged = [{**kept, name: value} for name in ("counts", "defects", "facts") for value in (5, None, [5])]
    for row, outputs in zip([*damaged, {"input": 1}], itertools.cycle([5, [5], [{}]]), strict=False):
        record.write_text(json.dumps(row))
        (record.parent / "gone.json").write_text(json.dumps({"outputs": outputs}))  # of a part whose input is gone
        log.write_text("")
        assert run_upper(source, run, log=str(log)) == first and log.read_text().split() == ["a-00000"], row
    log.write_text("")
    (source / "b.txt").write_text("new and short")
    record.write_text('{"input": 1}')
    changed = run_upper(source, run, log=str(log))
    assert log.read_text().split() == ["a-00000", "b"]
    assert changed["counts"]["documents_in"] == 81
    (source / "c.txt").unlink()
    shorter = run_upper(source, run)
    written = {path.name for path in run.out.glob("*.jsonl.gz")}
    assert written == {output["name"] for output in shorter["outputs"]} and not any("c-" in name for name in written)
    log.write_text("")
    run_upper(source, run, log=str(log), depends={"cut": 5})  # what an earlier phase found has changed
    assert len(log.read_text().split()) == len(shorter["outputs"])


def test_a_worker_that_is_killed_is_named_and_the_rest_is_kept(source, tmp_path):
    run, log = StepRun(tmp_path / "out", workers=2, quiet=True), tmp_path / "log"
    with pytest.raises(UserError, match=r"a worker was killed .* at .*c\.txt.*run the same command again"):
        run_upper(source, run, log=str(log), trap="c-00001")
    with pytest.raises(UserError, match="not finished"):
        read_manifest(run.out)
    assert list((run.out / ".state" / "upper").glob("*.json"))
    run_upper(source, run, log=str(log))
    assert read_manifest(run.out)["counts"]["documents_in"] == 120


def test_a_worker_that_is_killed_between_two_parts_is_named(source, tmp_path, monkeypatch):
    """Then the pool refuses the next part."""

    def refuse(pool, *work):
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", refuse)
    with pytest.raises(UserError, match=r"a worker was killed .* at .*\.txt; .*run the same command again"):
        run_upper(source, StepRun(tmp_path / "out", workers=2, quiet=True))


def upper_but(part, out, broken):
    """As :func:`upper`, for parts whose name does not hold ``broken``."""
    if broken in part.name:
        raise PartFailed(f"{part.name} is not to be had")
    return upper(part, out)


def upper_while(part, out, grows):
    """As :func:`upper`; meanwhile the first file grows."""
    if "c-" in part.name:
        with open(grows, "a") as file:
            file.write("more")
    return upper(part, out)


def test_a_file_that_changes_while_others_are_read_is_no_part_of_another_share(source, tmp_path):
    run = StepRun(tmp_path / "out", quiet=True)
    begin(run, "upper", {})
    parts = plan_parts(find_files([source], [".txt"]), part_bytes=100)
    with pytest.raises(UserError, match=r"a\.txt changed after it was read: run the same command again"):
        run_parts(run, "upper", parts, partial(upper_while, grows=source / "a.txt"))
    share = replace(run, share=(len(parts) - 1, len(parts)))
    assert run_parts(share, "upper", parts, partial(upper_while, grows=source / "a.txt")).missing


def test_a_later_phase_reads_what_the_earlier_one_has_read(source, tmp_path):
    run = StepRun(tmp_path / "out", quiet=True)
    begin(run, "upper", {})
    parts = plan_parts(find_files([source], [".txt"]))
    assert run_parts(run, "upper", parts, upper).results
    os.utime(source / "a.txt")
    assert run_parts(run, "again", parts, upper, follows="upper").results
    (source / "a.txt").write_text((source / "a.txt").read_text().replace("a1", "a2"))
    assert run_parts(run, "upper", parts, upper).results
    facts = (source / "a.txt").stat()
    (source / "a.txt").write_text((source / "a.txt").read_text().replace("a2", "a3"))
    os.utime(source / "a.txt", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert run_parts(run, "upper", parts, upper).results, "the file seems to be the same"
    with pytest.raises(UserError, match=r"a\.txt changed after it was read: run the same command again"):
        run_parts(run, "last", parts, upper, follows="upper")
    assert run_parts(run, "upper", parts, upper).results
    assert run_parts(run, "last", parts, upper, follows="upper").results


def upper_twice(part, out, error):
    """As :func:`upper`, with a second output, before which it fails."""
    upper(part, out)
    if error:
        raise error
    write_bytes(out / "more" / f"{part.name}.jsonl", b"")
    return upper(part, out)


def changed(part, out):
    """As :func:`upper`; its input changes meanwhile."""
    os.utime(part.path, (0, 0))
    return upper(part, out)


def test_what_a_part_wrote_before_it_was_done_is_known(source, tmp_path):
    """It goes with the part's input, and with --restart."""
    run = StepRun(tmp_path / "out", quiet=True)
    begin(run, "upper", {"seed": 0})
    parts = plan_parts(find_files([source], [".txt"]))
    with pytest.raises(UserError, match=r"a\.txt changed while it was read"):
        run_parts(run, "upper", parts, changed)
    assert (run.out / "a.jsonl.gz").is_file()
    assert run_parts(run, "upper", parts[1:], upper).results and not (run.out / "a.jsonl.gz").exists()
    for seed, error in enumerate((UserError("no token"), KeyboardInterrupt(), None), start=1):
        begin(run, "upper", {"seed": seed}, restart=True)
        assert not list(run.out.glob("*.jsonl.gz")) and not (run.out / "more").exists()
        with pytest.raises(type(error)) if error else contextlib.nullcontext():
            run_parts(run, "upper", parts, partial(upper_twice, error=error))
        assert (run.out / "a.jsonl.gz").is_file()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_that_fails_alone_lets_the_others_go_on(source, tmp_path, workers):
    run = StepRun(tmp_path / "out", workers, quiet=True)
    begin(run, "upper", {})
    parts = plan_parts(find_files([source], [".txt"]), part_bytes=100)
    done = run_parts(run, "upper", parts, partial(upper_but, broken="b-00001"))
    assert (done.results, done.missing, done.failed) == (None, 1, ["b-00001 is not to be had"])
    assert [part.name for part in parts if not is_done(run, "upper", part)] == ["b-00001"]
    assert len(run_parts(run, "upper", parts, upper).results) == len(parts)


def test_a_killed_command_leaves_no_half_and_goes_on(source, tmp_path):
    """The whole process group is killed at some moment, as by a scheduler; the repeated command ends as a first one."""
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tests/helpers', 'tests/data_prep'];"
        "import test_data_flow as t;"
        "from data_prep.flow.running import StepRun; import time;"
        "t.run_upper(Path(sys.argv[1]), StepRun(Path(sys.argv[2]), workers=1, quiet=True))"
    )
    slow = code.replace(
        "t.run_upper(", "w = t.upper; t.upper = lambda *a, **k: (time.sleep(0.1), w(*a, **k))[1];t.run_upper("
    )
    command = [sys.executable, "-c", slow, str(source), str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    state = tmp_path / "out" / ".state" / "upper"
    deadline = time.monotonic() + 60
    while len(list(state.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    # without those of parts at work, which only name files
    records = [path for path in state.glob("*.json") if "input" in (streams.read_json(path) or {})]
    finished = {path.name: path.stat().st_mtime_ns for path in records}
    assert finished and not (tmp_path / "out" / "manifest.json").exists()
    run_upper(source, StepRun(tmp_path / "out", quiet=True))
    run_upper(source, StepRun(tmp_path / "fresh", quiet=True))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert all((state / name).stat().st_mtime_ns == then for name, then in finished.items())


def slow(part, out):
    (out / f"worker-{os.getpid()}").touch()
    time.sleep(60)


def test_workers_end_with_a_command_that_is_killed(source, tmp_path):
    """Or they would write into the folder while the repeated command does."""
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tests/helpers', 'tests/data_prep'];"
        "import test_data_flow as t;"
        "from data_prep.flow.running import StepRun, run_parts;"
        "from data_prep.flow.parts import plan_parts, find_files;"
        "out = Path(sys.argv[2]); out.mkdir();"
        "run_parts(StepRun(out, 2, quiet=True), 'slow', plan_parts(find_files([Path(sys.argv[1])], ['.txt'])), t.slow)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(source), str(tmp_path / "out")], cwd=REPOSITORY)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "out").glob("worker-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(path.name.split("-")[1]) for path in (tmp_path / "out").glob("worker-*")]
    process.kill()
    process.wait(timeout=30)
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(map(is_alive, workers))


class SlowToArrive:
    """Work that takes a worker a second to unpickle."""

    def __init__(self, folder):
        self.folder = folder

    def __setstate__(self, state):
        (state["folder"] / f"worker-{os.getpid()}").touch()
        time.sleep(1)

    def __call__(self, part, out):
        time.sleep(20)


@pytest.mark.slow
def test_ctrl_c_while_workers_start_prints_no_traceback(source, tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['tests/helpers', 'tests/data_prep'];"
        "import test_data_flow as t;"
        "from data_prep.flow.running import StepRun, run_parts;"
        "from data_prep.flow.parts import plan_parts, find_files;"
        "source, out = map(Path, sys.argv[1:]);"
        "sys.excepthook = lambda *error: None;"  # of the command itself, which says nothing of Ctrl-C
        "work = t.SlowToArrive(out);"
        "run_parts(StepRun(out, 2, quiet=True), 'slow', plan_parts(find_files([source], ['.txt'])), work)"
    )
    (out := tmp_path / "out").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(out)],
        cwd=REPOSITORY,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(out.glob("worker-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    try:
        assert process.communicate(timeout=50)[1] == ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_folder_of_other_work_is_not_touched(source, tmp_path):
    run = StepRun(tmp_path / "out", quiet=True)
    run_upper(source, run, {"seed": 1})
    with pytest.raises(UserError, match=r"with other settings \(seed was 1, now 2\).*--restart"):
        run_upper(source, run, {"seed": 2})
    with pytest.raises(UserError, match="the step was upper"):
        begin(run, "lower", {"seed": 1})
    assert run_upper(source, run, {"seed": 2}, restart=True)["settings"] == {"seed": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds other files"):
        run_upper(source, StepRun(tmp_path / "mine"), restart=True)
    letter = tmp_path / "mine" / "letter.txt"
    (tmp_path / "new" / STATE).mkdir(parents=True)
    (tmp_path / "new" / STATE / "lock").symlink_to(letter)
    with pytest.raises(UserError, match="is a link: no step made it"):
        run_upper(source, StepRun(tmp_path / "new", quiet=True))
    with pytest.raises(OSError, match="symbolic links"), locked(StepRun(tmp_path / "new", quiet=True)):
        pass
    shutil.rmtree(tmp_path / "new" / STATE)
    (tmp_path / "new" / STATE).symlink_to(letter.parent)
    with pytest.raises(UserError, match="is a link: no step made it"):
        run_upper(source, StepRun(tmp_path / "new", quiet=True))
    (tmp_path / "new" / STATE).unlink()
    (tmp_path / "new" / ".work").symlink_to(letter.parent)
    with pytest.raises(UserError, match=r"\.work is a link: no step made it"):
        run_upper(source, StepRun(tmp_path / "new", quiet=True))
    assert letter.read_text() == "dear"


def test_two_commands_at_once_in_one_folder(source, tmp_path):
    import fcntl

    run = StepRun(tmp_path / "out", quiet=True)
    run_upper(source, run)
    with open(run.out / ".state" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another command is running"):
            run_upper(source, run)


def test_counts_must_add_up():
    counts = Counts()
    counts.keep()
    counts.drop("short")
    counts.check()
    counts.documents_in += 1
    with pytest.raises(AssertionError, match="3 in, 1 kept, 1 dropped"):
        counts.check()


def test_no_manifest(tmp_path):
    with pytest.raises(UserError, match="not finished"):
        read_manifest(tmp_path)
    write_bytes(Path(tmp_path / "manifest.json"), b"{")
    with pytest.raises(UserError, match="not a manifest of smlp data"):
        read_manifest(tmp_path)
    write_bytes(tmp_path / "manifest.json", b'{"step": "clean"}')
    with pytest.raises(UserError, match="made by 'smlp data clean', not by 'smlp data dedup'"):
        read_manifest(tmp_path, "dedup")
    with pytest.raises(UserError, match="settings must be names with values"):
        read_manifest(tmp_path, "clean")


def test_outputs_that_are_only_needed_until_the_step_is_finished(source, tmp_path):
    run, log = StepRun(tmp_path / "out", quiet=True), tmp_path / "log"
    parts = plan_parts(find_files([source], [".txt"]), part_bytes=100)

    def again():
        log.write_text("")
        done = run_parts(run, "upper", parts, partial(upper, log=str(log)), temporary=True)
        return done, len(log.read_text().split())

    begin(run, "upper", {})
    first, number = again()
    assert number == len(parts)
    write_manifest(run.out, "upper", {}, first.inputs, first.results)
    for part in parts:
        (run.out / f"{part.name}.jsonl.gz").unlink()
    assert again() == (first, 0)  # the manifest says that they are not needed any more
    (source / "b.txt").write_text("new and short")
    parts = plan_parts(find_files([source], [".txt"]), part_bytes=100)
    changed, number = again()
    assert number == len(parts) and not (run.out / "manifest.json").exists()
    assert sum(result.counts.documents_in for result in changed.results) == 81
    assert again() == (changed, 0)


def test_files_of_lines_are_cut_whatever_their_suffix(tmp_path):
    (tmp_path / "a.spm").write_text("one\n" * 100)
    write(tmp_path / "b.spm.gz", b"one\n" * 100)
    found = find_files([tmp_path], [".spm"])
    assert [part.name for part in plan_parts(found, 100)] == ["a", "b"]
    assert [part.name for part in plan_parts(found, 100, all_lines=True)] == [f"a-{n:05d}" for n in range(4)] + ["b"]


def test_ids_tell_files_of_one_name_apart(tmp_path):
    for folder in "pq":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.jsonl").write_text('{"text": "a", "id": null, "source": null}')
    parts = plan_parts(find_files([tmp_path], [".jsonl"]))
    records = [piece for part in parts for piece in read(part, ReadSettings())]
    assert [record.id for record in records] == ["p/same.jsonl:0", "q/same.jsonl:0"]
    assert {record.source for record in records} == {tmp_path.name}
    files = [tmp_path / folder / "same.jsonl" for folder in "pq"]
    parts = plan_parts(find_files(files, [".jsonl"]))
    assert [piece.id for part in parts for piece in read(part, ReadSettings())] == ["same.jsonl:0", "same.jsonl+2:0"]


def test_text_without_empty_lines_is_not_read_again_by_each_part(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("line\n" * 1000)
    parts = plan_parts(find_files([tmp_path / "a.txt"], [".txt"]), 100)
    drawn, whole = [], documents._Lines.__iter__
    monkeypatch.setattr(documents._Lines, "__iter__", lambda lines: (drawn.append(1) or one for one in whole(lines)))
    found = [piece for part in parts for piece in read(part, ReadSettings())]
    assert len(parts) == 50 and len(found) == 1
    assert len(drawn) < 3 * 1000, "the first part reads all of it, the others what they have"


def test_a_manifest_names_the_versions_that_made_its_parts(source, tmp_path, monkeypatch):
    run = StepRun(tmp_path / "out", quiet=True)
    run_upper(source, replace(run, share=(0, 2)))
    records = sorted((run.out / STATE).glob("*/*.json"))
    for record, version in zip(records, ("0.0.1", None), strict=False):
        row = {**json.loads(record.read_text()), "smlp": version}
        record.write_text(json.dumps({name: value for name, value in row.items() if value is not None}))
    assert len(records) > 1
    assert run_upper(source, run)["smlp"] == f"0.0.1, {__version__}, unknown"


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "there").mkdir()
    for name in ["in/a.txt", "in/B.TXT", "in/c.json", "in/.hidden", "in/.e.txt", "there/d.txt"]:
        (tmp_path / name).write_text("text")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "there")
    (tmp_path / "in" / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "there" / "back").symlink_to(tmp_path / "in")
    found = [str(path.relative_to(tmp_path)) for _, path in find_files([tmp_path / "in"], [".txt"])]
    assert found == ["in/B.TXT", "in/a.txt", "in/link/d.txt"]
    report_left_out([tmp_path / "in"], [".txt"])
    assert capsys.readouterr().err == f"not read in {tmp_path / 'in'}: c.json, gone.txt, .e.txt\n"


def test_a_long_path_gets_a_name_that_fits(tmp_path):
    deep = tmp_path.joinpath(*["a-folder-with-a-long-name" * 3] * 4)
    deep.mkdir(parents=True)
    for name in ("one.txt", "two.txt"):
        (deep / name).write_text("text")
    names = [part.name for part in plan_parts(find_files([tmp_path], [".txt"]))]
    assert len(set(names)) == 2 and all(len(name) < 200 for name in names)


def test_long_names_of_a_file_and_of_the_machine_fit_together(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 64)
    write_bytes(tmp_path / f"train--{unique_name('a' * 200, set())}-00000.jsonl.gz", b"text")


def test_names_from_files_write_no_lines_on_the_terminal(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "x\n\x1b[32mgreen.md"):
        (tmp_path / "in" / name).write_text("text")
    report_left_out([tmp_path / "in"], [".txt"])
    assert capsys.readouterr().err.endswith(": x\\n\\x1b[32mgreen.md\n")
    unfinished = tmp_path / "two\nlines"
    begin(StepRun(unfinished / "a"), "fetch", {}, False)
    for name in ("a/a.jsonl", "b.md"):
        (unfinished / name).write_text("text")
    report_left_out([unfinished], [".jsonl"])
    shown = f"{tmp_path}/two\\nlines"
    told = f"{shown}/a is not finished: some of its files are missing\nnot read in {shown}: b.md\n"
    assert capsys.readouterr().err == told
    defect = {"problem": "no column 'text': \x1b[31mred\nall is well", "where": "a\nb"}
    manifest = write_manifest(tmp_path, "upper", {}, [], [PartResult([], Counts(), [defect])])
    Report("upper", StepRun(tmp_path)).finished(manifest)
    assert capsys.readouterr().out.startswith("no column 'text': \\x1b[31mred\\nall is well: a\\nb\n")


def test_what_an_unfinished_step_wrote_is_not_read(source, tmp_path):
    run_upper(source, StepRun(tmp_path / "out", share=(0, 2), quiet=True))
    with pytest.raises(UserError, match="out is not finished: run 'smlp data upper' again"):
        find_files([tmp_path / "out"], [".jsonl"])
    run_upper(source, StepRun(tmp_path / "out", quiet=True))
    assert find_files([tmp_path / "out"], [".jsonl"])


def _one_share(source, out, index, number, barrier):
    barrier.wait(30)
    run_upper(source, StepRun(out, share=(index, number), quiet=True))


def test_shares_that_begin_together_do_not_meet(source, tmp_path):
    """Three processes prepare the same folder at the same moment, each for its share."""
    context = multiprocessing.get_context("fork")
    for trial in range(4):
        barrier = context.Barrier(3)
        out = tmp_path / f"out{trial}"
        shares = [context.Process(target=_one_share, args=(source, out, index, 3, barrier)) for index in range(3)]
        for share in shares:
            share.start()
        for share in shares:
            share.join(60)
        assert [share.exitcode for share in shares] == [0, 0, 0]
        run_upper(source, StepRun(out, quiet=True))
        assert read_manifest(out)["counts"]["documents_in"] == 120 and not list(out.rglob("*.partial"))


def test_a_share_keeps_the_whole_command_out_and_the_other_way_round(source, tmp_path):
    out = tmp_path / "out"
    begin(StepRun(out), "upper", {})
    with locked(StepRun(out, share=(0, 2))):
        with locked(StepRun(out, share=(1, 2))):
            pass
        with pytest.raises(UserError, match="another command"), locked(StepRun(out)):
            pass
        with pytest.raises(UserError, match="another command"):
            begin(StepRun(out), "upper", {"seed": 2}, restart=True)
    with locked(StepRun(out)), pytest.raises(UserError, match="another command"), locked(StepRun(out, share=(1, 2))):
        pass


def test_a_kill_while_old_work_is_thrown_away_leaves_a_folder_that_is_known(source, tmp_path, monkeypatch):
    run = StepRun(tmp_path / "out", quiet=True)
    run_upper(source, run, {"seed": 1})
    monkeypatch.setattr(shutil, "rmtree", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_upper(source, run, {"seed": 2}, restart=True)
    monkeypatch.undo()
    with pytest.raises(UserError, match="seed was 1, now 2"):
        run_upper(source, run, {"seed": 2})
    assert run_upper(source, run, {"seed": 2}, restart=True)["counts"]["documents_in"] == 120


@pytest.mark.parametrize("name", ["notes.md", "more/checkpoint.pt", ".git/config", "link"])
def test_old_work_is_not_thrown_away_with_files_of_others(source, tmp_path, name):
    run = StepRun(tmp_path / "out", quiet=True)
    run_upper(source, run, {"seed": 1})
    (path := run.out / name).parent.mkdir(exist_ok=True)
    path.symlink_to(source) if name == "link" else path.write_text("mine")
    with pytest.raises(UserError, match=f"would delete {path}, which no record of this step names: move it out"):
        run_upper(source, run, {"seed": 2}, restart=True)
    assert run_upper(source, run, {"seed": 1})["settings"] == {"seed": 1}, "nothing was deleted"
    path.unlink()
    assert run_upper(source, run, {"seed": 2}, restart=True)["counts"]["documents_in"] == 120


@pytest.mark.parametrize("out", ["in", "in/out"])
def test_out_inside_in_is_refused(tmp_path, capsys, out):
    from smlp.cli.main import main

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    assert main(["data", "clean", "--in", str(tmp_path / "in"), "--out", str(tmp_path / out)]) == 1
    assert "the next run would read its own output" in capsys.readouterr().err


def test_what_the_system_refuses_is_one_sentence(tmp_path, capsys):
    from smlp.cli.main import main

    (tmp_path / "a.txt").write_text("text")
    for out in ("a.txt", "a.txt/x"):
        assert main(["data", "clean", "--in", str(tmp_path / "a.txt"), "--out", str(tmp_path / out)]) == 1
        assert capsys.readouterr().err.startswith(f"smlp: error: {tmp_path / 'a.txt'}")


def test_records_cannot_name_files_elsewhere(tmp_path):
    """What an earlier run wrote for inputs that are gone is removed: nothing else may be, whatever a record says."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a\n")
    mine, out = tmp_path / "mine.txt", tmp_path / "out"
    mine.write_text("something of value")
    parts = plan_parts(find_files([tmp_path / "in"], [".txt"]))
    run_parts(StepRun(out, quiet=True), "upper", parts, upper)
    (record,) = (out / ".state" / "upper").glob("*.json")
    whole = write_manifest(out, "upper", {}, [], [])
    for name in ("../mine.txt", str(mine), "x/../../mine.txt"):
        row = {**json.loads(record.read_text()), "outputs": [{"name": name, "bytes": 18}]}
        (record.parent / "gone.json").write_text(json.dumps(row))
        with pytest.raises(UserError, match=r"gone\.json names the file .*mine.txt', which would lie outside"):
            run_parts(StepRun(out, quiet=True), "upper", parts, upper)
        assert mine.read_text() == "something of value"
        (out / "manifest.json").write_text(json.dumps({**whole, "outputs": row["outputs"]}))
        with pytest.raises(UserError, match="would lie outside its folder"):
            is_whole(out)
    (out / "link").symlink_to(tmp_path)
    (out / "manifest.json").write_text(json.dumps({**whole, "outputs": [{"name": "link/mine.txt", "bytes": 18}]}))
    with pytest.raises(UserError, match="outside its folder through a link"):
        is_whole(out)


@pytest.mark.parametrize(
    "content", ["", "[]", "5", "{}", '{"step": 5}', '{"step": "clean", "settings": []}', "[" * 9000]
)
def test_a_damaged_record_of_a_step_is_named(tmp_path, content):
    run = StepRun(tmp_path / "out")
    begin(run, "clean", {"seed": 1})
    record = tmp_path / "out" / STATE / SETTINGS
    record.write_text(content)
    for restart in (False, True):
        with pytest.raises(UserError, match=r"settings.json is damaged: remove the folder"):
            begin(run, "clean", {"seed": 1}, restart)
    (tmp_path / "out" / "a.txt").write_text("one")
    with pytest.raises(UserError, match=r"settings.json is damaged: remove the folder"):
        find_files([tmp_path / "out"], (".txt",))


def test_a_link_in_the_input_may_not_lead_to_the_output(tmp_path):
    """The next run would read what this one has written, and each after it a copy more."""
    (place := tmp_path / "in").mkdir()
    (place / "loop").symlink_to("..")
    args = Namespace(out=tmp_path / "out", workers=1, share=(0, 1), quiet=True, inputs=[place])
    with pytest.raises(UserError, match=r"--out .*out lies in the input .*in: the next run would read its own output"):
        run_of(args)
    (place / "loop").unlink()
    (place / "other").symlink_to(place)
    assert run_of(args).out.is_dir()


@pytest.mark.parametrize("option", ["tokenizer", "train", "inputs", "held_out", "sample", "decontaminate"])
def test_what_is_read_does_not_lie_in_the_folder_that_restart_empties(tmp_path, option):
    place = tmp_path / "out" / "texts"
    place.parent.mkdir()
    place.write_text("kept")
    for value in (place, tmp_path / "out" / ".." / "out") if option == "tokenizer" else ([place],):
        args = Namespace(out=tmp_path / "out", workers=1, share=(0, 1), quiet=True, **{option: value})
        with pytest.raises(UserError, match=r"lies in --out .*out: name another --out|lies in the input"):
            run_of(args)
    apart = Namespace(out=tmp_path / "new", workers=1, share=(0, 1), quiet=True, **{option: [place]})
    assert run_of(apart).out.is_dir()
