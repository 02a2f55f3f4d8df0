"""``smlp data clean``: every rule by hand, counts, and that cleaning again changes nothing."""

import gzip
import json
import random
import signal
import sys
import unicodedata
from collections import Counter
from dataclasses import replace

import pytest

from data_prep.clean import filters, rules
from data_prep.clean.cleaner import RULES, Cleaning, clean, clean_characters
from data_prep.clean.command import clean_part
from data_prep.clean.filters import (
    FILTERS,
    REPEATED_NGRAMS,
    TOP_NGRAMS,
    Measures,
    exceeds_ngram_share,
    excerpt,
    is_in,
)
from data_prep.dedup.signatures import words_of
from data_prep.flow.documents import ReadSettings
from data_prep.flow.limits import CpuLimit
from data_prep.flow.manifest import read_manifest
from data_prep.flow.parts import FilePart
from smlp.cli.main import main
from smlp.errors import UserError

ENGLISH = (
    "The keeper of the light walked along the shore every evening, and he told the children that the ships would "
    "come back with the spring. They did not believe him, but they liked to hear him speak of the far harbours."
)
GERMAN = (
    "Der Wärter des Leuchtturms ging jeden Abend am Ufer entlang und erzählte den Kindern, dass die Schiffe im "
    "Frühling zurückkommen würden. Sie glaubten ihm nicht, aber sie hörten ihm gerne zu, wenn er davon sprach."
)
ANY = Cleaning(language="any", min_words=1, min_word_length=0, max_symbols=1)


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("entities", "salt &amp; pepper &#8217; &#x41; &eacute;", "salt & pepper ’ A é"),
        ("entities", "twice &amp;amp;lt; once", "twice < once"),
        ("entities", "AT&T &unknown; &notit; R&D; & so", "AT&T &unknown; &notit; R&D; & so"),
        ("mojibake", "the cafÃ© was â€œopenâ€\x9d", "the café was “open”"),
        ("mojibake", "a naïve façade, “quoted”", "a naïve façade, “quoted”"),
        ("mojibake", "plain\nschÃ¶n\nÉtude", "plain\nschön\nÉtude"),
        ("control", "\ufeffin\u200bvis\xadible\x00 \x1b[0m\x7f", "invisible [0m"),
        ("control", "half \ud800 of a pair", "half  of a pair"),
        ("control", "می\u200cخواهم 👩\u200d👩 but fi\u200cn", "می\u200cخواهم 👩\u200d👩 but fin"),
        ("control", "tab\tand\nline\x1cstay", "tab\tand\nline\x1cstay"),
        ("nfc", "cafe\u0301 A\u030a", "café Å"),
        ("whitespace", "  two\u00a0 words\t \r\n\n\u2003\n next\u2028last\x0c", "two words\nnext\nlast"),
    ],
)
def test_rules_of_characters(rule, text, expected):
    assert rules.CHARACTER_RULES[rule](text) == expected
    assert rules.CHARACTER_RULES[rule](expected) == expected


def test_changed_characters_are_counted():
    assert rules.num_changed("same", "same") == 0
    assert rules.num_changed("a&amp;b", "a&b") == 4
    assert rules.num_changed("cafÃ©", "café") == 2
    assert rules.num_changed("tab\tx", "tab x") == 1


@pytest.mark.parametrize(
    ("rule", "removed", "kept"),
    [
        (
            "cookies",
            ["This site uses cookies to improve your visit.", "By going on you accept our cookies.", "Cookie settings"],
            ["She baked cookies for the school.", " ".join(["long"] * 80) + " this site uses cookies"],
        ),
        (
            "policies",
            ["Terms of Use | Privacy Policy", "Read our terms and conditions"],
            ["They came to terms with it.", "The right to privacy is old."],
        ),
        (
            "copyright",
            [
                "All rights reserved.",
                "© 2014 The Daily Example",
                "Copyright (c) Example Ltd 1999-2004",
                "Copyright 2014 by us",
            ],
            ["Copyright law changed in 1976.", "He had the right to remain in 2014."],
        ),
        (
            "javascript",
            ["Please enable JavaScript to view this page.", "Your browser does not support Javascript"],
            ["JavaScript was written in ten days."],
        ),
        ("placeholder", ["Lorem ipsum dolor sit amet"], ["A Latin placeholder text"]),
        (
            "invitations",
            [
                "Click here to subscribe",
                "Share this on Facebook",
                "ADVERTISEMENT",
                "Advertisements:",
                "Advertisement »",
                "Skip to main content",
            ],
            [
                "Sign in, please.",
                "Leave a reply to nobody but me and my dear old mother and father",
                "Advertisements pay for it",
            ],
        ),
    ],
)
def test_notices_are_removed_and_text_about_them_stays(rule, removed, kept):
    tally = Counter()
    mixed = [line for pair in zip(kept * 3, removed, strict=False) for line in pair] + kept
    settings = replace(ANY, off=frozenset({"repeated-lines", "many-repeated-lines", "repeated-ngrams"}))
    text, reason = clean("\n".join(mixed), settings, tally)
    assert not reason and text.split("\n") == [line for line in mixed if line in kept]
    assert tally == {f"{rule}: lines removed": len(removed)}
    off = replace(settings, off=settings.off | {rule})
    assert clean("\n".join(mixed), off, Counter())[0].split("\n") == mixed


