"""GBNF for boxes as the prompts ask for them: three decimals, between 0 and 1."""

from __future__ import annotations

_BOX = r"""box ::= num num num num
num ::= "<" ("0." [0-9] [0-9] [0-9] | "1.000") ">"
"""

ONE_BOX = "root ::= box\n" + _BOX
TOKENS = 40
"""Room for one box and its line end, also where every character is a token of its own."""


def list_of_boxes(most: int, empty: bool) -> str:
    """Up to ``most`` boxes, one a line; with ``empty`` also ``none``."""
    listed = f'box ("\\n" box){{0,{most - 1}}}' if most > 1 else "box"
    return (f'root ::= "none" | {listed}\n' if empty else f"root ::= {listed}\n") + _BOX
