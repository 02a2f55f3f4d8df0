"""``smlp data fetch``: whole runs against a local server, and on files of the disk."""

import bz2
import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import shutil
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from fetch_data import WIKITEXT, article, dump, page, write_warc
from fetch_running import QUICK, counts, documents, run, source_file, texts
from file_server import cut_after, first, serving, status

from data_prep.fetch import sequence, wanted
from data_prep.fetch.sequence import Writer
from data_prep.fetch.source import Hub, Size, Source, built_in
from data_prep.flow.documents import Defect, Failure, Loss, ReadSettings, Record
from data_prep.flow.manifest import read_manifest
from data_prep.flow.parts import FilePart
from data_prep.flow.running import StepRun, locked
from smlp.errors import UserError
from smlp.files import NamedFile


@pytest.fixture
def server():
    with serving() as state:
        yield state


def wikipedia_server(server, date="20260101", job_status="done"):
    """A dump of three parts, with an index besides."""
    files = {}
    for part in (10, 2, 1):
        name = f"xwiki-{date}-pages-articles-multistream{part}.xml-p{part}p{part}.bz2"
        content = dump([page(part, f"Part {part}", WIKITEXT), page(99, "To", "#REDIRECT [[A]]", redirect="A")])
        server.files[f"xwiki/{date}/{name}"] = content
        digest = hashlib.sha1(content).hexdigest()
        files[name] = {"size": len(content), "url": f"/xwiki/{date}/{name}", "sha1": digest}
    name = f"xwiki-{date}-pages-articles-multistream-index1.txt-p1p1.bz2"
    files[name] = {"size": 5, "url": f"/xwiki/{date}/{name}", "sha1": "0" * 40}
    jobs = {"articles": {"status": job_status, "files": files}}
    server.files[f"xwiki/{date}/dumpstatus.json"] = json.dumps({"version": "0.8", "jobs": jobs}).encode()
    server.files["xwiki/"] = server.files.get("xwiki/", b"") + f'<a href="{date}/">{date}</a>'.encode()


@pytest.fixture
def wiki(server, tmp_path):
    """A source file for it."""
    wikipedia_server(server)
    wikipedia_server(server, "20260201", job_status="in-progress")
    listing = built_in()["wikipedia"].listing
    body = f"""format = "wikipedia"
[options]
date = "latest"
[listing]
kind = "dumpstatus"
url = "{server.address}/xwiki/{{date}}/dumpstatus.json"
dates = "{server.address}/xwiki/"
job = "articles"
pattern = '{listing.pattern}'
"""
    return source_file(tmp_path, "wiki", body)


PART_2 = "xwiki/20260101/xwiki-20260101-pages-articles-multistream2.xml-p2p2.bz2"


def test_wikipedia_from_the_list_to_documents(server, wiki, tmp_path, capsys):
    """The newest dump that is finished; a part that stays broken is named, the rest goes through, and it alone is
    fetched when the command is repeated."""
    out = tmp_path / "out"
    server.faults[PART_2] = status(503)
    assert run(wiki, "--out", out, *QUICK) == 1
    error = capsys.readouterr().err
    assert (
        f"failed: {server.url(PART_2)}: the server answers 503 Service Unavailable; gave up after 2 attempts" in error
    )
    assert "wiki is not finished: run the same command again" in error
    assert [text.split("\n")[0] for text in texts(out)] == ["Part 1", "Part 10"]
    assert not (out / "wiki" / "manifest.json").exists()

    server.faults[PART_2] = first(1, cut_after(200))
    before = len(server.requests)
    assert run(wiki, "--out", out, *QUICK) == 0
    assert server.requests[before:] == [(PART_2, ""), (PART_2, "bytes=200-")]
    assert re.search(r"documents dropped: redirect +3 +50.00%", capsys.readouterr().out)
    manifest = read_manifest(out / "wiki", "fetch")
    assert manifest["counts"]["documents_in"] == 6 and manifest["counts"]["kept"] == 3
    assert [row["path"].rpartition("multistream")[2][:2] for row in manifest["inputs"]] == ["1.", "2.", "10"]
    assert manifest["inputs"][1]["sha256"] == hashlib.sha256(server.files[PART_2]).hexdigest()
    assert manifest["corpus"]["title"] == "wiki"
    assert [text.split("\n")[0] for text in texts(out)] == ["Part 1", "Part 10", "Part 2"]

    before = len(server.requests)
    for path in (out / ".raw" / "wiki").glob("*.bz2"):
        path.unlink()
    assert run(wiki, "--out", out, *QUICK) == 0
    assert len(server.requests) == before and read_manifest(out / "wiki") == manifest