def test_menus():
    sentence = "A whole sentence stands here, and it is longer."
    menu = ["Home", "About us", "Contact", "Our shops", "Help"]
    assert rules.navigation([sentence, *menu, sentence], 5) == [sentence, sentence]
    assert rules.navigation([sentence, *menu, sentence], 6) == [sentence, *menu, sentence]
    assert rules.navigation(["Yes.", "No!", "Who?", "Me;", "Oh,", "He said:"], 5) == [
        *("Yes.", "No!", "Who?", "Me;", "Oh,", "He said:")
    ]
    spaced = [line for item in menu for line in (item, "")]
    assert rules.navigation([sentence, *spaced, sentence], 5) == [sentence, "", sentence]
    assert rules.navigation([sentence, "", *menu, "", sentence], 5) == [sentence, "", "", sentence]
    assert rules.navigation(["", "", "", "", "", "", sentence], 5) == ["", "", "", "", "", "", sentence]
    assert rules.navigation(["Home | About | Contact | Help", "a / b / c", sentence], 5) == ["a / b / c", sentence]


def test_repeated_and_short_lines():
    refrain = "for his mercy endureth for ever"
    assert rules.repeated_lines([refrain, "Yes.", refrain, "Yes.", "end"], 5) == [refrain, "Yes.", "Yes.", "end"]
    assert rules.repeated_lines([refrain, "Yes.", refrain, "Yes."], 1) == [refrain, "Yes."]
    assert rules.short_lines(["one two", "one", "one two three"], 2) == ["one two", "one two three"]
    tally = Counter()
    assert clean("one two\none\n" + ENGLISH, replace(ANY, min_line_words=2), tally)[0] == "one two\n" + ENGLISH
    assert tally == {"short-lines: lines removed": 1}


def with_limits(**limits):
    return replace(ANY, language="any", **limits)


@pytest.mark.parametrize(
    ("rule", "text", "settings", "kept_with"),
    [
        ("few-words", "one two three", with_limits(min_words=4), with_limits(min_words=3)),
        ("many-words", "one two three", with_limits(max_words=2), with_limits(max_words=3)),
        ("word-length", "a b c dd", with_limits(min_word_length=1.3), with_limits(min_word_length=1.25)),
        ("word-length", "abcd\nefgh", with_limits(max_word_length=3.9), with_limits(max_word_length=4.0)),
        ("undecodable", "caf\ufffd", with_limits(max_undecodable=0.24), with_limits(max_undecodable=0.25)),
        ("symbols", "ab #| «x»", with_limits(max_symbols=0.28), with_limits(max_symbols=0.29)),
        ("digits", "ab 12 cé", with_limits(max_digits=0.33), with_limits(max_digits=0.34)),
        ("upper-case", "AbÉd?", with_limits(max_upper_case=0.49), with_limits(max_upper_case=0.5)),
        ("stop-words", "The cat and it", replace(with_limits(min_stop_words=3), language="en"), ANY),
        (
            "many-repeated-lines",
            "a\nb\na\nc",
            with_limits(max_repeated_lines=0.24),
            with_limits(max_repeated_lines=0.25),
        ),
    ],
)
def test_filters_at_their_thresholds(rule, text, settings, kept_with):
    assert clean(text, settings, Counter())[1] == rule
    assert clean(text, kept_with, Counter())[1] == ""
    off = replace(settings, off=frozenset({rule, "language"}))
    assert clean(text, off, Counter())[1] == ""


