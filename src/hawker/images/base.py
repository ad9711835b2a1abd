"""What drivers and the worker ask of a host's images. `hawker.images.service.Images` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from hawker.model.image import Image


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """What it would take to run an image here: the bytes of its layers that are not here, less what a fetch that runs
    has brought already, and how long their transfer is expected to take. `known` False: nobody here knows the image
    yet, so `bytes` is 0 and says nothing."""

    known: bool
    bytes: int = 0
    transfer_ms: int = 0


class ImageSource(Protocol):
    """A host's images, by reference (`registry/repository:tag`, `...@sha256:...`) or digest."""

    async def ensure(self, reference: str) -> Image:
        """Have it fetched, checked and unpacked. At once when it is here: a tag means what it meant when it was
        fetched, `pull` asks again. However many ask, each blob is fetched and unpacked once.

        Raises `errors.ImageError` (final), `errors.Unreachable` (may be had later), `errors.DiskFull`."""

    def find(self, reference: str) -> Image | None:
        """What `ensure` would give at once; None when something is missing."""

    def layers(self, image: Image) -> Sequence[Path]:
        """The unpacked trees of its layers for overlayfs, the topmost first. They are not to be written to."""

    def missing(self, reference: str) -> Missing:
        """What is missing here. Answers from memory, because every offer asks this."""

    def hold(self, holder: str, digest: str) -> None:
        """Keep an image from garbage collection while a machine or a reservation needs it; `holder` names which. One
        holder holds one image: holding another releases the first. Holds do not outlast a restart: after opening, the
        worker holds the image of each of its machines again and calls `collect` only then."""

    def release(self, holder: str) -> None:
        """Unknown holder: success."""