def test_a_source_without_any_document_is_no_success(server, tmp_path, capsys):
    """Such as a page that asks to log in, with status 200."""
    server.files["w/dump.xml"] = b"<html><body>Please log in</body></html>"
    body = f'format = "wikipedia"\n[[files]]\nurl = "{server.address}/w/dump.xml"\n'
    source, out = source_file(tmp_path, "w", body), tmp_path / "out"
    for _ in range(2):
        assert run(source, "--out", out, *QUICK) == 1
        said = f"smlp: error: w: there is no document in it; once it has some, remove {out}/w and {out}/.raw/w and"
        assert said in capsys.readouterr().err
    server.files["w/dump.xml"] = bz2.decompress(dump([page(1, "One", WIKITEXT)]))
    for folder in ("w", ".raw/w"):
        shutil.rmtree(out / folder)
    assert run(source, "--out", out, *QUICK) == 0


def test_a_date_that_is_not_finished_and_a_job_that_is_not_there(server, wiki, tmp_path, capsys):
    assert run(wiki, "--set", "date=20260201", "--out", tmp_path / "out", *QUICK) == 1
    assert "the job 'articles' is not finished there, its status is 'in-progress'" in capsys.readouterr().err
    wiki.write_text(wiki.read_text().replace('"articles"', '"abstracts"'))
    assert run(wiki, "--set", "wiki.date=20260101", "--out", tmp_path / "new", *QUICK) == 1
    assert "is not the status of a dump with the job 'abstracts'" in capsys.readouterr().err
    assert run(wiki, "--set", "date=20250101", "--out", tmp_path / "other", *QUICK) == 1
    assert "dumpstatus.json: the server answers 404" in capsys.readouterr().err


def test_the_latest_date_is_not_one_before_a_list_that_cannot_be_read_now(server, wiki, tmp_path, capsys):
    server.faults["xwiki/20260201/dumpstatus.json"] = lambda handler, content: handler.answer(503, b"") or True
    assert run(wiki, "--out", tmp_path / "out", *QUICK, "--attempts", "1") == 1
    assert "dumpstatus.json: the server answers 503" in capsys.readouterr().err
    del server.files["xwiki/20260201/dumpstatus.json"]
    assert run(wiki, "--out", tmp_path / "out", *QUICK) == 0


def news_source(server, folder):
    """Two months of news, two files each."""
    for month, names in {"2018-12": "ab", "2019-01": "cd"}.items():
        lines = []
        for number, name in enumerate(names):
            path = f"crawl/{name}.warc.gz"
            pages = [("200 OK", "text/html", article(10 * ord(name) + index).encode()) for index in range(2)]
            write_warc(folder / "x.warc.gz", [*pages, ("404 Not Found", "text/html", b"")])
            server.files[path] = (folder / "x.warc.gz").read_bytes()
            lines.append(f"{path}\n" + "\n" * number)
        server.files[f"{month}/warc.paths.gz"] = gzip.compress("".join(lines).encode("utf-8-sig"))
    (folder / "x.warc.gz").unlink()
    body = f"""format = "warc"
[options]
months = "2018-12:2019-01"
[listing]
kind = "paths"
url = "{server.address}/{{year}}-{{month}}/warc.paths.gz"
base = "{server.address}/"
"""
    return source_file(folder, "news", body)


def test_news_of_some_months_file_by_file(server, tmp_path, capsys):
    """With --delete-downloads: one file at a time on the disk, and one that fails leaves the others alone."""
    source, out = news_source(server, tmp_path), tmp_path / "out"
    assert run(source, "--out", out, "--set", "months=2018-13", "--dry-run") == 1
    assert "option months is '2018-13'" in capsys.readouterr().err and not server.asked("2018-13/warc.paths.gz")
    server.faults["crawl/b.warc.gz"] = status(500)
    assert run(source, "--out", out, "--delete-downloads", *QUICK) == 1
    assert "crawl/b.warc.gz: the server answers 500" in capsys.readouterr().err
    assert len(texts(out)) == 6
    server.faults.clear()
    assert run(source, "--out", out, "--delete-downloads", *QUICK) == 0
    assert len(server.asked("crawl/a.warc.gz")) == 1 and len(texts(out)) == 8
    assert counts(out / "news")["dropped"] == {"no page: the server's answer was not 200": 4}
    assert not list((out / ".raw" / "news").glob("*.warc.gz"))
    one = [piece for piece in documents(out) if "of article 970 says" in piece.text]
    assert len(one) == 1 and one[0].source == "news" and one[0].fields["url"] == "http://example.org/0"

    assert run(source, "--out", tmp_path / "one", "--set", "months=2019-01", "--limit-files", "1", *QUICK) == 0
    assert [row["path"][-9:] for row in read_manifest(tmp_path / "one" / "news")["inputs"]] == ["c.warc.gz"]