@pytest.mark.parametrize(
    "text",
    [
        "किताबें मेज़ पर रखी हैं। बच्चे हर शाम नदी के किनारे खेलते हैं और कहानियाँ सुनते हैं।",
        "เด็กๆ เล่นริมแม่น้ำทุกเย็นและฟังนิทานที่คุณยายเล่า",
        "می\u200cخواهم بروم، آیا می\u200cآیی؟ نمی\u200cدانم؛ شاید.",
        "孩子们每天傍晚都在河边玩，听奶奶讲故事：“从前，有一个国王。”他说，好！",
        "བོད་ཡིག་ནི་བོད་ཀྱི་སྐད་ཡིག་ཡིན།",
        "【東京】サン・テグジュペリ〔作家〕 בית־ספר Շուն։ co‐operate",
    ],
)
def test_signs_and_punctuation_of_other_scripts_are_no_symbols(text):
    assert Measures(text + " |").shares["symbols"] == 1 / (sum(not c.isspace() for c in text) + 1)


def test_mojibake_without_ftfy_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert rules.mojibake("café") == "café"
    with pytest.raises(UserError, match="the rule mojibake needs ftfy: use --without mojibake, or install the extra"):
        rules.mojibake("cafÃ©")


def test_loading_is_not_time_of_a_document(tmp_path, monkeypatch):
    running, identifier = [], filters._identifier
    monkeypatch.setattr(
        filters, "_identifier", lambda: running.append(signal.getitimer(signal.ITIMER_PROF)[0] > 0) or identifier()
    )
    monkeypatch.delitem(sys.modules, "ftfy", raising=False)
    part = FilePart.whole(write_jsonl(tmp_path / "a.jsonl", [{"text": ENGLISH}]))
    assert clean_part(part, tmp_path / "out", ReadSettings(), Cleaning(), "").counts.kept == 1
    assert running == [False, True] and "ftfy" in sys.modules


def test_lines_that_were_repeated_before_they_were_removed_count():
    text = "\n".join([ENGLISH, *["the same line comes again and again"] * 5])
    assert clean(text, ANY, Counter())[1] == "many-repeated-lines"


def test_empty_lines_and_indentation_that_stay_are_no_words_and_no_menu():
    settings = replace(ANY, off=frozenset({"whitespace"}))
    paragraphs = [f"{'':60}paragraph number {number} has words of its own" for number in range(6)]
    text = "\n\n\n\n\n\n".join(paragraphs)
    assert clean(text, settings, Counter()) == (text, "")


def test_nothing_left():
    assert clean(" \n\u200b\n", ANY, Counter()) == ("", "empty")
    assert clean("All rights reserved.", ANY, Counter()) == ("", "empty")


def slow_ngram_shares(words):
    """The same by counting, without arrays or hashes."""
    total, shares = sum(map(len, words)), {}
    for n in TOP_NGRAMS:
        counts = Counter(zip(*(words[k:] for k in range(n)), strict=False))
        sizes = [number * sum(map(len, gram)) for gram, number in counts.items() if number > 1]
        shares[n] = max(sizes, default=0) / total
    for n in REPEATED_NGRAMS:
        seen, covered = set(), set()
        for place in range(len(words) - n + 1):
            gram = tuple(words[place : place + n])
            if gram in seen:
                covered.update(range(place, place + n))
            seen.add(gram)
        shares[n] = sum(len(words[place]) for place in covered) / total
    return shares


def test_repeated_runs_of_words_agree_with_counting():
    draw, found = random.Random(3), Counter()
    for _ in range(300):
        vocabulary = [f"{'w' * draw.randint(1, 9)}{number}" for number in range(draw.choice([3, 40, 400]))]
        words = draw.choices(vocabulary, k=draw.randint(60, 300))
        for _ in range(draw.randint(0, 3)):
            size, start, goal = draw.randint(2, 15), draw.randrange(40), draw.randrange(40)
            words[goal : goal + size] = words[start : start + size]
        expected = any(share > {**TOP_NGRAMS, **REPEATED_NGRAMS}[n] for n, share in slow_ngram_shares(words).items())
        assert exceeds_ngram_share(words) == expected
        found[expected] += 1
    assert min(found[True], found[False]) > 50
    assert clean(" ".join(["spam and eggs"] * 30), ANY, Counter())[1] == "repeated-ngrams"
    assert clean(" ".join(["spam and eggs"] * 10), ANY, Counter())[1] == ""  # too short for this rule


def test_language():
    assert is_in(ENGLISH, "en", 0.9) and not is_in(GERMAN, "en", 0.1) and is_in(GERMAN, "de", 0.9)
    settings = Cleaning()
    assert clean(ENGLISH, settings, Counter())[1] == ""
    german = replace(settings, off=frozenset({"stop-words"}))
    assert clean(GERMAN, german, Counter())[1] == "language"
    assert clean(GERMAN, replace(settings, language="de"), Counter())[1] == ""
    assert clean(GERMAN, replace(german, language="any"), Counter())[1] == ""
    assert excerpt("one two three", 9) == "one two" and excerpt("onetwothree", 5) == "onetw"
    japanese = "第1章 " + "日本語の文章は単語の間に空白を置かない。" * 30
    assert excerpt(japanese, 500) == japanese[:500], "a space near the beginning ends no word near the end"


