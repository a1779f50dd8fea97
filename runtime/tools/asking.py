"""How a tool's calls to the MLLM draw their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..mllm.base import Sampling

if TYPE_CHECKING:
    from ..reasoning.session import Session


def sampling(session: Session, tool: str, *about: str) -> Sampling:
    """Draws that depend on what the tool is asked and on nothing else.

    The same tool with the same arguments says the same on every branch: tools report on the image, and what they
    report must not depend on who asks.
    """
    return session.draws(session.profile.temperature, "|".join((f"tool {tool}", *about)))
