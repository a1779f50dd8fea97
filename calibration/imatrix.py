"""The importance matrix of an MLLM, from its own activations on our own prompts.

Rounding a weight costs as much as the input that it meets is large. So the quantiser wants to know, for every
column of every weight matrix, the mean square of what it was fed. It is taken from the very questions, prompts
and agents that will run on the board, images included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime import pipeline, prompts
from ..runtime.bundle import Bundle
from ..runtime.digest import remembered_sha256, sha256_file
from ..runtime.errors import BadInput
from ..runtime.files import check_writable
from ..runtime.mllm.base import CancelToken
from ..runtime.mllm.chat import ChatFormat
from ..runtime.mllm.files import check_pair
from ..runtime.mllm.llamacpp import LlamaCppBackend, LlamaOptions
from ..runtime.profiles import Profile, profile_named
from ..runtime.tools.perception import PerceptionCache
from .activations import Activations
from .imatrix_file import ImportanceMatrix
from .questions import CheckedSet, check_set, frames, generic_questions, read_questions

#: Mean squares of fewer inputs than this are noise.
LEAST_TOKENS = 2048

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Result:
    """A matrix and how it was made."""

    matrix: ImportanceMatrix
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For people and scripts."""
        m = self.matrix
        return {"tensors": len(m.entries), "questions": m.chunks, **m.facts, "seconds": round(self.seconds, 1)}


def collect(
    mllm: str | os.PathLike[str],
    mmproj: str | os.PathLike[str],
    questions: CheckedSet,
    *,
    mode: str = "direct",
    profile: str | Profile = "onboard",
    prompt_version: str = prompts.VERSION,
    image_max_tokens: int | None = None,
    threads: int | None = None,
    dataset: str = "",
    allow_small: bool = False,
    progress: Progress | None = None,
    cancel: CancelToken | None = None,
) -> Result:
    """Answers every question and adds up what the weight matrices were fed.

    Args:
        mllm: Text model, GGUF; best F16 or BF16, since the activations of a coarse one carry its errors.
        mmproj: Its projector.
        questions: What to ask.
        mode: How to reason. ``direct`` is quick; with ``uavmas`` the prompts of all agents are among the inputs.
        profile: Settings of the reasoner.
        prompt_version: Of the prompt templates.
        image_max_tokens: Most visual tokens of an image.
        threads: CPU threads.
        dataset: Name of the set, for people.
        allow_small: Take fewer inputs than :data:`LEAST_TOKENS`.
        progress: Called with (questions done, questions).
        cancel: Lets another thread stop the work.

    Raises:
        BadInput: Files that do not fit, an unknown mode or profile, or too few tokens.
        HoverlensError: The model failed.
    """
    check_pair(mllm, mmproj)
    pipeline.check_mode(mode)
    settings = profile_named(profile)
    start = time.perf_counter()
    seen = Activations()
    backend = LlamaCppBackend(
        mllm,
        mmproj,
        LlamaOptions(
            n_ctx=settings.n_ctx,
            n_sequences=settings.n_sequences,
            n_batch=settings.n_batch,
            threads=threads or settings.threads,
            image_max_tokens=image_max_tokens,
        ),
        observer=seen.callback,
    )
    try:
        chat = ChatFormat.from_template(backend.info.chat_template)
        for i, (frame, question) in enumerate(frames(questions.items)):
            if progress is not None:
                progress(i, len(questions.items))
            pipeline.ask(
                backend,
                chat,
                settings,
                frame,
                question,
                mode=mode,
                seed=i,
                cancel=cancel,
                perception=PerceptionCache(frame),
                prompt_version=prompt_version,
            )
            seen.check()
            backend.forget()
        tokens = backend.counters.prefill_tokens + backend.counters.decoded_tokens + backend.counters.forced_tokens
    finally:
        backend.close()
    if progress is not None:
        progress(len(questions.items), len(questions.items))
    if tokens < LEAST_TOKENS and not allow_small:
        raise BadInput(
            f"the calibration questions came to {tokens} tokens, needed {LEAST_TOKENS}; give more, or --allow-small"
        )
    matrix = ImportanceMatrix(
        seen.entries(),
        datasets=(dataset,) if dataset else (),
        chunks=len(questions.items),
        chunk_size=tokens // max(len(questions.items), 1),
        facts={
            "set_sha256": questions.sha256,
            "images": questions.n_images,
            "noise_images": questions.n_noise,
            "tokens": tokens,
            "mode": mode,
            "prompts": prompt_version,
            "model_sha256": remembered_sha256(mllm),
        },
    )
    return Result(matrix, time.perf_counter() - start)


def calibrate_imatrix(
    out: str | os.PathLike[str],
    *,
    bundle: str | None = None,
    mllm: str | None = None,
    mmproj: str | None = None,
    questions: str | None = None,
    images: Sequence[str] = (),
    mode: str = "direct",
    image_max_tokens: int | None = None,
    limit: int | None = None,
    threads: int | None = None,
    allow_small: bool = False,
    allow_noise: bool = False,
    progress: Progress | None = None,
    cancel: CancelToken | None = None,
) -> dict[str, Any]:
    """:func:`collect` from files to a file.

    Args:
        out: GGUF file to write.
        bundle: Take the models from here, or
        mllm: from here, with
        mmproj: its projector.
        questions: JSON lines, see :func:`read_questions`.
        images: Folders of photos that are asked about in general.
        mode: How to reason.
        image_max_tokens: Most visual tokens of an image.
        limit: At most so many questions, spread over all.
        threads: CPU threads.
        allow_small: Take a set that is too small.
        allow_noise: Take pictures that show nothing.
        progress: Called with (questions done, questions).
        cancel: Lets another thread stop the work.

    Returns:
        Facts about matrix and set, with ``path`` and ``sha256`` of the file.

    Raises:
        BadInput: Arguments, files or a set that cannot be used.
        HoverlensError: The model failed.
    """
    if (bundle is None) == (mllm is None) or (mllm is None) != (mmproj is None):
        raise BadInput("which model? give --bundle, or --mllm and --mmproj")
    if not questions and not images:
        raise BadInput("no calibration questions; give --questions F.jsonl or --images DIR")
    check_writable(out, "the importance matrix")
    pipeline.check_mode(mode)
    version = prompts.VERSION
    if bundle is not None:
        opened = Bundle.open(bundle)
        text, vision = opened.need("mllm"), opened.need("mmproj")
        version = opened.manifest.prompt_template or version
        image_max_tokens = image_max_tokens or opened.manifest.image_max_tokens
    else:
        text, vision = Path(str(mllm)), Path(str(mmproj))
    check_pair(text, vision)
    items = read_questions(questions) if questions else []
    for folder in images:
        items += generic_questions(folder)
    if limit is not None and len(items) > limit:
        # Evenly: the first ones of a flight may all show the take-off.
        items = [items[i * len(items) // limit] for i in range(limit)]
    checked = check_set(items, allow_small=allow_small, allow_noise=allow_noise)
    result = collect(
        text,
        vision,
        checked,
        mode=mode,
        prompt_version=version,
        image_max_tokens=image_max_tokens,
        threads=threads,
        dataset=", ".join(Path(p).name for p in ([questions] if questions else []) + list(images)),
        allow_small=allow_small,
        progress=progress,
        cancel=cancel,
    )
    result.matrix.save(out)
    return {"path": str(out), "sha256": sha256_file(out), **result.to_dict()}
