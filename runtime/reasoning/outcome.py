"""What a mode returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .value import Value


@dataclass(frozen=True)
class Outcome:
    """An answer before it is wrapped for the caller.

    Attributes:
        value: The answer; of free text it may be empty.
        confidence: Probability of the answer among the options, or None.
        probabilities: Option to probability at first look, where options were scored.
        exit: How the question ended.
    """

    value: Value
    confidence: float | None = None
    probabilities: dict[str, float] | None = None
    exit: str = "complete"

    def ending(self, exit_name: str) -> Outcome:
        """The same answer with another exit."""
        return replace(self, exit=exit_name)
