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
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .console import (
    Root,
    Verbs,
    byte_progress,
    check_json_path,
    error_line,
    example,
    interruptible,
    is_quiet,
    json_file,
    json_flag,
    printable,
    progress,
    show,
    show_measured,
    show_version,
    stages,
    stdout_for_results_only,
    verbosity_options,
)
from .runtime.errors import BadInput, HoverlensError

if TYPE_CHECKING:
    from .runtime.answer import Answer
    from .runtime.frame import Frame
    from .runtime.mllm.base import CancelToken
    from .runtime.profiles import Profile
    from .runtime.question import Question
    from .runtime.runtime import Runtime

log = logging.getLogger("hoverlens.cli")

MAX_STDIN_BYTES = 256 * 2**20


@click.group(
    "hoverlens",
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


@cli.command(epilog=example("hoverlens ask photo.jpg 'How many cars?' --option 0 --option 1 --option 2 --json"))
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
@click.option("--bundle", metavar="DIR", help="Models to use. Default: $HOVERLENS_BUNDLE, else a shipped one.")
@click.option("--mode", metavar="MODE", help="How to reason. Default: uavmas.")
@click.option("--profile", default="onboard", show_default=True, help="Settings of the reasoner.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Random seed.")
@click.option("--kv-budget", "kv_budget_mb", type=float, metavar="MB", help="Most memory for KV states. Default: none.")
@click.option("--no-share", is_flag=True, help="Evaluate every call's prompt and images anew: same answers, slow.")
@click.option("--deadline", "deadline_s", type=float, metavar="S", help="Answer within this many seconds.")
@click.option("--at", "at_s", type=float, metavar="S", help="Of a video file: the frame at this second.")
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
    kv_budget_mb: float | None,
    no_share: bool,
    deadline_s: float | None,
    at_s: float | None,
    trace_path: str | None,
    overlay_path: str | None,
    as_json: bool,
) -> None:
    """Answer QUESTION about IMAGE.

    IMAGE is an image file, a video file (its first frame, or that of --at), an RTSP or UDP URL or
    /dev/videoN (the newest frame), or - for an encoded image on standard input.
    """
    from .runtime.pipeline import DEFAULT_MODE, check_deadline, check_mode
    from .runtime.profiles import profile_named
    from .runtime.question import Question

    asked = Question.make(question, options or None, kind)
    check_outputs(image, trace_path, overlay_path)
    mode = DEFAULT_MODE if mode is None else mode
    check_mode(mode)
    check_deadline(deadline_s)
    settings = profile_named(profile)
    if kv_budget_mb is not None:
        if not (math.isfinite(kv_budget_mb) and kv_budget_mb > 0):
            raise BadInput(f"the KV budget is {kv_budget_mb} MB; it must be a positive number")
        settings = replace(settings, kv_budget_mb=kv_budget_mb)
    with stdout_for_results_only():
        frame = read_frame(image, at_s)
        answer, unwritten = interruptible(
            lambda cancel: _answer(
                frame,
                asked,
                bundle,
                settings,
                mode,
                deadline_s,
                seed,
                not no_share,
                trace_path,
                overlay_path,
                cancel,
            )
        )
    if as_json:
        click.echo(answer.to_json(indent=2))
    else:
        click.echo(answer_text(answer))
    for warning in () if is_quiet() else answer.warnings:
        click.echo(f"warning: {error_line(warning)}", err=True)
    if unwritten:
        # The answer has been paid for; it is shown although a file is not there.
        for problem in unwritten[:-1]:
            click.echo(f"hoverlens: {error_line(str(problem))}", err=True)
        raise unwritten[-1]


