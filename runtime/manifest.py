"""``manifest.json``: what a bundle holds, where each file comes from, and how to use it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, field_validator

from .errors import BadInput

#: Format that this version writes and reads. It changes only when an old reader would go wrong.
FORMAT: Final = 1

MANIFEST = "manifest.json"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: No control characters, and none that make a line read otherwise than it is written.
Line = Annotated[
    str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]+$")
]
Name = Annotated[Line, StringConstraints(min_length=1, max_length=200)]
PromptVersion = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Role = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]

#: What each file is for.
ROLES = {
    "detector": "finds objects",
    "depth": "estimates depth",
    "mllm": "answers",
    "mmproj": "lets the MLLM see",
    "mllm_thinking": "answers after long thought",
    "calibration": "turns scores into probabilities",
}


class _Lenient(BaseModel):
    # A newer writer of the same format may add fields; they are kept, not refused.
    model_config = ConfigDict(extra="allow", frozen=True)


class FileEntry(_Lenient):
    """One file of a bundle.

    Attributes:
        path: Relative to the bundle, with forward slashes, inside it.
        sha256: Of the whole file.
        size: Bytes.
        source: The checkpoint or program that it comes from.
        licence: SPDX identifier or name of the terms.
        weights: Whether its answers can mean anything.
        precision: Of the weights, as the format names it.
        inputs: Tensor name to shape; a string names a dynamic axis.
        preprocessing: How pictures become its input.
        labels: Class names by index.
        family: How a detector's outputs are read.
        kind: ``metric`` or ``relative``, of a depth model.
        meaning: Whether a depth model's numbers are depth or disparity.
    """

    path: str
    sha256: Sha256
    size: int = Field(ge=0)
    source: str = ""
    licence: str = "unknown"
    weights: Literal["random", "trained", "unknown"] = "unknown"
    precision: str | None = None
    inputs: dict[str, list[int | str | None]] | None = None
    preprocessing: dict[str, Any] | None = None
    labels: list[str] | None = None
    family: str | None = None
    kind: Literal["metric", "relative"] | None = None
    meaning: Literal["depth", "disparity"] | None = None

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        try:
            os.fsencode(value)
        except UnicodeEncodeError:  # half characters
            raise ValueError(f"path {value!r} cannot be a file's name") from None
        path = PurePosixPath(value)
        outside = path.is_absolute() or ".." in path.parts or not path.parts
        # Backslash and colon would climb on Windows, where the same bundle may be opened.
        if outside or any(c in value for c in "\\:\0") or str(path) != value:
            raise ValueError(f"path {value!r} leaves the bundle or is not in plain form")
        return value


class Accuracy(_Lenient):
    """A check that the bundle passed before it was handed out."""

    dataset: str
    metric: str
    value: float
    needed: float


def check_words(name: str, prompt_template: str | None) -> None:
    """Checks what a caller chooses, before any work is spent on the rest.

    Raises:
        BadInput: A manifest cannot hold one of them.
    """
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise BadInput(
            f"a bundle cannot be called {name[:200]!r}; give a name of 1 to 200 characters, none of them control "
            "characters"
        ) from None
    try:
        if prompt_template is not None:
            TypeAdapter(PromptVersion).validate_python(prompt_template)
    except ValidationError:
        raise BadInput(f"the prompt version is {prompt_template!r}; give a plain word such as v1") from None


class Manifest(_Lenient):
    """The whole document.

    Attributes:
        format: Version of this document's form.
        name: For people.
        created: When, ISO 8601 in UTC, or None where the bundle is reproducible.
        note: A sentence for whoever opens the bundle.
        files: By role (:data:`ROLES`).
        tools: Versions of what made it.
        prompt_template: Version of the prompts that the MLLM was made for, or None.
        image_min_tokens: Least visual tokens an image needs for good grounding, or None.
        image_max_tokens: Most visual tokens of an image, or None for the model's own limit.
        accuracy: The check that it passed, or None.
        recipe: What it was made from, for the maker to see whether it is up to date.
    """

    format: Literal[1] = 1
    name: Name
    created: str | None = None
    note: str = ""
    files: dict[Role, FileEntry] = Field(min_length=1)
    tools: dict[str, str] = {}
    prompt_template: PromptVersion | None = None
    image_min_tokens: int | None = Field(default=None, ge=1)
    image_max_tokens: int | None = Field(default=None, ge=1)
    accuracy: Accuracy | None = None
    recipe: dict[str, Any] | None = None

    @field_validator("files")
    @classmethod
    def _manifest_is_no_file(cls, value: dict[str, FileEntry]) -> dict[str, FileEntry]:
        paths = [entry.path for entry in value.values()]
        if MANIFEST in paths:
            raise ValueError(f"{MANIFEST} cannot be a model file")
        return value

    def digest(self) -> str:
        """sha256 over all that changes an answer: file contents and how they are used.

        Names, paths, dates, sources and licences do not count, so a bundle keeps its digest when it is moved,
        renamed or made again. Fields that this version does not know may change an answer, so they count.
        """
        semantic = ("precision", "inputs", "preprocessing", "labels", "family", "kind", "meaning")
        content = {
            "format": self.format,
            "files": {
                role: {
                    "sha256": e.sha256,
                    "size": e.size,
                    **{k: getattr(e, k) for k in semantic},
                    **(e.model_extra or {}),
                }
                for role, e in self.files.items()
            },
            "prompt_template": self.prompt_template,
            "image_min_tokens": self.image_min_tokens,
            "image_max_tokens": self.image_max_tokens,
            **(self.model_extra or {}),
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The file's text."""
        document = self.model_dump(mode="json", exclude_none=True)
        # Null says that no check was made, which a reader should not have to infer from absence.
        document.setdefault("accuracy", None)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