def books_source(server, folder):
    """Plain text of two files, with checksums in a list as sha256sum writes it."""
    server.files["b/one.txt.xz"] = lzma.compress(b"First.\nStill first.\n\nSecond.\n\n\nThird.\n")
    server.files["b/two.txt.bz2"] = bz2.compress("".join(f"Document {n}.\n\n" for n in range(300)).encode())
    names = ["one.txt.xz", "two.txt.bz2"]
    sums = [f"{hashlib.sha256(server.files[f'b/{name}']).hexdigest()}  {name}\n" for name in names]
    server.files["b/SHA256SUMS"] = "".join(sums).encode()
    body = f'format = "txt"\n[listing]\nkind = "checksums"\nurl = "{server.address}/b/SHA256SUMS"\n'
    return source_file(folder, "books", body)


def test_text_in_files_of_some_size_whatever_the_workers(server, tmp_path, capsys):
    source = books_source(server, tmp_path)
    for name, more in {"one": [], "two": ["--workers", "2"]}.items():
        assert run(source, "--out", tmp_path / name, *QUICK, *more, "--file-bytes", "4000") == 0
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name / "books").glob("[!.]*")} for name in ("one", "two"))
    assert one == two and len(one) == 1 + 1 + 6
    assert documents(tmp_path / "one")[0].text == "First.\nStill first."
    expected = ["First.\nStill first.", "Second.", "Third.", *(f"Document {number}." for number in range(300))]
    assert texts(tmp_path / "one") == sorted(expected)
    rows = read_manifest(tmp_path / "one" / "books")["outputs"]
    assert sum(row["documents"] for row in rows) == 303
    server.files["b/SHA256SUMS"] = b"<html>not what you think</html>"
    assert run(source, "--out", tmp_path / "three", *QUICK) == 1
    assert "SHA256SUMS is not a list of sha256 checksums: it has the line '<html>" in capsys.readouterr().err
    server.faults["b/SHA256SUMS"] = cut_after(9)
    assert run(source, "--out", tmp_path / "four", *QUICK) == 1
    assert not list((tmp_path / "four" / ".raw" / "books").iterdir()), "nobody would resume the list"


def test_text_that_a_server_compresses_unasked_is_not_taken_for_the_file(server, tmp_path, capsys):
    body = gzip.compress(b"Some text.\n")
    server.files |= {"one.txt": body, "two.txt.gz": body}
    server.faults = dict.fromkeys(
        server.files, lambda handler, content: not handler.answer(200, content, {"Content-Encoding": "gzip"})
    )
    source = source_file(tmp_path, "own", f'format = "txt"\n[[files]]\nurl = "{server.url("one.txt")}"\n')
    assert run(source, "--out", tmp_path / "one", *QUICK) == 1
    assert "one.txt: the server sends it compressed (gzip), though it is asked not to" in capsys.readouterr().err
    source = source_file(tmp_path, "own", f'format = "txt"\n[[files]]\nurl = "{server.url("two.txt.gz")}"\n')
    assert run(source, "--out", tmp_path / "two", *QUICK) == 0, "so are compressed files sent by some servers"
    assert texts(tmp_path / "two") == ["Some text."]


def test_a_long_part_goes_on_after_the_files_that_it_had_written(server, tmp_path, monkeypatch):
    """As after a kill: what was written before stays as it is, and all is as if nothing had happened."""

    source = books_source(server, tmp_path)
    words = [*QUICK, "--file-bytes", "4000"]
    assert run(source, "--out", tmp_path / "fresh", *words) == 0
    whole, opened = sequence.write_stream, []

    def killed(path):
        opened.append(path.name)
        if path.name.startswith("two-00003"):
            raise KeyboardInterrupt
        return whole(path)

    monkeypatch.setattr(sequence, "write_stream", killed)
    assert run(source, "--out", tmp_path / "out", *words) == 130
    monkeypatch.setattr(sequence, "write_stream", lambda path: opened.append(path.name) or whole(path))
    opened.clear()
    assert run(source, "--out", tmp_path / "out", *words) == 0
    assert sorted(opened) == [f"two-{number:05d}.jsonl.gz" for number in range(3, 6)]
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name / "books").glob("[!.]*")} for name in ("fresh", "out")
    )
    assert one == two


