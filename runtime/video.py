"""Video without ROS: files, network streams and cameras through OpenCV.

A question in flight is about now. From a live source the newest frame counts: a thread keeps taking
frames, remembers only the last one, and counts those that nobody took. A file is read in order
instead.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from .errors import BadInput, HoverlensError
from .frame import MAX_PIXELS, Frame, Intrinsics, printable_name

URL_SCHEMES = frozenset(("rtsp", "rtsps", "rtmp", "rtmps", "rtp", "srt", "udp", "tcp", "http", "https"))
"""Network protocols that are opened. FFmpeg knows more, some of which read local files."""

_SUFFIXES = (
    ".mp4 .m4v .mov .avi .mkv .webm .ts .mts .m2ts .mpg .mpeg .mjpeg .mjpg .h264 .264 .h265 .265 "
    ".hevc .flv .3gp .ogv .wmv"
)
VIDEO_SUFFIXES = frozenset(_SUFFIXES.split())

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_DEVICE = re.compile(r"/dev/video\d+|\d+")


class StreamEnded(HoverlensError):
    """The file has no more frames, or the live source stopped sending."""


def is_video_source(source: str) -> bool:
    """Whether a command-line argument means a video (URL, camera or video file) and not a picture.

    It goes by the name only: any ``scheme://``, ``/dev/videoN``, a camera index such as ``0``, or a
    file name with one of :data:`VIDEO_SUFFIXES`.
    """
    return bool(
        _URL.fullmatch(source) or _DEVICE.fullmatch(source) or os.path.splitext(source)[1].lower() in VIDEO_SUFFIXES
    )


def masked(source: str) -> str:
    """The source for messages and records: user, password and query of a URL become ``***``."""
    url = _URL.fullmatch(source)
    if url is None:
        return printable_name(source)
    scheme, rest = url.groups()
    rest, query, _ = rest.partition("?")
    # Up to the last "@": a password with an unescaped "/" or "@" must not slip through.
    user, at, place = rest.rpartition("@")
    return printable_name(f"{scheme}://{'***' if user else ''}{at}{place}{'?***' if query else ''}")


@dataclass
class _Slot:
    """The newest frame of a live source."""

    bgr: NDArray[np.uint8]
    wall: float
    monotonic: float
    number: int


class VideoSource:
    """An open video. Safe to use from any thread; close it, or use it as a context manager.

    Stamps are seconds: since the start of a file, and since the Unix epoch at the moment of arrival
    for a live source.

    Example:
        with VideoSource.open("rtsp://10.0.0.2:8554/main") as video:
            frame = video.latest(max_age_s=0.5)

    Attributes:
        name: What messages and :attr:`Frame.source` call it; never holds credentials.
        live: Whether only the newest frame counts (streams, cameras), or frames come in order
            (files).
    """

    def __init__(
        self,
        target: str | int,
        name: str,
        live: bool,
        backend: int,
        open_timeout_s: float,
        read_timeout_s: float,
        frame_id: str | None,
        intrinsics: Intrinsics | None,
    ) -> None:
        """Use :meth:`open`."""
        self.name = name
        self.live = live
        self._target = target
        self._backend = backend
        self._open_timeout_s = open_timeout_s
        self._read_timeout_s = read_timeout_s
        self._frame_id = frame_id
        self._intrinsics = intrinsics
        self._changed = threading.Condition()
        self._slot: _Slot | None = None
        self._arrived = 0
        self._taken = 0
        self._dropped = 0
        self._opened = False
        self._closed = False
        self._failure: HoverlensError | None = None
        self._capture: cv2.VideoCapture | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str] | int,
        *,
        live: bool | None = None,
        open_timeout_s: float = 10.0,
        read_timeout_s: float = 5.0,
        frame_id: str | None = None,
        intrinsics: Intrinsics | None = None,
    ) -> VideoSource:
        """Opens a video file, a network stream or a camera.

        Args:
            source: A path, a URL of one of :data:`URL_SCHEMES`, ``/dev/videoN``, or a camera index.
            live: Whether only the newest frame counts. None decides by the source: files, also over
                HTTP, are read in order; everything else is live.
            open_timeout_s: Longest wait for a stream or camera to open.
            read_timeout_s: Longest silence of a stream before it counts as ended.
            frame_id: Given to every frame.
            intrinsics: Given to every frame.

        Raises:
            BadInput: No such file or camera, not a video, or an unknown URL scheme.
            HoverlensError: The stream or camera did not open in time.
        """
        _positive(open_timeout_s, "open_timeout_s")
        _positive(read_timeout_s, "read_timeout_s")
        text = os.fspath(source) if not isinstance(source, int) else str(source)
        name = masked(text)
        target: str | int
        backend = _stream_backend()
        url = _URL.fullmatch(text)
        if url is not None:
            scheme = url[1].lower()
            if scheme not in URL_SCHEMES:
                known = ", ".join(sorted(URL_SCHEMES))
                raise BadInput(f"cannot open {name}: unknown scheme {scheme}; use one of {known}")
            target = text
            path = url[2].partition("?")[0]
            a_file = scheme.startswith("http") and Path(path).suffix.lower() in VIDEO_SUFFIXES
            is_live = not a_file if live is None else live
        elif _DEVICE.fullmatch(text):
            target, backend = _camera(text, name)
            is_live = True if live is None else live
        else:
            target = _video_file(text, name)
            is_live = False if live is None else live
        video = cls(target, name, is_live, backend, open_timeout_s, read_timeout_s, frame_id, intrinsics)
        video._start()
        return video

    @property
    def dropped(self) -> int:
        """Frames of a live source that a newer one replaced before anybody took them."""
        with self._changed:
            return self._dropped

    @property
    def arrived(self) -> int:
        """Frames that came so far."""
        with self._changed:
            return self._arrived

    def read(self, timeout_s: float | None = None) -> Frame:
        """The next frame: of a file in order, of a live source the newest not handed out yet.

        Args:
            timeout_s: Longest wait for a live source's frame; None is the source's
                ``read_timeout_s``.

        Raises:
            StreamEnded: No more frames will come.
            HoverlensError: None came in time, or the source is closed.
        """
        if not self.live:
            return self._read_in_order()
        return self._newest(timeout_s, lambda slot: slot.number > self._taken)

    def latest(self, max_age_s: float = 1.0, timeout_s: float | None = None) -> Frame:
        """The newest frame, also if it was handed out before; for a file the same as :meth:`read`.

        Args:
            max_age_s: Oldest arrival that still counts; with an older frame it waits for a new one.
            timeout_s: Longest wait; None is the source's ``read_timeout_s``.

        Raises:
            StreamEnded: No more frames will come, and the last one is too old.
            HoverlensError: None came in time, or the source is closed.
        """
        _positive(max_age_s, "max_age_s")
        if not self.live:
            return self._read_in_order()
        return self._newest(timeout_s, lambda slot: time.monotonic() - slot.monotonic <= max_age_s)

    def seek(self, seconds: float) -> None:
        """Moves a file so that the next :meth:`read` gives the frame at that time since its start.

        Raises:
            BadInput: A live source, or a time outside the file.
        """
        if self.live:
            raise BadInput(f"{self.name} is live and cannot be moved in time; use a file")
        if not math.isfinite(seconds) or seconds < 0:
            raise BadInput(f"cannot go to {seconds} s; a time of 0 s or more is needed")
        with self._changed:
            capture = self._usable_capture()
            fps, count = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
            if fps > 0 and count > 0 and seconds >= count / fps:
                raise BadInput(f"{self.name} lasts {count / fps:.2f} s; {seconds:g} s is past its end")
            if not capture.set(cv2.CAP_PROP_POS_MSEC, seconds * 1000.0):
                raise BadInput(f"{self.name} cannot be moved in time; convert it to .mp4")

    def close(self) -> None:
        """Stops reading and frees the device. May be called more than once, from any thread."""
        with self._changed:
            self._closed = True
            self._slot = None
            self._changed.notify_all()
            if self._thread is None and self._capture is not None:
                self._capture.release()
                self._capture = None
        self._join(2.0)

    def _join(self, timeout_s: float) -> None:
        # A stream may sit in its read timeout; its thread frees it afterwards.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def __enter__(self) -> VideoSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Frame]:
        """Frames until the source ends."""
        while True:
            try:
                yield self.read()
            except StreamEnded:
                return

    def __repr__(self) -> str:
        return f"VideoSource({self.name!r}, live={self.live})"

    def _start(self) -> None:
        if isinstance(self._target, str) and not self.live and not _URL.fullmatch(self._target):
            self._capture = self._open_capture()
            return
        # Name resolution and drivers know no timeout, so opening happens apart from the caller.
        self._thread = threading.Thread(target=self._run, name="hoverlens-video", daemon=True)
        deadline = time.monotonic() + self._open_timeout_s + 0.5
        _RUNNING.add(self)
        self._thread.start()
        with self._changed:
            while not self._opened and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._closed = True
                    self._failure = HoverlensError(
                        f"{self.name} did not open within {self._open_timeout_s:g} s; "
                        "check the address and that it is sending"
                    )
                    break
                self._changed.wait(left)
            if self._failure is not None and not self._opened:
                raise self._failure
        if not self.live:
            self._thread.join()
            self._thread = None

    def _open_capture(self) -> cv2.VideoCapture:
        capture = cv2.VideoCapture()
        parameters: list[int] = []
        if self._backend == cv2.CAP_FFMPEG:
            parameters = [
                cv2.CAP_PROP_OPEN_TIMEOUT_MSEC,
                max(1, int(self._open_timeout_s * 1000)),
                cv2.CAP_PROP_READ_TIMEOUT_MSEC,
                max(1, int(self._read_timeout_s * 1000)),
            ]
        try:
            opened = capture.open(self._target, self._backend, parameters)
        except cv2.error:
            opened = False
        if not opened or not capture.isOpened():
            capture.release()
            if isinstance(self._target, str) and os.path.isfile(self._target):
                raise BadInput(f"{self.name} is not a video that can be read; convert it to H.264 in .mp4")
            raise HoverlensError(f"cannot open {self.name}; check the address, the credentials and that it is sending")
        w, h = (capture.get(p) for p in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        if w * h > MAX_PIXELS:
            capture.release()
            raise BadInput(
                f"{self.name} claims frames of {w:.0f} x {h:.0f} pixels, over the limit of "
                f"{MAX_PIXELS / 1e6:g} megapixels; use a smaller video"
            )
        if self._backend == cv2.CAP_V4L2:
            capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
        return capture

    def _run(self) -> None:
        """The thread of a stream or camera: opens it and, when live, keeps the newest frame."""
        try:
            capture = self._open_capture()
        except Exception as e:  # nobody else would hear of it
            wrapped = HoverlensError(f"cannot open {self.name}: {type(e).__name__}")
            self._stop(e if isinstance(e, HoverlensError) else wrapped)
            return
        with self._changed:
            self._opened = True
            keep = not self.live and not self._closed
            if keep:
                self._capture = capture
            self._changed.notify_all()
        if keep:
            return
        try:
            failure = self._keep_newest(capture)
        except Exception as e:  # nobody else would hear of it
            what = str(e) if isinstance(e, HoverlensError) else f"{self.name}: {type(e).__name__}"
            failure = HoverlensError(what)
        capture.release()
        self._stop(failure)

    def _keep_newest(self, capture: cv2.VideoCapture) -> HoverlensError:
        """Takes frames until the source is closed or ends, and says why it ended."""
        while not self._closed:
            started = time.monotonic()
            ok, bgr = capture.read()
            if not ok or bgr is None:
                return self._ending(time.monotonic() - started)
            self._put(bgr)
        return HoverlensError(f"{self.name} is closed; open it again")

    def _ending(self, waited_s: float) -> HoverlensError:
        if self._arrived == 0:
            return HoverlensError(f"{self.name} opened but sent no frame; check its video format")
        if waited_s >= 0.9 * self._read_timeout_s:
            return StreamEnded(f"{self.name} sent nothing for {waited_s:.1f} s; open it again")
        return StreamEnded(f"{self.name} stopped sending after {self._arrived} frames; open it again")

    def _put(self, bgr: NDArray[Any]) -> None:
        with self._changed:
            if self._slot is not None and self._slot.number > self._taken:
                self._dropped += 1
            self._arrived += 1
            # Kept without a copy: read() without a destination allocates each time.
            self._slot = _Slot(_bgr8(bgr), time.time(), time.monotonic(), self._arrived)
            self._changed.notify_all()

    def _stop(self, failure: HoverlensError) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()

    def _newest(self, timeout_s: float | None, good: Any) -> Frame:
        timeout = self._read_timeout_s if timeout_s is None else timeout_s
        _positive(timeout, "timeout_s")
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise HoverlensError(f"{self.name} is closed; open it again")
                slot = self._slot
                if slot is not None and good(slot):
                    self._taken = max(self._taken, slot.number)
                    break
                if self._failure is not None:
                    # A fresh one each time: a shared exception would collect tracebacks.
                    raise type(self._failure)(str(self._failure))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise HoverlensError(
                        f"no new frame from {self.name} within {timeout:g} s; check that it is sending"
                    )
                self._changed.wait(left)
        return self._frame(slot.bgr, slot.wall)

    def _read_in_order(self) -> Frame:
        with self._changed:
            capture = self._usable_capture()
            ok, bgr = capture.read()
            if not ok or bgr is None:
                if self._arrived == 0:
                    raise BadInput(f"no frame of {self.name} can be decoded; convert it to .mp4")
                raise StreamEnded(f"{self.name} has no more frames; seek to go back")
            self._arrived += 1
            self._taken = self._arrived
            stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
        return self._frame(_bgr8(bgr), stamp if math.isfinite(stamp) and stamp >= 0 else None)

    def _usable_capture(self) -> cv2.VideoCapture:
        if self._closed or self._capture is None:
            raise HoverlensError(f"{self.name} is closed; open it again")
        return self._capture

    def _frame(self, bgr: NDArray[np.uint8], stamp: float | None) -> Frame:
        return Frame.from_array(
            bgr,
            "bgr",
            stamp=stamp,
            frame_id=self._frame_id,
            intrinsics=self._intrinsics,
            source=self.name,
        )


_RUNNING: weakref.WeakSet[VideoSource] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends the threads before the interpreter does: cut off inside OpenCV, one aborts the process."""
    sources = list(_RUNNING)
    for source in sources:
        source._closed = True
    for source in sources:
        source._join(max(source._open_timeout_s, source._read_timeout_s) + 0.5)


