"""What ``smlp data fetch`` makes of Wikipedia's XML and of WARC files."""

import bz2
import gzip
import re
import tracemalloc
import zlib
from collections import Counter
from types import SimpleNamespace

import mwparserfromhell
import pytest
from fetch_data import HEAD, PLAIN, WIKITEXT, article, dump, page, write_warc

from data_prep.fetch import warc, wikipedia
from data_prep.fetch.listing import named_by_format
from data_prep.fetch.sequence import part_name
from data_prep.flow.documents import Defect, Failure, Loss, Record
from data_prep.flow.limits import CpuLimit


def reasons(pieces):
    return Counter(piece.reason for piece in pieces if isinstance(piece, Loss))


def texts(pieces):
    return [piece.text for piece in pieces if isinstance(piece, Record)]


def test_wikitext_as_paragraphs():
    assert wikipedia.plain_text(WIKITEXT, mwparserfromhell) == PLAIN


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("", ""),
        ("{{a|{{b|{{c}}}}}}", ""),
        ("before {{unclosed [[link]] after", "before {{unclosed link after"),
        ("[[:Category:Ships]] and [[Category talk]]s", "and Category talks"),
        ("one [[two|]] three [https://example.org]", "one three"),
        ("<ref>no end [[here]]", "no end here"),
        ("== A ==\n==B==\ntext", "A\nB\ntext"),
        ("a<!-- one --> b<!-- no end", "a b<!-- no end"),
        ("a<ref x/>b<REF>c</ref >d<ref>e", "abde"),
        ("a ( , ;) b  [ ]c(d )", "a bc(d )"),
    ],
)
def test_odd_wikitext(wikitext, plain):
    assert wikipedia.plain_text(wikitext, mwparserfromhell) == plain


@pytest.mark.parametrize("pattern", ["<ref>", "<ref ", "<!--", "</ref ", "{{{{a", " ", "(", "( ,"])
def test_time_grows_with_the_length_of_hostile_wikitext(pattern):
    """The limit is of CPU time, many times what it takes; time that grows with the square of it takes minutes."""
    parsed = SimpleNamespace(parse=lambda wikitext, **_: SimpleNamespace(nodes=[mwparserfromhell.nodes.Text(wikitext)]))
    with CpuLimit(20):
        for wikitext in (pattern * 200_000, pattern + " " * 200_000 + "x"):
            wikipedia.plain_text(wikitext, parsed)
        wikipedia._NO_TEXT_LINKS.match(" " * 200_000)


def test_templates_that_are_nested_too_deep():
    assert wikipedia.plain_text("a{{b" * 100 + "}}" * 100, mwparserfromhell) == "a"
    assert wikipedia.text_of_article("a{{b" * 101 + "}}" * 101) is None
    assert wikipedia.text_of_article("a{{b" * 5000 + "}}" * 5000) is None


def test_a_page_that_is_no_page_ends_the_file_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "a.xml.gz"
    with gzip.open(path, "wb") as file:
        file.write((HEAD + page(1, "A", "one") + "<page><title>B</title><text>").encode())
        for _ in range(20):
            file.write(b"x" * (1 << 20))
    pieces = list(wikipedia.articles(path, "wiki", 1 << 20))
    assert texts(pieces) == ["A\none"] and reasons(pieces) == {"cut off by damage": 1}
    assert "after 1 pages: the next page is longer than 9,437,184 bytes of XML" in pieces[-1].where


def test_pages_that_stall_or_crash_the_parser_are_dropped_and_named(tmp_path):
    """Unclosed tags take the parser's C code hours; what comes before and after them is kept."""
    path = tmp_path / "a.xml"
    path.write_text(HEAD + page(1, "A", "one") + page(2, "B", "<b>" * 20_000) + page(3, "C", "two") + "</mediawiki>")
    pieces = list(wikipedia.articles(path, "wiki", 1 << 20, 0.5))
    assert texts(pieces) == ["A\none", "C\ntwo"]
    assert reasons(pieces) == {"took more than 0.5 s of CPU time": 1}
    assert [piece.where for piece in pieces if isinstance(piece, Failure)] == [f"{path}: page 2"]


