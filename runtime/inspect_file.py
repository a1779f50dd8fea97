"""Says what a file is: picture, video, model, bundle, trace or answer.

A file is recognised by its content; its name only decides between things that look alike.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import BadInput, HoverlensError

MAX_JSON_BYTES = 256 * 2**20
PICTURE_SIGNATURES = (
    rb"\xff\xd8\xff",
    rb"\x89PNG\r\n",
    rb"II\*\0|MM\0\*|II\+\0|MM\0\+",
    rb"RIFF....WEBP",
    rb"BM",
    rb"GIF8[79]a",
    rb"P[1-6]\s",
    rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    rb"....ftypavi[fs]",
)
VIDEO_SIGNATURES = (
    rb"....ftyp",
    rb"\x1aE\xdf\xa3",
    rb"RIFF....AVI ",
    rb"\0\0\x01[\xba\xb3]",
    rb"G.{187}G",
    rb"FLV\x01",
    rb"OggS",
)
GPS_IFD = 0x8825
ORIENTATION = 0x0112
XMP_POSE = (
    "RelativeAltitude",
    "AbsoluteAltitude",
    "GimbalPitchDegree",
    "GimbalRollDegree",
    "GimbalYawDegree",
    "FlightYawDegree",
)


def inspect_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file or folder is, as JSON values; ``kind`` names it, ``path`` and ``bytes`` are given.

    Raises:
        BadInput: It does not exist, is damaged, or is nothing that hoverlens reads.
    """
    file = Path(path)
    if file.is_dir():
        return {"path": str(file), "kind": "bundle", **_bundle(file)}
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise BadInput(f"{file} is not a regular file; name a file or a bundle folder")
        with file.open("rb") as f:
            head = f.read(256)
    except OSError as e:
        raise BadInput(f"cannot read {file}: {e.strerror}; check the path") from None
    if not head:
        raise BadInput(f"{file} is empty (0 bytes); copy it again")
    kind, look = _recognise(file, head)
    return {"path": str(file), "kind": kind, "bytes": size, **look(file)}


def _recognise(file: Path, head: bytes) -> tuple[str, Callable[[Path], dict[str, Any]]]:
    if _matches(PICTURE_SIGNATURES, head):
        return "picture", _picture
    if _matches(VIDEO_SIGNATURES, head):
        return "video", _video
    if head.startswith(b"GGUF"):
        return "gguf", _gguf
    if head.lstrip()[:1] == b"{":
        return _recognise_json(file)
    if head.startswith(b"PK\x03\x04") and file.suffix.lower() in (".pt", ".pth", ".bin"):
        raise BadInput(f"{file} is a PyTorch checkpoint, which is not opened here; export it to ONNX")
    if file.suffix.lower() == ".onnx" or _looks_like_onnx(file):
        return "onnx", _onnx
    raise BadInput(
        f"{file} is nothing that hoverlens reads (it starts with {head[:8]!r}); needed: a picture, "
        "video, .onnx, .gguf, bundle, trace or answer"
    )


def _matches(signatures: tuple[bytes, ...], head: bytes) -> bool:
    return any(re.match(s, head, re.DOTALL) for s in signatures)


def _picture(file: Path) -> dict[str, Any]:
    from PIL import Image

    from .frame import Frame

    frame = Frame.from_file(file)
    info: dict[str, Any] = {"width": frame.width, "height": frame.height, "digest": frame.digest}
    with warnings.catch_warnings():
        # Frame has checked the size, by hoverlens' own limit.
        warnings.simplefilter("ignore")
        try:
            with Image.open(file) as image:
                exif = image.getexif()
                info |= {
                    "format": image.format,
                    "mode": image.mode,
                    "bits": _bits(image),
                    "pictures": getattr(image, "n_frames", 1),
                    "stored_size": list(image.size),
                    "orientation": exif.get(ORIENTATION, 1),
                    "gps": _gps(exif.get_ifd(GPS_IFD)),
                    "pose": _xmp_pose(image.info.get("xmp") or b""),
                }
        except Exception as e:
            # The pixels are good; what cannot be read about them is said, not fatal.
            info["metadata_error"] = f"{type(e).__name__}: {' '.join(str(e).split())}"
    return info


def _bits(image: Any) -> int:
    """Bits a sample as stored, before any conversion."""
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(258, (8,))))
    if image.format == "PNG" and image.tile and ";16" in str(image.tile[0][3]):
        return 16
    return {"1": 1, "I;16": 16, "I;16B": 16, "I": 32, "F": 32}.get(image.mode, 8)


def _gps(ifd: Mapping[int, Any]) -> dict[str, float] | None:
    """Degrees, north and east positive, and metres above sea level."""
    try:
        out = {}
        for name, ref, key, negative in (("latitude", 1, 2, "S"), ("longitude", 3, 4, "W")):
            d, m, s = (float(v) for v in ifd[key])
            degrees = d + m / 60 + s / 3600
            out[name] = round(-degrees if ifd.get(ref) == negative else degrees, 7)
        if 6 in ifd:
            below = ifd.get(5) in (1, b"\x01")
            out["altitude_m"] = round(float(ifd[6]) * (-1 if below else 1), 2)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return out