def test_what_is_on_record_of_other_content_is_not_used(tmp_path):
    def some(text, broken=False):
        for number in range(5):
            if broken and number == 3:
                raise ZeroDivisionError
            yield Record(f"{text} {number}", str(number), "x")

    def write(key, pieces):
        return Writer(tmp_path, "a", key, ".gz", 60, None).write(pieces)

    for key, first_text in (("old", "old 0"), ("new", "new 0")):
        with pytest.raises(ZeroDivisionError):
            write("old", some("old", broken=True))
        assert write(key, some("new")).counts.kept == 5
        assert documents(tmp_path)[0].text == first_text


@pytest.mark.parametrize("limit", [None, 3])
def test_the_end_of_a_file_is_counted_once_whenever_it_is_killed(tmp_path, monkeypatch, limit):
    def some():
        for number in range(5):
            yield Record(f"text {number}", str(number), "x")
        yield Defect("it breaks off", "a")

    def write(folder):
        return Writer(tmp_path / folder, "a", "key", ".gz", 15, limit).write(some())

    whole, note = write("whole"), Writer._note

    def killed(writer):
        note(writer)
        raise KeyboardInterrupt

    for _ in range(4):  # after each of its files
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Writer, "_note", killed)
            write("killed")
    assert write("killed") == whole and len(whole.outputs) > 1
    assert (len(whole.defects), whole.counts.other["parts cut short by --limit-documents"]) == (
        (0, 1) if limit else (1, 0)
    )


def test_a_full_disk_names_the_file_and_leaves_other_sources_alone(server, tmp_path, monkeypatch, capsys):
    class Full(NamedFile):
        def write(self, content):
            if ".txt." in str(self.name):  # not the list
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.name))
            return super().write(content)

    monkeypatch.setattr("data_prep.fetch.download.NamedFile", Full)
    (tmp_path / "mine.txt").write_text("A text.\n")
    raw = tmp_path / "out" / ".raw" / "books"
    assert run(books_source(server, tmp_path), tmp_path / "mine.txt", "--out", tmp_path / "out", *QUICK) == 1
    assert re.search(rf"error: books: {raw}/\w+\.txt\.\w+\.partial: No space left on device\n", capsys.readouterr().err)
    assert texts(tmp_path / "out") == ["A text."]


def test_two_commands_do_not_download_into_the_same_file(server, tmp_path, capsys):
    source, out = books_source(server, tmp_path), tmp_path / "out"
    asked, go_on, statuses = threading.Event(), threading.Event(), []

    def slow(handler, content):
        asked.set()
        return not go_on.wait(20)

    server.faults["b/one.txt.xz"] = slow
    first = threading.Thread(target=lambda: statuses.append(run(source, "--out", out, *QUICK)))
    first.start()
    assert asked.wait(20)
    kept = out / ".raw" / "books" / "listing.json"
    for more in ([], ["--restart"]):
        assert run(source, "--out", out, *QUICK, *more) == 1
        assert "another command is running in" in capsys.readouterr().err and kept.is_file()
    go_on.set()
    first.join()
    assert statuses == [0] and len(server.asked("b/one.txt.xz")) == 1


def test_what_is_done_anew_has_a_rate_again(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("One.\n")
    words = [tmp_path / "a.txt", "--out", tmp_path / "out", *QUICK]
    anew = ["--restart", "--compress", "none"]
    for more, ending in (([], "MB/s with"), ([], "(parts were done before)"), (anew, "MB/s with")):
        assert run(*words, *more) == 0
        assert ending in capsys.readouterr().out


def test_what_a_dry_run_finds_of_files_that_the_source_names(server, tmp_path, capsys):
    """What is there already is not needed again."""
    body = f'format = "txt"\n[[files]]\nurl = "{server.url("b/a.txt")}"\nbytes = 4000000\n'
    source, out = source_file(tmp_path, "some", body), tmp_path / "out"
    assert run(source, "--out", out, "--dry-run", "--json", tmp_path / "before.json") == 0
    raw = out / ".raw" / "some"
    raw.mkdir(parents=True)
    (raw / "a.txt.partial").write_bytes(bytes(3_000_000))
    assert run(source, "--out", out, "--dry-run", "--json", tmp_path / "after.json") == 0
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("before.json", "after.json"))
    before, after = (found["sources"][0]["needed_bytes"] for found in (before, after))
    assert before - after == 3_000_000


