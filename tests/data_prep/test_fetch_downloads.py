"""Downloads of ``smlp data fetch``, from a local server that breaks off, changes, refuses and lies."""

import hashlib
import json
import os
import threading
import time

import pytest
from file_server import cut_after, first, serving, stall, status

from data_prep.fetch.download import DownloadFailed, Patience, RemoteFile, download, download_all

QUICK = Patience(attempts=3, first_wait=0.01, longest_wait=0.05, timeout=5)
CONTENT = os.urandom(50_000) + bytes(range(256)) * 800  # 254,800 bytes
SHA1 = ("sha1", hashlib.sha1(CONTENT).hexdigest())


@pytest.fixture
def server():
    with serving() as state:
        state.files["a.bin"] = CONTENT
        yield state


def get(server, folder, patience=QUICK, **facts):
    path = folder / "a.bin"
    download(RemoteFile(server.url("a.bin"), "a.bin", **facts), path, patience)
    return path.read_bytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file(server, tmp_path):
    moved = []
    file = RemoteFile(server.url("a.bin"), "a.bin", len(CONTENT), SHA1)
    download(file, tmp_path / "a.bin", QUICK, moved.append)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and sum(moved) == len(CONTENT)
    assert names(tmp_path) == ["a.bin"] and server.asked("a.bin") == [""]


def test_a_cut_connection_is_resumed_where_it_broke_off(server, tmp_path):
    server.faults["a.bin"] = first(1, cut_after(100_000))
    assert get(server, tmp_path) == CONTENT
    assert server.asked("a.bin") == ["", "bytes=100000-"]


@pytest.mark.parametrize("ending", [".partial", ".partial.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link_or_a_pipe(server, tmp_path, ending, kind):
    victim, planted = tmp_path / "victim", tmp_path / f"a.bin{ending}"
    victim.write_bytes(b"of somebody else")
    planted.symlink_to(victim) if kind == "link" else os.mkfifo(planted)
    assert get(server, tmp_path) == CONTENT
    assert victim.read_bytes() == b"of somebody else" and names(tmp_path) == ["a.bin", "victim"]


def test_another_call_goes_on_where_the_first_gave_up(server, tmp_path):
    server.faults["a.bin"] = cut_after(100_000)  # on every request, whatever the range
    with pytest.raises(
        DownloadFailed,
        match=r"a\.bin: the connection failed after 100,000 of 254,800 bytes: .*gave up after 3 attempts",
    ):
        get(server, tmp_path)
    assert names(tmp_path) == ["a.bin.partial", "a.bin.partial.json"]
    server.faults.clear()
    assert get(server, tmp_path) == CONTENT
    assert server.asked("a.bin")[-1] == "bytes=100000-"


@pytest.mark.parametrize("stale", [False, True])
def test_progress_starts_the_attempts_anew(server, tmp_path, stale):
    """Ten cuts with three attempts: each brings new bytes, also after more bytes of a version that is gone."""
    if stale:
        (tmp_path / "a.bin.partial").write_bytes(b"x" * 240_000)
        memo = {"url": server.url("a.bin"), "version": '"old"'}
        (tmp_path / "a.bin.partial.json").write_text(json.dumps(memo))

    def cut(handler, content):
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        start = 0 if handler.headers.get("If-Range") == '"old"' else start
        if start >= 200_000:
            return False
        span = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}", "ETag": handler.tag(content)}
        handler.answer(206 if start else 200, content[start : start + 20_000], span, len(content) - start)
        return True

    server.faults["a.bin"] = cut
    assert get(server, tmp_path) == CONTENT
    assert len(server.asked("a.bin")) == 11


def test_a_file_that_changed_meanwhile_is_not_glued_together(server, tmp_path):
    server.faults["a.bin"] = cut_after(100_000)
    with pytest.raises(DownloadFailed):
        get(server, tmp_path)
    server.faults.clear()
    server.files["a.bin"] = new = os.urandom(300_000)
    before = len(server.requests)
    assert get(server, tmp_path) == new
    assert len(server.requests) == before + 1  # If-Range: the server sends the new one at once


def test_ranges_that_come_in_pieces(server, tmp_path):
    """A server that sends less than it was asked for, and says so."""

    def at_most(handler, content):
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start == 0:
            return cut_after(50_000)(handler, content)
        piece = content[start : start + 60_000]
        span = f"bytes {start}-{start + len(piece) - 1}/{len(content)}"
        handler.answer(206, piece, {"Content-Range": span, "ETag": handler.tag(content)})
        return True

    server.faults["a.bin"] = at_most
    assert get(server, tmp_path) == CONTENT
    assert len(server.asked("a.bin")) == 5


def test_a_server_that_ignores_if_range_is_found_out(server, tmp_path):
    server.faults["a.bin"] = cut_after(100_000)
    with pytest.raises(DownloadFailed):
        get(server, tmp_path)
    server.files["a.bin"] = new = os.urandom(300_000)

    def always_partial(handler, content):
        start = int(handler.headers["Range"].removeprefix("bytes=").rstrip("-"))
        span = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}", "ETag": handler.tag(content)}
        handler.answer(206, content[start:], span)
        return True

    server.faults["a.bin"] = first(1, always_partial)
    assert get(server, tmp_path) == new


