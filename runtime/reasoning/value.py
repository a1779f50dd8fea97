"""An answer as a value: what the search compares, keeps and returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..question import Question

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Value:
    """An answer to a question. All but the base answer are made only where they are valid.

    Attributes:
        text: As it is shown and put into prompts.
        options: The chosen options, in the question's order.
        box: Normalised x1, y1, x2, y2 of the original frame, or None.
    """

    text: str
    options: tuple[str, ...] = ()
    box: Box | None = None

    @property
    def valid(self) -> bool:
        """Whether it says anything: some words, and a box that has an area."""
        if self.box is not None and (self.box[0] >= self.box[2] or self.box[1] >= self.box[3]):
            return False
        return bool(self.text.strip())

    def same(self, other: Value, box_iou: float) -> bool:
        """Whether two answers are one: equal options, boxes that overlap by ``box_iou``, or equal words."""
        if self.box is not None and other.box is not None:
            return iou(self.box, other.box) >= box_iou
        if self.options or other.options:
            return self.options == other.options
        return " ".join(self.text.casefold().split()) == " ".join(other.text.casefold().split())


def of_options(question: Question, chosen: tuple[str, ...]) -> Value:
    """The value of chosen options, in the question's order."""
    ordered = tuple(o for o in question.options if o in chosen)
    return Value(", ".join(ordered), options=ordered)


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes; 0 where both are empty."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    common = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union > 0 else 0.0
