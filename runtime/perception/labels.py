"""Class names: from a file, from a model's metadata, or COCO's by their count."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import BadInput

COCO = (
    "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign "
    "parking_meter bench bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie "
    "suitcase frisbee skis snowboard sports_ball kite baseball_bat baseball_glove skateboard surfboard "
    "tennis_racket bottle wine_glass cup fork knife spoon bowl banana apple sandwich orange broccoli carrot "
    "hot_dog pizza donut cake chair couch potted_plant bed dining_table toilet tv laptop mouse remote keyboard "
    "cell_phone microwave oven toaster sink refrigerator book clock vase scissors teddy_bear hair_drier toothbrush"
)
COCO_NAMES = tuple(name.replace("_", " ") for name in COCO.split())

MAX_LABELS_BYTES = 1_000_000
MAX_CLASSES = 20_000


def default_names(count: int) -> tuple[str, ...]:
    """Names for a model that says nothing: 80 classes are COCO's, any other count is ``class_0`` and on."""
    return COCO_NAMES if count == len(COCO_NAMES) else tuple(f"class_{i}" for i in range(count))


def parse_names(text: str) -> tuple[str, ...] | None:
    """Reads names from a text that holds a Python or JSON list or dict, or one name a line.

    Exporters write a dict's ``repr``; it is read as a literal, never evaluated.

    Returns:
        The names by class index, or None where the text holds none. Gaps in a dict become ``class_i``.
    """
    text = text.strip()
    if not text or len(text) > MAX_LABELS_BYTES:
        return None
    if text[0] not in "[{(":
        return tuple(line.strip() for line in text.splitlines() if line.strip()) or None
    value: object
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
    if isinstance(value, Mapping) and isinstance(value.get("names"), (Mapping, list)):
        value = value["names"]
    if isinstance(value, Mapping):
        try:
            by_index = {int(k): str(v) for k, v in value.items()}
        except (TypeError, ValueError):
            return None
        if not by_index or min(by_index) < 0 or max(by_index) >= MAX_CLASSES:
            return None
        return tuple(by_index.get(i, f"class_{i}") for i in range(max(by_index) + 1))
    if isinstance(value, (list, tuple)) and value and len(value) <= MAX_CLASSES:
        return tuple(str(v) for v in value)
    return None


def load_labels(labels: str | os.PathLike[str] | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names from a labels file (one a line, or a JSON list or dict), or from a sequence as it is.

    Raises:
        BadInput: The file cannot be read, is too large or holds no names.
    """
    if labels is None:
        return None
    if not isinstance(labels, (str, os.PathLike)):
        return tuple(str(name) for name in labels) or None
    path = Path(labels)
    try:
        if path.stat().st_size > MAX_LABELS_BYTES:
            raise BadInput(f"cannot use the labels {path}: over {MAX_LABELS_BYTES} bytes, needed one name a line")
        names = parse_names(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise BadInput(f"cannot read the labels {path}: {e.strerror}; name a text file with one class a line") from None
    except UnicodeDecodeError:
        raise BadInput(f"cannot read the labels {path}: not UTF-8 text; name a file with one class a line") from None
    if names is None or len(names) > MAX_CLASSES:
        raise BadInput(f"cannot use the labels {path}: no class names in it; write one a line")
    return names


def names_from_metadata(metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """Names that the model file carries under ``names``, ``classes`` or ``labels``."""
    for key in ("names", "classes", "labels", "id2label"):
        if key in metadata and (names := parse_names(metadata[key])) is not None:
            return names
    return None
