"""Changes the search's code in one place at a time, and lists the changes that no test notices.

It works on a copy in ``build/mutation``, with cosmic-ray (installed there, in an environment of its own). A run that
was interrupted goes on where it was, unless the reasoner or its tests have changed since. A change that nobody can
notice is judged in ``mutants-judged.txt``, with the reason; any other survivor makes the exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sqlite3
import subprocess
import sys
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
WORK = REPO / "build" / "mutation"
JUDGED = Path(__file__).with_name("mutants-judged.txt")
COSMIC_RAY = "cosmic-ray>=8.4,<9"

REASONING = "runtime/reasoning"
FILES = [f"{REASONING}/{name}.py" for name in ("daas", "state", "value", "cair", "uavmas")]
REASONING_TESTS = f"tests/{REASONING}"
TESTS = [
    f"{REASONING_TESTS}/test_{name}.py"
    for name in ("state", "daas", "cair", "modes", "max_nodes", "search_order", "what_agents_see", "bad_models")
]
CONFIG = """[cosmic-ray]
module-path = [{modules}]
timeout = 300.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider --hypothesis-seed=0 {tests}"

[cosmic-ray.distributor]
name = "local"

[cosmic-ray.filters.operators-filter]
# X | None in annotations.
exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]
"""


def tool() -> Path:
    """cosmic-ray's folder of programs; installs it if it is missing."""
    folder = WORK / "venv" / "bin"
    if not (folder / "cosmic-ray").exists():
        venv.create(WORK / "venv", with_pip=True, clear=True)
        command = [folder / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", COSMIC_RAY]
        subprocess.run(command, check=True)
    return folder


def copy(folder: Path) -> Path:
    """A fresh copy of the package to be changed: tracked files and what was compiled."""
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "hoverlens"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, check=True, capture_output=True).stdout
    compiled = [str(p.relative_to(REPO)) for p in (REPO / "kernels").glob("*.so")]
    for name in [*listed.decode().split("\0"), *compiled]:
        if name and (REPO / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, target / name)
    return target


def state(files: list[str]) -> str:
    """A digest of what a run is about: its files, the rest of the reasoner, and the tests."""
    h = hashlib.sha256("\n".join([CONFIG, *files]).encode())
    sources = [*(REPO / REASONING).glob("*.py"), *(REPO / REASONING_TESTS).glob("*.py"), *(REPO / f for f in files)]
    for path in sorted(sources):
        h.update(path.read_bytes())
    return h.hexdigest()


def mutate(programs: Path, number: int, files: list[str]) -> Path:
    """Tries every change of these files, one after the other; the session's file."""
    folder = WORK / str(number) / "hoverlens"
    stamp, now = folder / "mutation.state", state(files)
    going_on = stamp.exists() and stamp.read_text() == now
    if going_on:
        # Where it was interrupted, a file may be as it was changed.
        for name in files:
            shutil.copy2(REPO / name, folder / name)
    else:
        copy(WORK / str(number))
    modules = ", ".join(f'"{f}"' for f in files)
    config = CONFIG.format(modules=modules, python=sys.executable, tests=" ".join(TESTS))
    (folder / "mutation.toml").write_text(config)
    # Byte code that was cached for one change could be taken for the next.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HOME": str(Path.home())}

    def run(program: str, *arguments: str) -> None:
        subprocess.run([programs / program, *arguments], cwd=folder, env=environment, check=True)

    if not going_on:
        run("cosmic-ray", "init", "mutation.toml", "session.sqlite")
        run("cr-filter-operators", "session.sqlite", "mutation.toml")
        run("cosmic-ray", "baseline", "mutation.toml")
        stamp.write_text(now)
    run("cosmic-ray", "exec", "mutation.toml", "session.sqlite")
    return folder / "session.sqlite"


def results(session: Path) -> list[tuple[str, str, int, str]]:
    """(outcome, file, line, changed line) of every change that was tried."""
    rows = sqlite3.connect(session).execute(
        "select test_outcome, module_path, start_pos_row, diff from work_results join mutation_specs using (job_id) "
        "where worker_outcome != 'SKIPPED' order by module_path, start_pos_row"
    )
    found = []
    for outcome, path, row, diff in rows:
        added = [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
        removed = [line[1:] for line in diff.splitlines() if line.startswith("-") and not line.startswith("---")]
        line = added[-1] if added else f"deleted: {removed[-1]}"
        found.append((outcome, path, row, " ".join(line.split())))
    return found


def judged() -> set[str]:
    """``file: changed line`` of the changes that nobody can notice."""
    lines = JUDGED.read_text().splitlines()
    return {" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=FILES, help="files to change; default: the search and Eq. 4")
    parser.add_argument("--jobs", type=int, default=2, help="how many changes are tried at once")
    arguments = parser.parse_args()
    start = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    programs = tool()
    # The longest first, so that the shares are about equal.
    files = sorted(arguments.files, key=lambda f: -(REPO / f).stat().st_size)
    shares = [files[i :: arguments.jobs] for i in range(arguments.jobs)]
    shares = [share for share in shares if share]
    with ThreadPoolExecutor(len(shares)) as pool:
        sessions = list(pool.map(mutate, [programs] * len(shares), range(len(shares)), shares))
    found = [r for session in sessions for r in results(session)]
    survivors = [r for r in found if r[0] != "KILLED"]
    known = judged()
    new = [r for r in survivors if f"{r[1]}: {r[3]}" not in known]
    for outcome, path, row, line in new:
        print(f"{outcome.lower()}: {path}:{row}\n{path}: {line}")
    minutes = (time.monotonic() - start) / 60
    print(
        f"mutation: {len(found)} changes, {len(found) - len(survivors)} noticed, "
        f"{len(survivors) - len(new)} judged, {len(new)} to judge; {minutes:.0f} minutes"
    )
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