def check_outputs(image: str, trace_path: str | None, overlay_path: str | None) -> None:
    """Checks the files that ``ask`` will write."""
    from .runtime.files import check_writable

    outputs = [(p, w) for p, w in ((trace_path, "the trace"), (overlay_path, "the overlay")) if p is not None]
    for path, what in outputs:
        check_writable(path, what)
        if os.path.exists(path) and os.path.exists(image) and os.path.samefile(path, image):
            raise BadInput(f"{what} would overwrite the input {image}; name another file")
    if len(outputs) == 2 and os.path.realpath(outputs[0][0]) == os.path.realpath(outputs[1][0]):
        raise BadInput(f"trace and overlay are both {trace_path}; name two files")
    if overlay_path is not None:
        from .runtime.overlay import check_image_path

        check_image_path(overlay_path)


def read_frame(image: str, at_s: float | None) -> Frame:
    """The frame to ask about: decoded, before any model is loaded."""
    from .runtime.frame import Frame

    if image == "-":
        data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
        if len(data) > MAX_STDIN_BYTES:
            raise BadInput(f"standard input holds more than {MAX_STDIN_BYTES >> 20} MB; send one image")
        return Frame.from_bytes(data, name="standard input")
    from .runtime.video import VideoSource, is_video_source

    if is_video_source(image):
        with VideoSource.open(image) as video:
            if at_s is not None:
                video.seek(at_s)
            return video.read()
    if at_s is not None:
        raise BadInput(f"--at is for video files, and {image} is none; leave it out")
    return Frame.from_file(image)


def _answer(
    frame: Frame,
    asked: Question,
    bundle: str | None,
    profile: Profile,
    mode: str,
    deadline_s: float | None,
    seed: int,
    share: bool,
    trace_path: str | None,
    overlay_path: str | None,
    cancel: CancelToken,
) -> tuple[Answer, list[HoverlensError]]:
    """The answer, and why the trace or the overlay, if asked for, could not be written."""
    from . import load
    from .runtime.files import atomic_write_text
    from .runtime.trace import Trace

    unwritten: list[HoverlensError] = []
    with load(bundle, profile=profile, share=share) as runtime:
        trace = Trace()
        try:
            answer = runtime.ask(
                frame,
                asked,
                mode=mode,
                deadline_s=deadline_s,
                seed=seed,
                on_step=lambda step: log.info("%s", " ".join(map(str, step.values()))),
                trace=trace,
                cancel=cancel,
            )
        finally:
            # A question that never began, since a model did not load, leaves no trace.
            if trace_path is not None and len(trace.events) > 1:
                try:
                    atomic_write_text(trace_path, trace.to_text())
                except HoverlensError as e:
                    unwritten.append(e)
        try:
            if overlay_path is not None:
                write_overlay(overlay_path, runtime, frame, asked.text, answer)
        except HoverlensError as e:
            unwritten.append(e)
    return answer, unwritten


def write_overlay(path: str, runtime: Runtime, frame: Frame, question: str, answer: Answer) -> None:
    """Draws what the bundle's models see; a bundle may lack a detector or a depth model."""
    from .runtime.overlay import draw_overlay, save_image

    has = runtime.bundle.file
    boxes = runtime.detect(frame) if has("detector") else None
    depth = runtime.depth(frame) if has("depth") else None
    save_image(draw_overlay(frame, boxes, depth, answer, question), path)


def answer_text(answer: Answer) -> str:
    """The answer for people: what, how sure, how it ended, where the time went."""
    confidence = "no confidence (free text)" if answer.confidence is None else f"confidence {answer.confidence:.2f}"
    stages = ", ".join(f"{name} {s:.2f}" for name, s in answer.stages_s.items() if s >= 0.005)
    stats = answer.stats
    return "\n".join(
        [
            printable(answer.answer, keep="\n\t"),
            f"{confidence}; exit {answer.exit}; mode {answer.mode}; bundle {answer.bundle.get('name')}",
            f"{stats.wall_s:.2f} s ({stages or 'all stages under 0.01'}); "
            f"{stats.mllm_calls} MLLM calls, {stats.prefill_tokens} prompt tokens, "
            f"{stats.reused_tokens} reused",
        ]
    )


@cli.group(
    cls=Verbs,
    epilog=example("hoverlens bundle info models/board"),
)
def bundle() -> None:
    """Make, show and check model bundles.

    A bundle is the folder that a device runs from: models and a manifest.
    """


