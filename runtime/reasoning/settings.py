"""Switches of the reasoner: what the paper leaves open, and its ablations (Tables III to VII)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Settings:
    """How UAV-MAS runs. The defaults are the whole system as the paper describes it.

    Attributes:
        toolset: ``domain`` (the five tools of DSPE) or ``general`` (plain crop, detection and depth).
        activation: ``per_tool`` (one TS agent a tool), ``central`` (one TS for all) or ``all`` (none; every
            tool is active).
        cair: Verify each step (PV, CI). Off, a node's answer is what SR finished with.
        pv: With CAIR, let PV draft from the step alone. Off, SR drafts from its history.
        ci: With CAIR, let CI judge each draft. Off, every draft is trusted.
        daas: Search a tree. Off, one chain of ``depth`` steps.
        difficulty: Threshold by S_init. Off, ``fixed_tau``.
        pruning: Cut two consecutive weak nodes.
        votes: Runs with different seeds, of which the most frequent answer wins (the first of equals).
        depth: D, the most steps of a path; also T where ``daas`` is off.
        width: The most children of a node; W = min(width, number of active tools).
        max_nodes: The search opens no more nodes than this, the root not counted; a valid answer at an open node
            then ends its path. None: no limit, as in the paper, where a question takes 4.6 nodes on average; a
            full tree has 363.
        fixed_tau: The threshold without difficulty awareness: the middle one.
        la: When the long-chain answer is asked for: ``each_path`` (every finished path), ``winner`` (the
            chosen path), ``unsettled`` (the chosen path, unless CI's state is settled) or ``never``.
        settled_after: CI's state is settled after so many trusted steps in a row with one answer.
        arbitrate_equal: Ask CI also where LA's answer is the one that stands (it cannot change it).
        score: ``likeliest`` (the most probable score, or a draw at the search temperature) or ``expected``
            (the mean of the score's distribution).
        same_box_iou: Two boxes are one answer from this overlap on.
        temperature: Of SR, which must differ between siblings.
        agent_temperature: Of all other agents; 0 takes the most probable.
        thought_tokens: Most tokens of SR's thought.
        evidence_tokens: Most tokens of PV's summary and of a clue.
        tip_tokens: Most tokens of TS's tips.
        text_tokens: Most tokens of a free-text answer.
        la_tokens: Most tokens of LA's reasoning where the weights are the other agents'.
        think_tokens: Most tokens of LA's thought where the bundle has a thinking model.
        tool_timeout_s: Seconds after which a tool's perception counts as failed.
    """

    toolset: str = "domain"
    activation: str = "per_tool"
    cair: bool = True
    pv: bool = True
    ci: bool = True
    daas: bool = True
    difficulty: bool = True
    pruning: bool = True
    votes: int = 1
    depth: int = 5
    width: int = 3
    max_nodes: int | None = 24
    fixed_tau: int = 4
    la: str = "unsettled"
    settled_after: int = 2
    arbitrate_equal: bool = False
    score: str = "likeliest"
    same_box_iou: float = 0.7
    temperature: float = 0.7
    agent_temperature: float = 0.0
    thought_tokens: int = 40
    evidence_tokens: int = 30
    tip_tokens: int = 20
    text_tokens: int = 48
    la_tokens: int = 128
    think_tokens: int = 512
    tool_timeout_s: float = 30.0


ONBOARD = Settings()

FAITHFUL = Settings(
    max_nodes=None,
    la="each_path",
    arbitrate_equal=True,
    agent_temperature=0.7,
    thought_tokens=512,
    evidence_tokens=256,
    tip_tokens=128,
    text_tokens=256,
    la_tokens=4096,
    think_tokens=8192,
    tool_timeout_s=600.0,
)

MODES: dict[str, dict[str, object]] = {
    "uavmas": {},
    "react": {"cair": False, "daas": False, "la": "never", "activation": "all"},
    "react_general": {
        "cair": False,
        "daas": False,
        "la": "never",
        "activation": "all",
        "toolset": "general",
    },
    "dspe": {"cair": False, "daas": False, "la": "never"},
    "no_dspe": {"toolset": "general", "activation": "all"},
    "no_cair": {"cair": False, "la": "never"},
    "no_daas": {"daas": False},
    "vote3": {"daas": False, "votes": 3},
    "no_activation": {"activation": "all"},
    "central_ts": {"activation": "central"},
    "no_pv": {"pv": False},
    "no_ci": {"ci": False},
    "no_difficulty": {"difficulty": False},
    "no_pruning": {"pruning": False},
}
"""Each mode that reasons, as changes to a profile's settings.

``dspe``, ``no_daas`` and ``no_cair`` are Exp1, Exp2 and Exp3 of Table IV; ``vote3`` is Table VI's majority
vote; the others are Table V's variants. ``react`` is the paper's general agent with the domain tools.
"""


def for_mode(base: Settings, mode: str) -> Settings:
    """A profile's settings with a mode's changes."""
    return replace(base, **MODES[mode])  # type: ignore[arg-type]
