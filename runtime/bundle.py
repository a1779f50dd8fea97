"""A bundle: the folder that a device runs from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .digest import remembered_sha256, sha256_file
from .errors import BadInput
from .manifest import FORMAT, MANIFEST, FileEntry, Manifest
from .paths import full_path, nano_bundle_dir, random_bundle_dir

_MAX_MANIFEST = 4 << 20

_MAKE_ONE = "run `python -m hoverlens.export.random_mllm` or `hoverlens bundle assemble`"


class Bundle:
    """An opened bundle.

    Attributes:
        path: Its folder, absolute.
        manifest: What it holds.
        sha256: Digest of contents and use (:meth:`~hoverlens.runtime.manifest.Manifest.digest`).
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.sha256 = manifest.digest()

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> Bundle:
        """Opens a bundle and checks that its files are there with the size that the manifest says.

        Args:
            path: The folder.
            verify: Also check every file's sha256. A file that has not changed since it was last checked on
                this machine is not read again.

        Raises:
            BadInput: No bundle, a manifest that cannot be used, or a file missing or changed.
        """
        folder = full_path(path)
        bundle = cls(folder, read_manifest(folder))
        for role in bundle.manifest.files:
            problem = bundle._problem_of_presence(role)
            if problem:
                raise BadInput(problem)
        if verify:
            bundle.verify()
        return bundle

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def random_roles(self) -> tuple[str, ...]:
        """Roles of the files whose weights are random, so that their answers mean nothing."""
        return tuple(role for role, e in self.manifest.files.items() if e.weights == "random")

    def file(self, role: str) -> Path | None:
        """The file of a role, or None where the bundle has none."""
        entry = self.manifest.files.get(role)
        return None if entry is None else self.path / entry.path

    def entry(self, role: str) -> FileEntry | None:
        """What the manifest says of a role's file, or None."""
        return self.manifest.files.get(role)

    def need(self, role: str) -> Path:
        """The file of a role.

        Raises:
            BadInput: The bundle has none.
        """
        path = self.file(role)
        if path is None:
            has = ", ".join(self.manifest.files)
            raise BadInput(f"bundle {self.name} has no {role} (it has {has}); add one with `hoverlens bundle assemble`")
        return path

    def verify(self) -> None:
        """Checks every file's sha256, reading only what changed since this machine last read it.

        Raises:
            BadInput: A file is missing or differs.
        """
        for role in self.manifest.files:
            self.check(role)

    def check(self, role: str) -> Path:
        """Checks a role's file as :meth:`verify` does. Costs next to nothing where it did not change.

        Raises:
            BadInput: The bundle has no such file, or it is missing or differs.
        """
        path = self.need(role)
        problem = self._problem_of_presence(role) or self._problem_of_content(role, remembered_sha256)
        if problem:
            raise BadInput(problem)
        return path

    def _problem_of_presence(self, role: str) -> str | None:
        entry = self.manifest.files[role]
        path = self.path / entry.path
        try:
            real = path.resolve(strict=True)
            if not real.is_relative_to(self.path.resolve()):
                return self._problem(role, f"is a link out of the bundle, to {real}", "copy the file itself")
            if not real.is_file():
                return self._problem(role, "is not a file", "copy the bundle again")
            found = real.stat().st_size
        except FileNotFoundError:
            return self._problem(role, "is missing", "copy or assemble the bundle again")
        except (OSError, RuntimeError) as e:
            reason = getattr(e, "strerror", None) or "a loop of links"
            return self._problem(role, f"cannot be read: {reason}", "copy the bundle again")
        if found != entry.size:
            size = f"has {found} bytes, needed {entry.size}"
            return self._problem(role, size, "copy or assemble the bundle again")
        return None

    def _problem_of_content(self, role: str, digest: Callable[[Path], str]) -> str | None:
        entry = self.manifest.files[role]
        try:
            found = digest(self.path / entry.path)
        except OSError as e:
            return self._problem(role, f"cannot be read: {e.strerror}", "copy the bundle again")
        if found == entry.sha256:
            return None
        what = f"has sha256 {found[:16]}.., needed {entry.sha256[:16]}.."
        return self._problem(role, what, "copy or assemble the bundle again")

    def _problem(self, role: str, what: str, cure: str) -> str:
        return f"bundle {self.path}: {role} file {self.manifest.files[role].path} {what}; {cure}"


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks ``manifest.json``, not the files that it lists.

    Raises:
        BadInput: There is none, or it cannot be used.
    """
    if not folder.is_dir():
        found = "is a file, not a folder" if folder.exists() else "does not exist"
        raise BadInput(f"bundle {folder} {found}; {_MAKE_ONE}")
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST:
            raise BadInput(f"{path} is larger than {_MAX_MANIFEST} bytes, so no manifest; assemble the bundle again")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{folder} is no bundle, it has no {MANIFEST}; {_MAKE_ONE}") from None
    except OSError as e:
        raise BadInput(f"cannot read {path}: {e.strerror}; check its permissions") from None
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path} is not JSON ({_one_line(e)}); assemble the bundle again") from None
    if not isinstance(document, dict):
        raise BadInput(f"{path} holds no JSON object; assemble the bundle again")
    written = document.get("format")
    if isinstance(written, int) and written != FORMAT:
        cure = "upgrade hoverlens" if written > FORMAT else "assemble the bundle again"
        raise BadInput(f"{path} has format {written}, needed {FORMAT}; {cure}")
    if written is None:
        raise BadInput(f"{path} has no format number, so no bundle's manifest; assemble the bundle again")
    try:
        return Manifest.model_validate(document)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BadInput(f"{path}: {where}: {_one_line(first['msg'])}; assemble the bundle again") from None


def verify_bundle(path: str | os.PathLike[str], progress: Callable[[str, int, int], None] | None = None) -> list[str]:
    """Reads every file of a bundle in full and compares it with the manifest.

    Args:
        path: The bundle's folder.
        progress: Called with (file, bytes read of all files, bytes of all files) as reading goes on.

    Returns:
        One line for each problem; empty when all is well.

    Raises:
        BadInput: There is no bundle, or its manifest cannot be used.
    """
    folder = full_path(path)
    bundle = Bundle(folder, read_manifest(folder))
    total = sum(e.size for e in bundle.manifest.files.values())
    done = 0
    problems = []
    for role, entry in bundle.manifest.files.items():
        problem = bundle._problem_of_presence(role)
        if problem is None:

            def read(file: Path, name: str = entry.path, before: int = done) -> str:
                so_far = before

                def step(n: int) -> None:
                    nonlocal so_far
                    so_far += n
                    if progress is not None:
                        progress(name, so_far, total)

                return sha256_file(file, step)

            problem = bundle._problem_of_content(role, read)
        if problem:
            problems.append(problem)
        done += entry.size
    return problems


def bundle_info(bundle: Bundle) -> dict[str, Any]:
    """What a bundle is, as plain JSON values."""
    manifest = bundle.manifest
    return {
        "name": bundle.name,
        "path": str(bundle.path),
        "sha256": bundle.sha256,
        "size": sum(e.size for e in manifest.files.values()),
        "random": list(bundle.random_roles),
        "note": manifest.note,
        "files": {role: entry.model_dump(mode="json", exclude_none=True) for role, entry in manifest.files.items()},
        "tools": manifest.tools,
        "prompt_template": manifest.prompt_template,
        "image_min_tokens": manifest.image_min_tokens,
        "accuracy": None if manifest.accuracy is None else manifest.accuracy.model_dump(mode="json"),
        "created": manifest.created,
    }


def describe_bundle(bundle: Bundle) -> str:
    """:func:`bundle_info` for people: a line for the bundle and one for each file."""
    manifest = bundle.manifest
    total = sum(e.size for e in manifest.files.values())
    lines = [f"{bundle.name}  {total / 1e6:.1f} MB  sha256 {bundle.sha256[:16]}..  {bundle.path}"]
    if manifest.note:
        lines.append(f"  {manifest.note}")
    for role, e in manifest.files.items():
        facts = [f"{e.size / 1e6:.1f} MB"]
        facts += [f for f in (e.precision, e.family, e.kind) if f]
        if e.labels:
            facts.append(f"{len(e.labels)} classes")
        if e.weights == "random":
            facts.append("RANDOM WEIGHTS")
        facts += [f"licence {e.licence}"]
        if e.source:
            facts.append(f"from {e.source}")
        lines.append(f"  {role:<14} {e.path}: {', '.join(facts)}")
    if manifest.image_min_tokens:
        lines.append(f"  grounding needs {manifest.image_min_tokens} image tokens or more")
    if manifest.accuracy is None:
        lines.append("  accuracy       not checked")
    else:
        a = manifest.accuracy
        lines.append(f"  accuracy       {a.metric} {a.value:g} on {a.dataset} (needed {a.needed:g})")
    return "\n".join(lines)


def find_bundle(path: str | os.PathLike[str] | None = None, verify: bool = True) -> Bundle:
    """The bundle to use: ``path``, else ``$HOVERLENS_BUNDLE``, else the shipped one, else the random one.

    Raises:
        BadInput: None of them is there, or the one named cannot be used.
    """
    named = path if path is not None and str(path) else os.environ.get("HOVERLENS_BUNDLE")
    if named:
        return Bundle.open(named, verify)
    for folder in (nano_bundle_dir(), random_bundle_dir()):
        if (folder / MANIFEST).is_file():
            return Bundle.open(folder, verify)
    raise BadInput(
        "no bundle: none given, HOVERLENS_BUNDLE is not set and none was made; run `make venv` in a checkout "
        "or `python -m hoverlens.export.random_mllm`"
    )


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]
