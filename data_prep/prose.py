"""Find the blocks of text that are running English sentences, and remove their inline markup."""

from __future__ import annotations

import re
from collections import Counter

_FORMULA = "\x00"  # replaces a formula; sentences with one are dropped
_MATH_ROLE = re.compile(r":math:`([^`]*)`")
_ROLE = re.compile(r":[a-zA-Z][\w:+-]{0,99}:`([^`]*)`")
_LINK = re.compile(r"`([^`<]+)<[^>`]*>`__?")
_LITERAL = re.compile(r"``([^`]+)``|`([^`]+)`_?_?")
_STRONG = re.compile(r"(?<![\w*])\*\*([^\s*](?:[^*]*[^\s*])?)\*\*(?![\w*])")
_EMPHASIS = re.compile(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])")
_CITATION = re.compile(r"(?<!\s)\s*+(?:\[(?:#?\w{1,12}|\*)\]_|\|[\w -]+\|_?)")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bcf\.)(?<!\betc\.)([\"')]*)\s+(?=[\"'(]*[A-Z])")
_OLD_QUOTES = re.compile(r"`([\w.-]+)'")  # `word' in texts older than Unicode
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})

_STARTS = re.compile(r"[\"'(]*[A-Z][a-z']*[\s,]")
_ENDS = re.compile(r"[a-zA-Z0-9)\]\"'][.!?][\"')]*$")
_CODE = re.compile(
    rf"[\\{{}}<>=|~^@#$;`•`{_FORMULA}]|::|:\w+:|https?:|www\.|->|\+\+|--|%[(sd]|\.\.(?!\.)|__|\w\(\w|\*\w|\w\*|\s[+*/]\s|\[\s*\d"
)
_WORD = re.compile(r"[\"'(]*[A-Za-z]+(?:['-][A-Za-z]+)*(?:[\"')]*[.,:!?]+)?[\"')]*$")
_LEGAL = re.compile(r"copyright|licen[sc]e|redistribut|warrant|all rights|\bauthors?\b|\be-?mail|todo|fixme|xxx", re.I)
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "the a an of to in is are be for and or that this it as by with on from if not when which can will has "
        "have was at no but you we may must should its their any all each into than then only same other used "
        "these they there where does do so such one more",
    )
)

MIN_WORDS = 8  # a shorter paragraph is a heading or a fragment
MAX_SENTENCE_WORDS = 80
MIN_PLAIN_SHARE = 0.82  # of a sentence's words that are plain words rather than identifiers or numbers
MIN_FUNCTION_SHARE = 0.2  # of a sentence's words that are English function words


def plain_text(block: str) -> str:
    """Return the block without reST inline markup, typographic quotes and runs of spaces."""
    block = _OLD_QUOTES.sub(r"'\1'", block.translate(_QUOTES))
    block = _MATH_ROLE.sub(lambda m: m.group(1) if re.fullmatch(r"[\w ]+", m.group(1)) else _FORMULA, block)
    block = _ROLE.sub(lambda m: _role_text(m.group(1)), block)
    block = _LINK.sub(lambda m: m.group(1).rstrip() or " ", block)
    block = _CITATION.sub("", block)
    block = _LITERAL.sub(lambda m: _role_text(m.group(1) or m.group(2)), block)
    block = _EMPHASIS.sub(r"\1", _STRONG.sub(r"\1", block))
    return " ".join(block.split())


def _role_text(target: str) -> str:
    address = target.find("<", target.rfind(">", 0, -1) + 1) if target.endswith(">") else -1
    if address > 0 and (title := target[:address].rstrip()):
        return title
    if target.startswith("~"):
        return target.rsplit(".", 1)[-1]
    return target.lstrip("!.")


def prose(block: str, removed: Counter[str]) -> str:
    """Return the longest run of English sentences in a block, or ``""``.

    ``removed`` counts what the rules cut, under "blocks: RULE" and "sentences: RULE".
    """
    text = plain_text(block)
    if _LEGAL.search(text):
        removed["blocks: legal or note to self"] += 1
        return ""
    runs: list[list[str]] = [[]]
    for sentence in _sentences(text):
        reason = _fault(sentence)
        if reason is None:
            runs[-1].append(sentence)
        else:
            removed[f"sentences: {reason}"] += 1
            runs.append([])
    kept = " ".join(max(runs, key=lambda run: sum(map(len, run))))
    if kept and len(kept.split()) < MIN_WORDS:
        removed["blocks: too short"] += 1
        return ""
    return kept


def _sentences(text: str) -> list[str]:
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        sentences.append(text[start : match.end(1)])
        start = match.end()
    sentences.append(text[start:])
    return [sentence for sentence in sentences if sentence]


def _fault(sentence: str) -> str | None:
    """Return the rule a sentence breaks, or None for an English sentence."""
    words = sentence.split()
    if not _ENDS.search(sentence):
        return "no full stop"
    if not _STARTS.match(sentence):
        return "no capital"
    if not sentence.isascii():
        return "not ASCII"
    if _CODE.search(sentence):
        return "code or formula"
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return "unbalanced brackets"
    if not 3 <= len(words) <= MAX_SENTENCE_WORDS:
        return "length"
    if sum(_WORD.match(word) is not None for word in words) < MIN_PLAIN_SHARE * len(words):
        return "identifiers"
    if sum(word.strip("\"'(),.:!?").lower() in _FUNCTION_WORDS for word in words) < MIN_FUNCTION_SHARE * len(words):
        return "few function words"
    return None
