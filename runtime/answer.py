"""The answer and its JSON, a contract that scripts outside the project read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

EXITS = (
    "complete",
    "bound",
    "route",
    "settled",
    "confident",
    "consistent",
    "deadline",
    "fallback",
)
"""Every way a question can end; ``complete`` means that the search ran its course."""

STAGES = ("encode", "prefill", "decode", "tools", "other")


@dataclass
class Stats:
    """Counts for one question. Tokens are those of the MLLM.

    Attributes:
        wall_s: Seconds from the call to the answer.
        mllm_calls: Agent calls (one prompt, one output); a batch of n siblings counts n.
        tool_calls: Perception tools executed.
        image_encodes: Images passed through the vision encoder.
        prefill_tokens: Prompt tokens evaluated.
        reused_tokens: Prompt tokens taken from a forked or cached KV state instead.
        decoded_tokens: Tokens sampled one by one.
        forced_tokens: Tokens that were given, not sampled: options being scored, fixed parts of an output.
        nodes: Search nodes scored, the root included (0 without a search).
        pruned: Nodes cut by the search.
        peak_rss_mb: Peak resident memory of the process, MB of 10^6 bytes.
    """

    wall_s: float = 0.0
    mllm_calls: int = 0
    tool_calls: int = 0
    image_encodes: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    forced_tokens: int = 0
    nodes: int = 0
    pruned: int = 0
    peak_rss_mb: float = 0.0


@dataclass
class Answer:
    """One answer.

    Attributes:
        answer: The answer as text: the option, the options joined by ``", "``, the box as
            ``<x1><y1><x2><y2>``, or free text.
        kind: The question's kind.
        options: The chosen options (empty for ``box`` and ``text``).
        box: ``(x1, y1, x2, y2)`` normalised by the width and height of the original frame, or None.
        confidence: Calibrated probability of being right where the bundle carries a calibration, else the
            option probability of the final answer; None for free text.
        exit: One of :data:`EXITS`.
        mode: ``direct``, ``react`` or ``uavmas``.
        stages_s: Seconds by stage; the keys are :data:`STAGES`.
        bundle: ``{"name", "sha256"}``.
        frame: ``{"digest", "width", "height", "stamp"}``; stamp in seconds or None.
        warnings: What a user should know about this answer, in words.
        probabilities: Option to probability, where options were scored.
    """

    answer: str
    kind: str
    options: tuple[str, ...] = ()
    box: tuple[float, float, float, float] | None = None
    confidence: float | None = None
    exit: str = "complete"
    mode: str = "direct"
    stats: Stats = field(default_factory=Stats)
    stages_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    bundle: dict[str, Any] = field(default_factory=dict)
    frame: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    probabilities: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The Answer JSON as plain Python values."""
        return {
            "answer": self.answer,
            "kind": self.kind,
            "options": list(self.options),
            "box": None if self.box is None else [float(v) for v in self.box],
            "confidence": self.confidence,
            "exit": self.exit,
            "mode": self.mode,
            "stats": dict(vars(self.stats)),
            "stages_s": dict(self.stages_s),
            "bundle": dict(self.bundle),
            "frame": dict(self.frame),
            "warnings": list(self.warnings),
            "probabilities": self.probabilities,
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def same_as(self, other: Answer) -> bool:
        """Equality as every comparison in hoverlens means it: all but stats, stages_s and frame.stamp."""
        return self.comparable() == other.comparable()

    def comparable(self) -> dict[str, Any]:
        """The parts of the JSON that must repeat when a question is asked again."""
        out = self.to_dict()
        del out["stats"], out["stages_s"]
        out["frame"] = {k: v for k, v in out["frame"].items() if k != "stamp"}
        return out
