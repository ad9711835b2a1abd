"""What a reference means: by what is known here, by what other workers say, or by what its registry answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from hawker.errors import HawkerError
from hawker.images.known import Known, Names
from hawker.images.pull import Pulls, key_of
from hawker.model.values import ImageRef, is_digest
from hawker.telemetry import get_logger

DESCRIBED_MAX = 1000
"""Images that are known and not here: a few kilobytes each."""

Namer = Callable[[str], Awaitable[str | None]]
"""Somebody who may know what a name means: the digest of its manifest, or None."""


class References:
    """`names` are of the images that are here, `namers` are asked before a registry is."""

    def __init__(self, names: Names, pulls: Pulls, namers: Sequence[Namer]) -> None:
        self._names = names
        self._pulls = pulls
        self._namers = namers
        self._described: dict[str, Known] = {}

    def known(self, reference: str) -> Known | None:
        """An image that is here, wholly or in part."""
        if is_digest(reference):
            return self._names.get(reference)
        ref = ImageRef(reference)
        found = self._names.named(key_of(ref))
        return found or (self._names.get(ref.digest) if ref.digest else None)

    def known_or_described(self, reference: str) -> Known | None:
        key = reference if is_digest(reference) else key_of(ImageRef(reference))
        return self.known(reference) or self._described.get(key)

    async def describe(self, reference: str) -> Known:
        """As `Images.describe`."""
        known = self.known(reference)
        if known is None:
            known = await self.resolve(reference, fresh=False)
            self._described[name_of(reference)] = known
            while len(self._described) > DESCRIBED_MAX:
                del self._described[next(iter(self._described))]
        return known

    def are_here(self, names: Iterable[str]) -> None:
        """Forget the descriptions of these references: their images are here now."""
        for name in names:
            self._described.pop(name, None)

    async def resolve(self, reference: str, *, fresh: bool) -> Known:
        """`fresh` asks the registry. Raises what that does, and `Invalid` for what is no reference."""
        if is_digest(reference):
            known = self._names.get(reference)
            return known or await self._pulls.resolve(None, reference)
        known = None if fresh else self.known(reference) or await self._told(reference)
        return known or await self._pulls.resolve(ImageRef.checked(reference))

    async def _told(self, reference: str) -> Known | None:
        """What another worker knows by this name: a region needs no registry, and a name means the same all over it."""
        ref = ImageRef.checked(reference)
        if ref.digest:
            return None  # that says it all
        for namer in list(self._namers):
            try:
                if (digest := await namer(name_of(reference))) is not None:
                    return await self._pulls.resolve(ref, digest)
            except HawkerError as error:
                _logger.info("image.name_not_followed", image=reference, problem=error.message)
        return None


def name_of(reference: str) -> str:
    """A digest as it is, a name in full. Raises `Invalid`."""
    return reference if is_digest(reference) else key_of(ImageRef.checked(reference))


_logger = get_logger()
