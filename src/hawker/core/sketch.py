"""A sketch of the images that a worker has: short hashes of their names and layers, for guesses.

A reader asks the worker before it relies on a match, so a hash that stands for something else (one in four thousand
million) costs only a question that is answered with no. A sketch is bounded: it names the images that were used last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from hawker.model.image import Image
from hawker.model.values import ImageRef

NAMES_MOST = 192
LAYERS_MOST = 256
"""Hashes in a sketch, 11 characters each as they travel: both stay below what a column of the catalog may have."""


class Sketch(msgspec.Struct, frozen=True):
    """`names`: of references and manifests; `layers`: of layers. Sorted, so that the same set is the same sketch."""

    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


def short(name: str) -> str:
    """Eight hexadecimal digits that stand for a digest or a reference. All ways to write one reference give the
    same."""
    return blake2b(str(ImageRef(name)).encode(), digest_size=4).hexdigest()


def sketch(images: Iterable[tuple[Sequence[str], Image]]) -> Sketch:
    """Sketch the images, each given with its references, the one used last first."""
    names: dict[str, None] = {}
    layers: dict[str, None] = {}
    for references, image in images:
        for name in (image.digest, *references):
            if len(names) < NAMES_MOST:
                names[short(name)] = None
        for layer in image.layers:
            if len(layers) < LAYERS_MOST:
                layers[short(layer.digest)] = None
    return Sketch(tuple(sorted(names)), tuple(sorted(layers)))
