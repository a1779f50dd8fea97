"""JSON as models write it. Nothing here raises, whatever the text; time is bounded."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any

from .parse_boxes import NUMBER
from .parsed import Parsed, visible

Json = dict[str, Any] | list[Any]

MAX_DEPTH = 32
MAX_STARTS = 32
"""So many brackets are tried as the beginning; each try is linear in the text."""

_FENCE = re.compile(r"```[a-zA-Z0-9]{0,10}")
# "[see" is prose.
_START = re.compile(r"\{|\[(?=\s{0,100}[\"'\u201c\u2018{\[(\]\-.\dtfnTFN])")
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "`": "`"}
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None, "nan": math.nan}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_CUT = "closed what was cut off"


class _TooDeep(Exception):
    pass


def parse_json(text: str) -> Parsed[Json]:
    """The JSON object or array in a text.

    Repaired are: code fences, text around it, trailing and missing commas, single or missing quotes, quotes
    inside of strings, Python's True and None, and an end that is missing. Of several candidates the longest
    that is not empty counts.
    """
    text = visible(text)
    repairs: list[str] = []
    if "```" in text:
        text = _FENCE.sub("\n", text)
        repairs.append("code fence removed")
    text = text.strip()
    best: tuple[bool, int, int, Json, list[str]] | None = None
    reach = 0
    for tries, match in enumerate(_START.finditer(text)):
        start = match.start()
        if start < reach:
            continue
        if tries >= MAX_STARTS:
            break
        found = _read(text, start)
        if found is None:
            continue
        value, reach, mended = found
        if best is None or (best[0], best[2] - best[1]) < (bool(value), reach - start):
            best = (bool(value), start, reach, value, mended)
    if best is None:
        return Parsed.none("no JSON in the text", repairs)
    _, start, end, value, mended = best
    if text[:start].strip() or text[end:].strip():
        repairs.append("text around the JSON ignored")
    return Parsed(value, (*repairs, *mended))


def _read(text: str, start: int) -> tuple[Json, int, list[str]] | None:
    """Value, end and repairs of what begins at ``start``."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        return value, end, []
    except (ValueError, RecursionError):
        pass
    reader = _Reader(text, start)
    try:
        value = reader.value(0)
    except _TooDeep:
        return None
    return value, reader.at, reader.repairs


class _Reader:
    """A forgiving reader of one value."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.at = start
        self.repairs: list[str] = []

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _TooDeep
        c = self._space()
        if c == "{":
            return self._object(depth)
        if c in ("[", "("):
            return self._array(depth, "]" if c == "[" else ")")
        return self._string(c) if c in _QUOTES else self._word()

    def _repair(self, what: str) -> None:
        if what not in self.repairs and len(self.repairs) < 16:
            self.repairs.append(what)

    def _space(self) -> str:
        """The next character that is no space, "" at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _ends(self, closer: str) -> bool:
        """Whether the object or array is over, be it properly or not; steps over its closing bracket."""
        c = self._space()
        if c == closer:
            self.at += 1
            return True
        if c == "":
            self._repair(_CUT)
            return True
        if c in "}])":
            # The bracket of something further out.
            self._repair("closed what was left open")
            return True
        return False

    def _comma(self, closer: str) -> bool:
        if self._space() not in (",", ";"):
            return False
        self.at += 1
        if self._space() in (closer, ",", ""):
            self._repair("trailing comma removed")
        return True

    def _object(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        self.at += 1
        while not self._ends("}"):
            if self._comma("}"):
                continue
            before, c = self.at, self._space()
            key = self._string(c) if c in _QUOTES else self._word()
            if self._space() in (":", "="):
                self.at += 1
                if self._space() not in ("", "}", ","):
                    out[str(key)] = self.value(depth + 1)
                    if self._space() not in ("", ",", "}", "]"):
                        self._repair("missing comma added")
                    continue
            if self.at == before:
                self.at += 1
                self._repair("stray character left out")
            else:
                self._repair(f"key {str(key)[:40]!r} without a value left out")
        return out

    def _array(self, depth: int, closer: str) -> list[Any]:
        out: list[Any] = []
        self.at += 1
        while not self._ends(closer):
            if self._comma(closer):
                continue
            before = self.at
            item = self.value(depth + 1)
            if self.at == before:
                self.at += 1
                self._repair("stray character left out")
                continue
            out.append(item)
        return out

    def _string(self, quote: str) -> str:
        """Up to the quote behind which stands something that may follow a string."""
        if quote != '"':
            self._repair("quotes made plain")
        out: list[str] = []
        i, text = self.at + 1, self.text
        while i < len(text):
            c = text[i]
            if c == "\\":
                char, i = _escape(text, i + 1)
                out.append(char)
                continue
            if c == _QUOTES[quote]:
                j = i + 1
                while j < len(text) and text[j].isspace():
                    j += 1
                follows = text[j : j + 1]
                if follows in ("", ",", ":", ";", "}", "]", ")", "=") or (j > i + 1 and follows in _QUOTES):
                    self.at = i + 1
                    return "".join(out)
                self._repair("quote inside a string kept")
            out.append(c)
            i += 1
        self.at = len(text)
        self._repair(_CUT)
        return "".join(out)

    def _word(self) -> Any:
        """A number, a word of JSON or Python, or a string without quotes."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ',:;{}[]()=\n"':
            self.at += 1
        word = self.text[start : self.at].strip()
        lower = word.lower()
        if lower in _WORDS:
            if word not in ("true", "false", "null"):
                self._repair("Python's words read as JSON's")
            return _WORDS[lower]
        if len(word) < 64 and NUMBER.fullmatch(word):
            return float(word) if any(c in lower for c in ".en") else int(word)
        if word and self.at == len(self.text):
            self._repair(_CUT)
            whole = next((w for w in ("true", "false", "null") if w.startswith(lower)), None)
            return word if whole is None else _WORDS[whole]
        if word:
            self._repair("missing quotes added")
        return word


def _escape(text: str, i: int) -> tuple[str, int]:
    """The character that an escape stands for (``i`` is behind the backslash), and where it ends."""
    c = text[i : i + 1]
    code = text[i + 1 : i + 5]
    if c == "u" and len(code) == 4 and all(d in "0123456789abcdefABCDEF" for d in code):
        char = chr(int(code, 16))
        return ("\ufffd" if unicodedata.category(char) == "Cs" else char), i + 5
    return _ESCAPES.get(c, c), i + 1
