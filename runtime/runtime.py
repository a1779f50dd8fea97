"""The public runtime: a loaded bundle that answers questions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray

from . import pipeline, prompts
from .answer import Answer
from .bundle import Bundle, find_bundle
from .errors import BadInput, HoverlensError
from .frame import Frame
from .memory import MB, MemoryPlan, available_bytes, cells_within, check_plan, plan_memory
from .mllm.base import Backend, CancelToken
from .mllm.chat import ChatFormat
from .profiles import Profile, profile_named
from .question import Question
from .reasoning.session import StepCallback, Thinker
from .reasoning.settings import MODES, for_mode
from .tools.perception import PerceptionCache
from .trace import Trace

if TYPE_CHECKING:
    from .boxes import Boxes
    from .mllm.llamacpp import LlamaCppBackend
    from .perception.depth import DepthMap, DepthModel
    from .perception.detector import Detector

FrameLike = Union[Frame, str, "os.PathLike[str]", NDArray[np.uint8]]


class Runtime:
    """A loaded bundle. Safe to call from any thread; one question runs at a time and others wait.

    Models are loaded when they are first needed, so that ``detect`` alone never loads the MLLM.

    Example:
        >>> import hoverlens                                                     # doctest: +SKIP
        >>> with hoverlens.load() as runtime:                                    # doctest: +SKIP
        ...     answer = runtime.ask("photo.jpg", "Is there a car?", ["yes", "no"])
        ...     print(answer.answer, answer.confidence)
    """

    def __init__(self, bundle: Bundle, profile: str | Profile = "onboard", share: bool = True) -> None:
        self.bundle = bundle
        self.profile = profile_named(profile)
        self.share = share
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._plan: MemoryPlan | None = None
        self._backend: LlamaCppBackend | None = None
        self._thinking: Thinker | None = None
        self._chat: ChatFormat | None = None
        self._detector: Detector | None = None
        self._depth: DepthModel | None = None

    # -- what it answers -----------------------------------------------------------------------------

    def ask(
        self,
        frame: FrameLike,
        question: str | Question,
        options: Sequence[str] | None = None,
        kind: str | None = None,
        mode: str = pipeline.DEFAULT_MODE,
        deadline_s: float | None = None,
        seed: int = 0,
        on_step: StepCallback | None = None,
        trace: Trace | None = None,
        cancel: CancelToken | None = None,
    ) -> Answer:
        """Answers one question about one frame.

        Args:
            frame: A frame, a path to an image, or a uint8 RGB array (H, W, 3).
            question: The question's text, or a ready :class:`Question` (then no options or kind).
            options: Candidate answers.
            kind: ``option``, ``options``, ``box`` or ``text``; by default ``option`` with options, else
                ``text``.
            mode: How to reason.
            deadline_s: Seconds from now by which the answer must be there.
            seed: Of every random choice; the same seed gives the same answer.
            on_step: Called with a dict at each step, on this thread.
            trace: Collects what every agent saw and said; the caller closes it.
            cancel: Lets another thread stop the question.

        Raises:
            BadInput: An image, question, mode or deadline that cannot be used.
            Cancelled: ``cancel`` was set.
            HoverlensError: The work failed, or no answer came before the deadline.
        """
        if isinstance(question, Question):
            if options is not None or kind is not None:
                raise BadInput("a ready Question has its own options and kind; leave the arguments out")
            asked = question
        else:
            asked = Question.make(question, options, kind)
        pipeline.check_mode(mode)
        pipeline.check_deadline(deadline_s)
        called = time.perf_counter()
        picture = as_frame(frame)
        with self._turn(called, deadline_s, cancel):
            backend, chat = self._mllm()
            return pipeline.ask(
                backend,
                chat,
                self.profile,
                picture,
                asked,
                mode=mode,
                seed=seed,
                deadline_s=deadline_s,
                called=called,
                on_step=on_step,
                trace=trace,
                cancel=cancel,
                perception=PerceptionCache(
                    picture,
                    self._open_detector if self.bundle.file("detector") else None,
                    self._open_depth if self.bundle.file("depth") else None,
                ),
                thinker=self._thinker(mode),
                prompt_version=self.bundle.manifest.prompt_template or prompts.VERSION,
                image_min_tokens=self.bundle.manifest.image_min_tokens,
                bundle={"name": self.bundle.name, "sha256": self.bundle.sha256},
                warnings=self._warnings(),
            )

    @contextmanager
    def _turn(self, called: float, deadline_s: float | None, cancel: CancelToken | None) -> Iterator[None]:
        """Waits for the questions before this one, but not past its deadline and not once it is cancelled."""
        self._check_process()
        while not self._lock.acquire(timeout=0.05):
            if cancel is not None:
                cancel.check()
            if deadline_s is not None and time.perf_counter() - called >= deadline_s:
                raise pipeline.too_late(deadline_s)
        try:
            yield
        finally:
            self._lock.release()

    def detect(self, frame: FrameLike, **options: Any) -> Boxes:
        """Objects in a frame, in pixels of the original frame.

        Args:
            frame: As for :meth:`ask`.
            options: See :meth:`hoverlens.runtime.perception.detector.Detector.detect`.

        Raises:
            BadInput: The bundle has no detector, or an argument cannot be used.
        """
        picture = as_frame(frame)
        self._check_process()
        with self._lock:
            return self._open_detector().detect(picture, **options)

    def depth(self, frame: FrameLike) -> DepthMap:
        """The depth of a frame: float32, larger is farther; metres where the model is metric.

        Raises:
            BadInput: The bundle has no depth model.
        """
        picture = as_frame(frame)
        self._check_process()
        with self._lock:
            return self._open_depth().estimate(picture)

    def memory_plan(self) -> MemoryPlan:
        """What this bundle takes in this profile, in bytes; nothing is loaded.

        A thinking model has a plan of its own, when a question first needs it.
        """
        if self._plan is None:
            b, p = self.bundle, self.profile
            self._plan = plan_memory(
                b.need("mllm"),
                b.file("mmproj"),
                self._n_ctx("mllm"),
                p.n_batch,
                (b.file("detector"), b.file("depth")),
                b.manifest.image_max_tokens,
                p.n_sequences,
            )
        return self._plan

    def _n_ctx(self, role: str) -> int:
        """KV cells of a model: the profile's, or as many as its budget holds."""
        p = self.profile
        if p.kv_budget_mb is None:
            return p.n_ctx
        return cells_within(self.bundle.need(role), int(p.kv_budget_mb * MB), p.n_ctx)

    def _limits(self) -> dict[str, int]:
        """What a user can lower where memory does not suffice, with its value now."""
        return {"n_ctx": self._n_ctx("mllm"), "n_batch": self.profile.n_batch}

    def _warnings(self) -> tuple[str, ...]:
        """What every answer of this bundle has to say."""
        random = [role for role in self.bundle.random_roles if role.startswith("mllm")]
        return ("the language model has random weights: its answers mean nothing",) if random else ()

    # -- loading ------------------------------------------------------------------------------------

    def backend(self) -> Backend:
        """The MLLM, loaded if it was not. For tests and benchmarks; hold no states across questions."""
        self._check_process()
        with self._lock:
            return self._mllm()[0]

    def _mllm(self) -> tuple[LlamaCppBackend, ChatFormat]:
        self._check_open()
        if self._backend is None or self._chat is None:
            self.bundle.need("mmproj")
            check_plan(self.memory_plan(), available_bytes(), self._limits())
            self._backend, self._chat = self._open_mllm("mllm")
        return self._backend, self._chat

    def _thinker(self, mode: str) -> Thinker | None:
        """What LA runs on in a mode, loaded if it was not; None where the bundle or the mode has none."""
        path = self.bundle.file("mllm_thinking")
        if path is None or mode not in MODES or for_mode(self.profile.reasoner, mode).la == "never":
            return None
        if self._thinking is None:
            p = self.profile
            plan = plan_memory(path, None, self._n_ctx("mllm_thinking"), p.n_batch, n_sequences=p.n_sequences)
            check_plan(plan, available_bytes(), self._limits())
            self._thinking = Thinker(*self._open_mllm("mllm_thinking", projector_of=self._backend))
        return self._thinking

    def _open_mllm(self, role: str, projector_of: LlamaCppBackend | None = None) -> tuple[LlamaCppBackend, ChatFormat]:
        from .mllm.files import check_pair
        from .mllm.llamacpp import LlamaCppBackend, LlamaOptions
        from .mllm.trial import try_load

        p = self.profile
        mllm, mmproj = (self.bundle.check(r) for r in (role, "mmproj"))
        entries = [e for e in map(self.bundle.entry, (role, "mmproj")) if e is not None]
        check_pair(mllm, mmproj)
        try_load(mllm, mmproj, *(e.sha256 for e in entries))
        backend = LlamaCppBackend(
            mllm,
            None if projector_of is not None else mmproj,
            LlamaOptions(
                n_ctx=self._n_ctx(role),
                n_sequences=p.n_sequences,
                n_batch=p.n_batch,
                threads=p.threads,
                image_max_tokens=self.bundle.manifest.image_max_tokens,
                share=self.share,
                feature_cache_bytes=self.memory_plan().features,
                use_mmap=p.mmap,
            ),
            identity="|".join(e.sha256 for e in entries),
            projector_of=projector_of,
        )
        try:
            return backend, ChatFormat.from_template(backend.info.chat_template)
        except BaseException:
            backend.close()
            raise

    def _open_detector(self) -> Detector:
        self._check_open()
        if self._detector is None:
            from .perception.detector import Detector

            path, entry = self.bundle.check("detector"), self.bundle.entry("detector")
            assert entry is not None
            self._detector = Detector.open(
                path, entry.labels, entry.family, entry.preprocessing, threads=self.profile.threads
            )
        return self._detector

    def _open_depth(self) -> DepthModel:
        self._check_open()
        if self._depth is None:
            from .perception.depth import DepthModel

            path, entry = self.bundle.check("depth"), self.bundle.entry("depth")
            assert entry is not None
            self._depth = DepthModel.open(
                path,
                kind=entry.kind,
                meaning=entry.meaning,
                preprocessing=entry.preprocessing,
                threads=self.profile.threads,
            )
        return self._depth

    def _check_open(self) -> None:
        if self._closed:
            raise HoverlensError("this runtime is closed; call hoverlens.load again")

    def _check_process(self) -> None:
        # A fork copies no threads: neither those that compute, nor the one that may hold the lock.
        if os.getpid() != self._pid:
            raise HoverlensError("this runtime was loaded before fork; load it in the child")

    def close(self) -> None:
        """Frees all models. Waits for a running question. May be called more than once."""
        if os.getpid() != self._pid:
            self._closed = True  # the models are the parent's; here they end with the process
            return
        with self._lock:
            self._closed = True
            # The thinking model uses the other one's projector, so it goes first.
            thinking = None if self._thinking is None else self._thinking.backend
            for model in (thinking, self._backend, self._detector, self._depth):
                if model is not None:
                    model.close()
            self._thinking = self._backend = self._detector = self._depth = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def as_frame(frame: FrameLike) -> Frame:
    """A frame from whatever a caller has: a frame, a path, or a uint8 RGB array.

    Raises:
        BadInput: It cannot be read as an image.
    """
    if isinstance(frame, Frame):
        return frame
    if isinstance(frame, np.ndarray):
        return Frame.from_array(frame)
    if isinstance(frame, (str, os.PathLike)):
        return Frame.from_file(Path(frame))
    raise BadInput(f"a frame is a Frame, a path or a uint8 RGB array; found {type(frame).__name__}")


def load(
    bundle: str | os.PathLike[str] | Bundle | None = None,
    profile: str | Profile = "onboard",
    share: bool = True,
) -> Runtime:
    """Opens a bundle: the one named, else ``$HOVERLENS_BUNDLE``, else the shipped one.

    Every file is checked against the manifest's sha256 before it is used.

    Args:
        bundle: A bundle's folder, or an opened bundle.
        profile: ``onboard`` or ``faithful``, or a profile of your own.
        share: Fork KV states between calls; off, every call evaluates its whole prompt (for comparison).

    Raises:
        BadInput: No bundle, or one that is damaged.
    """
    opened = bundle if isinstance(bundle, Bundle) else find_bundle(bundle)
    return Runtime(opened, profile, share)
