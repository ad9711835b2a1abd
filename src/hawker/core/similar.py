"""The images that somebody may have meant who named one that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from hawker.model.values import ImageRef

SHOWN_MOST = 5
_DOCKER = ImageRef("any").registry
_USUAL = (f"{_DOCKER}/library/", f"{_DOCKER}/")


def similar_images(image: str, known: Iterable[str]) -> list[str]:
    """Other tags of its repository, wherever they are from, or else images with a name that is spelled much like it;
    in the short form that people write. Empty if the very image is there."""
    wanted = ImageRef(image)
    refs = {str(ref): ref for ref in map(ImageRef, known) if ref.tag}
    if str(wanted) in refs:
        return []
    last = _last(wanted)
    names = {_last(ref) for ref in refs.values()}
    meant = {last} if last in names else set(get_close_matches(last, sorted(names), n=2))
    found = sorted((ref.registry != wanted.registry, text) for text, ref in refs.items() if _last(ref) in meant)
    return [_short(text) for _, text in found][:SHOWN_MOST]


def _last(ref: ImageRef) -> str:
    return ref.repository.rpartition("/")[2]


def _short(text: str) -> str:
    return next((text.removeprefix(usual) for usual in _USUAL if text.startswith(usual)), text)
