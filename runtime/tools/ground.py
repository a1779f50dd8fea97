"""Semantic grounding: one target from an instruction, as a box."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..boxes import format_box
from ..mllm.base import GenerateRequest, Generation
from ..reasoning.box_grammar import ONE_BOX, TOKENS
from ..reasoning.parse_boxes import parse_box
from .arguments import Arguments
from .asking import sampling
from .base import Feedback, Parameter, Perception, ToolError, ToolRun

if TYPE_CHECKING:
    from ..reasoning.session import Session


@dataclass
class Ground:
    """Lets the MLLM locate one target, from image and question alone."""

    name: str = "ground"
    about: str = "finds one object from a description, as a box."
    parameters: tuple[Parameter, ...] = (Parameter("target", "text", "the object in words"),)

    def run(self, session: Session, perception: Perception, arguments: Mapping[str, Any]) -> ToolRun:
        given = Arguments(self.name, self.parameters, arguments)
        target = given.text("target")
        request = GenerateRequest(
            session.shared,
            suffix=session.suffix("tool_ground", target=target),
            max_tokens=TOKENS,
            sampling=sampling(session, self.name, target),
            grammar=ONE_BOX if session.backend.capabilities.grammar else None,
            label="tool ground",
        )
        (told,) = yield [request]
        assert isinstance(told, Generation)
        parsed = parse_box(told.text)
        if parsed.value is None:
            raise ToolError(f"no box for {target!r} ({parsed.reason})")
        details = {"said": told.text[:200], "repairs": [*given.repairs, *parsed.repairs], "logprob": told.logprob}
        return Feedback(f"{target}: {format_box(parsed.value)}", boxes=(parsed.value,), details=details)
