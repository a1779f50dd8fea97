"""Open-vocabulary detection with de-hallucination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..boxes import Space, format_box
from ..errors import BadInput
from ..mllm.base import Choice, ChooseRequest, GenerateRequest, Generation
from ..reasoning.box_grammar import TOKENS, list_of_boxes
from ..reasoning.parse_boxes import parse_boxes
from .arguments import Arguments
from .asking import sampling
from .base import Ask, Box, Feedback, Parameter, Perception, Told, ToolRun
from .equidistance import DELTA, RUN, equidistant

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..reasoning.session import Session

CONFIRM = ("always", "unknown_only", "never")


@dataclass
class Detect:
    """Finds all objects of a category, in three stages.

    1. The MLLM confirms that the category is in the image at all, by the probability of "yes".
    2. Boxes: of the compiled detector where it knows the category, else of the MLLM.
    3. Of the MLLM's boxes, those at regular intervals are dropped (:mod:`.equidistance`), then exact repeats.

    Attributes:
        confirm_existence: When stage 1 runs: ``always``, ``unknown_only`` (where the MLLM would have to find
            the boxes) or ``never``.
        equidistance: Whether stage 3 runs.
        delta, run: Of stage 3.
        sliced: Let the detector also look through tiles: slower by their number, finds smaller objects.
        shown: Most boxes that the feedback lists; the count is of all.
        max_boxes: Most boxes that the MLLM may write.
    """

    confirm_existence: str = "always"
    equidistance: bool = True
    delta: float = DELTA
    run_length: int = RUN
    sliced: bool = False
    shown: int = 8
    max_boxes: int = 20
    name: str = "detect"
    about: str = "finds and counts all objects of a category."
    parameters: tuple[Parameter, ...] = (
        Parameter("category", "text", "what to find, in one or two words", max_tokens=8),
        Parameter("within", "boxes", "count only inside; empty for the whole image", required=False),
    )

    def __post_init__(self) -> None:
        if self.confirm_existence not in CONFIRM:
            raise BadInput(f"confirm_existence is {self.confirm_existence!r}; use one of {', '.join(CONFIRM)}")

    def run(self, session: Session, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        given = Arguments(self.name, self.parameters, arguments)
        category = given.text("category")
        within = given.boxes("within")
        known = perception.knows(category)
        details: dict[str, Any] = {"category": category, "classes": list(known), "repairs": given.repairs}
        if self.confirm_existence == "always" or (self.confirm_existence == "unknown_only" and not known):
            (told,) = yield [
                ChooseRequest(
                    session.shared,
                    ("yes", "no"),
                    suffix=session.suffix("tool_detect_exists", category=category),
                    label="tool detect exists",
                )
            ]
            assert isinstance(told, Choice)
            yes = float(told.probabilities[0])
            details["exists"] = yes
            if yes < session.profile.yes_threshold:
                return Feedback(f"{category}: none in the image (probability {1 - yes:.2f}).", details=details)
        found = self._compiled(perception, known) if known else None
        if found is None:
            found = yield from self._written(session, category)
        details |= found.details
        if within:
            found.keep([_inside(box, within) for box in found.boxes])
        return Feedback(self._text(category, found, within), boxes=tuple(found.boxes), details=details)

    def _compiled(self, perception: Perception, known: Sequence[str]) -> _Found | None:
        boxes = perception.detections(self.sliced)
        if boxes is None:
            return None
        labels = [boxes.label(i) for i in range(len(boxes))]
        boxes = boxes.to_original().clip().to(Space.NORM)
        rows = [i for i, label in enumerate(labels) if label in known]
        found = _Found("detector", [], [labels[i] for i in rows])
        found.boxes = [_as_box(boxes.xyxy[i]) for i in rows]
        found.scores = [float(boxes.scores[i]) if boxes.scores is not None else 1.0 for i in rows]
        return found

    def _written(self, session: Session, category: str) -> Generator[list[Ask], list[Told], _Found]:
        grammar = list_of_boxes(self.max_boxes, empty=self.confirm_existence == "never")
        (told,) = yield [
            GenerateRequest(
                session.shared,
                suffix=session.suffix("tool_detect_boxes", category=category),
                max_tokens=self.max_boxes * TOKENS,
                sampling=sampling(session, self.name, category),
                grammar=grammar if session.backend.capabilities.grammar else None,
                label="tool detect boxes",
            )
        ]
        assert isinstance(told, Generation)
        parsed = parse_boxes(told.text)
        boxes = (parsed.value or [])[: self.max_boxes]
        found = _Found("mllm", boxes, [])
        found.cut = told.finish == "length" or len(parsed.value or []) >= self.max_boxes
        found.details = {"written": len(boxes), "box_repairs": list(parsed.repairs), "reason": parsed.reason}
        if self.equidistance:
            regular = equidistant(np.array(found.boxes).reshape(-1, 4), self.delta, self.run_length)
            found.regular = int(regular.sum())
            found.details["regular"] = [list(b) for b, r in zip(found.boxes, regular, strict=True) if r]
            found.keep([not r for r in regular])
        found.boxes = list(dict.fromkeys(found.boxes))
        return found

    def _text(self, category: str, found: _Found, within: Sequence[Box]) -> str:
        place = f" inside {' '.join(format_box(b) for b in within)}" if within else ""
        text = f"{category}{place}: {len(found.boxes) or 'none'} found"
        counts = Counter(found.labels)
        if len(counts) > 1:
            text += f" ({', '.join(f'{name} {n}' for name, n in counts.most_common())})"
        if found.boxes:
            listed = []
            for i, box in enumerate(found.boxes[: self.shown]):
                label = f" {found.labels[i]}" if len(counts) > 1 else ""
                score = f" {found.scores[i]:.2f}" if found.scores else ""
                listed.append(f"{format_box(box)}{label}{score}")
            more = len(found.boxes) - self.shown
            text += ": " + ", ".join(listed) + (f" and {more} more" if more > 0 else "")
        text += "."
        if found.regular:
            text += f" {found.regular} made-up boxes at regular intervals were dropped."
        if found.cut:
            text += " There may be more."
        return text


@dataclass
class _Found:
    """Boxes on their way to the feedback.

    Attributes:
        source: ``detector`` or ``mllm``.
        boxes: Normalised; the detector's by falling score, the MLLM's as written.
        labels, scores: Of the detector's boxes.
        regular: How many were dropped by the equidistance filter.
        cut: The MLLM may have had more to write.
    """

    source: str
    boxes: list[Box]
    labels: list[str]
    scores: list[float] = field(default_factory=list)
    regular: int = 0
    cut: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.details.setdefault("source", self.source)

    def keep(self, mask: Sequence[bool]) -> None:
        self.boxes = [b for b, m in zip(self.boxes, mask, strict=True) if m]
        self.labels = [v for v, m in zip(self.labels, mask, strict=False) if m]
        self.scores = [v for v, m in zip(self.scores, mask, strict=False) if m]


def _inside(box: Box, within: Sequence[Box]) -> bool:
    """Whether the box's centre lies in one of the regions."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return any(r[0] <= x <= r[2] and r[1] <= y <= r[3] for r in within)


def _as_box(row: Any) -> Box:
    x1, y1, x2, y2 = (min(max(float(v), 0.0), 1.0) for v in row)
    return x1, y1, x2, y2
