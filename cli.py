"""The command line: ``hoverlens VERB``.

Verbs stay thin: they check what can be checked cheaply, call the package that does the work, and
print. Heavy libraries are imported inside the verbs, so that ``--help`` and usage errors need none.

Exit status: 0 done, 1 the work failed or a gate was missed, 2 bad usage or input, 130 interrupted
by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from .runtime.errors import BadInput, Cancelled, HoverlensError

if TYPE_CHECKING:
    from .runtime.answer import Answer
    from .runtime.frame import Frame

F = TypeVar("F", bound=Callable[..., Any])

MAX_ERROR_CHARS = 600
MAX_STDIN_BYTES = 256 * 2**20
OVERLAY_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
VERBOSE = "hoverlens.verbose"


def printable(text: str, keep: str = "") -> str:
    """Text with its control characters escaped.

    A file name or a model's output must not steer a terminal.
    """
    return "".join(
        ch
        if ch in keep or unicodedata.category(ch) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else ch.encode("unicode_escape", "surrogatepass").decode("ascii")
        for ch in text
    )


def error_line(message: str) -> str:
    """One line of bounded length, whatever the message holds."""
    line = printable(" ".join(str(message).split()))
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[: MAX_ERROR_CHARS - 4]} ..."


class Verbs(click.Group):
    """A group whose errors are short, and which names its verbs when none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(f"name a verb: {', '.join(self.list_commands(ctx))}", ctx)
        return super().parse_args(ctx, args)