@bundle.command(
    epilog=example(
        "hoverlens bundle assemble --detector yolox.onnx --depth depth.onnx "
        "\\\n    --mllm qwen.gguf --mmproj mmproj.gguf -o models/board"
    )
)
@click.option("--detector", metavar="FILE", help="Detector, ONNX.")
@click.option("--labels", metavar="FILE", help="Class names, one a line. Default: the model's own.")
@click.option("--depth", metavar="FILE", help="Monocular depth model, ONNX.")
@click.option("--mllm", required=True, metavar="FILE", help="Text model, GGUF.")
@click.option("--mmproj", required=True, metavar="FILE", help="Its vision projector, GGUF.")
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder to make.")
@click.option("--name", metavar="TEXT", help="For people. Default: the folder's name.")
@click.option("--mllm-thinking", metavar="FILE", help="Text model for long thought, GGUF.")
@click.option("--family", metavar="NAME", help="How to read the detector. Default: found by itself.")
@click.option("--depth-kind", type=click.Choice(["metric", "relative"]), help="Whether depth is in metres.")
@click.option(
    "--image-min-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Least visual tokens for good grounding; 1024 for real Qwen3-VL models.",
)
@click.option("--image-max-tokens", type=click.IntRange(min=1), metavar="N", help="Most visual tokens of an image.")
@json_flag
@verbosity_options
def assemble(output: str, as_json: bool, **options: Any) -> None:
    """Make a bundle of model files.

    Without a detector or a depth model the tools that need one ask the MLLM instead, or say that they cannot.
    """
    from .export.assemble import assemble
    from .runtime.bundle import bundle_info, describe_bundle

    with stdout_for_results_only():
        made = assemble(output, progress=byte_progress(), **options)
    show(bundle_info(made), True) if as_json else click.echo(describe_bundle(made))


@bundle.command("info", epilog=example("hoverlens bundle info models/board --json"))
@click.argument("folder", metavar="DIR")
@json_flag
@verbosity_options
def bundle_info_verb(folder: str, as_json: bool) -> None:
    """Show what a bundle holds."""
    from .runtime.bundle import Bundle, bundle_info, describe_bundle

    opened = Bundle.open(folder, verify=False)
    show(bundle_info(opened), True) if as_json else click.echo(describe_bundle(opened))


@bundle.command("verify", epilog=example("hoverlens bundle verify models/board"))
@click.argument("folder", metavar="DIR")
@json_flag
@verbosity_options
def bundle_verify(folder: str, as_json: bool) -> None:
    """Check a bundle, byte for byte.

    Every file is compared with the manifest, and the models with each other.
    """
    from .runtime.bundle import Bundle, verify_bundle
    from .runtime.mllm.files import check_pair

    with stdout_for_results_only():
        problems = verify_bundle(folder, byte_progress())
        if not problems:
            opened = Bundle.open(folder, verify=False)
            mllm, mmproj = opened.file("mllm"), opened.file("mmproj")
            if mllm is not None and mmproj is not None:
                try:
                    check_pair(mllm, mmproj)
                except BadInput as e:
                    problems = [str(e)]
    if as_json:
        show({"ok": not problems, "problems": problems}, True)
    elif not problems:
        click.echo(f"{printable(folder)}: ok")
    if problems:
        more = f" (and {len(problems) - 1} more: --json)" if len(problems) > 1 else ""
        raise BadInput(f"{problems[0]}{more}")


@cli.command(epilog=example("hoverlens inspect yolox.onnx"))
@click.argument("file")
@json_flag
@verbosity_options
def inspect(file: str, as_json: bool) -> None:
    """Say what FILE is.

    Pictures, videos, ONNX and GGUF models, bundles, traces and answers are recognised.
    """
    from .runtime.inspect_file import inspect_file

    with stdout_for_results_only():
        found = inspect_file(file)
    show(found, as_json)