@pytest.mark.parametrize("said", [True, False], ids=["its length is said", "or not"])
def test_a_whole_file_that_is_called_a_part_is_not_glued_together(server, tmp_path, said):
    server.faults["a.bin"] = cut_after(100_000)
    with pytest.raises(DownloadFailed):
        get(server, tmp_path)

    def whole(handler, content):
        span = {"Content-Range": f"bytes 100000-{len(content) - 1}/{len(content)}", "ETag": handler.tag(content)}
        handler.send_response(206)
        for name, value in {**span, **({"Content-Length": str(len(content))} if said else {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = True
        return True

    server.faults["a.bin"] = first(1, whole)
    assert get(server, tmp_path) == CONTENT


def test_a_length_that_cannot_be_is_not_believed(server, tmp_path):
    class Length(int):
        def __str__(self):
            return "9" * 5000  # more digits than Python makes a number of

    def endless(handler, content):
        handler.answer(200, content, length=Length(len(content) + 1))
        return True

    server.faults["a.bin"] = endless
    assert get(server, tmp_path) == CONTENT


def test_without_ranges_it_begins_again(server, tmp_path):
    server.ranges = False
    server.faults["a.bin"] = first(1, cut_after(100_000))
    moved = []
    download(RemoteFile(server.url("a.bin"), "a.bin"), tmp_path / "a.bin", QUICK, moved.append)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and sum(moved) == len(CONTENT)


def test_without_a_version_only_a_checksum_allows_to_resume(server, tmp_path):
    server.tags["a.bin"] = ""
    server.faults["a.bin"] = first(1, cut_after(100_000))
    assert get(server, tmp_path) == CONTENT
    assert server.asked("a.bin") == ["", ""]
    (tmp_path / "a.bin").unlink()
    server.faults["a.bin"] = first(1, cut_after(100_000))
    assert get(server, tmp_path, digest=SHA1) == CONTENT
    assert server.asked("a.bin")[2:] == ["", "bytes=100000-"]


def test_a_kill_between_the_last_byte_and_the_name(server, tmp_path):
    server.faults["a.bin"] = cut_after(len(CONTENT) - 1)
    with pytest.raises(DownloadFailed):
        get(server, tmp_path)
    server.faults.clear()
    with open(tmp_path / "a.bin.partial", "ab") as file:
        file.write(CONTENT[-1:])
    before = len(server.requests)
    assert get(server, tmp_path) == CONTENT  # 416 with the length that is there
    assert server.requests[before:] == [("a.bin", "bytes=254800-")]


def test_a_wrong_length_is_not_taken(server, tmp_path):
    server.faults["a.bin"] = lambda handler, content: handler.answer(200, content, length=len(content) + 5) or True
    with pytest.raises(DownloadFailed, match=r"254,80[05]"):
        get(server, tmp_path)
    server.faults.clear()
    with pytest.raises(DownloadFailed, match="its list says 7 bytes, the server has 254,800"):
        get(server, tmp_path, num_bytes=7)
    assert "a.bin" not in names(tmp_path)


def test_a_server_that_does_not_say_the_length(server, tmp_path):
    def until_closed(handler, content):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(content[:-1])
        handler.close_connection = True
        return True

    server.faults["a.bin"] = until_closed
    assert get(server, tmp_path) == CONTENT[:-1]  # nobody can know better
    (tmp_path / "a.bin").unlink()
    with pytest.raises(
        DownloadFailed, match=r"it has 254,799 bytes, but its list says 254,800; gave up after 3 attempts"
    ):
        get(server, tmp_path, num_bytes=len(CONTENT))


@pytest.mark.parametrize("said", [3, 999_999])
def test_chunks_override_a_length(server, tmp_path, said):
    """As RFC 9112 says; a proxy that unpacks a file may leave the packed one's length."""

    def chunked(handler, content):
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Content-Length", str(said))
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
        handler.close_connection = True
        return True

    server.faults["a.bin"] = chunked
    assert get(server, tmp_path) == CONTENT


def test_a_wrong_checksum_is_tried_again_and_then_named(server, tmp_path):
    bad = ("sha1", "0" * 40)
    with pytest.raises(DownloadFailed, match=rf"its sha1 is {SHA1[1]}, expected 0+; gave up after 3 attempts"):
        get(server, tmp_path, digest=bad)
    assert server.asked("a.bin") == ["", "", ""] and names(tmp_path) == []
    server.faults["a.bin"] = first(1, lambda handler, content: handler.answer(200, b"x" * len(content)) or True)
    assert get(server, tmp_path, digest=SHA1) == CONTENT


def test_503_passes_and_is_waited_for(server, tmp_path):
    server.faults["a.bin"] = first(2, status(503, Retry_After="0"))
    assert get(server, tmp_path) == CONTENT
    for strange in ("\xb2", "Mon, 01 Jan 99999999999 00:00:00 GMT"):
        server.faults["a.bin"] = first(1, status(503, Retry_After=strange))
        (tmp_path / "a.bin").unlink()
        assert get(server, tmp_path) == CONTENT
    start = time.monotonic()
    server.faults["a.bin"] = first(1, status(429, Retry_After="1"))
    (tmp_path / "a.bin").unlink()
    patience = Patience(attempts=3, first_wait=0.01, longest_wait=30, timeout=5)
    assert get(server, tmp_path, patience) == CONTENT
    assert 0.9 < time.monotonic() - start < 10


def test_503_for_ever_and_404(server, tmp_path):
    server.faults["a.bin"] = status(503)
    with pytest.raises(DownloadFailed, match=r"the server answers 503 .*gave up after 3 attempts"):
        get(server, tmp_path)
    del server.files["a.bin"]
    with pytest.raises(DownloadFailed, match=r"http://127.0.0.1:\d+/a.bin: the server answers 404 Not Found$"):
        get(server, tmp_path)
    assert len(server.asked("a.bin")) == 4  # 404 is not tried again


def test_a_server_that_says_nothing_more(server, tmp_path):
    server.faults["a.bin"] = first(1, stall(100_000, 1.5))
    assert get(server, tmp_path, Patience(3, 0.01, 0.05, timeout=0.3)) == CONTENT
    assert server.asked("a.bin") == ["", "bytes=100000-"]


def test_no_server_and_no_address(tmp_path, monkeypatch):
    with serving() as gone:
        address = gone.url("a.bin")
    with pytest.raises(DownloadFailed, match=r"a\.bin: the connection failed after 0 bytes: .*refused"):
        download(RemoteFile(address, "a.bin"), tmp_path / "a.bin", QUICK)
    with pytest.raises(DownloadFailed, match="is not the address of a file"):
        download(RemoteFile("corpora/a.bin", "a.bin"), tmp_path / "a.bin", QUICK)
    with serving() as leading:
        leading.files["a.bin"] = CONTENT
        for place in ("ftp://127.0.0.1/b.bin", "http://[", "http://h:abc/"):
            leading.faults["a.bin"] = status(302, Location=place)
            with pytest.raises(DownloadFailed, match=r"leads to what is (none|not the address of a file)"):
                download(RemoteFile(leading.url("a.bin"), "a.bin"), tmp_path / "a.bin", QUICK)
        leading.faults["a.bin"] = status(416, Content_Range="bytes */0")  # to a request of no range
        with pytest.raises(DownloadFailed, match="the server did not resume where it was asked to"):
            download(RemoteFile(leading.url("a.bin"), "a.bin"), tmp_path / "a.bin", QUICK)
    monkeypatch.setenv("http_proxy", "http:///nowhere")
    with pytest.raises(DownloadFailed, match="the proxy of the environment has no valid address: Please"):
        download(RemoteFile("http://example.invalid/a.bin", "a.bin"), tmp_path / "a.bin", QUICK)


def test_many_files_and_the_one_that_stays_broken(server, tmp_path):
    files = []
    for number in range(8):
        server.files[f"{number}.bin"] = CONTENT[number:]
        files.append(RemoteFile(server.url(f"{number}.bin"), f"{number}.bin"))
    server.faults["3.bin"] = status(500)
    problems = download_all(files, tmp_path, 3, QUICK, quiet=True)
    assert len(problems) == 1 and "3.bin: the server answers 500" in problems[0]
    assert names(tmp_path) == [f"{number}.bin" for number in range(8) if number != 3]
    server.faults.clear()
    before = len(server.requests)
    assert download_all(files, tmp_path, 3, QUICK, quiet=True) == []
    assert [path for path, _ in server.requests[before:]] == ["3.bin"]
    assert (tmp_path / "3.bin").read_bytes() == CONTENT[3:]


def test_when_the_network_is_down_the_rest_is_not_tried(tmp_path):
    with serving() as gone:
        files = [RemoteFile(gone.url(f"{number}.bin"), f"{number}.bin") for number in range(40)]
    problems = download_all(files, tmp_path, 2, Patience(1, 0.01, 0.01, 1), quiet=True)
    assert 12 <= len(problems) <= 15 and "further files were not tried" in problems[-1]


def test_stopping_keeps_what_there_is(server, tmp_path):
    stop = threading.Event()
    server.faults["a.bin"] = stall(100_000, 1.0)
    file = RemoteFile(server.url("a.bin"), "a.bin")
    with pytest.raises(DownloadFailed, match="stopped after"):
        download(file, tmp_path / "a.bin", Patience(3, 0.01, 0.05, 0.3), lambda came: came and stop.set(), stop)
    assert 0 < (tmp_path / "a.bin.partial").stat().st_size <= 100_000
