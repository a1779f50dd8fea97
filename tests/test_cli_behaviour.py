"""How every verb behaves: help, usage errors, exit statuses, clean streams, lazy imports."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from hoverlens.cli import cli
from hoverlens.console import MAX_ERROR_CHARS, error_line, printable
from hoverlens.runtime.errors import BadInput, HoverlensError


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def program(*args: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "hoverlens.cli", *args],
        capture_output=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def verbs(command: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from verbs(child, (*path, name))


def is_group(path: tuple[str, ...]) -> bool:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return isinstance(command, click.Group)


LEAVES = [path for path in verbs() if not is_group(path)]


@pytest.mark.parametrize("path", list(verbs()), ids=" ".join)
def test_help_has_a_working_example(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    example = result.stdout.split("Example:\n", 1)[1].strip().replace("\\\n", " ")
    # The example parses: only the missing files stop it, not its spelling.
    words = shlex.split(example.split(" > ")[0])
    assert words[0] == "hoverlens"
    command: click.Command = cli
    rest = words[1:]
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    command.make_context("x", rest)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_verb_takes_verbosity_and_json(path: tuple[str, ...]) -> None:
    text = run(*path, "--help").stdout
    assert "--verbose" in text
    assert "--quiet" in text
    assert "--json" in text


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("bundle",),
        ("bench",),
        ("nosuchverb",),
        ("--nosuch",),
        ("ask",),
        ("ask", "a.jpg"),
        ("ask", "--foo", "a.jpg", "q"),
        ("ask", "a.jpg", "q", "extra"),
        ("ask", "a.jpg", "q", "x" * 100_000),
        ("ask", "a.jpg", "q", "--kind", "haiku"),
        ("ask", "a.jpg", "q", "--seed", "many"),
        ("ask", "a.jpg", "q", "--seed", "-1"),
        ("ask", "a.jpg", "q", "--option"),
        ("ask", "a.jpg", "q", "--deadline", "soon"),
        ("bundle", "info"),
        ("bundle", "assemble", "--detector", "x.onnx"),
        ("bench", "detector", "m.onnx"),
        ("bench", "detector", "m.onnx", "d", "--limit", "0"),
        ("inspect",),
        ("inspect", "\x1b[31m", "\x1b]0;title\x07"),
        ("doctor", "extra"),
    ],
    ids=lambda a: " ".join(a)[:40].encode("unicode_escape").decode() or "nothing",
)
def test_usage_errors_are_one_line_and_exit_2(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < MAX_ERROR_CHARS + 200
    assert "\x1b" not in result.stderr
    assert result.stderr.startswith("hoverlens")
    assert "--help'" in result.stderr


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("hoverlens ")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BadInput("found a, needed b"), 2, "hoverlens: found a, needed b"),
        (HoverlensError("it broke"), 1, "hoverlens: it broke"),
        (KeyboardInterrupt(), 130, "hoverlens: interrupted"),
        (MemoryError(), 1, "hoverlens: out of memory"),
        (ZeroDivisionError("two\nlines"), 1, "hoverlens: internal error: ZeroDivisionError: two lines"),
    ],
)
def test_failures_become_a_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, line: str
) -> None:
    def broken(path: str) -> dict[str, object]:
        raise error

    monkeypatch.setattr("hoverlens.runtime.inspect_file.inspect_file", broken)
    monkeypatch.delenv("HOVERLENS_DEBUG", raising=False)
    result = run("inspect", "x")
    assert result.exit_code == status
    assert result.stderr.startswith(line)
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("how", ["-v", "environment"])
def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def broken(path: str) -> dict[str, object]:
        raise ZeroDivisionError("why")

    monkeypatch.setattr("hoverlens.runtime.inspect_file.inspect_file", broken)
    if how == "environment":
        monkeypatch.setenv("HOVERLENS_DEBUG", "1")
    result = run("inspect", "x", *(["-v"] if how == "-v" else []))
    assert "Traceback" in result.stderr
    assert result.exit_code == 1


def test_error_lines_are_short_and_inert() -> None:
    line = error_line("a\nb\t\x1b[2J\u202e" + "x" * 10_000)
    assert line.startswith("a b \\x1b[2J\\u202e")
    assert len(line) == MAX_ERROR_CHARS
    assert printable("a\nb\x00", keep="\n") == "a\nb\\x00"


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys, hoverlens.cli\n"
        "try: hoverlens.cli.main(['ask', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'onnxruntime', 'llama_cpp', 'cv2', 'torch', 'transformers', 'PIL', 'pydantic', 'tqdm'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hoverlens.cli", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 1


def test_a_full_disk_and_closed_streams_are_no_internal_errors() -> None:
    command = f"{shlex.quote(sys.executable)} -m hoverlens.cli"
    full = subprocess.run(f"{command} --help > /dev/full", shell=True, capture_output=True, text=True)
    assert (full.returncode, "No space left" in full.stderr) == (1, True)
    closed = subprocess.run(f"{command} ask - q <&- >&-", shell=True, capture_output=True, text=True)
    assert (closed.returncode, len(closed.stderr.splitlines())) == (2, 1)
    assert "internal" not in full.stderr + closed.stderr


def test_output_has_no_colour_when_it_is_no_terminal() -> None:
    done = program("--help", env=os.environ | {"FORCE_COLOR": "0"})
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout


SLOW_INSPECT = """
import sys, time
import hoverlens.cli, hoverlens.runtime.inspect_file as module
def wait(path):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
module.inspect_file = wait
hoverlens.cli.main(["inspect", "x"])
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_verb(number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_INSPECT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors == ("hoverlens: interrupted\n" if number == signal.SIGINT else "")


SLOW_ASK = """
import ctypes, sys, time
import numpy as np
from PIL import Image
import hoverlens, hoverlens.cli

class Runtime:
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def ask(self, frame, question, trace, cancel, **options):
        trace.emit("question")
        print("ready", file=sys.stderr, flush=True)
        if sys.argv[1] == "native":
            ctypes.CDLL(None).sleep(60)
        while True:
            time.sleep(0.01)
            cancel.check()

hoverlens.load = lambda *a, **k: Runtime()
hoverlens.cli.main(["ask", sys.argv[2], "What?", "--trace", sys.argv[3]])
"""


@pytest.mark.parametrize("work", ["native", "python"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_question_can_be_interrupted(tmp_path: Path, work: str, number: signal.Signals, status: int) -> None:
    photo, trace = tmp_path / "p.png", tmp_path / "t.jsonl"
    Image.new("RGB", (8, 8)).save(photo)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_ASK, work, str(photo), str(trace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    start = time.monotonic()
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode == status
    assert out == ""
    assert errors == ("hoverlens: interrupted\n" if number == signal.SIGINT else "")
    # What could be finished is whole; what could not is absent.
    assert sorted(os.listdir(tmp_path)) == (["p.png", "t.jsonl"] if work == "python" else ["p.png"])


@pytest.mark.parametrize("verbose", [True, False])
def test_what_libraries_print_stays_out_of_the_json(tmp_path: Path, verbose: bool) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"t": 0.0, "event": "trace", "version": 1}\n')
    code = (
        "import os, hoverlens.cli, hoverlens.runtime.inspect_file as m\n"
        "real = m.inspect_file\n"
        "def noisy(path):\n"
        "    print('python noise'); os.write(1, b'native noise'); return real(path)\n"
        "m.inspect_file = noisy\n"
        f"hoverlens.cli.main(['inspect', {str(trace)!r}, '--json', {'-v' if verbose else '-q'!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["kind"] == "trace"
    assert ("native noise" in done.stderr) == verbose
    assert ("python noise" in done.stderr) == verbose


def test_file_names_that_are_no_text_are_reported() -> None:
    done = program("inspect", b"caf\xe9.jpg")  # type: ignore[arg-type]
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", LONG),
        ("bundle", "info", LONG),
        ("bundle", "info", "~no-such-user/x"),
        ("bundle", "verify", LONG),
        ("ask", "photo.png", "what?", "--bundle", LONG),
        ("ask", "photo.png", "what?", "--bundle", "~no-such-user/x"),
        ("bundle", "assemble", "--mllm", LONG, "--mmproj", LONG, "-o", "new"),
        ("bundle", "assemble", "--mllm", "photo.png", "--mmproj", "photo.png", "-o", LONG),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_names_that_no_file_can_have_are_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert "internal error" not in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["photo.png"]


def test_a_deleted_working_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    result = run("bundle", "info", "x")
    assert result.exit_code == 2
    assert "working directory, which was deleted" in result.stderr


def test_no_home_folder_is_told_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: str) -> str:
        return path

    from hoverlens.runtime.paths import cache_dir

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOVERLENS_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", homeless)
    with pytest.raises(HoverlensError, match="set HOVERLENS_CACHE"):
        cache_dir()
    monkeypatch.setenv("HOVERLENS_CACHE", "~no-such-user/x")
    with pytest.raises(BadInput, match="HOVERLENS_CACHE cannot be used"):
        cache_dir()
