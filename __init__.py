"""hoverlens answers questions about what a drone sees, on the drone.

>>> import hoverlens                                                         # doctest: +SKIP
>>> with hoverlens.load() as runtime:                                        # doctest: +SKIP
...     print(runtime.ask("photo.jpg", "How many cars?", ["0", "1", "2"]).to_json())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.answer import Answer
    from .runtime.boxes import Boxes
    from .runtime.errors import BadInput, Cancelled, HoverlensError
    from .runtime.frame import Frame
    from .runtime.mllm.base import CancelToken
    from .runtime.question import Question
    from .runtime.runtime import Runtime, load
    from .runtime.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BadInput",
    "Boxes",
    "CancelToken",
    "Cancelled",
    "Frame",
    "HoverlensError",
    "Question",
    "Runtime",
    "Trace",
    "__version__",
    "load",
]

_HOMES = {
    "Answer": "runtime.answer",
    "BadInput": "runtime.errors",
    "Boxes": "runtime.boxes",
    "CancelToken": "runtime.mllm.base",
    "Cancelled": "runtime.errors",
    "Frame": "runtime.frame",
    "HoverlensError": "runtime.errors",
    "Question": "runtime.question",
    "Runtime": "runtime.runtime",
    "Trace": "runtime.trace",
    "load": "runtime.runtime",
}


def __getattr__(name: str) -> Any:
    # Names are resolved on first use, so that the command line's --help loads no heavy library.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
