"""The compiled models as the tools see them: opened when first used, run once for a frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..frame import Frame
from ..mllm.base import CancelToken
from .base import Perception, ToolError
from .categories import classes_for

if TYPE_CHECKING:
    from ..boxes import Boxes
    from ..perception.depth import DepthMap, DepthModel
    from ..perception.detector import Detector

T = TypeVar("T")

POLL_S = 0.1
"""How often a waiting call looks whether it was cancelled."""


class PerceptionCache:
    """What a detector and a depth model see in one frame.

    Each model has a lock of its own: a run that was given up on (:class:`Timed`) goes on to its end, and nobody
    enters the model before; its result is kept like any other.
    """

    def __init__(
        self,
        frame: Frame,
        open_detector: Callable[[], Detector | None] | None = None,
        open_depth: Callable[[], DepthModel | None] | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            frame: What all results are of.
            open_detector: Gives the detector, or None if there is none; called at most once. The caller closes
                it.
            open_depth: The same for depth.
        """
        self.frame = frame
        self._detector = _Once(open_detector)
        self._depth = _Once(open_depth)
        self._results: dict[str, Any] = {}

    def detections(self, sliced: bool = False) -> Boxes | None:
        """All objects of the frame by the compiled detector, original pixels; None without a detector."""
        with self._detector.lock:
            detector = self._detector.get()
            if detector is None:
                return None
            key = "sliced" if sliced else "whole"
            if key not in self._results:
                self._results[key] = detector.detect(self.frame, sliced=sliced)
            boxes: Boxes = self._results[key]
            return boxes

    def depth_map(self) -> DepthMap | None:
        """The frame's depth; None without a depth model."""
        with self._depth.lock:
            model = self._depth.get()
            if model is None:
                return None
            if "depth" not in self._results:
                self._results["depth"] = model.estimate(self.frame)
            depth: DepthMap = self._results["depth"]
            return depth

    def knows(self, category: str) -> tuple[str, ...]:
        """The detector's class names that a category stands for (:mod:`.categories`); opens the detector."""
        with self._detector.lock:
            detector = self._detector.get()
        return () if detector is None else classes_for(category, detector.names)


class _Once:
    """A value that is made when it is first asked for."""

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self.lock = threading.Lock()
        self._make = make
        self._value: Any = None

    def get(self) -> Any:
        """Call with the lock held. Where making fails it is tried again the next time."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value


class Timed:
    """A perception whose calls are given up on after a while.

    Each call runs in a daemon thread. Python cannot stop a thread, so one that is given up on goes on until its
    model returns, on one core, holding that model's lock; it ends with the process at the latest.
    """

    def __init__(self, inner: Perception, timeout_s: float, cancel: CancelToken | None = None) -> None:
        """Wraps a perception.

        Args:
            inner: What does the work.
            timeout_s: Seconds for one call; then :class:`~.base.ToolError`.
            cancel: Looked at while waiting; raises Cancelled.
        """
        self.inner = inner
        self.timeout_s = timeout_s
        self.cancel = cancel

    def detections(self, sliced: bool = False) -> Boxes | None:
        return self._limited("detection", lambda: self.inner.detections(sliced))

    def depth_map(self) -> DepthMap | None:
        return self._limited("depth", self.inner.depth_map)

    def knows(self, category: str) -> tuple[str, ...]:
        return self._limited("detection", lambda: self.inner.knows(category))

    def _limited(self, what: str, call: Callable[[], T]) -> T:
        outcome: list[T] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                outcome.append(call())
            except BaseException as e:
                failure.append(e)

        thread = threading.Thread(target=work, name=f"perception-{what}", daemon=True)
        thread.start()
        until = time.monotonic() + self.timeout_s
        while thread.is_alive() and (left := until - time.monotonic()) > 0:
            if self.cancel is not None:
                self.cancel.check()
            thread.join(min(left, POLL_S))
        if failure:
            raise failure[0]
        if not outcome:
            raise ToolError(f"{what} took more than {self.timeout_s:g} s")
        return outcome[0]