def test_an_encoding_that_the_parser_lacks(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text('<?xml version="1.0" encoding="shift_jis"?>' + HEAD + page(1, "A", "one") + "</mediawiki>")
    (defect,) = wikipedia.articles(path, "wiki", 5000)
    assert (defect.problem, "encoding" in defect.where) == ("damaged: it breaks off", True)


def test_xml_without_a_page_is_named(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text("<html><body>Log in first</body></html>")
    assert list(wikipedia.articles(path, "wiki", 5000)) == [Defect("no document in it", str(path))]


def test_a_dump_of_several_streams(tmp_path):
    pages = [
        page(1, "Ada", WIKITEXT),
        page(2, "Talk:Ada", "hello", namespace=1),
        page(3, "Lady Ada", "#WEITERLEITUNG [[Ada]]", redirect="Ada"),
        page(4, "Countess", "#redirect [[Ada]]"),
        page(5, "Empty", "{{stub}}"),
        page(6, "Long", "word " * 2000),
        page(7, "Bab <&> age", "He made engines."),
    ]
    path = tmp_path / "enwiki-pages-articles-multistream1.xml-p1p7.bz2"
    path.write_bytes(dump(pages, streams=3))
    pieces = list(wikipedia.articles(path, "wiki", 5000))
    assert pieces[0] == Record(f"Ada\n{PLAIN}", "wiki:1", "wiki", {"title": "Ada", "date": "2026-01-01T00:00:00Z"})
    assert pieces[-1].text == "Bab <&> age\nHe made engines." and len(pieces) == 7
    assert reasons(pieces) == {
        "redirect": 2,
        "not an article (another namespace)": 1,
        "no text left": 1,
        "longer than 5,000 bytes": 1,
    }


def test_pages_just_before_damage_are_kept(tmp_path):
    """They are fewer bytes than the parser asks for at a time."""
    packer = zlib.compressobj(wbits=31)
    text = HEAD + "".join(page(number, f"T{number}", "one") for number in range(20))
    path = tmp_path / "a.xml.gz"
    path.write_bytes(packer.compress(text.encode()) + packer.flush(zlib.Z_SYNC_FLUSH))
    pieces = list(wikipedia.articles(path, "wiki", 1 << 20))
    assert texts(pieces) == [f"T{number}\none" for number in range(20)]
    assert "after 20 pages" in pieces[-1].where


def test_a_dump_that_breaks_off(tmp_path):
    pages = [page(number, f"Title {number}", f"Text of article {number}. " * 30) for number in range(200)]
    path = tmp_path / "a.xml.bz2"
    content = dump(pages, streams=5)
    path.write_bytes(content[: len(content) * 2 // 3])
    pieces = list(wikipedia.articles(path, "wiki", 1 << 20))
    whole = texts(pieces)
    assert 80 <= len(whole) < 200 and whole == [
        f"Title {n}\n" + (f"Text of article {n}. " * 30).strip() for n in range(len(whole))
    ]
    assert (
        isinstance(pieces[-1], Defect)
        and "damaged" in pieces[-1].problem
        and set(reasons(pieces)) <= {"cut off by damage"}
    )
    plain = (HEAD + "".join(pages)).encode()
    path = tmp_path / "b.xml"
    path.write_bytes(plain[: len(plain) // 2])
    pieces = list(wikipedia.articles(path, "wiki", 1 << 20))
    assert len(texts(pieces)) == plain[: len(plain) // 2].count(b"</page>")
    assert reasons(pieces) == {"cut off by damage": 1} and "no element found" in pieces[-1].where
    path.write_bytes(b"no xml")
    assert [type(piece) for piece in wikipedia.articles(path, "wiki", 1 << 20)] == [Defect]


def test_memory_of_a_long_dump(tmp_path, monkeypatch):
    """Pages that are done with do not stay in the tree."""
    monkeypatch.setattr(wikipedia, "helper", lambda *_: lambda wikitext: wikitext[:10])
    path = tmp_path / "a.xml.bz2"
    path.write_bytes(bz2.compress((HEAD + page(1, "A", "word " * 4000) * 300 + "</mediawiki>").encode()))
    tracemalloc.start()
    try:
        assert sum(isinstance(piece, Record) for piece in wikipedia.articles(path, "wiki", 1 << 20)) == 300
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def ok(number):
    return ("200 OK", "text/html; charset=utf-8", article(number).encode())


def test_pages_of_a_warc_file(tmp_path):
    path = tmp_path / "CC-NEWS-1.warc.gz"
    write_warc(
        path,
        [
            ok(0),
            ("404 Not Found", "text/html", b"<html>gone</html>"),
            ("200 OK", "image/png", b"\x89PNG"),
            ("200 OK", "text/html", b"<html><body></body></html>"),
            ("200 OK", "text/html", b"<p>" + b"long " * 20_000),
            ("200 OK", "text/html; charset=latin-1", article(7).replace("town", "caf\xe9").encode("latin-1")),
        ],
    )
    pieces = list(warc.pages(path, "news", 50_000))
    first, last = texts(pieces)
    assert "Paragraph 5 of article 0 says" in first and "About us" not in first and "caf\xe9" in last
    assert pieces[0].source == "news" and pieces[0].id.startswith("urn:uuid:")
    assert pieces[0].fields == {"url": "http://example.org/0", "date": "2018-01-01T00:00:00Z"}
    assert reasons(pieces) == {
        "no page: the server's answer was not 200": 1,
        "not HTML": 1,
        "no text found on the page": 1,
        "longer than 50,000 bytes": 1,
    }


def test_pages_that_are_compressed_by_themselves(tmp_path, capfd):
    """warcio returns what it could unpack, as if that were all."""
    path, content = tmp_path / "a.warc.gz", ok(0)[2]
    whole, deflated = gzip.compress(content), zlib.compress(content)
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # in the checksum
    members = gzip.compress(content[:90]) + gzip.compress(content[90:])
    kept = [(whole, "gzip"), (members, "gzip"), (deflated, "deflate"), (deflated[2:-4], "deflate"), (content, "gzip")]
    damaged = [(whole[:-40], "gzip"), (bytes(flipped), "gzip"), (deflated[:-40], "deflate")]
    write_warc(path, [("200 OK", "text/html", body, name) for body, name in [*kept, *damaged, (b"", "gzip")]])
    pieces = list(warc.pages(path, "news", 1 << 20))
    assert len(texts(pieces)) == len(kept) == len([text for text in texts(pieces) if text == texts(pieces)[0]])
    assert reasons(pieces) == {"page whose compressed text is damaged": 3, "no text found on the page": 1}
    assert next(piece.where for piece in pieces if isinstance(piece, Failure)) == f"{path}: http://example.org/5"
    assert capfd.readouterr().err == ""


def test_a_library_for_brotli_that_warcio_cannot_use(tmp_path, monkeypatch):
    from warcio.bufferedreaders import BufferedReader

    def set_attribute():
        object().unused_data = None

    monkeypatch.setitem(BufferedReader.DECOMPRESSORS, "br", set_attribute)
    path = tmp_path / "a.warc.gz"
    write_warc(path, [ok(0), (*ok(1), "br"), ok(2)])
    pieces = list(warc.pages(path, "news", 1 << 20))
    assert len(texts(pieces)) == 2 and list(reasons(pieces)) == [
        "page in brotli, which warcio unpacks with brotlipy alone"
    ]


@pytest.mark.parametrize("suffix", [".warc.gz", ".warc"])
def test_a_warc_file_that_breaks_off(tmp_path, suffix):
    """Wherever it is cut: all pages before come, the one that is cut is counted, and the file is named."""
    path = tmp_path / f"a{suffix}"
    write_warc(path, [ok(number) for number in range(4)])
    content = path.read_bytes()
    seen = set()
    for cut in range(len(content) // 3, len(content) - 30, 97 if suffix == ".warc" else 31):
        if content[cut:].startswith(b"\x1f\x8b\x08"):
            continue  # between two records
        path.write_bytes(content[:cut])
        pieces = list(warc.pages(path, "news", 1 << 20))
        whole = [number for number in range(4) if any(f"of article {number} says" in text for text in texts(pieces))]
        assert whole == list(range(len(whole))) and len(texts(pieces)) == len(whole)
        seen.add((len(whole), any(isinstance(piece, Defect) for piece in pieces)))
    assert {(1, True), (2, True), (3, True)} <= seen
    if suffix == ".warc.gz":  # of a plain file, a cut between records cannot be told from its end
        assert all(damaged for number, damaged in seen if number < 4)
        starts = [match.start() for match in re.finditer(b"\x1f\x8b\x08", content)]  # the file's, then pairs
        path.write_bytes(content[: starts[4] + 30])
        pieces = list(warc.pages(path, "news", 1 << 20))
        assert len(texts(pieces)) == 1 and reasons(pieces) == {"cut off by damage": 1}


def test_files_that_are_no_warc(tmp_path):
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(b"hello\nworld\n" * 50))
    assert isinstance(list(warc.pages(path, "news", 1000))[-1], Defect)
    path.write_bytes(b"hello")
    assert isinstance(list(warc.pages(path, "news", 1000))[-1], Defect)
    path.write_bytes(b"")
    assert [piece.problem for piece in warc.pages(path, "news", 1000)] == ["no document in it"]


def test_names_of_what_is_written():
    assert part_name("enwiki-20260101-pages-articles-multistream1.xml-p1p41242.bz2") != part_name(
        "enwiki-20260101-pages-articles-multistream1.xml-p41243p9.bz2"
    )
    assert part_name("CC-NEWS-2018-1.warc.gz") == "CC-NEWS-2018-1" and part_name("en.txt.xz") == "en"
    assert (
        named_by_format("en.txt.xz", "txt") == "en.txt.xz" and named_by_format("books.gz", "jsonl") == "books.jsonl.gz"
    )
    assert (
        named_by_format("download", "txt") == "download.txt"
        and named_by_format("a.xml.bz2", "wikipedia") == "a.xml.bz2"
    )
