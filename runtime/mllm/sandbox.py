"""Where a model file's template renders: without reach, and in bounded time and memory.

A template comes out of a model file, so it may be hostile. Jinja's sandbox keeps it from Python; what is here keeps it
from running for ever: every turn of a loop, every call and every filter is counted, and what it builds is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, ClassVar

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 100_000
MAX_RANGE = 10_000
MAX_CHARS = 1_000_000
"""Longest output, and longest string on the way."""
MAX_ITEMS = 10_000
MAX_EXPONENT = 64
# A width or precision of more than three digits, or one that an argument gives.
_WIDE = re.compile(r"\*|\d{4,}|\{[^{}]*\{")

_COUNTED = "hoverlens_counted"
_SIZED = "hoverlens_sized"
# Chat templates need none of them, and each builds something as large as a number says.
_LEFT_OUT = ("batch", "center", "format", "indent", "slice", "wordwrap", "xmlattr", "urlize")
_LEFT_OUT_METHODS = ("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill")


class TooMuch(Exception):
    """The template does more than a chat template needs."""


def template_environment() -> tuple[ImmutableSandboxedEnvironment, Callable[[Iterable[str]], str]]:
    """An environment for one rendering, and what joins its pieces while they are few."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True)
    return environment, environment.joined


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops: ClassVar[frozenset[str]] = frozenset(["*", "**", "%", "+"])  # type: ignore[misc]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._steps = 0
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        for name in _LEFT_OUT:
            self.filters.pop(name)
        self.globals["range"] = self._range
        self.filters |= {"replace": self._replace, "join": self._join, "tojson": self._to_json}
        self.filters[_COUNTED] = self._counted
        self.filters[_SIZED] = self._sized

    def joined(self, pieces: Iterable[str]) -> str:
        parts: list[str] = []
        size = 0
        for piece in pieces:
            self._step()
            size += len(piece)
            if size > MAX_CHARS:
                raise TooMuch(f"more than {MAX_CHARS} characters")
            parts.append(piece)
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _through(loop.iter, _COUNTED)
        _size_everything(tree)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        self._check_format(obj)  # where Jinja, before 3.1.5, gives the method itself
        if getattr(obj, "__name__", None) in _LEFT_OUT_METHODS and hasattr(obj, "__self__"):
            raise TooMuch(f"it calls {obj.__name__}")
        if getattr(obj, "__name__", None) in ("replace", "join"):
            self._check_growth(obj, args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._step()
        if operator == "**" and not (_small(left) and _small(right)):
            raise TooMuch("a large power")
        if operator == "*":
            for several, times in ((left, right), (right, left)):
                if isinstance(several, (str, list, tuple)) and isinstance(times, int):
                    limit = MAX_CHARS if isinstance(several, str) else MAX_ITEMS
                    if len(several) * times > limit:
                        raise TooMuch("a long repetition")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TooMuch("a wide format")
        return self._sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        self._check_format(value)
        return super().wrap_str_format(value)

    def _check_format(self, method: Any) -> None:
        text = getattr(method, "__self__", None)
        named = getattr(method, "__name__", None) in ("format", "format_map")
        if named and isinstance(text, str) and _WIDE.search(text):
            raise TooMuch("a wide format")

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> Any:
        method = str(text).replace
        self._check_growth(method, (old, new))
        return method(old, new, count)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
        parts = [str(v if attribute is None else self.getitem(v, attribute)) for v in self._counted(values)]
        self._check_growth(separator.join, (parts,))
        return separator.join(parts)

    def _to_json(self, value: Any, indent: int | None = None, **options: Any) -> str:
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_EXPONENT):
            raise TooMuch("a wide indent")
        return json.dumps(value, indent=indent, **options)

    def _check_growth(self, method: Any, args: tuple[Any, ...]) -> None:
        """Of ``s.replace(old, new)`` and ``s.join(parts)``: the result's length, before it is made."""
        text = getattr(method, "__self__", None)
        if not isinstance(text, str):
            return
        if method.__name__ == "replace" and len(args) > 1 and isinstance(args[1], str):
            found = text.count(args[0]) if isinstance(args[0], str) else 0
            size = len(text) + found * len(args[1])
        elif method.__name__ == "join" and args and isinstance(args[0], (list, tuple)):
            size = sum(len(str(part)) + len(text) for part in args[0])
        else:
            return
        if size > MAX_CHARS:
            raise TooMuch(f"more than {MAX_CHARS} characters")

    def _range(self, *bounds: int) -> range:
        found = range(*bounds)
        if len(found) > MAX_RANGE:
            raise TooMuch(f"a range of more than {MAX_RANGE}")
        self._step(len(found))
        return found

    def _counted(self, values: Iterable[Any]) -> Iterable[Any]:
        # Loops look at the length, so what has one keeps it.
        if isinstance(values, Sized):
            self._step(len(values))
            return values
        return self._counting(values)

    def _counting(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _sized(self, value: Any) -> Any:
        self._step()
        if isinstance(value, str) and len(value) > MAX_CHARS:
            raise TooMuch(f"more than {MAX_CHARS} characters")
        if isinstance(value, (list, tuple, dict)) and len(value) > MAX_ITEMS:
            raise TooMuch(f"more than {MAX_ITEMS} items")
        if isinstance(value, int) and value.bit_length() > 4096:
            raise TooMuch("a large number")
        return value

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > MAX_STEPS:
            raise TooMuch(f"more than {MAX_STEPS} steps")


def _small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_EXPONENT


def _through(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _size_everything(tree: nodes.Node) -> None:
    """What is joined or filtered is checked where it is kept: the next line could double it."""
    for kept in list(tree.find_all((nodes.Assign, nodes.Concat))):
        if isinstance(kept, nodes.Assign):
            kept.node = _through(kept.node, _SIZED)
        elif isinstance(kept, nodes.Concat):
            kept.nodes = [_through(part, _SIZED) for part in kept.nodes]
