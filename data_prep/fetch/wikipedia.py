"""Read the articles of a Wikipedia dump page by page, and turn wikitext into plain paragraphs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from data_prep.flow.documents import Defect, Failure, Loss, Record
from data_prep.flow.limits import DEFAULT_SECONDS, DocumentFailed, Helper, helper
from data_prep.flow.streams import READ_BYTES, DamagedFile, open_stream
from smlp.errors import UserError

# Namespaces whose links are not text: pictures, categories. English names work in all languages.
_NO_TEXT_LINKS = re.compile(r"^\s*(?::\s*)?(file|image|media|category)\s*:", re.IGNORECASE)
_NO_TEXT_TAGS = frozenset({"ref", "references", "table", "gallery", "math", "chem", "timeline", "score", "imagemap"})
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
# Final sections with lists of works and links. They are removed with their subsections.
END_SECTIONS = frozenset({"references", "external links", "see also", "further reading", "notes", "bibliography"})
# Removed before parsing, innermost first: half of an article's markup, for which the parser would build trees.
_INNERMOST_TEMPLATE = re.compile(r"\{\{\{[^{}]*\}\}\}|\{\{[^{}]*\}\}")
_XML_BYTES = 8  # most XML bytes of a page per byte of wikitext: a quotation mark takes six
_MOST_NESTED = 100  # nesting depth of templates; MediaWiki itself gives up at 40
_COMMENT_OR_NOTE_BEGINS = re.compile(r"<!--|<ref\b", re.IGNORECASE)
_COMMENT_ENDS, _TAG_ENDS, _NOTE_ENDS = (re.compile(end, re.IGNORECASE) for end in ("-->", ">", r"</ref\s*>"))
_QUOTES_OR_OPEN_NOTE = re.compile(r"'{2,5}|</?ref\b[^<>]*>", re.IGNORECASE)
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
_EMPTY_BRACKETS = re.compile(r"(?<!\s)\s*(?:\([,;:\s]*\)|\[\s*\])")
_SPACES = re.compile(r"[ \t\u00a0]+")


def articles(
    path: Path, source: str, max_bytes: int, max_seconds: float = DEFAULT_SECONDS
) -> Iterator[Record | Loss | Defect]:
    """Yield the articles of a dump, in order; redirects and pages of other namespaces are losses.

    The dump is ``pages-articles`` XML, plain or compressed (``.bz2`` of several streams too). A page of more than
    ``max_bytes`` of wikitext is a loss; so is one that takes more than ``max_seconds`` of CPU time, and a
    defect names it.
    """
    parse = helper(f"{__name__}:text_of_article", max_seconds, ("mwparserfromhell",))
    num_pages, in_page = 0, False
    try:
        with open_stream(path) as stream:
            bounded = _OnePage(stream, _XML_BYTES * max_bytes + READ_BYTES)
            events = ElementTree.iterparse(bounded, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                if element.tag.rpartition("}")[2] != "page":
                    continue
                in_page = event == "start"
                if in_page:
                    continue
                num_pages += 1
                yield _article(element, path, source, max_bytes, parse)
                root.clear()  # discard finished pages, or memory would grow with the file
                bounded.num_bytes = 0
        if not num_pages:
            yield Defect("no document in it", str(path))
    except UserError:
        raise
    except (DamagedFile, ElementTree.ParseError, ValueError, LookupError) as error:  # or an encoding it does not have
        if in_page:
            yield Loss("cut off by damage")
        yield Defect("damaged: it breaks off", f"{path}: after {num_pages:,} pages: {error}")


class _OnePage:
    """A stream that ends at a page that is too long, because the parser would hold it in memory.

    ``num_bytes`` have been read since the caller set it to 0.
    """

    def __init__(self, stream: io.BufferedReader, most_bytes: int) -> None:
        self._stream, self._most_bytes, self.num_bytes = stream, most_bytes, 0

    def read(self, num_bytes: int) -> bytes:
        content = self._stream.read1(num_bytes)  # read() would lose what came before damage
        self.num_bytes += len(content)
        if self.num_bytes > self._most_bytes:
            raise DamagedFile(f"the next page is longer than {self._most_bytes:,} bytes of XML")
        return content


def _article(page: ElementTree.Element, path: Path, source: str, max_bytes: int, parse: Helper) -> Record | Loss:
    values: dict[str, str] = {}
    for element in page.iter():
        name = element.tag.rpartition("}")[2]
        if name in ("title", "ns", "id", "redirect", "text", "timestamp"):
            values.setdefault(name, element.text or "")  # the first id is the page's, the next its revision's
    if values.get("ns") != "0":
        return Loss("not an article (another namespace)")
    wikitext = values.get("text", "")
    if "redirect" in values or _REDIRECT.match(wikitext):
        return Loss("redirect")
    if len(wikitext.encode()) > max_bytes:
        return Loss(f"longer than {max_bytes:,} bytes")
    try:
        body = parse(wikitext)
    except DocumentFailed as error:
        return Failure(str(error), where=f"{path}: page {values.get('id', '?')}")
    if body is None:
        return Loss("wikitext that cannot be parsed")
    if not body:
        return Loss("no text left")
    title = values.get("title", "")
    fields = {"title": title, "date": values.get("timestamp", "")}
    return Record(f"{title}\n{body}", f"{source}:{values.get('id', '?')}", source, fields)


def text_of_article(wikitext: str) -> str | None:
    """Call :func:`plain_text` with the parser of this process; return None where it cannot be parsed."""
    import mwparserfromhell

    try:
        return plain_text(wikitext, mwparserfromhell)
    except (mwparserfromhell.parser.ParserError, RecursionError, ValueError):
        return None


def plain_text(wikitext: str, parser: Any) -> str:
    """Return the running text of an article, a paragraph a line.

    Templates, tables, footnotes, pictures, categories, formulas, HTML comments and the sections at the end
    (``END_SECTIONS``) go; links stay as the words that they show; headings stay as lines of their own.
    """
    wikitext = _without_notes(wikitext)
    for _ in range(_MOST_NESTED + 1):  # the last finds that none is left
        wikitext, number = _INNERMOST_TEMPLATE.subn("", wikitext)
        if not number:
            break
    else:
        raise ValueError("templates are nested too deep")
    pieces: list[str] = []
    skipping = 0  # level of the heading whose section is skipped
    for node in parser.parse(wikitext, skip_style_tags=True).nodes:
        if type(node).__name__ == "Heading":
            if skipping and node.level > skipping:
                continue
            title = _shown(node.title)
            skipping = node.level if title.strip().lower() in END_SECTIONS else 0
            if not skipping:
                pieces.append(f"\n{title}\n")
        elif not skipping:
            pieces.append(_shown_of_node(node))
    text = _MAGIC_WORD.sub("", _QUOTES_OR_OPEN_NOTE.sub("", "".join(pieces)))
    paragraphs = (_SPACES.sub(" ", _EMPTY_BRACKETS.sub("", line)).strip() for line in text.split("\n"))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def _without_notes(wikitext: str) -> str:
    """Remove HTML comments and footnotes; one that does not end stays."""
    comments, tags, notes = (_Ends(pattern, wikitext) for pattern in (_COMMENT_ENDS, _TAG_ENDS, _NOTE_ENDS))
    kept, done = [], 0
    for begin in _COMMENT_OR_NOTE_BEGINS.finditer(wikitext):
        if begin.start() < done:
            continue
        end = (comments if begin[0] == "<!--" else tags).after(begin.end())
        if end is not None and begin[0] != "<!--" and wikitext[max(end.start() - 1, begin.end()) : end.start()] != "/":
            end = notes.after(end.end())
        if end is not None:
            kept.append(wikitext[done : begin.start()])
            done = end.end()
    return "".join(kept) + wikitext[done:]


class _Ends:
    """Places where something may end, each searched for once, however often it is needed."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._matches = pattern.finditer(text)
        self._match = next(self._matches, None)

    def after(self, place: int) -> re.Match[str] | None:
        """Return the first match that begins at ``place`` or later; places do not decrease from call to call."""
        while self._match is not None and self._match.start() < place:
            self._match = next(self._matches, None)
        return self._match


def _shown(code: Any) -> str:
    """Return the words of parsed wikitext that a reader of the page sees."""
    return "".join(map(_shown_of_node, code.nodes))


def _shown_of_node(node: Any) -> str:
    kind = type(node).__name__
    if kind == "Text":
        return node.value
    if kind == "Wikilink":
        if _NO_TEXT_LINKS.match(str(node.title)):
            return ""
        return _shown(node.title if node.text is None else node.text)
    if kind == "ExternalLink":
        return "" if node.title is None else _shown(node.title)
    if kind == "HTMLEntity":
        return node.normalize()
    if kind == "Tag":
        name = str(node.tag).strip().lower()
        if name in ("br", "hr"):
            return "\n"
        return "" if name in _NO_TEXT_TAGS or node.contents is None else _shown(node.contents)
    return ""  # templates, their arguments, comments; headings are handled between paragraphs
