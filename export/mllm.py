"""From a Hugging Face folder to what a board loads: a quantised GGUF text model and its projector.

Stages: checks, conversion by llama.cpp's own converter, quantisation, a self-test against the source. The output
folder appears complete or not at all, with ``export.json`` beside the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibration.imatrix_file import ImportanceMatrix, read_imatrix
from ..runtime.digest import remembered_sha256, sha256_file
from ..runtime.errors import BadInput, HoverlensError
from ..runtime.files import atomic_write_text
from ..runtime.gguf import read_gguf_header
from ..runtime.mllm.files import check_pair
from .assemble import gguf_facts, tool_versions
from .checkpoint import Checkpoint, check_supported, open_checkpoint
from .converter import Converter, ensure_converter, run_converter
from .quantise import BITS, NEEDS_IMATRIX, PLAIN, check_imatrix, quant_named, run_quantise
from .selftest import SelfTest, run_selftest, verdict, why_not
from .staging import check_output, check_space, staged

SIDECAR = "export.json"
WHAT = "exported model"
MMPROJ_QUANTS = ("F16", "BF16", "F32", "Q8_0")

#: Raise it when the same sources would give other files.
_RECIPE_VERSION = 1

#: Which plain type holds a checkpoint's numbers without loss.
_LOSSLESS = {"F32": "F32", "BF16": "BF16", "F16": "F16"}


@dataclass(frozen=True)
class Steps:
    """How the work reports.

    Attributes:
        stage: Called with a line for people when a stage begins.
        progress: Called with (stage, done, total) inside a stage that can tell.
    """

    stage: Callable[[str], None] = lambda _: None
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None


@dataclass(frozen=True)
class Exported:
    """What an export came to.

    Attributes:
        path: The folder.
        document: Its ``export.json``.
        made: False where it was up to date.
        reason: Why it was made again, or why it was not.
    """

    path: Path
    document: Mapping[str, Any]
    made: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """For scripts."""
        return {"path": str(self.path), "made": self.made, "reason": self.reason, **self.document}


def export_mllm(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant: str = "Q8_0",
    mmproj_quant: str = "F16",
    imatrix: str | os.PathLike[str] | None = None,
    self_test: bool | None = None,
    min_agreement: float | None = None,
    name: str | None = None,
    licence: str | None = None,
    pre_tokenizer: str | None = None,
    threads: int = 1,
    force: bool = False,
    steps: Steps | None = None,
) -> Exported:
    """Converts, quantises and tests a multimodal model.

    Args:
        source: Folder of a checkpoint.
        out: Folder to make: ``mllm.gguf``, ``mmproj.gguf``, ``export.json``.
        quant: Type of the text model's weights, one of :data:`hoverlens.export.quantise.QUANTS`.
        mmproj_quant: Type of the vision encoder's, one of :data:`MMPROJ_QUANTS`.
        imatrix: Importance matrix for the quantiser.
        self_test: Compare with the source in torch; None means where memory allows.
        min_agreement: Least share of tokens on which the result must agree with the source.
        name: ``general.name`` in the files; the folder's name by default.
        licence: Terms of the weights; by default what the folder says.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer, for a vocabulary that its converter does not know.
        threads: CPU threads for quantiser and self-test.
        force: Make it even if it is up to date.
        steps: How to report.

    Raises:
        BadInput: The folder cannot be exported, or an argument cannot be used.
        HoverlensError: A stage failed, or the self-test or ``min_agreement`` was missed.
    """
    steps = steps or Steps()
    quant, mmproj_quant = quant_named(quant), quant_named(mmproj_quant)
    if mmproj_quant not in MMPROJ_QUANTS:
        raise BadInput(f"the projector cannot be {mmproj_quant}; choose one of {', '.join(MMPROJ_QUANTS)}")
    matrix = read_imatrix(imatrix) if imatrix is not None else None
    if matrix is not None and quant in PLAIN:
        raise BadInput(f"an importance matrix does nothing for {quant}; leave --imatrix out or choose another --quant")
    if matrix is None and quant in NEEDS_IMATRIX:
        raise BadInput(f"{quant} needs an importance matrix; make one with 'hoverlens calibrate imatrix'")
    target = check_output(out, SIDECAR, WHAT)
    steps.stage("checking the checkpoint")
    checkpoint = open_checkpoint(source)
    if target == checkpoint.path or target in checkpoint.path.parents:
        raise BadInput(f"the output {target} is or holds the source; name another folder with -o")
    if self_test and (missing := why_not(checkpoint, 0)):
        steps.stage(f"the self-test was asked for although it {missing}")
    converter = ensure_converter()
    check_supported(checkpoint, converter)
    recipe = _recipe(checkpoint, converter, quant, mmproj_quant, imatrix, name, pre_tokenizer)
    reason = _why_rebuild(target, recipe)
    if force:
        reason = reason or "it was asked for"
    if reason is None:
        document = _read(target)
        if not self_test or document.get("self_test") is not None:
            _check_agreement(document, min_agreement)
            return Exported(target, document, False, "up to date")
        reason = "it has no self-test yet"
    if target.is_dir() and (target / SIDECAR).is_file():
        steps.stage(f"making {target} again: {reason}")
    _check_space(checkpoint, target, quant)
    with staged(target, SIDECAR, WHAT, _digest(recipe)) as (work, fresh):
        links = _data_only(checkpoint, work)
        _convert(checkpoint, links, converter, work, fresh, quant, mmproj_quant, name, pre_tokenizer, steps)
        if quant not in PLAIN:
            _quantise(work, fresh, quant, imatrix, matrix, threads, steps)
        check_pair(fresh / "mllm.gguf", fresh / "mmproj.gguf")
        result, skipped = _test(checkpoint, links, recipe, fresh, self_test, threads, steps)
        if result is not None:
            wrong = verdict(result, quant, mmproj_quant)
            if wrong is not None:
                raise HoverlensError(f"the self-test failed: {wrong}; nothing was written (--no-self-test skips it)")
        document = _document(checkpoint, fresh, recipe, matrix, licence, result, skipped)
        _check_agreement(document, min_agreement)
        atomic_write_text(fresh / SIDECAR, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return Exported(target, document, True, reason or "made")


# -- recipe --------------------------------------------------------------------------------------------


def _recipe(
    checkpoint: Checkpoint,
    converter: Converter,
    quant: str,
    mmproj_quant: str,
    imatrix: str | os.PathLike[str] | None,
    name: str | None,
    pre_tokenizer: str | None,
) -> dict[str, Any]:
    try:
        sources = {f: remembered_sha256(checkpoint.path / f) for f in checkpoint.files}
    except OSError as e:
        raise BadInput(f"cannot read {e.filename}: {e.strerror}; check its permissions") from None
    return {
        "maker": f"export mllm {_RECIPE_VERSION}",
        "quant": quant,
        "mmproj_quant": mmproj_quant,
        "imatrix": remembered_sha256(imatrix) if imatrix is not None else None,
        "name": name or checkpoint.path.name,
        "pre_tokenizer": pre_tokenizer,
        "converter": converter.version,
        "sources": sources,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _why_rebuild(target: Path, recipe: Mapping[str, Any]) -> str | None:
    """What has changed since the output was made; None if nothing has."""
    if not (target / SIDECAR).is_file():
        return "it is not there"
    try:
        document = _read(target)
        before = document["recipe"]
        for key, now in recipe.items():
            if before.get(key) != now and key == "sources":
                changed = sorted(f for f in now if before["sources"].get(f) != now[f]) or sorted(before["sources"])
                return f"the source's {changed[0]} has changed"
            if before.get(key) != now:
                return f"{key} was {before.get(key)}, now {now}"
        for entry in document["files"].values():
            path = target / entry["path"]
            if not path.is_file() or remembered_sha256(path) != entry["sha256"]:
                return f"{entry['path']} is missing or has changed since"
    except (HoverlensError, KeyError, TypeError, AttributeError, OSError):
        return f"its {SIDECAR} is damaged"
    return None


def _read(target: Path) -> dict[str, Any]:
    try:
        document = json.loads((target / SIDECAR).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict):
        raise HoverlensError(f"{target / SIDECAR} is damaged")
    return document


# -- stages --------------------------------------------------------------------------------------------


def _check_space(checkpoint: Checkpoint, target: Path, quant: str) -> None:
    plain = checkpoint.n_params * (4 if checkpoint.dtype == "F32" else 2)
    quantised = 0 if quant in PLAIN else int(checkpoint.n_params * BITS.get(quant, 4.5) / 8)
    check_space(target.parent, int(1.05 * (plain + quantised)) + (64 << 20), f"exporting {checkpoint.path.name}")


def _data_only(checkpoint: Checkpoint, work: Path) -> Path:
    """Links to the checkpoint's data, without any code that the converter's libraries might run."""
    links = work / "source"
    links.mkdir(exist_ok=True)
    for file in checkpoint.files:
        link = links / file
        if not link.is_symlink():
            link.symlink_to(checkpoint.path / file)
    return links


def _convert(
    checkpoint: Checkpoint,
    links: Path,
    converter: Converter,
    work: Path,
    fresh: Path,
    quant: str,
    mmproj_quant: str,
    name: str | None,
    pre_tokenizer: str | None,
    steps: Steps,
) -> None:
    title = name or checkpoint.path.name
    exact = _LOSSLESS.get(checkpoint.dtype, "F16")
    jobs = [
        ("text model", work / "plain.gguf", False, (quant if quant in PLAIN else exact).lower()),
        ("projector", work / "projector.gguf", True, mmproj_quant.lower()),
    ]
    for what, path, is_mmproj, outtype in jobs:
        if path.is_file():  # a run that was killed got this far
            steps.stage(f"the {what} was converted before")
            continue
        steps.stage(f"converting the {what} to {outtype.upper()}")
        try:
            run_converter(
                links,
                path,
                mmproj=is_mmproj,
                outtype=outtype,
                model_name=title,
                pre_tokenizer=pre_tokenizer,
                converter=converter,
            )
        except HoverlensError as e:
            message = str(e).replace(str(links), str(checkpoint.path))
            if "pre-tokenizer was not recognized" in message:
                message = (
                    f"llama.cpp's converter does not know the vocabulary of {checkpoint.path}; if its tokenizer splits "
                    "text as a known one does, name that one with --pre-tokenizer (qwen2, for Qwen's pattern)"
                )
            raise HoverlensError(message) from None
    os.replace(work / "projector.gguf", fresh / "mmproj.gguf")
    if quant in PLAIN:
        os.replace(work / "plain.gguf", fresh / "mllm.gguf")


def _quantise(
    work: Path,
    fresh: Path,
    quant: str,
    imatrix: str | os.PathLike[str] | None,
    matrix: ImportanceMatrix | None,
    threads: int,
    steps: Steps,
) -> None:
    plain = work / "plain.gguf"
    if matrix is not None:
        check_imatrix(matrix, plain, str(imatrix))
    stage = f"quantising to {quant}" + (" with the importance matrix" if matrix is not None else "")
    steps.stage(stage)
    path = Path(imatrix).absolute() if imatrix is not None else None
    run_quantise(
        plain, fresh / "mllm.gguf", quant, path, threads, lambda done, total: steps.progress(stage, done, total)
    )
    plain.unlink()


def _test(
    checkpoint: Checkpoint,
    links: Path,
    recipe: Mapping[str, Any],
    fresh: Path,
    wanted: bool | None,
    threads: int,
    steps: Steps,
) -> tuple[SelfTest | None, str | None]:
    """The self-test's result, or why there is none."""
    if wanted is False:
        return None, "it was left out (--no-self-test)"
    mllm = fresh / "mllm.gguf"
    if wanted is None and (reason := why_not(checkpoint, mllm.stat().st_size)) is not None:
        steps.stage(f"no self-test: it {reason}; --self-test tries all the same")
        return None, f"it {reason}"
    key = _digest(recipe["sources"])
    return run_selftest(checkpoint, links, key, mllm, fresh / "mmproj.gguf", threads=threads, note=steps.stage), None


