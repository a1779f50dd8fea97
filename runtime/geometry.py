"""How an image is fitted into a network's input, as numbers that map boxes there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from .boxes import Boxes, Region, Size, Space


@dataclass(frozen=True)
class Letterbox:
    """An image resized into a network input, with padding where the shapes differ.

    The image is resized to ``resized`` and its top left corner is put at ``(pad_left, pad_top)``.
    The scale of each axis is the one that the rounded size really has: with one nominal scale,
    boxes at the far edge of a large photo would be off by several pixels.

    Attributes:
        source: ``(width, height)`` of the image before, in its pixels.
        network: ``(width, height)`` of the network input, in its pixels.
        resized: ``(width, height)`` of the image inside the network input.
        pad_left: Network-input pixels left of the image.
        pad_top: Network-input pixels above it.
        region: When the image is a crop or tile: the part of the original frame that it shows.
        origin_size: ``(width, height)`` of that original frame; set exactly when ``region`` is.
    """

    source: Size
    network: Size
    resized: Size
    pad_left: int = 0
    pad_top: int = 0
    region: Region | None = None
    origin_size: Size | None = None

    def __post_init__(self) -> None:
        for name in ("source", "network", "resized"):
            w, h = getattr(self, name)
            if w <= 0 or h <= 0:
                raise ValueError(f"{name} is {w} x {h}; both sides must be positive")
        if (self.region is None) != (self.origin_size is None):
            raise ValueError("region and origin_size belong together: give both or neither")
        fits = (
            0 <= self.pad_left <= self.network[0] - self.resized[0]
            and 0 <= self.pad_top <= self.network[1] - self.resized[1]
        )
        if not fits:
            raise ValueError(f"{self.resized} at ({self.pad_left}, {self.pad_top}) leaves {self.network}")

    @classmethod
    def fit(
        cls,
        source: Size,
        network: Size,
        center: bool = True,
        enlarge: bool = True,
        region: Region | None = None,
        origin_size: Size | None = None,
    ) -> Letterbox:
        """The largest fit that keeps the aspect ratio, to the nearest pixel.

        Args:
            center: Pad both sides alike; False puts the image in the top left corner (YOLOX does).
            enlarge: Whether an image smaller than the network input grows.
        """
        scale = min(network[0] / source[0], network[1] / source[1])
        if not enlarge:
            scale = min(scale, 1.0)
        w = min(max(round(source[0] * scale), 1), network[0])
        h = min(max(round(source[1] * scale), 1), network[1])
        left, top = ((network[0] - w) // 2, (network[1] - h) // 2) if center else (0, 0)
        return cls(source, network, (w, h), left, top, region, origin_size)

    @classmethod
    def stretch(
        cls,
        source: Size,
        network: Size,
        region: Region | None = None,
        origin_size: Size | None = None,
    ) -> Letterbox:
        """A plain resize to the whole network input, without padding."""
        return cls(source, network, network, 0, 0, region, origin_size)

    @property
    def scale(self) -> tuple[float, float]:
        """Network-input pixels for each pixel of the image, along x and y."""
        return self.resized[0] / self.source[0], self.resized[1] / self.source[1]

    @property
    def shown(self) -> Region:
        """What the whole network input covers, in pixels of the image; padding lies outside it."""
        sx, sy = self.scale
        return Region(-self.pad_left / sx, -self.pad_top / sy, self.network[0] / sx, self.network[1] / sy)

    def forward(self, boxes: Boxes) -> Boxes:
        """Boxes of the image on the network input, in its pixels; they remember the original frame.

        Raises:
            ValueError: ``boxes`` live on another image than this letterbox was made for.
        """
        expected = Boxes.empty(self.source, region=self.region, origin_size=self.origin_size)
        expected._check_same_image(boxes, "letterbox")
        return boxes.to(Space.PIXEL).in_region(self._shown_of_original(), self.network)

    def backward(
        self,
        xyxy: ArrayLike,
        scores: ArrayLike | None = None,
        classes: ArrayLike | None = None,
        names: Sequence[str] | None = None,
    ) -> Boxes:
        """A network's N x 4 boxes, in its input pixels, as boxes in pixels of the original.

        Without ``region`` the image is the original frame. Not clipped.
        """
        origin = self.source if self.origin_size is None else self.origin_size
        return Boxes(
            xyxy,
            Space.PIXEL,
            self.network,
            self._shown_of_original(),
            origin,
            scores,
            classes,
            names,
        ).to_original()

    def _shown_of_original(self) -> Region:
        s, r = self.shown, self.region
        if r is None:
            return s
        kx, ky = r.width / self.source[0], r.height / self.source[1]
        return Region(r.x + s.x * kx, r.y + s.y * ky, s.width * kx, s.height * ky)