@cli.command(epilog=example("hoverlens trace steps.jsonl"))
@click.argument("file")
@click.option("--prompts", is_flag=True, help="Also what each agent was shown.")
@json_flag
@verbosity_options
def trace(file: str, prompts: bool, as_json: bool) -> None:
    """Show how a question was answered.

    FILE was written by 'hoverlens ask --trace FILE'. Shown are the search as a tree, each agent's words, and what
    each agent cost.
    """
    from .runtime.trace_view import agent_costs, read_trace, show_trace

    events = read_trace(file)
    if as_json:
        if not prompts:
            events = [{k: v for k, v in event.items() if k != "prompt"} for event in events]
        show({"agents": agent_costs(events), "events": events}, True)
    else:
        click.echo(printable(show_trace(events, prompts), keep="\n"))


@cli.command(epilog=example("hoverlens doctor --json > doctor.json"))
@click.option("--bundle", metavar="DIR", help="Bundle to verify. Default: the one that ask takes.")
@click.option("--deep", is_flag=True, help="Also load a large bundle's language model and check its caches.")
@json_flag
@verbosity_options
def doctor(bundle: str | None, deep: bool, as_json: bool) -> None:
    """Check this machine and say how to cure it.

    Looks at Python, board, accelerators, libraries, memory, caches and bundle, and proves on this device that cached
    states give the answers of full prompts.

    Exit status 1 if anything is bad.
    """
    from .runtime.doctor import cache_law_check, report, report_text, run_doctor

    with stdout_for_results_only():
        checks = run_doctor(bundle=bundle, extra=[cache_law_check(bundle, deep)])
    found = report(checks)
    if as_json:
        show(found, True)
    else:
        click.echo(printable(report_text(checks), keep="\n"))
    if found["status"] == "bad":
        sys.exit(1)


@cli.group(cls=Verbs, epilog=example("hoverlens export engine yolox.onnx --target rtx-sm86 -o models"))
def export() -> None:
    """Turn models into what a device runs."""


@export.command(
    "engine", epilog=example("hoverlens export engine yolox.onnx --precision fp16 --target rtx-sm86 -o models")
)
@click.argument("model", metavar="X.onnx")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "int8", "fp8", "fp32"]),
    default="fp16",
    show_default=True,
    help="int8 and fp8 need a model with Q/DQ pairs.",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME=MIN,OPT,MAX",
    help="Sizes of a dynamic input, as in images=1x3x640x640,4x3x640x640,8x3x640x640; repeat for each.",
)
@click.option("--target", metavar="board|rtx-smNN", help="What to build for. Default: board, the GPU of this machine.")
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder for the engine and its description.")
@click.option("--workspace-mb", type=click.IntRange(min=1), metavar="MB", help="Most scratch memory. Default: all.")
@click.option("--force", is_flag=True, help="Build again although nothing has changed.")
@json_flag
@verbosity_options
def export_engine_verb(model: str, output: str, as_json: bool, **options: Any) -> None:
    """Compile an ONNX model into a TensorRT engine.

    On the board TensorRT builds for its GPU; elsewhere TensorRT for RTX builds ahead of time for a named
    generation of GPUs.
    """
    from .export.engine import build_engine

    bar = stages()
    with stdout_for_results_only():
        made = interruptible(
            lambda cancel: build_engine(model, output, progress=bar, cancelled=lambda: cancel.cancelled, **options)
        )
    if as_json:
        show(made, True)
        return
    engine = made["engine"]
    click.echo(printable(made["path"]))
    if made["up_to_date"]:
        click.echo("up to date")
    else:
        click.echo(f"{engine['bytes'] / 1e6:.1f} MB after {made['build_s']:.1f} s; built since {made['why']}")