def random_text(draw):
    pieces = [
        *("&", "amp;", "#8203;", "#x0;", "lt;", "\u200b", "\u200d", "\u200c", "e\u0301", "\u0301", "Ã©", "â€™", "\x80"),
        *("\xa0", " ", "  ", "\n", "\r", "\x85", "\u2028", "\ufeff", "\ud800", "\udc00", "\x00", "\x1c", "word", "é"),
        *(
            "Home\n",
            "Cookie policy\n",
            "All rights reserved\n",
            "the same line is here again\n",
            "|",
            "#",
            "😀",
            "한",
            "ᄒ",
        ),
        *("the ", "and ", "of ", "Ångström ", "ﬁ", "\u0344", "க", "\u0bc6\u0bbe", "Yes.\n", "•", "12 ", "\u202e"),
    ]
    return "".join(draw.choices(pieces, k=draw.randint(1, 60))) * draw.choice([1, 1, 1, 3])


def test_a_share_of_repeated_lines_at_the_threshold_is_kept():
    """Counted as 7 of 10: 1 - 7 / 10 is more than 0.3."""
    lines = [f"{ENGLISH} It has the number {number}." for number in range(7)]
    once_more = replace(ANY, off=frozenset({"repeated-lines", "repeated-ngrams"}))
    assert clean("\n".join([*lines, *lines[:3]]), once_more, Counter())[1] == ""
    assert clean("\n".join([*lines, *lines[:4]]), once_more, Counter())[1] == "many-repeated-lines"


def test_entities_are_unfolded_to_the_last():
    """Thirty are inside each other, a round each."""
    before, after = "", "lt;"
    for _ in range(30):
        before, after = before + "&a", f"#8203;mp;{after}"
    text = f"{before}&{after}"
    once, reason = clean(f"{ENGLISH} {text}", ANY, Counter())
    assert (once, reason) == (f"{ENGLISH} <", "")


def test_cleaning_twice_changes_nothing_more():
    draw = random.Random(11)
    loose = replace(ANY, max_repeated_lines=0.6, max_undecodable=1)
    kept = 0
    for _ in range(3000):
        text = random_text(draw)
        once, reason = clean(text, loose, Counter())
        if reason:
            continue
        tally = Counter()
        assert clean(once, loose, tally) == (once, ""), text
        assert not tally
        once.encode()  # no halves of surrogate pairs
        kept += 1
    assert kept > 1000