def _xmp_pose(xmp: bytes | str) -> dict[str, float] | None:
    text = xmp.decode("utf-8", "replace") if isinstance(xmp, bytes) else xmp
    out = {}
    for key in XMP_POSE:
        found = re.search(rf":{key}(?:=\"|>)\s*([-+]?[\d.]+)", text)
        if found:
            try:
                out[key] = float(found[1])
            except ValueError:
                continue
    return out or None


def _video(file: Path) -> dict[str, Any]:
    import cv2

    capture = cv2.VideoCapture(str(file))
    try:
        ok, _ = capture.read()
        if not ok:
            raise BadInput(f"{file} looks like a video, but no frame can be decoded; copy it again")
        fps = capture.get(cv2.CAP_PROP_FPS)
        frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        code = int(capture.get(cv2.CAP_PROP_FOURCC))
        width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
        height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    finally:
        capture.release()
    codec = "".join(chr(code >> 8 * i & 0xFF) for i in range(4))
    known = fps > 0 and frames > 0
    return {
        "width": width,
        "height": height,
        "fps": round(fps, 3) if fps > 0 else None,
        "frames": frames if frames > 0 else None,
        "seconds": round(frames / fps, 3) if known else None,
        "codec": codec if codec.isprintable() else None,
    }


def _gguf(file: Path) -> dict[str, Any]:
    from .gguf import Array, read_gguf_header

    header = read_gguf_header(file)
    info: dict[str, Any] = {
        "role": "mmproj" if header.is_projector else "text model",
        "architecture": header.architecture,
        "name": header.get("general.name"),
        "version": header.version,
        "parameters": header.n_params,
        "quantisation": header.quantisation,
        "tensors": len(header.tensors),
        "licence": header.get("general.license"),
    }
    if header.is_projector:
        patch, size = header.get("clip.vision.patch_size"), header.get("clip.vision.image_size")
        merge = header.get("clip.vision.spatial_merge_size", 1)
        tokens = None
        if isinstance(patch, int) and isinstance(size, int) and patch > 0 and merge > 0:
            tokens = (size // patch // merge) ** 2
        info |= {
            "projector": header.get("clip.projector_type") or header.get("clip.vision.projector_type"),
            "image_px": size,
            "patch_px": patch,
            "image_tokens": tokens,
            "embedding": header.get("clip.vision.projection_dim"),
        }
    else:
        vocabulary = header.get("tokenizer.ggml.tokens")
        info |= {
            "layers": header.get("{arch}.block_count"),
            "embedding": header.get("{arch}.embedding_length"),
            "context": header.get("{arch}.context_length"),
            "vocabulary": vocabulary.length if isinstance(vocabulary, Array) else None,
            "tokenizer": header.get("tokenizer.ggml.pre") or header.get("tokenizer.ggml.model"),
            "chat_template": header.get("tokenizer.chat_template") is not None,
        }
    return info


def _varint(f: IO[bytes]) -> int:
    value = shift = 0
    while True:
        byte = f.read(1)
        if not byte or shift > 63:
            raise ValueError("cut short")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
        shift += 7


def _fields(f: IO[bytes], end: int) -> list[tuple[int, Any]]:
    """The fields of one protobuf message; those over 1 MB, which are weights, as None."""
    out: list[tuple[int, Any]] = []
    while f.tell() < end:
        key = _varint(f)
        number, wire = key >> 3, key & 7
        if number == 0 or wire not in (0, 1, 2, 5):
            raise ValueError("no protobuf")
        if wire == 0:
            out.append((number, _varint(f)))
            continue
        length = {1: 8, 5: 4}.get(wire) or (_varint(f) if wire == 2 else 0)
        if length > end - f.tell():
            raise ValueError("cut short")
        if length > 2**20:
            f.seek(length, os.SEEK_CUR)
            out.append((number, None))
        else:
            out.append((number, f.read(length)))
    return out


def onnx_header(file: Path) -> dict[str, Any]:
    """Format version, opsets and producer of an ONNX file, without its weights.

    Raises:
        ValueError: The file is no ONNX model.
    """
    import io

    with file.open("rb") as f:
        fields = _fields(f, os.fstat(f.fileno()).st_size)
    # Field numbers of onnx.proto's ModelProto: 1 ir_version, 2 and 3 producer, 7 graph, 8 opsets.
    numbers = {n for n, _ in fields}
    if not {1, 7, 8} <= numbers:
        raise ValueError("no ONNX model")
    texts = {n: v.decode("utf-8", "replace") for n, v in fields if n in (2, 3) and v}
    opsets = {}
    for number, value in fields:
        if number == 8 and isinstance(value, bytes):
            parts = dict(_fields(io.BytesIO(value), len(value)))
            domain = parts.get(1, b"")
            opsets[domain.decode("utf-8", "replace") or "ai.onnx"] = parts.get(2)
    version = next((v for n, v in fields if n == 1), None)
    producer = " ".join(filter(None, (texts.get(2), texts.get(3))))
    return {"ir_version": version, "opset": opsets, "producer": producer or None}


def _looks_like_onnx(file: Path) -> bool:
    try:
        onnx_header(file)
    except (ValueError, OSError, AttributeError):
        return False
    return True


def _onnx(file: Path) -> dict[str, Any]:
    from .engines.base import open_engine

    engine = open_engine(file)
    try:
        info: dict[str, Any] = {
            "inputs": [s.describe() for s in engine.inputs],
            "outputs": [s.describe() for s in engine.outputs],
            "metadata": {k: v[:400] for k, v in engine.metadata.items()},
        }
    finally:
        engine.close()
    try:
        info |= onnx_header(file)
    except (ValueError, AttributeError):
        # ONNX Runtime could read it, so it is a model all the same.
        info["opset"] = None
    info |= _model_use(file)
    return info


def _model_use(file: Path) -> dict[str, Any]:
    """What hoverlens would take the model for."""
    from .perception.depth import DepthModel
    from .perception.detector import Detector

    try:
        with Detector.open(file) as detector:
            return {
                "use": "detector",
                "family": detector.family.name,
                "classes": detector.family.classes,
                "labels": list(detector.names),
                "labels_from": "model" if detector.named else "default",
                "preprocessing": detector.preprocessing.to_dict(),
            }
    except HoverlensError as e:
        no_detector = str(e)
    try:
        with DepthModel.open(file) as depth:
            return {
                "use": "depth",
                "depth": depth.kind,
                "preprocessing": depth.preprocessing.to_dict(),
            }
    except HoverlensError as e:
        return {"use": None, "no_detector": no_detector, "no_depth": str(e)}


def _bundle(folder: Path) -> dict[str, Any]:
    from .bundle import Bundle

    if not (folder / "manifest.json").is_file():
        raise BadInput(f"{folder} is a folder without manifest.json; name a file or a bundle folder")
    bundle = Bundle.open(folder, verify=False)
    return {
        "name": bundle.name,
        "sha256": bundle.sha256,
        "manifest": bundle.manifest.model_dump(mode="json", exclude_none=True),
    }


def _recognise_json(file: Path) -> tuple[str, Callable[[Path], dict[str, Any]]]:
    if file.stat().st_size > MAX_JSON_BYTES:
        raise BadInput(f"{file} is JSON of more than {MAX_JSON_BYTES >> 20} MB; nothing here is")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise BadInput(f"{file} begins like JSON but is not UTF-8 text (byte {e.start})") from None
    first = _json_object(text.split("\n", 1)[0])
    if first is not None and first.get("event") == "trace":
        return "trace", lambda _: _trace(text)
    whole = _json_object(text)
    if whole is None:
        raise BadInput(f"{file} begins like JSON but cannot be parsed; copy or write it again")
    if {"answer", "kind", "exit", "bundle"} <= whole.keys():
        keys = ("answer", "options", "confidence", "exit", "mode")
        found = {k: whole.get(k) for k in keys}
        asked = {"answer_kind": whole["kind"], "from": whole["bundle"], "frame": whole.get("frame")}
        return "answer", lambda _: found | asked
    if file.name == "manifest.json" and "files" in whole:
        return "manifest", lambda f: _bundle(f.parent)
    keys_text = ", ".join(list(whole)[:6]) or "none"
    raise BadInput(f"{file} is JSON that hoverlens did not write (keys: {keys_text})")


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _trace(text: str) -> dict[str, Any]:
    events: dict[str, int] = {}
    damaged = 0
    last = 0.0
    version = None
    for line in text.splitlines():
        entry = _json_object(line)
        if entry is None or "event" not in entry:
            damaged += 1
            continue
        events[str(entry["event"])] = events.get(str(entry["event"]), 0) + 1
        version = entry.get("version", version) if entry["event"] == "trace" else version
        if isinstance(entry.get("t"), (int, float)):
            last = max(last, float(entry["t"]))
    return {"version": version, "events": events, "seconds": last, "damaged_lines": damaged}


def inspection_text(info: Mapping[str, Any]) -> str:
    """An inspection for people: one line a fact, nested facts indented."""
    return "\n".join(_lines(info, ""))


def _lines(value: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            lines += [f"{indent}{key}:", *_lines(item, indent + "  ")]
        elif isinstance(item, (list, tuple)) and any(isinstance(i, Mapping) for i in item):
            lines.append(f"{indent}{key}:")
            for entry in item:
                nested = _lines(entry, "") if isinstance(entry, Mapping) else [str(entry)]
                lines += [f"{indent}  - {nested[0]}", *(f"{indent}    {n}" for n in nested[1:])]
        elif isinstance(item, (list, tuple)):
            lines.append(f"{indent}{key}: {', '.join(map(str, item)) or 'none'}")
        else:
            shown = {None: "none", True: "yes", False: "no"}.get(item, item) if _plain(item) else item
            lines.append(f"{indent}{key}: {shown}")
    return lines


def _plain(item: Any) -> bool:
    return item is None or isinstance(item, bool)
