"""CAIR's answer state and its update (arXiv 2608.11738, Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .value import Value


@dataclass(frozen=True)
class Belief:
    """The current best answer a_t and its clues C_t.

    Attributes:
        answer: a_t; None where no step has given a valid answer and there is no base answer.
        clues: C_t, the evidence that goes with this answer alone.
        confidence: Probability of the answer among the options where it was drafted, or None.
        confirmed: Trusted steps in a row that kept this answer.
    """

    answer: Value | None
    clues: tuple[str, ...] = ()
    confidence: float | None = None
    confirmed: int = 0


@dataclass(frozen=True)
class Draft:
    """What one step says: PV's answer and evidence, or LA's.

    Attributes:
        answer: None where it was not valid.
    """

    answer: Value | None
    evidence: str = ""
    confidence: float | None = None


def update(belief: Belief, draft: Draft, trusted: bool, box_iou: float) -> Belief:
    """Eq. 4: the state after a draft.

    Trusted and another answer: answer and clues are replaced, since clues belong to their answer. Trusted and
    the same answer: it stays and the clue is added. Not trusted, or no valid answer: nothing changes but that
    the run of confirmations ends.
    """
    if not trusted or draft.answer is None:
        return replace(belief, confirmed=0)
    clue = (draft.evidence,) if draft.evidence else ()
    if belief.answer is None or not draft.answer.same(belief.answer, box_iou):
        return Belief(draft.answer, clue, draft.confidence, confirmed=1)
    return replace(belief, clues=belief.clues + clue, confirmed=belief.confirmed + 1)
