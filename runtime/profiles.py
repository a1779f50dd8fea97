"""Profiles: named settings of the reasoner and the MLLM.

``onboard`` is what a board runs; ``faithful`` keeps to the paper (arXiv 2608.11738, appendix B) wherever
it says something.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BadInput
from .reasoning.settings import FAITHFUL, ONBOARD, Settings


@dataclass(frozen=True)
class Profile:
    """Settings of one question.

    Attributes:
        name: For the trace.
        n_ctx: KV cells for all branches together.
        kv_budget_mb: Most memory for them, MB of 10^6 bytes; the cache then holds fewer than ``n_ctx``. Branches
            that do not fit are dropped, least recently used first, and evaluated again when they are needed.
        n_sequences: Most branches in the cache at once.
        n_batch: Most tokens in a forward pass.
        mmap: Map the MLLM's weights from its file; off, they are read into memory, and the file may change meanwhile.
        threads: CPU threads; None means one for each core that the process may use.
        temperature: Sampling temperature of free text; 0 is greedy.
        max_tokens: Most new tokens of one MLLM call.
        box_tokens: Most new tokens of a box.
        reasoner: Settings of the modes that reason.
        yes_threshold: An option of kind ``options`` is chosen from this probability of "yes" on.
    """

    name: str
    n_ctx: int = 8192
    kv_budget_mb: float | None = None
    n_sequences: int = 64
    n_batch: int = 512
    threads: int | None = None
    mmap: bool = True
    temperature: float = 0.0
    max_tokens: int = 256
    box_tokens: int = 64
    yes_threshold: float = 0.5
    reasoner: Settings = ONBOARD


PROFILES: dict[str, Profile] = {
    "onboard": Profile(name="onboard"),
    "faithful": Profile(name="faithful", temperature=0.7, max_tokens=8192, n_ctx=32768, reasoner=FAITHFUL),
}


def profile_named(name: str | Profile) -> Profile:
    """The profile of that name.

    Raises:
        BadInput: No such profile.
    """
    if isinstance(name, Profile):
        return name
    if name not in PROFILES:
        raise BadInput(f"unknown profile {name!r}; use one of {', '.join(PROFILES)}")
    return PROFILES[name]
