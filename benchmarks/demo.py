"""``make demo``: looks at aerial photos with compiled models and answers through both interfaces.

Photos, detector and depth model come from a data folder beside the checkout where there is one
(``$HOVERLENS_SHARED_DATA``, else ``../shared/data``). Without it the demo draws a photo of its own and asks
the language model alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..runtime.bundle import Bundle, find_bundle
from ..runtime.errors import HoverlensError

QUESTION = "How many cars can you see?"
MODE = "direct"
OPTIONS = ("0", "1 to 3", "4 to 9", "10 or more")


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; pictures and JSON lie in ``demo-output/`` afterwards."""
    parser = argparse.ArgumentParser(prog="python -m hoverlens.benchmarks.demo", description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("demo-output"), help="folder for the results")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        out: Path = args.output
        out.mkdir(parents=True, exist_ok=True)
        run(out)
    except (HoverlensError, OSError) as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as e:
        print(f"demo: the command failed with status {e.returncode}: {shown(e.cmd)}", file=sys.stderr)
        return 1
    print(f"\nDone in {time.perf_counter() - start:.0f} s. Look at {out}/*.png")
    return 0


def run(out: Path) -> None:
    """The demo's steps."""
    data = data_folder()
    bundle = find_bundle()
    if bundle.random_roles:
        print(
            "The language model of this bundle has RANDOM WEIGHTS: its answers mean nothing.\n"
            "They show that the whole way from photo to answer works. Boxes and depth are real where a\n"
            "detector and a depth model are there.\n"
        )
    if data is None:
        photos = [drawn_photo(out / "drawn.png")]
        print("No data folder found beside the checkout: this photo is drawn, and there is no detector.\n")
    else:
        photos = real_photos(data)
        bundle = with_perception(bundle, data, out / "bundle")
    environment = os.environ | {"HOVERLENS_BUNDLE": str(bundle.path)}
    for photo in photos:
        overlay = out / f"{photo.stem}.png"
        command = [*ask_command(photo), "--overlay", str(overlay), "--trace", str(out / f"{photo.stem}.jsonl")]
        print(f"$ {shown(command)}")
        subprocess.run(command, check=True, env=environment)
        print(f"overlay: {overlay}\n")
    command = [*ask_command(photos[0]), "--json"]
    print(f"$ {shown(command)} > {out}/answer.json")
    with open(out / "answer.json", "wb") as f:
        subprocess.run(command, check=True, env=environment, stdout=f)
    through_python(bundle, photos[0])


def through_python(bundle: Bundle, photo: Path) -> None:
    """The same question through the Python interface, and what the perception models see."""
    import hoverlens

    print("\nThe same in Python:")
    with hoverlens.load(bundle) as runtime:
        answer = runtime.ask(photo, QUESTION, OPTIONS, mode=MODE)
        print(f"  runtime.ask(...)    -> {answer.answer!r}, confidence {answer.confidence:.2f}")
        if bundle.file("detector"):
            boxes = runtime.detect(photo)
            names = [boxes.label(i) for i in range(len(boxes))]
            counts = ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names))
            print(f"  runtime.detect(...) -> {len(boxes)} boxes: {counts or 'nothing found'}")
        if bundle.file("depth"):
            depth = runtime.depth(photo)
            print(f"  runtime.depth(...)  -> {depth.depth.shape[1]}x{depth.depth.shape[0]} {depth.kind} depth")


def data_folder() -> Path | None:
    """The data folder beside the checkout, or None."""
    named = os.environ.get("HOVERLENS_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if (folder / "images").is_dir() and (folder / "models").is_dir() else None


def real_photos(data: Path) -> list[Path]:
    """One oblique photo and one from higher up."""
    found = [
        *sorted(data.glob("images/visdrone/*.jpg"))[:1],
        *sorted(data.glob("images/auair/frame_20190905111947*.jpg"))[:1],
    ]
    if not found:
        raise HoverlensError(f"{data}/images holds no photos of visdrone or auair; check the data folder")
    return found


def with_perception(bundle: Bundle, data: Path, folder: Path) -> Bundle:
    """A bundle with the MLLM of ``bundle`` and the data folder's detector and depth model."""
    models = data / "models"
    detector, depth = models / "yolov5su_visdrone_640.onnx", models / "rtmonodepth_s_ms_256x448.onnx"
    command = [*hoverlens_command(), "bundle", "assemble", "-o", str(folder)]
    for flag, path in (
        ("--detector", detector),
        ("--depth", depth),
        ("--mllm", bundle.file("mllm")),
        ("--mmproj", bundle.file("mmproj")),
    ):
        if path is not None and path.is_file():
            command += [flag, str(path)]
    print(f"$ {shown(command)}")
    subprocess.run(command, check=True)
    print()
    return Bundle.open(folder)


def ask_command(photo: Path) -> list[str]:
    # A search over random weights would only wander; direct shows the whole way in seconds.
    command = [*hoverlens_command(), "ask", str(photo), QUESTION, "--mode", MODE]
    for option in OPTIONS:
        command += ["--option", option]
    return command


def hoverlens_command() -> list[str]:
    """The installed command of this very environment."""
    script = Path(sys.executable).with_name("hoverlens")
    return [str(script)] if script.exists() else [sys.executable, "-m", "hoverlens.cli"]


def shown(command: list[str]) -> str:
    """A command as a user would type it."""
    return shlex.join([Path(command[0]).name, *command[1:]])


def drawn_photo(path: Path, seed: int = 0) -> Path:
    """Draws a car park from above, with noise, and writes it; (960, 720) pixels."""
    from PIL import Image

    Image.fromarray(draw_car_park(seed)).save(path)
    return path


def draw_car_park(seed: int) -> NDArray[np.uint8]:
    """uint8 RGB (720, 960, 3): asphalt, a lawn, and a row of cars of several colours."""
    from PIL import Image, ImageDraw, ImageFilter

    rng = np.random.default_rng(seed)
    picture = Image.new("RGB", (960, 720), (92, 94, 98))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 960, 190), fill=(74, 112, 58))
    draw.rectangle((0, 190, 960, 204), fill=(176, 174, 168))
    colours = [(178, 34, 34), (235, 235, 232), (32, 60, 120), (28, 28, 30), (150, 152, 155), (196, 160, 40)]
    for column in range(11):
        x = 60 + 80 * column
        draw.line((x, 300, x, 470), fill=(226, 226, 220), width=4)
        if column < 10 and rng.random() < 0.7:
            dx, dy = rng.integers(-5, 6, 2)
            colour = colours[int(rng.integers(len(colours)))]
            car = (x + 16 + dx, 316 + dy, x + 64 + dx, 436 + dy)
            draw.rounded_rectangle((car[0] + 6, car[1] + 8, car[2] + 8, car[3] + 8), 12, fill=(58, 60, 63))
            draw.rounded_rectangle(car, 12, fill=colour)
            glass = (car[0] + 7, car[1] + 26, car[2] - 7, car[1] + 46)
            draw.rounded_rectangle(glass, 5, fill=(40, 48, 56))
    pixels = np.asarray(picture.filter(ImageFilter.GaussianBlur(0.8)), dtype=np.float32)
    noisy = pixels + rng.normal(0.0, 5.0, pixels.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    sys.exit(main())
