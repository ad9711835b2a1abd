"""What a broker has heard of images: what one is made of, and which workers seem to have it. Hints are kept a short
time; what a worker lacks it says itself.

What an image is made of comes with the first offer of a worker that has it. The asks of the next minute carry it, so
that workers which have never heard of the image can say what they lack of it (decision record 14).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from hawker.broker.directory import Directory
from hawker.core.sketch import short
from hawker.host import clock_s
from hawker.model.market import Offer, Parts
from hawker.model.values import is_host_image

KEPT_S = 60.0
"""How long a hint is kept: a tag may mean another image tomorrow."""
REMEMBERED = 1000
LAYERS_MOST = 150
"""An image with more layers is not described to workers: that would make every ask large. Builders stop at 127."""


class ImageHints:
    """The hints of one broker. `directory` tells of the workers of its own region."""

    def __init__(self, directory: Directory | None = None) -> None:
        self._directory = directory
        self._parts: OrderedDict[str, tuple[float, Parts]] = OrderedDict()

    def parts(self, image: str) -> Parts | None:
        """What the image is made of, as a worker said a short while ago."""
        heard = self._parts.get(image)
        if heard is None or clock_s() > heard[0]:
            return None
        return heard[1]

    def heard(self, image: str, offers: Iterable[Offer]) -> None:
        for offer in offers:
            if offer.image_parts is not None and len(offer.image_parts.layers) <= LAYERS_MOST:
                self._parts[image] = clock_s() + KEPT_S, offer.image_parts
                self._parts.move_to_end(image)
                if len(self._parts) > REMEMBERED:
                    self._parts.popitem(last=False)
                return

    def holders(self, region: str, image: str) -> Collection[str]:
        """Workers of a region that are said to have the image; none are known of another region than the own."""
        if self._directory is None or is_host_image(image):
            return ()
        held = self._directory.image_holders(region)
        parts = self.parts(image)
        return held.get(short(image), frozenset()) | (held.get(short(parts.digest), frozenset()) if parts else set())