def _check_agreement(document: Mapping[str, Any], least: float | None) -> None:
    if least is None:
        return
    result = document.get("self_test")
    if not isinstance(result, dict):
        raise HoverlensError("--min-agreement needs the self-test, which was not run; add --self-test")
    found = float(result["token_agreement"])
    if found < least:
        raise HoverlensError(
            f"the model agrees with its source on {found:.1%} of tokens, needed {least:.1%}; take a finer --quant or "
            "an --imatrix"
        )


def _document(
    checkpoint: Checkpoint,
    fresh: Path,
    recipe: Mapping[str, Any],
    matrix: ImportanceMatrix | None,
    licence: str | None,
    result: SelfTest | None,
    skipped: str | None,
) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for role in ("mllm", "mmproj"):
        path = fresh / f"{role}.gguf"
        facts = gguf_facts(read_gguf_header(path))
        own = licence or facts.get("licence") or "unknown"
        source = {"source": checkpoint.path.name, "licence": own}
        size = {"path": path.name, "sha256": sha256_file(path), "size": path.stat().st_size}
        files[role] = {**facts, **size, **source}
    document: dict[str, Any] = {
        "format": 1,
        "architecture": checkpoint.architecture,
        "n_params": checkpoint.n_params,
        "files": files,
        "self_test": result.to_dict() if result is not None else None,
        "imatrix": None,
        "tools": tool_versions("torch", "transformers"),
        "recipe": recipe,
    }
    if skipped is not None:
        document["self_test_skipped"] = skipped
    if matrix is not None:
        document["imatrix"] = {
            "sha256": recipe["imatrix"],
            "datasets": list(matrix.datasets),
            "questions": matrix.chunks,
            **matrix.facts,
        }
    return document


def describe(exported: Exported) -> str:
    """The result for people."""
    document = exported.document
    lines = [f"{'made' if exported.made else 'up to date:'} {exported.path}"]
    for role, entry in document["files"].items():
        lines.append(f"  {role}: {entry['path']}, {entry['precision']}, {entry['size'] / 1e6:.1f} MB")
    test = document.get("self_test")
    if test:
        seen = f", visual features cosine {test['cosine']:.5f}" if test.get("cosine") is not None else ""
        lines.append(
            f"  against the source: {test['token_agreement']:.1%} of {test['positions']} tokens agree, logit error "
            f"{test['logit_error']:.4f}{seen}"
        )
    else:
        lines.append(f"  no self-test: {document.get('self_test_skipped', 'not run')}")
    return "\n".join(lines)
