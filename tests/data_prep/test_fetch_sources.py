"""Sources of ``smlp data fetch``: their files, what is printed of them, and what a user gets wrong."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from fetch_running import run, source_file
from running import REPOSITORY

from data_prep.fetch import wanted
from data_prep.fetch.download import Patience, RemoteFile, from_json
from data_prep.fetch.listing import (
    KEPT,
    _checksums,
    _dumpstatus,
    _filled,
    _paths,
    kept_files,
    list_files,
    months,
    named,
)
from data_prep.fetch.source import Listing, Source, built_in, read_source
from data_prep.flow.streams import compression_of
from smlp.errors import UserError


def test_the_sources_that_come_with_it():
    sources = built_in()
    assert {"wikipedia", "cc-news", "openwebtext", "stories", "bookcorpus", "cc100-en"} <= set(sources)
    for name, source in sources.items():
        assert source.name == name and source.title and source.citation and source.notes and source.licence
        assert all(other in sources for other in source.replacement), name
        assert (source.status == "gone") == bool(source.replacement), name
        urls = [file.url for file in source.files] + ([source.listing.url] if source.listing else [])
        assert all(url.startswith("https://") for url in urls)
        assert source.size.basis or not any((source.size.bytes, source.size.text_bytes)), name


def test_the_package_has_them(monkeypatch):
    """As setuptools builds it."""
    from distutils.core import run_setup

    monkeypatch.chdir(REPOSITORY)
    build = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    build.ensure_finalized()
    (shipped,) = (files for package, _, _, files in build.data_files if package == "data_prep")
    assert {Path(name).stem for name in shipped} == set(built_in())
    assert "data_prep.fetch" in build.packages


def test_list_and_show(capsys, tmp_path):
    assert run("--list", "--json", tmp_path / "list.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(built_in())
    (stories,) = (line for line in lines if line.startswith("stories"))
    assert "gone: use cc-stories" in stories and "31.0 GB" in stories
    assert {row["name"] for row in json.loads((tmp_path / "list.json").read_text())} == set(built_in())
    assert run("--show", "cc100-en") == 0
    shown = capsys.readouterr().out
    assert "https://data.statmt.org/cc-100/en.txt.xz" in shown and "55,608,000,000" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a source"),
        (["wikipedia"], "--out DIR is missing"),
        (["--list", "wikipedia", "--dry-run"], "--list prints and exits: it takes no SOURCE, --dry-run"),
        (["--show", "wikipedia", "--out", "a"], "--show prints and exits: it takes no --out"),
        (["wikipedai", "--out", "x"], "no source, file or folder 'wikipedai': did you mean wikipedia?"),
        (["stories", "--out", "x"], "stories is gone: .*; instead: cc-stories"),
        (["hf:a:b:c:d", "--out", "x"], "is not hf:OWNER/NAME"),
        (["wikipedia", "wikipedia", "--out", "x"], "two sources would be written to x/wikipedia"),
        (["wikipedia", "--set", "month=3", "--out", "x"], "there are wikipedia.wiki, wikipedia.date"),
        (["wikipedia", "--limit-files", "0", "--out", "x"], "--limit-files must be at least 1, got 0"),
        (["wikipedia", "--timeout", "0", "--out", "x"], "--timeout must be above 0"),
        (["wikipedia", "--out", "x", "--json", "f"], "--json f would not be used: it is for --list, --show"),
    ],
)
def test_what_a_user_gets_wrong(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("format =", "is not TOML"),
        ("a = " + "[" * 50_000, "is not TOML"),
        (f'paths = ["a"]\n[size]\nbytes = 0x{"f" * 5000}', "is not TOML: Exceeds the limit"),
        (f'paths = ["a"]\n[size]\nbytes = {"9" * 400}', "'size.bytes' must be below 2\\*\\*63, not 9{80}$"),
        ('format = "txt"', "exactly one of 'files', 'listing', 'hub' and 'paths' .* there is none"),
        ('form = "txt"', "unknown field 'form'; there are name, title"),
        ('format = "doc"\n[[files]]\nurl = "http://x/a"', "'format' is 'doc', but must be one of wikipedia, warc"),
        ('format = "txt"\n[[files]]\nlink = "http://x/a"', "unknown field 'files.link'"),
        ('format = "txt"\n[[files]]\nurl = "http://x/a"\nbytes = "9"', "'files.bytes' must be a whole number, not '9'"),
        ('format = "txt"\n[[files]]\nurl = "http://x/a"\nbytes = true', "must be a whole number, not True"),
        ('format = "txt"\n[[files]]\nurl = "http://me:key@x/a"', "'files.url' has a user name or a password"),
        (
            'format = "txt"\n[listing]\nkind = "paths"\nurl = "http://x/a"\nbase = "http://me@x/"',
            "'listing.base' has a",
        ),
        ('format = "txt"\n[[files]]\nurl = "http://x/a"\nsha1 = 123', "'files.sha1' must be a string, not 123"),
        ('format = "txt"\n[[files]]\nurl = "http://x/a"\nbytes = -7', "'files.bytes' must be at least 0, not -7"),
        ('format = "txt"\n[[files]]\nurl = "http://x/a"\nmd5 = "abc"', "'files.md5' must be 32 hexa.* not 'abc'"),
        ('paths = ["x"]\n[size]\ntext_bytes = -1000', "'size.text_bytes' must be at least 0, not -1000"),
        ('[hub]\nname = ""', "'hub.name' must not be empty"),
        ('paths = ["x"]\n[options]\n"a.b" = "1"', "the name of an option must not have a dot, but there is 'a.b'"),
        ('format = "txt"\n[listing]\nkind = "paths"', "a field is missing: .*'url'"),
        ('format = "txt"\n[listing]\nkind = "ftp"\nurl = "http://x"', "'listing.kind' is 'ftp', but must be one of"),
        ('[hub]\nname = "a/b"\nrows_per_document = 0', "must be at least 1, not 0"),
        ('[hub]\nname = "a/b"\nrows_per_document = "2"', "'hub.rows_per_document' must be a whole number, not '2'"),
        ('status = "gone"\n[hub]\nname = "a/b"', "'status' is 'gone', so 'hub' must not be there"),
        ('name = "../up"\npaths = ["x"]', "'name' is '../up', but a folder's name has only"),
        ('paths = "x"', "'paths' must be a list of strings"),
        ("[options]\nyear = 3", "'options' must be a table of strings"),
    ],
)
def test_a_source_file_that_is_not_in_order(tmp_path, body, message):
    path = source_file(tmp_path, "mine", body)
    with pytest.raises(UserError, match=message) as raised:
        read_source(path)
    assert str(path) in str(raised.value)


def test_a_refused_file_leaves_nothing(tmp_path, capsys):
    (tmp_path / "texts.zip").write_bytes(b"PK")
    assert run(tmp_path / "texts.zip", "--out", tmp_path / "out") == 1
    assert "texts.zip: files of documents end in .jsonl or .txt, plain, " in capsys.readouterr().err
    assert run(source_file(tmp_path, "old", 'status = "gone"'), "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err.endswith("old is gone\n")
    assert not list(tmp_path.glob("out/*/.state"))


def test_months():
    assert months("2018-11:2019-02") == [("2018", "11"), ("2018", "12"), ("2019", "01"), ("2019", "02")]
    assert months("2018-03") == [("2018", "03")]
    for text in ["2018", "2018-13", "2018-02:2018-01", "2018-01:", ":2018-01", "2018-01:2018-02:x"]:
        with pytest.raises(UserError, match="option months"):
            months(text)


def test_a_dry_run_says_what_stands_against_it(tmp_path, capsys, monkeypatch):
    words = ["wikipedia", "cc100-en", "--set", "date=20260101", "--dry-run"]
    monkeypatch.setattr(wanted.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    assert run(*words, "--out", tmp_path / "new", "--json", tmp_path / "plan.json") == 0
    printed = capsys.readouterr().out
    assert "82.0 GB" in printed and "date=20260101" in printed and not (tmp_path / "new").exists()
    assert json.loads((tmp_path / "plan.json").read_text())["sources"][1]["files"] == 1
    monkeypatch.setattr(wanted.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**11))
    monkeypatch.setattr(wanted.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "file").touch()
    assert run(*words, "--out", tmp_path / "file" / "new") == 1
    printed = capsys.readouterr().out
    assert "problem: wikipedia: not installed: mwparserfromhell, requests" in printed
    assert re.search(r"problem: about 26\d.\d GB are needed in .*, 100.0 GB are free", printed)
    assert "problem: --out: " in printed and "is not a folder" in printed
    assert run(*words[:-1], "--out", tmp_path / "new") == 1
    assert "wikipedia needs mwparserfromhell, requests: install the extra 'data'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b.gz", "b.gz"),
        ("../../b.gz", "b.gz"),
        ("%2e%2e%2f%2e%2e%2fb.gz", "b.gz"),
        ("a/..", "index"),
        ("a/%2e%2e", "index"),
        ("", "index"),
        ("b%00.gz", "b.gz"),
        ("listing.json", "file-listing.json"),
        ("shards.json", "file-shards.json"),
        (".state", "file-.state"),
        ("a.warc.gz.partial", "a.warc.gz-partial"),
        ("a.warc.gz.partial.json", "a.warc.gz-partial.json"),
        ("a.warc.gz.request.json", "a.warc.gz-request.json"),
    ],
)
def test_names_of_a_server_stay_in_the_folder(path, name):
    """Neither are they those of the files in which a list, or what is known of another file, is kept."""
    (file,) = named([RemoteFile(f"https://example.org/{path}", "")], "warc")
    assert file.name == name


def test_files_of_one_name_get_names_of_their_own():
    urls = ("1/a.txt", "2/a.txt", "3/2-a.txt", "4/a.txt", "5/3-a.txt")
    names = [file.name for file in named([RemoteFile(f"https://example.org/{url}", "") for url in urls], "txt")]
    assert names == ["a.txt", "4-a.txt", "2-a.txt", "5-a.txt", "3-a.txt"]
    files = [RemoteFile(f"https://example.org/{name}", "") for name in ("a.gz", "a.txt.gz", "a.txt", "a")]
    assert [file.name for file in named(files, "txt")] == ["a.txt.gz", "2-a.txt.gz", "a.txt", "2-a.txt"]
    twice = [RemoteFile(f"https://example.org/{url}", "") for url in "aba"]
    assert [file.name for file in named(twice, "warc")] == ["a", "b"]
    (file,) = named([RemoteFile("https://example.org/DATA.GZ", "")], "jsonl")
    assert file.name == "DATA.jsonl.GZ" and compression_of(Path(file.name)) == ".gz"


@pytest.mark.parametrize("name", ["../b.gz", "/tmp/b.gz", "a/b.gz", "", "..", "a\0b", None])
def test_a_kept_list_cannot_name_files_elsewhere(name):
    row = {**asdict(RemoteFile("https://example.org/b.gz", "b.gz")), "name": name}
    with pytest.raises(UserError, match=r"https://example.org/b.gz names the file"):
        from_json(row)


@pytest.mark.parametrize("content", ["", "[]", "5", "{}", '{"definition": "", "options": {}, "files": [5]}'])
def test_a_kept_list_that_is_damaged_is_asked_for_again(tmp_path, content):
    (tmp_path / KEPT).write_text(content)
    assert kept_files(Source("mine", "Mine"), {}, tmp_path) is None


def test_names_of_a_kept_list_that_become_one_are_asked_for_again(tmp_path):
    """Earlier versions kept names without formats."""
    files = [asdict(RemoteFile(f"https://example.org/{name}", name)) for name in ("a.gz", "b.txt.gz")]
    row = {"definition": "", "options": {}, "files": files}
    (tmp_path / KEPT).write_text(json.dumps(row))
    source = Source("mine", "Mine", format="txt")
    assert [file.name for file in kept_files(source, {}, tmp_path)] == ["a.txt.gz", "b.txt.gz"]
    files[1]["name"] = "a.txt.gz"
    (tmp_path / KEPT).write_text(json.dumps(row))
    assert kept_files(source, {}, tmp_path) is None


@pytest.mark.parametrize("length", [200, 201, 255])
def test_a_long_name_leaves_room_for_what_is_added_to_it(length):
    stem = "n" * (length - len(".jsonl.gz"))
    files = named([RemoteFile(f"https://example.org/{first}/{stem}.jsonl.gz", "") for first in "ab"], "jsonl")
    assert len({file.name for file in files}) == 2
    for file in files:
        assert file.name.endswith(f"{stem[-100:]}.jsonl.gz") and len(file.name) <= 202
        assert (file.name == f"{stem}.jsonl.gz") == (length == 200 and file is files[0])


def test_lists_that_cannot_be_right_are_named(tmp_path):
    """Each would be kept, and its files downloaded again and again."""
    listing = Listing("checksums", "http://x/list")
    assert [file.url for file in _checksums(f"{'a' * 64}  b.gz\n\n", listing.url, listing)] == ["http://x/b.gz"]
    for name in ("a#b", "c?d", "e%20f", "g h", "i:j", "dir/k"):  # of files, in which these are letters
        (file,) = _checksums(f"{'a' * 64} *{name}.txt", listing.url, listing)
        assert unquote(urlsplit(file.url).path) == f"/{name}.txt" and named([file], "txt")[
            0
        ].name == f"{name}.txt".removeprefix("dir/")
    with pytest.raises(UserError, match="http://x/list is not a list of sha256 checksums: it has the line 'aaa"):
        _checksums(f"{'a' * 32}  b.gz\n", listing.url, listing)
    text = json.dumps({"jobs": {"j": {"status": "done", "files": {"a": {"size": 1, "url": "/w/a", "sha1": None}}}}})
    (file,) = _dumpstatus(text, listing.url, replace(listing, job="j", base="http://mirror/"))
    assert file.url == "http://mirror/w/a"
    for reader, line in ((_paths, "http://[abc/x"), (_checksums, f"{'a' * 64}  http://[abc/x"), (_dumpstatus, text)):
        with pytest.raises(UserError, match=r"'http://\[abc/x' is not the address of a file: Invalid IPv6 URL"):
            reader(line.replace("/w/a", "http://[abc/x"), listing.url, replace(listing, job="j"))
    for size, sha1 in (("19", "a" * 40), (-1, "a" * 40), (19, "a" * 39), (19, 5)):
        files = {"a": {"size": size, "url": "/a", "sha1": sha1}}
        text = json.dumps({"jobs": {"j": {"status": "done", "files": files}}})
        with pytest.raises(UserError, match="http://x/list"):
            _dumpstatus(text, listing.url, replace(listing, job="j"))
    with pytest.raises(UserError, match=r"date=latest needs 'listing.dates' in the source's file"):
        list_files(Source("mine", "Mine", listing=listing), {"date": "latest"}, tmp_path, Patience())


def test_what_a_source_says_writes_no_lines_on_the_terminal(tmp_path, capsys):
    body = 'licence = "a\\n  b\\u001b[31m"\npaths = ["x\\n  y"]\n[options]\no = "1\\n2"'
    source = source_file(tmp_path, "mine", body)
    assert run("--show", source) == 0
    shown = capsys.readouterr().out
    assert r"licence    a\n  b\x1b[31m" in shown and r"o=1\n2" in shown and shown.count("\n") == 7
    assert run(source, "--out", tmp_path / "out", "--dry-run") == 1
    shown = capsys.readouterr().out
    assert r"o=1\n2" in shown and r"/x\n  y" in shown and shown.count("\n") == 4


def test_an_address_of_a_billion_spaces_is_refused():
    for width in ("3000000000", "{width}"):
        with pytest.raises(UserError, match=r"^the address 'http://x/\{x:>[^']*' has a format of \{x\} with another"):
            _filled(f"http://x/{{x:>{width}}}", {"x": "1", "width": "3000000000"})
    assert _filled("http://x/{x:0>5}/{date:.4}", {"x": "1", "date": "20240101"}) == "http://x/00001/2024"


def test_what_is_no_address_is_named():
    with pytest.raises(UserError, match=r"'http://\[::1' is not the address of a file: Invalid IPv6 URL"):
        named([RemoteFile("http://[::1", "")], "txt")
