"""Chat templates: where our text goes between a model's own control tokens.

The Jinja template of the model file is rendered once with markers in place of the contents. What stands
around the markers is trusted template text; contents are put between as plain text, so nothing in a
question can act as a control token. Prompts of one question share everything up to the end of the user
turn, which is why the layout is cut into three pieces.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from ..errors import BadInput
from .base import Part, Text

MAX_TEMPLATE_CHARS = 200_000

# Line ends stand inside expressions: a dash in a tag strips those that stand in the text.
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class ChatFormat:
    """The trusted text around a system message, one user turn and the beginning of the answer.

    Attributes:
        before_system: Up to the system text.
        before_user: From the end of the system text to the user's content.
        after_user: From the end of the user's content to where the answer begins.
        merged: The template knows no system role: the system text stands at the head of the user turn.
    """

    before_system: str
    before_user: str
    after_user: str
    merged: bool = False

    @classmethod
    def from_template(cls, template: str | None, bos: str = "", eos: str = "") -> ChatFormat:
        """Cuts a Jinja chat template; None means ChatML.

        Some templates know no system role (Gemma, older Mistral: they raise, or leave it out), some take a
        message's content only as a list of typed parts.

        Raises:
            BadInput: The template does not render, or drops or repeats a message's content.
        """
        source = template or CHATML
        if len(source) > MAX_TEMPLATE_CHARS:
            raise BadInput(
                f"the model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read, so "
                "export the model with its original template"
            )
        tag = secrets.token_hex(8)
        system, user = f"SYSTEM{tag}", f"USER{tag}"
        reasons: list[str] = []
        for merged, typed in ((False, False), (False, True), (True, False), (True, True)):
            texts = {"user": f"{system}\n\n{user}"} if merged else {"system": system, "user": user}
            messages = [
                {"role": role, "content": [{"type": "text", "text": text}] if typed else text}
                for role, text in texts.items()
            ]
            try:
                text = _render(source, messages, bos, eos)
            except _TemplateError as e:
                reasons.append(str(e))
                continue
            if text.count(system) == text.count(user) == 1 and text.index(system) < text.index(user):
                before_system, rest = text.split(system)
                before_user, after_user = rest.split(user)
                return cls(before_system, before_user, after_user, merged)
            reasons.append("it does not place system and user text once each, in order")
        raise BadInput(
            f"the model's chat template cannot be used: {reasons[0]}; export the model with its original template"
        )

    def open(self, system: str, *content: Part) -> list[Part]:
        """The beginning of a prompt: system text, then an open user turn with ``content``."""
        return [
            Text(self.before_system, trusted=True),
            Text(system),
            Text(self.before_user, trusted=True),
            *content,
        ]

    def close(self, *content: Part) -> tuple[Part, ...]:
        """The end of a prompt: the last of the user turn, then the place where the answer begins."""
        return (*content, Text(self.after_user, trusted=True))


class _TemplateError(Exception):
    """The template refuses the messages, or does not render; one line."""


def _render(source: str, messages: list[dict[str, Any]], bos: str, eos: str) -> str:
    import jinja2

    from .sandbox import TooMuch, template_environment

    def refuse(message: object) -> None:
        raise _TemplateError(_one_line(message))

    environment, joined = template_environment()
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _format: ""
    try:
        template = environment.from_string(source)
        return joined(
            template.generate(
                messages=messages,
                add_generation_prompt=True,
                bos_token=bos,
                eos_token=eos,
                tools=None,
                enable_thinking=False,
            )
        )
    except _TemplateError:
        raise
    except TooMuch as e:
        raise _TemplateError(f"it does not end, or not soon ({e})") from None
    except jinja2.TemplateError as e:
        raise _TemplateError(f"it does not render ({_one_line(e)})") from None
    except Exception as e:  # whatever its expressions come to
        raise _TemplateError(f"it does not render ({type(e).__name__}: {_one_line(e)})") from None


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]
