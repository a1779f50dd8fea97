"""Mode ``direct``: one look, one answer, no tools.

The baseline of the paper's tables, and a_0 of its Algorithm 1.
"""

from __future__ import annotations

import math

from ..boxes import format_box
from ..errors import HoverlensError
from ..mllm.base import ChooseRequest, GenerateRequest
from .outcome import Outcome
from .session import Session
from .value import Value, of_options

# Three decimals between 0 and 1, as UAVQA-Bench writes boxes.
BOX_GRAMMAR = r"""root ::= num num num num
num ::= "<" ("0." [0-9] [0-9] [0-9] | "1.000") ">"
"""


def answer(session: Session) -> Outcome:
    """Answers the question from the shared prefix.

    An option is the one with the highest length-normalised probability; of several options each is asked
    for by itself, yes or no; a box is held to its grammar; text is generated freely.
    """
    kind = session.question.kind
    session.step("answer")
    if kind == "option":
        return _option(session)
    if kind == "options":
        return _options(session)
    if kind == "box":
        return _box(session)
    return _text(session)


def _option(session: Session) -> Outcome:
    options = session.question.options
    request = ChooseRequest(session.shared, options, suffix=session.suffix("direct_option"), label="base")
    choice = session.choose([request])[0]
    chosen = options[choice.index]
    return Outcome(
        of_options(session.question, (chosen,)),
        confidence=float(choice.probabilities[choice.index]),
        probabilities=dict(zip(options, map(float, choice.probabilities), strict=True)),
    )


def _options(session: Session) -> Outcome:
    options = session.question.options
    requests = [
        ChooseRequest(
            session.shared,
            ("yes", "no"),
            suffix=session.suffix("direct_options", option=option),
            label="base",
        )
        for option in options
    ]
    yes = [float(c.probabilities[0]) for c in session.choose(requests)]
    threshold = session.profile.yes_threshold
    chosen = [i for i, p in enumerate(yes) if p >= threshold]
    if not chosen:
        # An answer has at least one option.
        chosen = [max(range(len(yes)), key=lambda i: (yes[i], -i))]
        session.warnings.append("no option reached the threshold; the most probable one is given")
    return Outcome(
        of_options(session.question, tuple(options[i] for i in chosen)),
        # Each option was judged by itself: the set is right if every judgement is.
        confidence=math.prod(p if i in chosen else 1.0 - p for i, p in enumerate(yes)),
        probabilities=dict(zip(options, yes, strict=True)),
    )


def _box(session: Session) -> Outcome:
    request = GenerateRequest(
        session.shared,
        suffix=session.suffix("direct_box"),
        max_tokens=session.profile.box_tokens,
        sampling=session.draws(session.profile.temperature, "base"),
        grammar=BOX_GRAMMAR,
        label="base",
    )
    result = session.generate([request])[0]
    numbers = [float(n) for n in result.text.strip("<>").split("><") if n]
    if len(numbers) != 4:
        raise HoverlensError(
            f"the model's box is incomplete ({result.text!r} after {len(result.tokens)} tokens); "
            "raise box_tokens in the profile"
        )
    x1, y1, x2, y2 = numbers
    box = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
    if box != (x1, y1, x2, y2):
        session.warnings.append("the model gave the corners of the box in another order")
        session.trace.emit("repair", what="box corners reordered", found=result.text)
    return Outcome(Value(format_box(box), box=box))


def _text(session: Session) -> Outcome:
    request = GenerateRequest(
        session.shared,
        suffix=session.suffix("direct_text"),
        max_tokens=session.profile.max_tokens,
        sampling=session.draws(session.profile.temperature, "base"),
        label="base",
    )
    result = session.generate([request])[0]
    if result.finish == "length":
        session.warnings.append(f"the text was cut after {len(result.tokens)} tokens")
    text = result.text.strip()
    if not text:
        session.warnings.append("the model's answer is empty")
    return Outcome(Value(text))