def test_a_dry_run_needs_no_disk_for_what_is_done(server, tmp_path, capsys):
    names = ("a.txt", "b.txt")
    server.files.update({name: b"A text.\n" for name in names})
    files = "".join(f'[[files]]\nurl = "{server.url(name)}"\nbytes = 8\n' for name in names)
    web = source_file(tmp_path, "web", f'format = "txt"\n{files}')
    (tmp_path / "mine.txt").write_text("A text.\n")
    local = source_file(tmp_path, "local", 'paths = ["mine.txt"]\n[size]\ntext_bytes = 100\n')
    out = tmp_path / "out"

    def planned(*more):
        assert run(web, local, "--out", out, *more, "--dry-run", "--json", tmp_path / "plan.json") == 0
        rows = json.loads((tmp_path / "plan.json").read_text())["sources"]
        return [(row["files"], row["needed_bytes"]) for row in rows]

    assert planned() == [(2, 16), (1, 45)]
    server.faults["b.txt"] = status(404)
    assert run(web, local, "--out", out, *QUICK) == 1
    (out / ".raw" / "web" / "a.txt").unlink()
    assert planned() == [(2, 8), (1, 0)]
    server.faults.clear()
    assert run(web, local, "--out", out, *QUICK) == 0
    for name in names:
        (out / ".raw" / "web" / name).unlink(missing_ok=True)
    assert planned() == [(2, 0), (1, 0)]
    assert planned("--restart") == [(2, 0), (1, 0)], "nothing would be deleted"
    assert planned("--file-bytes", "100", "--restart") == [(2, 16), (1, 45)]
    os.utime(tmp_path / "mine.txt", (1, 1))
    assert planned() == [(2, 0), (1, 45)]
    local.write_text(local.read_text().replace("text_bytes = 100", ""))
    assert planned("--restart") == [(2, 0), (1, None)]
    assert run(local, "--out", out, "--dry-run", "--file-bytes", "100") == 1
    assert f"problem: {out}/local holds work with other settings" in capsys.readouterr().out
    (other := tmp_path / "other" / "local").mkdir(parents=True)
    (other / "letter.txt").write_text("dear")
    assert run(local, "--out", other.parent, "--dry-run") == 1
    assert f"problem: local: --out {other} holds other files" in capsys.readouterr().out
    (tmp_path / "mine.txt").unlink()
    assert run(web, local, "--out", out, "--dry-run") == 1
    assert f"problem: local: there is no file or folder {tmp_path}/mine.txt" in capsys.readouterr().out


def test_a_shorter_file_leaves_nothing_of_the_longer_one(tmp_path):
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    for edition, number in (("first", 50), ("second", 5)):
        (folder / "a.txt").write_text("".join(f"{edition} edition, document {index}\n\n" for index in range(number)))
        assert run(folder, "--out", out, *QUICK, "--file-bytes", "300") == 0
        assert len(texts(out)) == number and all(text.startswith(edition) for text in texts(out))


def test_a_part_that_was_interrupted_leaves_nothing_when_its_file_is_gone(tmp_path, monkeypatch):
    folder, out, whole = tmp_path / "texts", tmp_path / "out", sequence.write_stream
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(f"{name}, document {index}\n\n" for index in range(15)))

    def killed(path):
        if path.name.startswith("b-00001"):
            raise KeyboardInterrupt
        return whole(path)

    words = (folder, "--out", out, *QUICK, "--file-bytes", "300")
    with monkeypatch.context() as patch:
        patch.setattr(sequence, "write_stream", killed)
        assert run(*words) == 130
    assert list(out.rglob("b-00000.jsonl.gz"))
    (folder / "b.txt").unlink()
    assert run(*words) == 0
    assert len(texts(out)) == 15 and all(text.startswith("a, ") for text in texts(out))