@export.command(
    "mllm",
    epilog=example("hoverlens export mllm Qwen3-VL-2B-Instruct --quant Q4_K_M --imatrix imatrix.gguf -o models/2b"),
)
@click.argument("source", metavar="SRC")
@click.option(
    "--quant", default="Q8_0", show_default=True, metavar="TYPE", help="Of the text model: F16, Q8_0, Q4_K_M .."
)
@click.option(
    "--mmproj-quant",
    type=click.Choice(["F16", "BF16", "F32", "Q8_0"], case_sensitive=False),
    default="F16",
    show_default=True,
    help="Of the vision encoder.",
)
@click.option("--imatrix", metavar="FILE", help="Importance matrix, of 'hoverlens calibrate imatrix' or llama.cpp.")
@click.option(
    "--to",
    "target",
    type=click.Choice(["gguf", "edgellm"]),
    default="gguf",
    show_default=True,
    help="For llama.cpp, or for TensorRT Edge-LLM.",
)
@click.option("-o", "--output", required=True, metavar="DIR", help="Folder to make.")
@click.option(
    "--self-test/--no-self-test",
    default=None,
    help="Compare with the source in torch. Default: where memory allows.",
)
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Fail below this share of tokens on which source and result agree.",
)
@click.option("--name", metavar="TEXT", help="Name in the files. Default: the folder's.")
@click.option("--licence", metavar="TEXT", help="Terms of the weights. Default: what the folder says.")
@click.option("--pre-tokenizer", metavar="NAME", help="llama.cpp's, for a vocabulary that its converter does not know.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads.")
@click.option("--force", is_flag=True, help="Make it again although nothing has changed.")
@click.option("--install", is_flag=True, help="With --to edgellm: install its exporter first, in a place of its own.")
@json_flag
@verbosity_options
def export_mllm_verb(
    source: str, output: str, target: str, install: bool, as_json: bool, quant: str, imatrix: str | None, **options: Any
) -> None:
    """Convert a Hugging Face model folder SRC for a board.

    Writes mllm.gguf, mmproj.gguf and export.json, which records what the self-test found. Pickled weights are refused,
    and nothing in the folder is run.
    """
    from .export.mllm import Steps, describe, export_mllm

    bar = stages()
    steps = Steps(stage=lambda line: bar(line, 0, 1), progress=bar)
    if target == "edgellm":
        from .export.edgellm import describe_edgellm, export_edgellm

        if imatrix is not None or options["min_agreement"] is not None:
            raise BadInput("--imatrix and --min-agreement are for GGUF; leave them out with --to edgellm")
        with stdout_for_results_only():
            made = export_edgellm(source, output, install=install, force=options["force"], stage=steps.stage)
        show(made, True) if as_json else click.echo(printable(describe_edgellm(made), keep="\n"))
        return
    with stdout_for_results_only():
        # What takes long runs in processes of its own, so an interruption needs no thread here.
        exported = export_mllm(source, output, quant=quant, imatrix=imatrix, steps=steps, **options)
    show(exported.to_dict(), True) if as_json else click.echo(printable(describe(exported), keep="\n"))


@cli.group(cls=Verbs, epilog=example("hoverlens calibrate int8 yolo.onnx --images flight1 -o yolo-int8.onnx"))
def calibrate() -> None:
    """Fit what a model needs from real frames."""


