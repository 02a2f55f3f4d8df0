"""A small Wikipedia dump and a small WARC file, made by hand."""

from __future__ import annotations

import bz2
import io
import os
import signal
from pathlib import Path
from xml.sax.saxutils import escape

WIKITEXT = """{{Short description|Mathematician}}
{{Infobox person
| name = Ada <ref>{{cite web|url=http://example.org}}</ref>
}}
[[File:Ada.jpg|thumb|left|A [[picture]] of her]]
'''Ada''' (; {{lang|fr|dame}}) was an ''English'' [[mathematician|maths person]] and [[writer]].<ref name="a">x</ref>\
<ref name="a"/> She [http://example.org lived] &ndash; here.<!-- a note -->

== Life ==
{| class="wikitable"
|-
| a cell || another
|}
* item one
* item ''two''
Text with <math>x^2</math> a <b>bold</b> word; 5 < 6 {{{1|x}}}:
=== Early ===
More<br />lines.
== See also ==
* [[Other]]
=== Below it ===
gone
== Legacy ==
Kept. She&nbsp;was.
== References ==
{{reflist}}
[[Category:People]]
__NOTOC__
"""
PLAIN = """Ada was an English maths person and writer. She lived – here.
Life
item one
item two
Text with a bold word; 5 < 6 :
Early
More
lines.
Legacy
Kept. She was."""


def page(number: int, title: str, text: str, namespace: int = 0, redirect: str = "") -> str:
    """A page of a dump."""
    target = f'<redirect title="{redirect}" />' if redirect else ""
    return (
        f"<page><title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>{target}<revision><id>{number + 900}"
        f"</id><timestamp>2026-01-01T00:00:00Z</timestamp><text>{escape(text)}</text></revision></page>\n"
    )


HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><dbname>x</dbname></siteinfo>\n'


def dump(pages: list[str], streams: int = 2) -> bytes:
    """The pages as ``pages-articles-multistream`` has them: bzip2 streams one after the other."""
    cut = max(1, len(pages) // streams)
    groups = [HEAD, *("".join(pages[start : start + cut]) for start in range(0, len(pages), cut)), "</mediawiki>\n"]
    return b"".join(bz2.compress(group.encode()) for group in groups)


def article(number: int) -> str:
    """HTML of a news page."""
    paragraphs = "".join(
        f"<p>Paragraph {index} of article {number} says that something happened in the town, and who saw it.</p>"
        for index in range(6)
    )
    menu = "<nav><a href='/'>Home</a> <a href='/about'>About us</a></nav>"
    return f"<html><title>News</title><body>{menu}<article><h1>Title {number}</h1>{paragraphs}</article></body>"


def write_warc(path: Path, pages: list[tuple]) -> None:
    """A WARC file of (status line, content type, body[, content encoding]), with a request before each response."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "tests"}))
        for number, (status, kind, body, *encoding) in enumerate(pages):
            url = f"http://example.org/{number}"
            asked = StatusAndHeaders("GET / HTTP/1.1", [("Host", "example.org")], is_http_request=True)
            writer.write_record(writer.create_warc_record(url, "request", http_headers=asked))
            named = [("Content-Type", kind), *(("Content-Encoding", name) for name in encoding)]
            headers = StatusAndHeaders(status, named, protocol="HTTP/1.1")
            record = writer.create_warc_record(
                url,
                "response",
                payload=io.BytesIO(body),
                http_headers=headers,
                warc_headers_dict={"WARC-Date": "2018-01-01T00:00:00Z"},
            )
            writer.write_record(record)


def answer(word: str) -> str:
    """For a helper process: what it makes of a document, or what becomes of it."""
    if word == "stall":
        while True:
            pass
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "fill":
        raise MemoryError
    if word == "leave":
        os._exit(7)
    return word.upper()