def test_a_document_that_is_slow_only_once_hides_no_other(tmp_path):
    def some(is_slow, breaks):
        for number in range(6):
            if number == 1 and is_slow:
                yield Failure("took more than 1 s of CPU time", where="a")
                continue
            if number == 3 and breaks:
                raise ZeroDivisionError
            yield Record(f"document {number}", str(number), "x")

    with pytest.raises(ZeroDivisionError):
        Writer(tmp_path, "a", "key", ".gz", 1, None).write(some(is_slow=True, breaks=True))
    result = Writer(tmp_path, "a", "key", ".gz", 1, None).write(some(is_slow=False, breaks=False))
    assert [piece.text for piece in documents(tmp_path)] == [f"document {number}" for number in (0, 2, 3, 4, 5)]
    assert (result.counts.kept, result.counts.documents_in) == (5, 6)
    assert result.defects == [{"problem": "dropped, took more than 1 s of CPU time", "where": "a"}]


def test_a_file_that_changed_on_the_server_is_void(server, tmp_path, capsys):
    source, out = books_source(server, tmp_path), tmp_path / "out"
    assert run(source, "--out", out, *QUICK) == 0
    server.files["b/one.txt.xz"] = lzma.compress(b"Quite another text.\n")
    digest = hashlib.sha256(server.files["b/one.txt.xz"]).hexdigest()
    lines = server.files["b/SHA256SUMS"].decode().splitlines()
    server.files["b/SHA256SUMS"] = f"{digest}  one.txt.xz\n{lines[1]}\n".encode()
    before = len(server.requests)
    assert run(source, "--out", out, *QUICK) == 0 and len(server.requests) == before  # the list is the one of old
    server.faults["b/SHA256SUMS"] = first(1, status(404))
    assert run(source, "--out", out, *QUICK, "--restart") == 1
    assert run(source, "--out", out, *QUICK) == 0, "the list of old is still there"
    assert run(source, "--out", out, *QUICK, "--restart") == 0
    assert [path for path, _ in server.requests[before:]] == ["b/SHA256SUMS", "b/SHA256SUMS", "b/one.txt.xz"]
    assert "Quite another text." in texts(out) and "Second." not in texts(out)
    assert run(source, "--out", out, *QUICK, "--limit-documents", "2") == 1
    assert "with other settings (limit_documents was None, now 2)" in capsys.readouterr().err


def test_a_download_that_was_changed_is_not_converted(server, tmp_path, capsys):
    source, out = books_source(server, tmp_path), tmp_path / "out"
    server.faults["b/two.txt.bz2"] = status(404)
    assert run(source, "--out", out, *QUICK) == 1
    server.faults.clear()
    held = out / ".raw" / "books" / "one.txt.xz"
    held.write_bytes(lzma.compress(b"Quite another text.\n"))
    for path in (out / "books").rglob("*one*"):
        path.unlink()
    assert run(source, "--out", out, *QUICK) == 1
    assert f"{held} was changed (its sha256 is " in capsys.readouterr().err
    held.unlink()
    assert run(source, "--out", out, *QUICK) == 0 and "Second." in texts(out)


def test_limits(server, tmp_path):
    source, out = books_source(server, tmp_path), tmp_path / "out"
    assert run(source, "--out", out, *QUICK, "--limit-documents", "2") == 0
    assert texts(out) == ["Document 0.", "Document 1.", "First.\nStill first.", "Second."]
    assert counts(out / "books")["other"]["parts cut short by --limit-documents"] == 2


def test_limits_are_of_files_not_of_their_parts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{number}"}}\n' for number in range(100)))
    run(
        folder, "--out", tmp_path / "out", *QUICK, "--file-bytes", "300", "--limit-documents", "2", "--limit-files", "2"
    )
    assert texts(tmp_path / "out") == ["a0", "a1", "b0", "b1"]
    run(folder, "--out", tmp_path / "files", *QUICK, "--file-bytes", "300", "--limit-files", "2")
    assert len(texts(tmp_path / "files")) == 200


def test_a_folder_of_mixed_files(tmp_path, capsys):
    """Each kind of file, one that is empty and one that is damaged, without any network."""
    folder, out = tmp_path / "my texts", tmp_path / "out"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\n")
    (folder / "b.jsonl").write_text('{"text": "three", "source": "elsewhere"}\nnot json\n')
    (folder / "c.txt").touch()
    (folder / "e.zip").write_bytes(b"no format of ours")
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"four\n\n" + bytes(range(256)) * 40)[:-200])
    assert run(folder, "--out", out, *QUICK) == 0
    printed, told = capsys.readouterr()
    assert "empty file: " in printed and "d.txt.gz" in printed and "dropped: not JSON" in printed
    assert f"not read in {folder}: e.zip" in told
    assert texts(out) == ["four", "one", "three", "two"]
    assert {piece.source for piece in documents(out)} == {"my-texts", "elsewhere"}
    row = counts(out / "my-texts")
    assert row["documents_in"] == 4 + sum(row["dropped"].values()) and row["dropped"]["not JSON"] == 1
    (folder / "b.jsonl").unlink()
    assert run(folder, "--out", out, *QUICK) == 0
    assert texts(out) == ["four", "one", "two"]  # what was made of a file that is no longer there went with it


