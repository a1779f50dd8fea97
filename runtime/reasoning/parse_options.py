"""Which of a question's options a model's text names. Nothing here raises, whatever the text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from .parse_boxes import Box, parse_box, parse_boxes
from .parse_json import parse_json
from .parsed import after_answer, visible

BOX_TOLERANCE = 0.005
"""Two boxes whose coordinates differ by no more than this are the same option."""
MAX_ITEMS = 64

_NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
    "twenty",
)
_TO_DIGITS = {word: str(i) for i, word in enumerate(_NUMBER_WORDS)}
_NEGATIONS = {"not", "isn't", "aren't", "never", "neither", "nor", "without", "isnt", "arent"}
# A point inside a number and a sign before it belong to it; an apostrophe to its word.
_WORD = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|\d+")
_LETTER = re.compile(r"\W{0,4}(?:option|choice)?\W{0,4}([A-Za-z])\W{0,4}", re.IGNORECASE)
_LETTER_HEAD = re.compile(r"\s*(?:option\s+|choice\s+)?[(\[*\"']{0,3}([A-Za-z])[*]{0,2}[.):\]]\s*", re.IGNORECASE)
_LETTERS = re.compile(r"[A-Za-z](?:(?:\s{0,4}[,;/&]\s{0,4}(?:and\s{1,4})?|\s{1,4}and\s{1,4}|\s{1,4})[A-Za-z])+")
_PHRASE = re.compile(
    r"\s{0,4}(?:so|thus|therefore|hence)?[,\s]{0,3}(?:the|my)?\s{0,3}(?:final|correct|right|best)?\s{0,3}"
    r"(?:answer|option|choice)\s{0,3}(?:is|:|would be)?[\s:]{0,4}",
    re.IGNORECASE,
)
_ANSWER_KEYS = ("answer", "final_answer", "option", "options", "answers", "choice", "choices", "result")


def match_option(text: str, options: Sequence[str]) -> int | None:
    """The option that a text names, or None where it names none or more than one.

    Looked for in this order; the first that gives exactly one option wins: the same text; the same but for
    case, space and punctuation, or with number words for digits; a JSON object's ``answer``; what follows "the
    answer is"; a letter A, B, C.. with nothing else or in front of the option, unless an option is a letter
    itself; the same box within :data:`BOX_TOLERANCE`; one option alone standing in the text as whole words.
    Words under a "not" do not count.
    """
    return _match(visible(text), options, nested=False)


def match_options(text: str, options: Sequence[str]) -> tuple[int, ...]:
    """All options that a text names, by index: items of a JSON list, letters, or options as whole words."""
    text = visible(text).strip()
    same = _alike(text, options)
    if same is not None:
        return (same,)
    items = _items(text)
    if items is not None:
        return tuple(sorted({i for item in items if (i := match_option(item, options)) is not None}))
    text = after_answer(text) or text
    if not _has_letters(options):
        letter = _LETTER.fullmatch(text)
        letters = [letter.group(1)] if letter else []
        if _LETTERS.fullmatch(text.strip(" .()[]\n")):
            letters = re.findall(r"\b[A-Za-z]\b", text)
        indices = {ord(c.lower()) - ord("a") for c in letters}
        if indices and max(indices) < len(options):
            return tuple(sorted(indices))
    boxes = (parse_boxes(text).value or [])[:MAX_ITEMS]
    found = {i for box in boxes if (i := _same_box(box, options)) is not None}
    return tuple(sorted(found or _contained(text, options, letters=True)))


def _items(text: str) -> list[str] | None:
    """What a JSON list holds, or a JSON object under ``answer``."""
    if "[" not in text and "{" not in text:
        return None
    value: Any = parse_json(text).value
    if isinstance(value, dict):
        value = next((value[k] for k in _ANSWER_KEYS if k in value), None)
        if isinstance(value, str):
            value = [v for v in value.split(",") if v.strip()]
    if isinstance(value, list) and all(isinstance(v, str) or type(v) is int for v in value):
        return [str(v) for v in value[:MAX_ITEMS]]
    return None


def _match(text: str, options: Sequence[str], nested: bool) -> int | None:
    text = text.strip()
    if not text or not options:
        return None
    found = _alike(text, options)
    if found is None and not nested:
        rest = _stated(text)
        found = None if rest is None else _match(rest, options, nested=True)
    if found is not None:
        return found
    if not _has_letters(options):
        letter = _LETTER.fullmatch(text)
        head = letter or _LETTER_HEAD.match(text)
        index = None if head is None else ord(head.group(1).lower()) - ord("a")
        if head is not None and index is not None and index < len(options):
            # "B. Two": the letter and the words must not contradict each other.
            others = set() if letter else _contained(text[head.end() :], options)
            return index if others <= {index} else None
    box = parse_box(text).value
    same = None if box is None else _same_box(box, options)
    if same is not None:
        return same
    contained = _contained(text, options)
    return contained.pop() if len(contained) == 1 else None


def _stated(text: str) -> str | None:
    """What the text itself marks as its answer."""
    if "{" in text:
        value = parse_json(text).value
        if isinstance(value, dict):
            for key in _ANSWER_KEYS:
                if isinstance(value.get(key), (str, int, float)):
                    return str(value[key])
    rest = after_answer(text)
    if rest is None and (phrase := _PHRASE.match(text)):
        rest = text[phrase.end() :]
    return rest


def _alike(text: str, options: Sequence[str]) -> int | None:
    """The one option that is the same text, ever more loosely compared."""
    text = text.strip()
    for form in (str, str.casefold, _plain, _digits):
        key = form(text)
        same = [i for i, o in enumerate(options) if key and form(o.strip()) == key]
        if same:
            return same[0] if len(same) == 1 else None
    return None


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold().replace("\u2019", "'"))


def _plain(text: str) -> str:
    return " ".join(_words(text))


def _digits(text: str) -> str:
    return " ".join(_TO_DIGITS.get(w, w) for w in _words(text))


def _has_letters(options: Sequence[str]) -> bool:
    return any(len(w) == 1 and w.isalpha() for w in map(_plain, options))


def _same_box(box: Box, options: Sequence[str]) -> int | None:
    near = []
    for i, option in enumerate(options):
        other = parse_box(option).value
        if other is not None and max(abs(a - b) for a, b in zip(box, other, strict=True)) <= BOX_TOLERANCE:
            near.append(i)
    return near[0] if len(near) == 1 else None


def _contained(text: str, options: Sequence[str], letters: bool = False) -> set[int]:
    """Options that stand in the text as whole words, not as a part of a longer option and not negated.

    Args:
        text: The text.
        options: What to look for.
        letters: Also look for options of a single letter, written in capitals.
    """
    words = [_TO_DIGITS.get(w, w) for w in _words(text)]
    capitals = set(re.findall(r"\b[A-Z]\b", text)) if letters else set()
    places: dict[str, list[int]] = {}
    for at, word in enumerate(words):
        places.setdefault(word, []).append(at)
    longest = [0] * len(words)
    spans: list[tuple[int, int, int]] = []
    found: set[int] = set()
    for i, option in enumerate(options):
        wanted = _digits(option).split()
        if len(wanted) == 1 and len(wanted[0]) == 1 and wanted[0].isalpha():
            # "a" is also an article.
            if wanted[0].upper() in capitals:
                found.add(i)
            continue
        n = len(wanted)
        for at in places.get(wanted[0], []) if wanted else []:
            if words[at : at + n] == wanted:
                spans.append((at, n, i))
                longest[at : at + n] = [max(n, v) for v in longest[at : at + n]]
    for at, n, i in spans:
        part = min(longest[at : at + n]) > n
        negated = bool(_NEGATIONS & set(words[max(0, at - 2) : at]))
        if not part and not negated:
            found.add(i)
    return found
