"""Checks on a Hugging Face model folder before any work: what it is, and whether its parts fit.

Nothing in the folder is run and nothing is unpickled; weights are judged by their headers.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.errors import BadInput
from . import qwen3vl
from .converter import Converter, installed_version
from .safetensors_header import SIZES, Stored, read_header

INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")

#: Data files that the converter may read. Everything else in the folder, code above all, is kept from it.
_DATA_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken")

#: For the message of an unsupported architecture; what the issue of interest usually is.
_FAMILIES = ("Qwen3VL", "Qwen3_5", "InternVL", "Glm4v", "SmolVLM", "Gemma3", "Idefics3")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed the checks.

    Attributes:
        path: The folder.
        config: Its config.json.
        architecture: First of the config's architectures.
        tensors: By name.
        files: What a conversion reads, by name relative to the folder.
    """

    path: Path
    config: Mapping[str, Any]
    architecture: str
    tensors: Mapping[str, Stored]
    files: tuple[str, ...]

    @property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The type that holds the most weights: F16, BF16, F32, .."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors.values():
            weights[tensor.dtype] += tensor.n_elements
        return weights.most_common(1)[0][0]

    @property
    def n_bytes(self) -> int:
        return sum(SIZES.get(t.dtype, 4) * t.n_elements for t in self.tensors.values())


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads config and headers of a model folder and checks them against each other.

    Raises:
        BadInput: No such folder, no or a damaged config, pickled weights, missing or damaged files, or sizes in
            the config that the weights do not have.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise BadInput(f"{folder} is a file{_file_hint(folder)}")
    if not folder.is_dir():
        raise BadInput(
            f"{folder} does not exist; give the folder of a downloaded checkpoint (hub ids are not downloaded: run "
            "'hf download ID --local-dir DIR')"
        )
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "it is an adapter: merge it into its base model first" if adapter else "give the checkpoint's own folder"
        raise BadInput(f"{folder} is no Hugging Face model folder: it has no config.json; {hint}")
    config = _json(folder / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise BadInput(f"{folder / 'config.json'} names no architectures; use the config.json of the checkpoint")
    tensors = _tensors(folder)
    for names, what in ((_TOKENIZERS, "tokenizer"), (_PROCESSORS, "image preprocessor")):
        if not any((folder / n).is_file() for n in names):
            raise BadInput(f"{folder} has no {what} ({' or '.join(names)}); download the whole checkpoint")
    _check_sizes(folder, config, architectures[0], tensors)
    weights = {t.file for t in tensors.values()}
    files = sorted(
        p.name
        for p in folder.iterdir()
        if p.is_file()
        and p.suffix in _DATA_SUFFIXES
        and not p.name.startswith(".")
        and (p.suffix != ".safetensors" or p.name in weights)
    )
    return Checkpoint(folder.absolute(), config, architectures[0], tensors, tuple(files))


def supported(converter: Converter) -> tuple[set[str], set[str]]:
    """Architectures that a converter knows: of text models, and of vision encoders.

    Its tables are read as text; importing it would import torch.
    """
    tables: dict[str, set[str]] = {"TEXT_MODEL_MAP": set(), "MMPROJ_MODEL_MAP": set()}
    tree = ast.parse((converter.path / "conversion" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        if isinstance(node.target, ast.Name) and node.target.id in tables:
            names = [k.value for k in node.value.keys if isinstance(k, ast.Constant)]
            tables[node.target.id] = {n for n in names if isinstance(n, str)}
    return tables["TEXT_MODEL_MAP"], tables["MMPROJ_MODEL_MAP"]


def check_supported(checkpoint: Checkpoint, converter: Converter) -> None:
    """Refuses an architecture that the converter cannot convert with its vision encoder.

    Raises:
        BadInput: It does not know the text model or the vision encoder.
    """
    text, vision = supported(converter)
    if not text or not vision:  # tables of another revision: let the converter speak for itself
        return
    config = checkpoint.config
    names = {
        "text model": (_inner(config, "text_config", "llm_config"), text),
        "vision encoder": (_inner(config, "vision_config"), vision),
    }
    for what, (inner, known) in names.items():
        own = inner.get("architectures")
        name = own[0] if isinstance(own, list) and own else checkpoint.architecture
        if name not in known and checkpoint.architecture not in known:
            some = sorted(n for n in vision if n.startswith(_FAMILIES))
            raise BadInput(
                f"{checkpoint.path} is a {name}, whose {what} llama.cpp's converter ({installed_version()}) does not "
                f"know; it knows {len(vision)} models that see, among them {', '.join(some[:8])}"
            )


def _tensors(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    listed: dict[str, str] | None = None
    if index.is_file():
        listed = _json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
            raise BadInput(f"{index} has no weight_map; download it again")
        shards = sorted(set(listed.values()))
        if any(Path(s).name != s for s in shards):
            raise BadInput(f"{index} names files outside the folder; download the checkpoint again")
        missing = [s for s in shards if s not in found]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BadInput(f"{folder} lacks {missing[0]}{more} of {len(shards)} shards; download the rest")
        found = shards
    elif not found:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
        if pickled:
            raise BadInput(
                f"{folder} holds pickled weights ({pickled[0]}), which can run code and are never read here; in an "
                "environment you trust: from_pretrained(DIR).save_pretrained(NEW), which writes safetensors"
            )
        raise BadInput(f"{folder} has no weights (*.safetensors); download the whole checkpoint")
    else:
        numbered = [re.fullmatch(r".*-(\d+)-of-(\d+)\.safetensors", name) for name in found]
        if any(m is not None for m in numbered):
            raise BadInput(f"{folder} holds shards but no {INDEX}; download it too")
        if len(found) > 1 and "model.safetensors" in found:
            found = ["model.safetensors"]
    tensors: dict[str, Stored] = {}
    for name in found:
        tensors |= read_header(folder / name)
    for name, shard in (listed or {}).items():
        if name not in tensors or tensors[name].file != shard:
            raise BadInput(f"{folder / shard} lacks the tensor {name} that {INDEX} lists; download both again")
    if not tensors:
        raise BadInput(f"{folder} holds no tensors; download the checkpoint again")
    return tensors


def _check_sizes(folder: Path, config: Mapping[str, Any], architecture: str, tensors: Mapping[str, Stored]) -> None:
    if architecture == "Qwen3VLForConditionalGeneration":
        _check_qwen3vl(folder, config, tensors)
        return
    text = _inner(config, "text_config", "llm_config") or config
    layers = _highest(tensors, r"(?:language_model|text_model|model)\.(?:.*\.)?layers\.(\d+)\.(?=.*(?:mlp|self_attn))")
    if isinstance(declared := text.get("num_hidden_layers"), int) and layers and layers != declared:
        raise _disagree(folder, "num_hidden_layers", declared, f"weights of {layers} layers")
    for suffix, keys in (
        ("embed_tokens.weight", ("vocab_size", "hidden_size")),
        ("self_attn.o_proj.weight", ("hidden_size", None)),
        ("mlp.down_proj.weight", ("hidden_size", "intermediate_size")),
    ):
        for name, stored in tensors.items():
            if not name.endswith(suffix) or "vis" in name or "expert" in name or len(stored.shape) != 2:
                continue
            for key, found in zip(keys, stored.shape, strict=True):
                declared = text.get(key) if key else None
                # Vocabularies are padded, in either direction.
                if isinstance(declared, int) and key != "vocab_size" and found != declared:
                    raise _disagree(folder, str(key), declared, f"{name} of {list(stored.shape)}")


def _check_qwen3vl(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    text, vision = _inner(config, "text_config"), _inner(config, "vision_config")
    try:
        heads = int(text["num_attention_heads"])
        sizes = qwen3vl.Sizes(
            hidden=int(text["hidden_size"]),
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads", heads)),
            head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
            intermediate=int(text["intermediate_size"]),
            vision_hidden=int(vision["hidden_size"]),
            vision_depth=int(vision["depth"]),
            vision_heads=int(vision["num_heads"]),
            vision_intermediate=int(vision["intermediate_size"]),
            deepstack=tuple(int(i) for i in vision["deepstack_visual_indexes"]),
            vocabulary=int(text["vocab_size"]),
            positions=int(vision["num_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise BadInput(
            f"{folder / 'config.json'} lacks or garbles a size of Qwen3-VL ({type(e).__name__}: {e}); use the "
            "checkpoint's own config.json"
        ) from None
    if max(sizes.layers, sizes.vision_depth) > 1000:
        raise _disagree(folder, "num_hidden_layers", max(sizes.layers, sizes.vision_depth), f"{len(tensors)} tensors")
    wanted = qwen3vl.shapes(sizes)
    for name, shape in wanted.items():
        stored = tensors.get(name)
        if stored is None:
            raise BadInput(
                f"{folder} has no weights for {name}, which its config.json needs; use files of one checkpoint"
            )
        if stored.shape != shape:
            raise BadInput(
                f"{folder}: config.json needs {name} of {list(shape)}, {stored.file} has {list(stored.shape)}; use "
                "files of one checkpoint"
            )
    extra = [n for n in tensors if n not in wanted and re.search(r"\.(layers|blocks)\.\d+\.", n)]
    if extra:
        raise BadInput(
            f"{folder} has weights that its config.json leaves out ({extra[0]}); use files of one checkpoint"
        )


def _disagree(folder: Path, key: str, declared: int, found: str) -> BadInput:
    return BadInput(f"{folder}: config.json says {key} {declared}, but there are {found}; use files of one checkpoint")


def _highest(tensors: Mapping[str, Stored], pattern: str) -> int:
    """One more than the highest number that a pattern finds in names that are not of the vision encoder."""
    numbers = [int(m.group(1)) for n in tensors if "vis" not in n and (m := re.search(pattern, n))]
    return max(numbers, default=-1) + 1


def _inner(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if isinstance(inner := config.get(name), dict):
            return inner
    return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise BadInput(f"cannot read {path}: {e.strerror}; check its permissions") from None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadInput(f"{path} is no JSON object; download it again")
    return document


def _file_hint(path: Path) -> str:
    if path.suffix == ".gguf":
        return ", already converted; give it to 'hoverlens bundle assemble --mllm'"
    if path.suffix in _PICKLED:
        return " of pickled weights, which can run code and are never read here; give a folder with safetensors"
    return "; give the folder of a Hugging Face checkpoint"
