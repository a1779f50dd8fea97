"""What is where: detectors, depth, and how pictures go into them."""

from __future__ import annotations