def write_jsonl(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_command(tmp_path, capsys):
    rows = [
        {"id": "a", "source": "news", "text": f"  {ENGLISH}\u200b \n\nAll rights reserved.", "url": "u"},
        {"text": "too short"},
        {"text": GERMAN + " the and"},
        "no json",
        {"text": "one\n" + ENGLISH},
    ]
    source = write_jsonl(tmp_path / "web.jsonl", rows)
    (tmp_path / "empty.txt").touch()
    command = ["data", "clean", "--in", str(source), str(tmp_path / "empty.txt"), "--workers", "1", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    manifest = read_manifest(tmp_path / "out", "clean")
    assert manifest["counts"] == {
        "documents_in": 5,
        "kept": 2,
        "dropped": {"few-words": 1, "language": 1, "not JSON": 1},
        "other": {
            "characters in": sum(len(row["text"]) for row in rows if isinstance(row, dict)),
            "characters kept": 2 * len(ENGLISH) + 4,
            "control: characters changed": 1,
            "copyright: lines removed": 1,
            "whitespace: characters changed": 4,
        },
    }
    assert [defect["problem"] for defect in manifest["defects"]] == ["1 document not JSON", "empty file"]
    with gzip.open(tmp_path / "out" / "web.jsonl.gz", "rt") as file:
        written = [json.loads(line) for line in file]
    assert written[0] == {"id": "a", "source": "news", "text": ENGLISH, "url": "u"}
    assert written[1]["text"] == "one\n" + ENGLISH and written[1]["source"] == "web"
    output = capsys.readouterr().out
    assert "dropped: language" in output and "empty file" in output and "empty.txt" in output
    assert main([*command, "--out", str(tmp_path / "out"), "--language", "de"]) == 1
    assert "language was 'en', now 'de'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-symbols", "1.5"], "--max-symbols must be at most 1, got 1.5"),
        (["--min-words", "-1"], "--min-words must be at least 0, got -1"),
        (["--min-probability", "2"], "--min-probability must be at most 1, got 2.0"),
        (["--language-characters", "0"], "--language-characters must be at least 1, got 0"),
        (["--language", "xx"], "--language 'xx' is unknown: choose any or one of"),
        (["--min-words", "9", "--max-words", "8"], "--min-words 9 is above --max-words 8"),
        (["--min-words", "9", "--without", "few-words"], "--min-words 9 has no effect with --without few-words"),
        (["--menu-lines", "9", "--without", "navigation"], "--menu-lines 9 has no effect with --without navigation"),
        (["--min-probability", "0.9", "--language", "any"], "--min-probability 0.9 has no effect with --language any"),
        (["--min-stop-words", "1", "--language", "fr"], "--min-stop-words 1 has no effect with --language fr"),
        (["--without", "few-words", "--max-words", "10"], "out: not one of 1 documents was kept"),
        (["--without", "many-words", "--min-words", "2000000"], "out: not one of 1 documents was kept"),
        (["--text-field", "txt"], "out: not one of 1 documents was kept"),
    ],
)
def test_wrong_options(tmp_path, capsys, options, message):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": ENGLISH}])
    assert main(["data", "clean", "--in", str(source), "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("step", [["clean", "--language", "any"], ["dedup"], ["dedup", "--no-near"]], ids=" ".join)
def test_a_step_that_could_read_nothing_is_no_success(tmp_path, capsys, step):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert main(["data", *step, "--in", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "out"), "--quiet"]) == 1
    assert f"smlp: error: {tmp_path}/out: no documents\n" in capsys.readouterr().err


HOSTILE = {
    "escaped again and again": "&" + "amp;" * 250_000,
    "accents in the wrong order": "a" + "\u0301\u0316" * 100_000,
    "joiners": "a\u200d" * 100_000,
    "quotation marks": "'" * 500_000,
    "spaces": " " * 500_000 + "x",
    "mojibake": "\u00c3\u00a9" * 100_000,
}


@pytest.mark.parametrize("document", HOSTILE)
def test_time_grows_with_the_length_of_a_hostile_document(document):
    """The limit is of CPU time, some fifty times what it takes; time that grows with the square of it takes minutes."""
    with CpuLimit(20):
        clean_characters(HOSTILE[document], frozenset(), Counter())
        words_of(HOSTILE[document])


@pytest.mark.parametrize(
    "text", ["&&#97;mp;amp;", "&am&#112;;x", "&amp;#38;lt;", "&&amp;amp;gt;", "&#38;#38;bogus;&amp;"]
)
def test_entities_of_entities_are_taken_apart_as_if_one_by_one(text):
    slowly = text
    while (once := rules._ENTITY.sub(rules._character, slowly)) != slowly:
        slowly = once
    assert rules.entities(text) == slowly


@pytest.mark.parametrize("accents", ["\u0301\u0316", "\u0344\u0f73\u0f71", "\u3099\u0323\u0345"])
def test_sorted_accents_give_the_same_normal_form(accents):
    text = "e" + accents * 30 + "\u1ec7" + accents * 40 + "\uac00\u11a8" + accents[::-1] * 50
    assert rules.nfc(text) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_document_that_takes_too_long_is_dropped_and_named(tmp_path, capsys, workers):
    rows = [{"text": ENGLISH}, {"text": " ".join(map(str, range(1_500_000)))}, {"text": ENGLISH + " Again."}]
    write_jsonl(tmp_path / "in" / "a.jsonl", rows)
    write_jsonl(tmp_path / "in" / "b.jsonl", rows[:1])
    command = ["data", "clean", "--in", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--language", "any"]
    assert main([*command, "--workers", workers, "--max-document-seconds", "0.03", "--compress", "none"]) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["dropped"] == {"took more than 0.03 s of CPU time": 1}
    assert manifest["settings"]["max_document_seconds"] == 0.03
    problem = "dropped, took more than 0.03 s of CPU time"
    assert [defect["problem"] for defect in manifest["defects"]] == [problem]
    assert f"{problem}: a.jsonl:" in capsys.readouterr().out
    assert len((tmp_path / "out" / "a.jsonl").read_text().splitlines()) == 2


def test_every_rule_can_be_turned_off():
    assert len(set(RULES)) == len(RULES) == len(rules.CHARACTER_RULES) + len(rules.PATTERNS) + 3 + len(FILTERS) + 1
    dirty = "  &amp;\u200b\n\nAll rights reserved\nAll rights reserved"
    assert clean(dirty, replace(ANY, off=frozenset(RULES)), Counter()) == (dirty, "")
    assert Measures("").shares == {"symbols": 0, "digits": 0, "upper": 0}