def _bgr8(picture: NDArray[Any]) -> NDArray[np.uint8]:
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3):
        raise HoverlensError(f"found video frames of {picture.dtype} and shape {picture.shape}; 8-bit ones are needed")
    return picture


def _positive(value: float, what: str) -> None:
    if not math.isfinite(value) or value <= 0:
        raise BadInput(f"{what} is {value}; a positive number of seconds is needed")


def _stream_backend() -> int:
    """FFmpeg where OpenCV has it, the only one with timeouts; else what OpenCV picks."""
    _quieten()
    has_ffmpeg = cv2.CAP_FFMPEG in cv2.videoio_registry.getStreamBackends()
    return cv2.CAP_FFMPEG if has_ffmpeg else cv2.CAP_ANY


def _quieten() -> None:
    """Keeps OpenCV and FFmpeg from printing; they may print addresses, and the errors here say enough.

    FFmpeg's level is read when OpenCV first opens a video. Either variable, set by the user, wins.
    """
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    if "OPENCV_LOG_LEVEL" not in os.environ:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


def _camera(text: str, name: str) -> tuple[str | int, int]:
    """What OpenCV opens for ``/dev/videoN`` or an index, and with which backend."""
    device = f"/dev/video{int(text)}" if text.isdigit() else text
    if not os.path.isdir("/dev") or not hasattr(cv2, "CAP_V4L2") or os.name != "posix":
        return (int(text) if text.isdigit() else text), cv2.CAP_ANY
    if not os.path.exists(device):
        raise BadInput(f"no such camera: {device} ({name}); list them with: ls /dev/video*")
    if not os.access(device, os.R_OK | os.W_OK):
        raise BadInput(f"no permission to open {device}; join its group: sudo usermod -aG video $USER")
    return device, cv2.CAP_V4L2


def _video_file(text: str, name: str) -> str:
    try:
        status = os.stat(text)
        if stat.S_ISDIR(status.st_mode):
            raise BadInput(f"{name} is a folder; a video file is needed")
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{name} is not a regular file; a video file is needed")
        if status.st_size == 0:
            raise BadInput(f"{name} has 0 bytes; a video file is needed")
        with open(text, "rb"):
            pass
    except FileNotFoundError:
        raise BadInput(f"no such file: {name}") from None
    except PermissionError:
        raise BadInput(f"no permission to read {name}; check its owner and mode (ls -l)") from None
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {name}: {getattr(e, 'strerror', None) or e}") from None
    # Absolute, so that FFmpeg never takes a name such as "concat:a" for a protocol.
    return os.path.abspath(text)
