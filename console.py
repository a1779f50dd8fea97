"""How every verb of the command line behaves: errors, exit statuses, verbosity, clean output."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from .runtime.errors import Cancelled, HoverlensError

if TYPE_CHECKING:
    from .runtime.mllm.base import CancelToken

F = TypeVar("F", bound=Callable[..., Any])

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_ERROR_CHARS = 600
INTERRUPT_GRACE_S = 2.0
CONTROL = ("Cc", "Cs", "Zl", "Zp")
REORDERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that make a line read otherwise than it is written."""


def printable(text: str, keep: str = "") -> str:
    """Text with its control characters escaped.

    A file name or a model's output must not steer a terminal.
    """
    return "".join(
        ch
        if ch in keep or (unicodedata.category(ch) not in CONTROL and ch not in REORDERING)
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
        set_verbosity(0, False)
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
            debug_traceback(2)
            fail(f"hoverlens: {error_line(str(e))}", e.exit_status)
        except MemoryError:
            debug_traceback()
            fail(
                "hoverlens: out of memory; use a smaller bundle or image, or close other programs",
                1,
            )
        except Exception as e:
            debug_traceback()
            if isinstance(e, OSError) and e.errno in FULL:
                fail(f"hoverlens: cannot write the result: {e.strerror}; free some space", 1)
            if isinstance(e, OSError) and (reason := _file_problem(e)):
                fail(f"hoverlens: {error_line(reason)}", 2)
            fail(
                f"hoverlens: internal error: {type(e).__name__}: {error_line(str(e))}; "
                "set HOVERLENS_DEBUG=1 for the traceback and report it",
                1,
            )


def _file_problem(error: OSError) -> str | None:
    """What is wrong with the file that an error names, or with the working directory."""
    if error.filename is not None:
        path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else error.filename
        return f"cannot read or write {path}: {error.strerror}; check the path"
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "the working directory was deleted; change to another"
    return None


_verbosity = 0


def debug_traceback(verbosity: int = 1) -> None:
    if _verbosity >= verbosity or os.environ.get("HOVERLENS_DEBUG", "0") not in ("", "0"):
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
    # llama.cpp fills pages; -v is for what hoverlens itself does.
    logging.getLogger("hoverlens.llama").setLevel(logging.NOTSET if verbose > 1 else logging.WARNING)


def is_quiet() -> bool:
    return _verbosity < 0


def verbosity_options(function: F) -> F:
    """``-v`` and ``-q``; the verb itself receives neither."""

    def take(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        ctx.meta[f"hoverlens.{param.name}"] = value
        set_verbosity(ctx.meta.get("hoverlens.verbose", 0), ctx.meta.get("hoverlens.quiet", False))

    for option in (
        click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=take, help="Errors only."),
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


json_flag = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, alone on stdout.")


json_file = click.option(
    "--json", "json_path", metavar="FILE", help="Write the result as JSON; - for stdout, alone there."
)


def example(text: str) -> str:
    """An epilog that click does not re-wrap."""
    return f"\b\nExample:\n  {text}"


@contextlib.contextmanager
def stdout_for_results_only() -> Iterator[None]:
    """Keeps what libraries print, from Python or from C, off standard output.

    With ``-v`` it goes to standard error, else nowhere: an error has three lines at most.
    """
    sys.stdout.flush()
    saved = -1
    with open(os.devnull, "w") as nowhere:
        sink = sys.stderr if _verbosity > 0 else nowhere
        with contextlib.suppress(OSError):
            saved = os.dup(1)
            os.dup2(2 if _verbosity > 0 else nowhere.fileno(), 1)
        try:
            with contextlib.redirect_stdout(sink):
                yield
        finally:
            if saved >= 0:
                os.dup2(saved, 1)
                os.close(saved)


def interruptible(work: Callable[[CancelToken], T]) -> T:
    """Runs work that spends long in native code so that Ctrl-C takes effect at once.

    Python handles a signal on the main thread only, between two instructions, and inside a native
    callback it would lose the interruption. So the work gets a thread of its own and a token.
    Native code that does not look at the token in time is left behind with the process.
    """
    from .runtime.mllm.base import CancelToken

    token = CancelToken()
    results: list[T] = []
    errors: list[BaseException] = []
    # Not Thread.join: interrupted, it takes the thread for finished before Python 3.13.
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work(token))
        except BaseException as e:
            errors.append(e)
        done.set()

    try:
        # Started in here: the work may go on for a while before this thread runs again, and be interrupted then.
        threading.Thread(target=run, name="hoverlens-work", daemon=True).start()
        done.wait()
    except (KeyboardInterrupt, SystemExit) as stop:
        token.cancel()
        with contextlib.suppress(KeyboardInterrupt):
            done.wait(INTERRUPT_GRACE_S)
        if not done.is_set():
            # Ending in good order would wait for the native code, or crash below it.
            terminated = isinstance(stop, SystemExit)
            if not terminated:
                click.echo("hoverlens: interrupted", err=True)
            os._exit(143 if terminated else 130)
        raise
    if errors:
        raise errors[0]
    return results[0]


def progress(what: str) -> Callable[[int, int], None]:
    """A ``(done, total)`` callback that moves a bar on a terminal, and does nothing elsewhere."""
    if is_quiet() or not sys.stderr.isatty():
        return lambda done, total: None
    from tqdm import tqdm

    bar = tqdm(desc=what, leave=False)

    def advance(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return advance


def stages() -> Callable[[str, int, int], None]:
    """A ``(stage, done, total)`` callback for work whose stages nest: a bar on a terminal, with -v a line a stage."""
    logger = logging.getLogger("hoverlens.stages")
    seen: set[str] = set()
    if is_quiet() or not sys.stderr.isatty():

        def say(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                logger.info("%s", stage)

        return say
    from tqdm import tqdm

    bar = tqdm(leave=False)

    def advance(stage: str, done: int, total: int) -> None:
        bar.set_description(stage[:40], refresh=False)
        bar.total = total
        bar.n = done
        bar.refresh()

    return advance


def byte_progress() -> Callable[[str, int, int], None]:
    """As :func:`progress`, for work that reads files: ``(file, bytes done, bytes in all)``."""
    advance = progress("bytes")
    return lambda _file, done, total: advance(done, total)


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


def show(result: Mapping[str, Any], as_json: bool) -> None:
    """Prints a result as JSON or as one line a fact."""
    if as_json:
        from .runtime.files import write_json

        write_json("-", result)
    else:
        from .runtime.inspect_file import inspection_text

        click.echo(printable(inspection_text(result), keep="\n\t"))


def check_json_path(path: str | None) -> None:
    if path not in (None, "-"):
        from .runtime.files import check_writable

        check_writable(str(path), "the result")


def show_measured(result: Mapping[str, Any], json_path: str | None) -> None:
    """Writes the JSON where it was asked for, else prints the figures."""
    if json_path is not None:
        from .runtime.files import write_json

        write_json(json_path, result)
    if json_path != "-":
        show(result, False)
