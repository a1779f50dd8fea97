"""Live video answers about now, files play in order, and a dead source is one line in bounded time."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.video import StreamEnded, VideoSource, is_video_source, masked

SIZE = (64, 48)


def picture(number: int) -> np.ndarray:
    """A picture whose red channel carries a number 0..30 that compression keeps."""
    image = np.full((SIZE[1], SIZE[0], 3), 128, np.uint8)
    image[..., 2] = number * 8 + 4
    return image


def number_of(rgb: np.ndarray) -> int:
    return int(rgb[..., 0].mean()) // 8


def write_video(path: Path, frames: int = 20, fps: int = 10) -> Path:
    code = {".avi": "MJPG", ".mp4": "mp4v", ".mkv": "MJPG", ".ts": "mp4v"}[path.suffix]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*code), fps, SIZE)
    if not writer.isOpened():
        pytest.skip(f"this OpenCV cannot write {path.suffix}")
    for i in range(frames):
        writer.write(picture(i % 31))
    writer.release()
    return path


def drain(video: VideoSource, timeout_s: float) -> None:
    while True:
        video.read(timeout_s)


class Mjpeg:
    """A camera over HTTP: numbered frames at a fixed rate, then silence or the end."""

    def __init__(self, frames: int = 10_000, period_s: float = 0.02, hang: bool = False) -> None:
        self.sent = 0
        self.stop = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
                self.end_headers()
                for i in range(frames):
                    jpeg = cv2.imencode(".jpg", picture(i % 31))[1].tobytes()
                    head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}"
                    try:
                        self.wfile.write(head.encode() + b"\r\n\r\n" + jpeg + b"\r\n")
                    except OSError:
                        return
                    outer.sent = i
                    if outer.stop.wait(period_s):
                        return
                if hang:
                    outer.stop.wait(30)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://pilot:s3cret@127.0.0.1:{self.server.server_port}/camera?token=hidden"

    def __enter__(self) -> Mjpeg:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def deaf_server() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class TestFiles:
    @pytest.mark.parametrize("suffix", [".avi", ".mp4", ".mkv", ".ts"])
    def test_frames_come_in_order_to_the_end(self, suffix: str, tmp_path: Path) -> None:
        path = write_video(tmp_path / f"flight{suffix}")
        with VideoSource.open(path, frame_id="cam") as video:
            assert not video.live
            frames = list(video)
        assert [number_of(f.rgb) for f in frames] == list(range(20))
        assert frames[0].size == SIZE
        assert frames[0].frame_id == "cam"
        assert frames[0].source == str(path)
        stamps = [f.stamp for f in frames]
        assert None not in stamps
        np.testing.assert_allclose(np.diff(np.array(stamps, float)), 0.1, atol=0.002)

    def test_colours_are_rgb(self, tmp_path: Path) -> None:
        with VideoSource.open(write_video(tmp_path / "a.avi")) as video:
            video.seek(1.9)
            red, green, blue = video.read().rgb.reshape(-1, 3).mean(axis=0)
        assert red > green + 15
        assert abs(green - blue) < 8

    def test_seek(self, tmp_path: Path) -> None:
        with VideoSource.open(str(write_video(tmp_path / "a.mp4"))) as video:
            video.seek(1.0)
            frame = video.read()
            assert number_of(frame.rgb) == 10
            assert frame.stamp == pytest.approx(1.0)
            video.seek(0)
            assert number_of(video.latest().rgb) == 0
            for bad in (-1, float("nan")):
                with pytest.raises(BadInput, match="0 s or more"):
                    video.seek(bad)
            with pytest.raises(BadInput, match=r"lasts 2\.00 s"):
                video.seek(2)

    def test_a_file_read_as_live_gives_its_newest_frame(self, tmp_path: Path) -> None:
        with VideoSource.open(write_video(tmp_path / "a.avi"), live=True) as video:
            while video.arrived < 20:
                time.sleep(0.01)
            assert number_of(video.read().rgb) == 19
            assert video.dropped == 19
            with pytest.raises(StreamEnded, match="20 frames"):
                video.read()

    def test_end_and_close_are_said(self, tmp_path: Path) -> None:
        video = VideoSource.open(write_video(tmp_path / "a.avi", frames=1))
        video.read()
        with pytest.raises(StreamEnded, match=r"a\.avi has no more frames"):
            video.read()
        video.close()
        video.close()
        with pytest.raises(HoverlensError, match="closed"):
            video.read()

    def test_threads_share_a_file_without_losing_a_frame(self, tmp_path: Path) -> None:
        seen: list[int] = []
        with VideoSource.open(write_video(tmp_path / "a.avi", frames=30)) as video:
            threads = [threading.Thread(target=lambda: seen.extend(number_of(f.rgb) for f in video)) for _ in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        assert sorted(seen) == list(range(30))


class TestLive:
    def test_a_slow_reader_gets_the_newest_frame_and_drops_are_counted(self) -> None:
        with Mjpeg() as camera, VideoSource.open(camera.url) as video:
            assert video.live
            stamps = []
            for _ in range(4):
                before = time.time()
                frame = video.read()
                # One frame may be under way; modulo 31 since the picture says no more.
                assert (camera.sent - number_of(frame.rgb)) % 31 <= 2
                assert frame.stamp is not None
                assert frame.stamp > before - 0.2
                stamps.append(frame.stamp)
                time.sleep(0.4)
            assert stamps == sorted(set(stamps))
            assert video.dropped >= 3 * 10
            assert video.arrived >= video.dropped + 4

    def test_latest_gives_a_young_frame_twice_and_waits_for_an_old_one(self) -> None:
        with Mjpeg(period_s=0.3) as camera, VideoSource.open(camera.url) as video:
            first = video.latest()
            assert video.latest(max_age_s=10).stamp == first.stamp
            time.sleep(0.05)
            second = video.latest(max_age_s=0.04)
            assert second.stamp is not None
            assert first.stamp is not None
            assert second.stamp > first.stamp

    def test_the_end_of_a_stream_is_said_after_its_last_frame(self) -> None:
        with Mjpeg(frames=5) as camera, VideoSource.open(camera.url) as video:
            numbers = [number_of(f.rgb) for f in video]
            assert numbers[-1] == 4
            with pytest.raises(StreamEnded, match="stopped sending"):
                video.read()
            with pytest.raises(StreamEnded, match="stopped sending"):
                video.latest(max_age_s=0.001)

    def test_a_stream_that_falls_silent_is_noticed(self) -> None:
        with (
            Mjpeg(frames=5, hang=True) as camera,
            VideoSource.open(camera.url, read_timeout_s=1) as video,
        ):
            started = time.monotonic()
            with pytest.raises(HoverlensError, match=r"nothing for|no new frame"):
                drain(video, timeout_s=3)
            assert time.monotonic() - started < 5

    def test_a_reader_that_waits_is_told_of_the_timeout(self) -> None:
        with (
            Mjpeg(frames=5, hang=True) as camera,
            VideoSource.open(camera.url) as video,
            pytest.raises(HoverlensError, match=r"no new frame .* within 0.2 s"),
        ):
            drain(video, timeout_s=0.2)

    def test_closing_wakes_a_waiting_reader(self) -> None:
        with Mjpeg(frames=5, hang=True) as camera:
            video = VideoSource.open(camera.url, read_timeout_s=2)
            told: list[str] = []

            def wait() -> None:
                try:
                    drain(video, timeout_s=20)
                except HoverlensError as e:
                    told.append(str(e))

            reader = threading.Thread(target=wait)
            reader.start()
            time.sleep(0.3)
            started = time.monotonic()
            video.close()
            reader.join(5)
            assert time.monotonic() - started < 3
            assert "closed" in told[0]

    def test_live_sources_do_not_seek(self) -> None:
        with Mjpeg() as camera, VideoSource.open(camera.url) as video, pytest.raises(BadInput, match="live"):
            video.seek(0)

    def test_udp_stream(self, tmp_path: Path) -> None:
        data = write_video(tmp_path / "a.ts", frames=248, fps=25).read_bytes()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        stop = threading.Event()

        def send() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                while not stop.is_set():
                    for at in range(0, len(data), 7 * 188):
                        out.sendto(data[at : at + 7 * 188], ("127.0.0.1", port))
                        time.sleep(0.002)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        try:
            with VideoSource.open(f"udp://127.0.0.1:{port}", open_timeout_s=15) as video:
                frame = video.read(timeout_s=10)
                assert frame.size == SIZE
                time.sleep(0.5)
                video.read(timeout_s=10)
                assert video.dropped > 0
        finally:
            stop.set()
            sender.join()

    def test_an_open_stream_does_not_spoil_the_exit_of_a_program(self) -> None:
        with Mjpeg() as camera:
            code = (
                "from hoverlens.runtime.video import VideoSource\n"
                f"video = VideoSource.open({camera.url!r})\n"
                "print(video.read().size)\n"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{SIZE}\n", "")


class TestBadSources:
    def refuse(self, source: str, error: type[HoverlensError], *needed: str) -> str:
        started = time.monotonic()
        with pytest.raises(error) as caught:
            VideoSource.open(source, open_timeout_s=1, read_timeout_s=1)
        assert time.monotonic() - started < 4
        message = str(caught.value)
        assert "\n" not in message
        assert "s3cret" not in message
        for text in needed:
            assert text in message
        return message

    def test_files(self, tmp_path: Path) -> None:
        self.refuse(str(tmp_path / "no.mp4"), BadInput, "no such file", "no.mp4")
        self.refuse(str(tmp_path), BadInput, "is a folder")
        empty = tmp_path / "empty.mp4"
        empty.touch()
        self.refuse(str(empty), BadInput, "0 bytes")
        text = tmp_path / "text.mp4"
        text.write_text("this is no video\n" * 50)
        self.refuse(str(text), BadInput, "text.mp4 is not a video", "convert it")
        self.refuse("a\0b.mp4", BadInput, "null")

    def test_a_file_cut_short_ends_early_or_is_refused(self, tmp_path: Path) -> None:
        whole = write_video(tmp_path / "a.mp4").read_bytes()
        cut = tmp_path / "cut.mp4"
        cut.write_bytes(whole[: len(whole) // 2])
        self.refuse(str(cut), BadInput, "cut.mp4 is not a video")

    @pytest.mark.parametrize("scheme", ["rtsp", "http", "tcp"])
    def test_nobody_listens(self, scheme: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        url = f"{scheme}://pilot:s3cret@127.0.0.1:{port}/x"
        self.refuse(url, HoverlensError, f"{scheme}://***@127.0.0.1:{port}/x")

    @pytest.mark.parametrize("scheme", ["rtsp", "http", "tcp"])
    def test_a_server_that_never_answers_is_given_up(self, scheme: str, deaf_server: int) -> None:
        self.refuse(f"{scheme}://127.0.0.1:{deaf_server}/x", HoverlensError, str(deaf_server))

    def test_silent_udp(self) -> None:
        self.refuse("udp://127.0.0.1:45999", HoverlensError, "udp://127.0.0.1:45999")

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "concat://a", "ftp://h/a.mp4"])
    def test_other_schemes(self, url: str) -> None:
        self.refuse(url, BadInput, "unknown scheme", "rtsp")

    @pytest.mark.parametrize("source", ["/dev/video987", "987"])
    def test_missing_camera(self, source: str) -> None:
        self.refuse(source, BadInput, "/dev/video987", "ls /dev/video*")

    def test_nonsense_times(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "a.avi")
        for name in ("open_timeout_s", "read_timeout_s"):
            with pytest.raises(BadInput, match=name):
                VideoSource.open(path, **{name: 0})  # type: ignore[arg-type]
        with VideoSource.open(path) as video, pytest.raises(BadInput, match="max_age_s"):
            video.latest(max_age_s=-1)


class TestNames:
    @pytest.mark.parametrize(
        "source",
        [
            "rtsp://h/x",
            "udp://@239.0.0.1:5000",
            "http://h/photo",
            "/dev/video0",
            "0",
            "A.MP4",
            "x/y.avi",
            "a.ts",
            "b.h264",
            "odd+one://x",
        ],
    )
    def test_video(self, source: str) -> None:
        assert is_video_source(source)

    @pytest.mark.parametrize("source", ["a.jpg", "/dev/null", "mp4", "a.mp4.png", "", "C:\\a.tif"])
    def test_picture(self, source: str) -> None:
        assert not is_video_source(source)

    @pytest.mark.parametrize(
        ("source", "shown"),
        [
            ("rtsp://u:p@h:554/a", "rtsp://***@h:554/a"),
            ("rtsp://u:p@ss/w@rd@h/a", "rtsp://***@h/a"),
            ("RTSP://u@h/a?key=1", "RTSP://***@h/a?***"),
            ("udp://@239.0.0.1:5000", "udp://@239.0.0.1:5000"),
            ("http://h/a?user=u&pwd=p@x", "http://h/a?***"),
            ("rtsp://h/a\nb", "rtsp://h/a\\nb"),
            ("flight@home.mp4", "flight@home.mp4"),
        ],
    )
    def test_credentials_are_masked(self, source: str, shown: str) -> None:
        assert masked(source) == shown

    def test_frames_do_not_carry_credentials(self) -> None:
        with Mjpeg() as camera, VideoSource.open(camera.url) as video:
            source = video.read().source
            assert source == masked(camera.url)
            assert "s3cret" not in repr(video) + str(source)
            assert "hidden" not in repr(video) + str(source)
