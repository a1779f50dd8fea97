"""Ctrl-C waits for a safe point.

Python runs signal handlers between any two bytecodes, also inside a function that C code calls back: there
llama.cpp cannot pass an exception on, so it would be printed and lost. Between two bookkeeping steps it would
leave a sequence taken for ever.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_outermost: hold_interrupts | None = None


class hold_interrupts:  # noqa: N801 - used as a function, as contextlib's managers are
    """While inside, SIGINT is only noted; :meth:`check` and the end of the block pass it on.

    Does nothing outside the main thread, which alone receives signals, and where SIGINT is not handled by
    Python. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._noted = False

    def __enter__(self) -> hold_interrupts:
        global _outermost
        if _outermost is None and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _outermost = self
                signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._noted = True

    @staticmethod
    def check() -> None:
        """Passes a noted SIGINT to the program's own handler, which usually raises KeyboardInterrupt."""
        held = _outermost
        if held is not None and held._noted and threading.current_thread() is threading.main_thread():
            held._noted = False
            assert held._handler is not None
            held._handler(signal.SIGINT, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _outermost
        if _outermost is not self:
            return
        assert self._handler is not None
        _outermost = None
        signal.signal(signal.SIGINT, self._handler)
        if self._noted:
            self._noted = False
            self._handler(signal.SIGINT, None)