@calibrate.command(
    "int8",
    epilog=example(
        "hoverlens calibrate int8 yolo.onnx --images flight1 --gate-dataset labelled \\\n    -o yolo-int8.onnx"
    ),
)
@click.argument("model", metavar="MODEL.onnx")
@click.option("--images", multiple=True, required=True, metavar="DIR", help="Frames of the camera; repeat for more.")
@click.option("-o", "--output", required=True, metavar="OUT.onnx", help="Model with Q/DQ pairs to write.")
@click.option(
    "--method",
    type=click.Choice(["percentile", "minmax", "entropy"]),
    default="percentile",
    show_default=True,
    help="How the range of an activation is taken.",
)
@click.option("--percentile", type=click.FloatRange(50, 100), metavar="P", help="Share of values inside the range.")
@click.option(
    "--layout",
    type=click.Choice(["tensorrt", "onnxruntime"]),
    default="tensorrt",
    show_default=True,
    help="Which runtime the pairs are placed for.",
)
@click.option("--kind", type=click.Choice(["detector", "depth"]), help="What the model is. Default: found by itself.")
@click.option("--gate-dataset", metavar="DIR", help="Labelled pictures: a loss of accuracy there fails the work.")
@click.option("--max-drop", type=float, default=0.02, show_default=True, help="Most that AP50 and AP50_small may fall.")
@click.option("--keep-float", multiple=True, metavar="TEXT", help="Layers whose names hold this stay float.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N pictures, spread over all.")
@click.option(
    "--budget", "budget_s", type=float, default=600, show_default=True, metavar="S", help="Seconds to try in."
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads. Default: all.")
@click.option("--allow-small", is_flag=True, help="Take fewer than 8 pictures.")
@click.option("--allow-noise", is_flag=True, help="Take pictures that show nothing.")
@json_flag
@verbosity_options
def calibrate_int8_verb(
    model: str,
    images: tuple[str, ...],
    output: str,
    gate_dataset: str | None,
    percentile: float | None,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Quantise a detector or depth model to INT8.

    Ranges come from real frames; layers that suffer stay float; the gate compares accuracy with the float model and
    writes nothing on a miss (exit status 1).
    """
    from .calibration.int8 import calibrate_int8, calibration_text

    if percentile is not None:
        options["percentile"] = percentile

    def measure(path: Any, kind: str) -> dict[str, Any]:
        from .benchmarks.depth import bench_depth
        from .benchmarks.detector import bench_detector

        assert gate_dataset is not None
        bench_one = bench_detector if kind == "detector" else bench_depth
        return bench_one(path, gate_dataset, threads=threads or 1, progress=lambda done, total: None)

    if gate_dataset is not None:
        from .benchmarks.datasets import open_dataset

        open_dataset(gate_dataset)
    bar = stages()
    with stdout_for_results_only():
        made = interruptible(
            lambda cancel: calibrate_int8(
                model,
                images,
                output,
                measure=measure if gate_dataset is not None else None,
                threads=threads,
                progress=bar,
                cancelled=lambda: cancel.cancelled,
                **options,
            )
        )
    show(made, True) if as_json else click.echo(printable(calibration_text(made), keep="\n"))
    for warning in () if is_quiet() else made["warnings"]:
        click.echo(f"warning: {error_line(warning)}", err=True)


@calibrate.command(
    "imatrix",
    epilog=example(
        "hoverlens calibrate imatrix --mllm f16.gguf --mmproj mmproj.gguf --questions q.jsonl \\\n    -o imatrix.gguf"
    ),
)
@click.option("--bundle", metavar="DIR", help="Take MLLM and projector from a bundle.")
@click.option("--mllm", metavar="FILE", help="Text model, GGUF; best F16 or BF16.")
@click.option("--mmproj", metavar="FILE", help="Its projector, GGUF.")
@click.option("--questions", metavar="F.jsonl", help='One {"image": .., "question": .., "options": [..]} a line.')
@click.option("--images", multiple=True, metavar="DIR", help="Photos, asked about in general; repeat for more.")
@click.option("-o", "--output", required=True, metavar="FILE", help="Importance matrix to write, GGUF.")
@click.option("--mode", default="direct", show_default=True, help="How to reason; uavmas: all agents' prompts, slow.")
@click.option("--image-max-tokens", type=click.IntRange(min=1), metavar="N", help="Most visual tokens of an image.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N questions, spread over all.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads. Default: all.")
@click.option("--allow-small", is_flag=True, help="Take a set that is too small.")
@click.option("--allow-noise", is_flag=True, help="Take pictures that show nothing.")
@json_flag
@verbosity_options
def calibrate_imatrix_verb(
    bundle: str | None,
    mllm: str | None,
    mmproj: str | None,
    questions: str | None,
    images: tuple[str, ...],
    output: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure which weights of an MLLM matter.

    The model answers calibration questions, and the mean squares of what its weight matrices were fed go to the
    quantiser: hoverlens export mllm --imatrix.
    """
    from .calibration.imatrix import calibrate_imatrix

    with stdout_for_results_only():
        made = interruptible(
            lambda cancel: calibrate_imatrix(
                output,
                bundle=bundle,
                mllm=mllm,
                mmproj=mmproj,
                questions=questions,
                images=images,
                progress=progress("questions"),
                cancel=cancel,
                **options,
            )
        )
    show(made, as_json)


@cli.group(cls=Verbs, epilog=example("hoverlens bench detector yolox.onnx photos/auair --json -"))
def bench() -> None:
    """Measure accuracy and time."""


limit_option = click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N pictures.")


@bench.command("detector", epilog=example("hoverlens bench detector yolox.onnx photos/auair --json -"))
@click.argument("model")
@click.argument("dataset")
@click.option("--sliced", is_flag=True, help="Also look at tiles of each picture.")
@click.option("--labels", metavar="FILE", help="Class names. Default: the model's own.")
@click.option("--family", metavar="NAME", help="How to read the outputs. Default: found by itself.")
@limit_option
@json_file
@verbosity_options
def bench_detector_verb(
    model: str,
    dataset: str,
    sliced: bool,
    labels: str | None,
    family: str | None,
    limit: int | None,
    json_path: str | None,
) -> None:
    """Measure a detector MODEL on a DATASET folder.

    Average precision, recall, precision and time a picture.
    """
    from .benchmarks.detector import bench_detector

    check_json_path(json_path)
    with stdout_for_results_only():
        result = bench_detector(
            model,
            dataset,
            sliced=sliced,
            labels=labels,
            family=family,
            limit=limit,
            progress=progress("pictures"),
        )
    show_measured(result, json_path)


@bench.command("depth", epilog=example("hoverlens bench depth depth.onnx photos/brighton --json -"))
@click.argument("model")
@click.argument("dataset")
@limit_option
@json_file
@verbosity_options
def bench_depth_verb(model: str, dataset: str, limit: int | None, json_path: str | None) -> None:
    """Measure a depth MODEL on a DATASET folder.

    Relative error, near/far order and time a picture.
    """
    from .benchmarks.depth import bench_depth

    check_json_path(json_path)
    with stdout_for_results_only():
        result = bench_depth(model, dataset, limit=limit, progress=progress("pictures"))
    show_measured(result, json_path)


@bench.command("latency", epilog=example("hoverlens bench latency --nodes 4 --lean --json -"))
@click.option("--bundle", metavar="DIR", help="Models to use. Default: $HOVERLENS_BUNDLE, else a shipped one.")
@click.option("--baseline", type=click.Choice(["naive", "none"]), default="naive", show_default=True, help="Compare.")
@click.option("--nodes", type=int, default=4, show_default=True, help="Nodes of the search: 3, 4, 6 or 9.")
@click.option("--lean", is_flag=True, help="Short outputs of every agent.")
@click.option("--questions", type=click.IntRange(min=1), default=5, show_default=True, help="Repetitions.")
@click.option("--image-px", type=click.IntRange(min=16), default=448, show_default=True, help="Side of the picture.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads.")
@json_file
@verbosity_options
def bench_latency_verb(bundle: str | None, baseline: str, json_path: str | None, **options: Any) -> None:
    """Measure one recorded question run three ways: shared, naive and direct.

    The agents' words are given, so that all ways decode the same tokens; tools cost nothing.
    """
    from .benchmarks.latency import bench_latency
    from .runtime.bundle import find_bundle

    check_json_path(json_path)
    with stdout_for_results_only():
        result = bench_latency(
            find_bundle(bundle),
            baseline=None if baseline == "none" else baseline,
            progress=progress("runs"),
            **options,
        )
    show_measured(result, json_path)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Closed by whoever started the program.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    # A terminated run cleans up its temporary files like an interrupted one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not sys.warnoptions:
        # Written for the developers of libraries, and more lines than an error may have.
        warnings.simplefilter("ignore")
    # Decoders print to standard error on their own; what matters arrives as an exception.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    for stream in (sys.stdout, sys.stderr):
        # A file name need not fit the terminal's encoding; in JSON the replacement is an escape.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    cli.main(argv)


if __name__ == "__main__":
    main()