class Root(Verbs):
    """The program: turns every way of failing into a line on standard error and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Before click sees it, which would print an empty line.
            raise Cancelled("interrupted") from None

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        extra["standalone_mode"] = False
        try:
            status = super().main(args, prog_name or "hoverlens", **extra)
            sys.stdout.flush()
            sys.exit(status if isinstance(status, int) else 0)
        except BrokenPipeError:
            # The reader has left (``| head``). Python flushes once more at exit: give it a sink.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except click.UsageError as e:
            path = e.ctx.command_path if e.ctx else "hoverlens"
            message = error_line(e.format_message()).rstrip(".")
            fail(f"{path}: {message[:1].lower()}{message[1:]}; see '{path} --help'", 2)
        except click.ClickException as e:
            fail(f"hoverlens: {error_line(e.format_message())}", 2)
        except (click.Abort, Cancelled, KeyboardInterrupt):
            fail("hoverlens: interrupted", 130)
        except HoverlensError as e:
            debug_traceback()
            fail(f"hoverlens: {error_line(str(e))}", e.exit_status)
        except MemoryError:
            debug_traceback()
            fail(
                "hoverlens: out of memory; use a smaller bundle or image, or close other programs",
                1,
            )
        except Exception as e:
            debug_traceback()
            fail(
                f"hoverlens: internal error: {type(e).__name__}: {error_line(str(e))}; "
                "set HOVERLENS_DEBUG=1 for the traceback and report it",
                1,
            )


_verbosity = 0


def debug_traceback() -> None:
    if _verbosity > 0 or os.environ.get("HOVERLENS_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()


def fail(line: str, status: int) -> NoReturn:
    click.echo(line, err=True)
    sys.exit(status)


def set_verbosity(verbose: int, quiet: bool) -> None:
    global _verbosity
    _verbosity = -1 if quiet else verbose
    level = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(_verbosity, logging.DEBUG)
    logger = logging.getLogger("hoverlens")
    logger.setLevel(level)
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("hoverlens: %(message)s"))
    logger.handlers[:] = [handler]


def verbosity_options(function: F) -> F:
    """``-v`` and ``-q``; the verb itself receives neither."""

    def take(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        ctx.meta[f"hoverlens.{param.name}"] = value
        set_verbosity(ctx.meta.get("hoverlens.verbose", 0), ctx.meta.get("hoverlens.quiet", False))

    for option in (
        click.option(
            "-q", "--quiet", is_flag=True, expose_value=False, callback=take, help="Errors only."
        ),
        click.option(
            "-v",
            "--verbose",
            count=True,
            expose_value=False,
            callback=take,
            help="Say more on standard error (-vv: everything).",
        ),
    ):
        function = option(function)
    return function


json_flag = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, alone on stdout."
)


def example(text: str) -> str:
    """An epilog that click does not re-wrap."""
    return f"\b\nExample:\n  {text}"


@contextlib.contextmanager
def stdout_for_results_only() -> Iterator[None]:
    """Sends what libraries print, from Python or from C, to standard error."""
    sys.stdout.flush()
    saved = -1
    with contextlib.suppress(OSError):
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved >= 0:
            os.dup2(saved, 1)
            os.close(saved)


def progress(total: int | None, what: str) -> Callable[[int], None] | None:
    """A callback that advances a bar on standard error, or None where nobody watches."""
    if _verbosity < 0 or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(total=total, desc=what, leave=False)
    return lambda n=1: bar.update(n) and None


def show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("hoverlens")
    except PackageNotFoundError:
        found = "(not installed)"
    click.echo(f"hoverlens {found}")
    ctx.exit()


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=example("hoverlens ask photo.jpg 'Is the road free?' --option yes --option no"),
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=show_version,
    help="Show the version.",
)
def cli() -> None:
    """Answers questions about what a drone sees, on the drone.

    Exit status: 0 done, 1 the work failed or a gate was missed, 2 bad usage or bad input, 130
    interrupted.
    """


# ask


@cli.command(
    epilog=example(
        "hoverlens ask photo.jpg 'How many cars?' --option 0 --option 1 --option 2 --json"
    )
)
@click.argument("image")
@click.argument("question")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="TEXT",
    help="A candidate answer; repeat for each.",
)
@click.option(
    "--kind",
    type=click.Choice(["option", "options", "box", "text"]),
    help="What is asked for. Default: option with options, text without.",
)
@click.option(
    "--bundle", metavar="DIR", help="Models to use. Default: $HOVERLENS_BUNDLE, else a shipped one."
)
@click.option("--mode", metavar="MODE", help="How to reason: direct, react or uavmas.")
@click.option("--profile", default="onboard", show_default=True, help="Settings of the reasoner.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Random seed."
)
@click.option(
    "--deadline", "deadline_s", type=float, metavar="S", help="Answer within this many seconds."
)
@click.option("--trace", "trace_path", metavar="FILE", help="Write every step as JSON lines.")
@click.option(
    "--overlay",
    "overlay_path",
    metavar="FILE",
    help="Write the photo with boxes, depth and the answer.",
)
@json_flag
@verbosity_options
def ask(
    image: str,
    question: str,
    options: tuple[str, ...],
    kind: str | None,
    bundle: str | None,
    mode: str | None,
    profile: str,
    seed: int,
    deadline_s: float | None,
    trace_path: str | None,
    overlay_path: str | None,
    as_json: bool,
) -> None:
    """Answer QUESTION about IMAGE.

    IMAGE is an image file, a video file, an RTSP or UDP URL or /dev/videoN (the newest frame is
    taken), or - for an encoded image on standard input.
    """
    from .runtime.question import Question

    asked = Question.make(question, options or None, kind)
    if deadline_s is not None and not (math.isfinite(deadline_s) and deadline_s > 0):
        raise BadInput(f"the deadline is {deadline_s:g} s; a positive number of seconds is needed")
    check_outputs(image, trace_path, overlay_path)
    from .runtime.pipeline import DEFAULT_MODE, MODES

    mode = mode or DEFAULT_MODE
    if mode not in MODES:
        raise BadInput(f"unknown mode {mode!r}; use one of {', '.join(MODES)}")
    with stdout_for_results_only():
        frame = read_frame(image)
        answer = _answer(
            frame, asked, bundle, profile, mode, deadline_s, seed, trace_path, overlay_path
        )
    if as_json:
        click.echo(answer.to_json(indent=2))
    else:
        click.echo(answer_text(answer))
    for warning in answer.warnings if _verbosity >= 0 else ():
        click.echo(f"warning: {error_line(warning)}", err=True)


def check_outputs(image: str, trace_path: str | None, overlay_path: str | None) -> None:
    """Checks the files that ``ask`` will write."""
    from .runtime.files import check_writable

    outputs = [
        (p, w)
        for p, w in ((trace_path, "the trace"), (overlay_path, "the overlay"))
        if p is not None
    ]
    for path, what in outputs:
        check_writable(path, what)
        if os.path.exists(path) and os.path.exists(image) and os.path.samefile(path, image):
            raise BadInput(f"{what} would overwrite the input {image}; name another file")
    if len(outputs) == 2 and os.path.realpath(outputs[0][0]) == os.path.realpath(outputs[1][0]):
        raise BadInput(f"trace and overlay are both {trace_path}; name two files")
    if overlay_path is not None and Path(overlay_path).suffix.lower() not in OVERLAY_SUFFIXES:
        raise BadInput(
            f"the overlay {overlay_path} is no image file; end it in {', '.join(OVERLAY_SUFFIXES)}"
        )


def read_frame(image: str) -> Frame:
    """The frame to ask about: decoded, before any model is loaded."""
    from .runtime.frame import Frame

    if image == "-":
        data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
        if len(data) > MAX_STDIN_BYTES:
            raise BadInput(
                f"standard input holds more than {MAX_STDIN_BYTES >> 20} MB; send one image"
            )
        return Frame.from_bytes(data, name="standard input")
    from .runtime.video import VideoSource, is_video_source

    if is_video_source(image):
        with VideoSource(image) as source:
            return source.read()
    return Frame.from_file(image)


def _answer(
    frame: Frame,
    asked: Any,
    bundle: str | None,
    profile: str,
    mode: str,
    deadline_s: float | None,
    seed: int,
    trace_path: str | None,
    overlay_path: str | None,
) -> Answer:
    from . import load
    from .runtime.trace import Trace

    with load(bundle, profile=profile) as runtime:
        # Made after loading, so that a bundle that cannot be read leaves no trace behind.
        with Trace(trace_path) as trace:
            answer = runtime.ask(
                frame,
                asked.text,
                options=asked.options or None,
                kind=asked.kind,
                mode=mode,
                deadline_s=deadline_s,
                seed=seed,
                trace=trace,
            )
        if overlay_path is not None:
            from .runtime.overlay import draw, save

            drawn = draw(
                frame, answer=answer, detections=runtime.detect(frame), depth=runtime.depth(frame)
            )
            save(overlay_path, drawn)
    return answer


def answer_text(answer: Answer) -> str:
    """The answer for people: what, how sure, how it ended, where the time went."""
    confidence = (
        "no confidence (free text)"
        if answer.confidence is None
        else f"confidence {answer.confidence:.2f}"
    )
    stages = ", ".join(f"{name} {s:.2f}" for name, s in answer.stages_s.items() if s >= 0.005)
    stats = answer.stats
    return "\n".join(
        [
            printable(answer.answer, keep="\n\t"),
            f"{confidence}; exit {answer.exit}; mode {answer.mode}; "
            f"bundle {answer.bundle.get('name')}",
            f"{stats.wall_s:.2f} s ({stages or 'all stages under 0.01'}); "
            f"{stats.mllm_calls} MLLM calls, {stats.prefill_tokens} prompt tokens, "
            f"{stats.reused_tokens} reused",
        ]
    )


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    # A terminated run cleans up its temporary files like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for stream in (sys.stdout, sys.stderr):
        # A file name need not fit the terminal's encoding; in JSON the replacement is an escape.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    cli.main(argv)


if __name__ == "__main__":
    main()