def test_documents_are_not_written_into_what_is_read(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    for out in (folder, folder / "deeper"):
        for dry, source in itertools.product(([], ["--dry-run"]), (folder, f"hf:{folder}")):
            assert run(source, "--out", out, *QUICK, *dry) == 1
            error = capsys.readouterr().err
            assert f" lies in the input {folder}: the next run" in error and error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["a.txt"]
    assert run(folder, "--out", tmp_path, *QUICK) == 1  # the same folder under its own name
    capsys.readouterr()
    within = tmp_path / "out" / "b" / "b.txt"  # --restart would delete it
    within.parent.mkdir(parents=True)
    within.write_text("one\n")
    assert run(within, "--out", tmp_path / "out", *QUICK, "--restart") == 1
    assert f"the input {within} lies in --out {within.parent}" in capsys.readouterr().err and within.exists()


def test_a_dataset_of_the_hub_stays_at_the_revision_that_was_found(tmp_path, monkeypatch):
    hub = Hub("someone/texts", split="train")
    row = {"key": {"hub": asdict(hub)}, "hub": {**asdict(hub), "revision": "old"}, "num_shards": 2}
    (tmp_path / "shards.json").write_text(json.dumps(row))
    monkeypatch.setattr(sequence.hub, "pinned", pytest.fail)
    found = sequence._shards(SimpleNamespace(raw=tmp_path, source=SimpleNamespace(hub=hub), restart=False))
    assert [(shard["hub"]["revision"], shard["shard"]) for _, shard in found] == [("old", 0), ("old", 1)]


def test_shards_of_the_hub_whole_and_in_part(tmp_path, monkeypatch):
    source = Source("texts", "Texts", hub=Hub("someone/texts"), size=Size(text_bytes=1000))
    whole = wanted.Wanted(source, tmp_path, StepRun(tmp_path / "texts", quiet=True), {}, ReadSettings())
    monkeypatch.setattr(sequence.hub, "pinned", lambda hub: (replace(hub, revision="new"), 4))
    monkeypatch.setattr(sequence.hub, "rows", lambda *of: iter([Record("text", "1", "x")]))
    with locked(whole.run), pytest.raises(UserError, match="another command is running"):
        sequence.fetch(whole)
    assert not whole.raw.exists()
    assert sequence.needed_bytes(whole, []) == 450
    two = replace(whole, limit_files=2, restart=True)
    assert sequence.fetch(two).manifest["corpus"]["hub"]["revision"] == "new"
    assert [sequence.needed_bytes(replace(whole, limit_files=number), []) for number in (None, 1, 2)] == [450, 112, 0]
    monkeypatch.setattr(sequence.hub, "pinned", lambda hub: (_ for _ in ()).throw(UserError("no Hub")))
    with pytest.raises(UserError, match="no Hub"):
        sequence.fetch(two)
    assert sequence.fetch(replace(two, restart=False)).manifest, "what was known is still known"


def test_a_dataset_through_datasets(tmp_path, capsys):
    """From a folder on the disk, which 'datasets' reads as it reads the Hub's. One test: its import takes seconds."""
    pytest.importorskip("datasets")
    folder, out = tmp_path / "set", tmp_path / "out"
    folder.mkdir()
    for shard in range(3):
        rows = [{"body": f"Text {shard}-{row}.", "stars": row} for row in range(4)] + [{"body": None, "stars": 0}]
        (folder / f"train-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(f"hf:{folder}", "--out", out, *QUICK, "--text-field", "body") == 0
    found = documents(out)
    assert [piece.text for piece in found] == [f"Text {shard}-{row}." for shard in range(3) for row in range(4)]
    assert isinstance(found[5], Record) and found[5].fields == {"stars": 1}
    assert found[5].id == "train-00001-of-00003:1"
    manifest = read_manifest(next(path for path in out.iterdir() if path.name != ".raw"))
    assert manifest["counts"]["dropped"] == {"no text in field 'body'": 3} and len(manifest["outputs"]) == 3
    hub = Hub(str(folder), split="train", rows_per_document=2)
    part, reading = FilePart(tmp_path, "a", "x"), ReadSettings(text_field="body", max_bytes=20)
    joined = list(sequence.hub.rows(hub, 0, 3, part, reading))
    assert [type(piece) for piece in joined] == [Record, Record, Loss], "two texts are 19 bytes, a missing one is lost"
    short = ReadSettings(text_field="body", max_bytes=18)
    assert [piece.reason for piece in sequence.hub.rows(hub, 0, 3, part, short)][:2] == ["longer than 18 bytes"] * 2
    assert run(f"hf:{folder}", "--out", tmp_path / "new", *QUICK) == 1
    assert "no column 'text'; there are body, stars" in capsys.readouterr().err
    joined = source_file(tmp_path, "joined", f'text_field = "body"\n[hub]\nname = "{folder}"\nrows_per_document = 3\n')
    assert run(joined, "--out", out, *QUICK, "--limit-files", "1") == 0
    assert [piece.text for piece in documents(out / "joined")] == ["Text 0-0.\nText 0-1.\nText 0-2.", "Text 0-3."]
    (folder / "train-0.jsonl").write_text('{"body": "Another text.", "stars": 1}\n')
    assert run(f"hf:{folder}", "--out", out, *QUICK, "--text-field", "body") == 0
    assert "Another text." in [piece.text for piece in documents(out)], "its files say which revision it is"
    assert run(f"hf:{folder}::nosplit", "--out", tmp_path / "new", *QUICK) == 1
    assert "nosplit" in capsys.readouterr().err


def test_a_disk_that_is_too_small(server, wiki, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(wanted.shutil, "disk_usage", lambda path: SimpleNamespace(free=500))
    assert run(wiki, "--out", tmp_path / "out", *QUICK) == 1
    assert "wiki still needs about 0.0 GB in " in capsys.readouterr().err
    assert not list((tmp_path / "out" / ".raw" / "wiki").glob("*.bz2"))
    assert run(wiki, "--out", tmp_path / "out", *QUICK, "--no-space-check") == 0
    (tmp_path / "a.txt").write_text("A text.\n")
    local = source_file(tmp_path, "local", 'paths = ["a.txt"]\n[size]\ntext_bytes = 4_000\n')
    assert run(local, "--out", tmp_path / "out", *QUICK) == 1
    assert "local still needs about 0.0 GB in " in capsys.readouterr().err
    assert run(local, "--out", tmp_path / "one", *QUICK, "--limit-documents", "1") == 0, "no text of 4,000 bytes"
    for number in range(9):
        (tmp_path / f"b{number}.txt").write_text("B text.\n")
    ten = source_file(tmp_path, "ten", 'paths = ["."]\n[size]\ntext_bytes = 4_000\n')
    for options in ((), ("--limit-files", "1")):
        assert run(ten, "--out", tmp_path.parent / "ten", *QUICK, *options) == (1 if not options else 0)
    assert "ten still needs about 0.0 GB in " in capsys.readouterr().err
    assert run(local, "--out", tmp_path / "out", *QUICK, "--no-space-check", "--restart") == 0
    for more in ((), ("--restart",)):
        assert run(local, "--out", tmp_path / "out", *QUICK, *more) == 0, "nothing is left to be written"


def test_some_of_the_files_are_that_share_of_the_documents(server, tmp_path):
    body = 'format = "txt"\n[size]\ntext_bytes = 4_000_000\n'
    body += "".join(f'[[files]]\nurl = "{server.url(f"b/{name}.txt")}"\n' for name in "abcd")
    source = source_file(tmp_path, "some", body)
    for more, share in (((), 1.0), (("--limit-files", "1"), 0.25)):
        assert run(source, "--out", tmp_path / "out", "--dry-run", "--json", tmp_path / "found.json", *more) == 0
        found = json.loads((tmp_path / "found.json").read_text())["sources"][0]
        assert found["document_bytes"] == 4_000_000 * wanted.COMPRESSED_SHARE * share


def test_shares_of_a_job_array(server, wiki, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(wiki, "--out", out, *QUICK, "--share", "0/2") == 0
    assert "1 parts are left to other shares" in capsys.readouterr().out and not server.asked(PART_2)
    assert run(wiki, "--out", out, *QUICK, "--share", "1/2") == 0
    assert counts(out / "wiki")["kept"] == 3
