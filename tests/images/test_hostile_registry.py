"""Registries whose answers mean to break who reads them: each ends in a clear refusal, and never in a fault of ours."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from tests.kit.front import Answer, Asked, Front, Spoil, answer, cut, status
from tests.kit.images import images, plain_image
from tests.kit.registry import DockerRegistry, front, put, registry

from hawker.errors import ImageError, Unreachable
from hawker.images.service import Images

__all__ = ["front", "images", "registry"]

NO_NUMBER = ["\u00b2", "\u0663" * 3, "9" * 5000, "-1", "1e9", "0x10", " ", "NaN"]
"""The first two are digits, and int() takes none of the first; of the third it says that it is too long."""


def ranged(content_range: str) -> Spoil:
    """The answer to a request for the rest of a blob."""

    async def spoil(asked: Asked, true: Answer, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(206, true.body, {"Content-Range": content_range}))
        await writer.drain()

    return spoil


@pytest.mark.parametrize("number", NO_NUMBER)
async def test_a_patience_that_is_no_number_is_passed_over(front: Front, images: Images, number: str) -> None:
    made = plain_image()
    reference = await put(front.host, "patience:1", made)
    front.spoil("manifests/", status(503, {"Retry-After": number}), times=1)
    assert (await images.ensure(reference)).digest == made.digest
    assert len(front.asked("manifests/")) == 2


@pytest.mark.parametrize("number", NO_NUMBER)
@pytest.mark.parametrize("place", ["bytes {}-9/10", "bytes 0-9/{}", "bytes 0-{}/10"])
async def test_a_range_that_is_no_range_is_no_fault(front: Front, images: Images, number: str, place: str) -> None:
    made = plain_image()
    digest = made.layers[0].digest
    reference = await put(front.host, "range:1", made)
    front.spoil(digest, cut(after=300_000), times=1)
    front.spoil(digest, ranged(place.format(number)))
    with suppress(ImageError, Unreachable):
        assert (await images.ensure(reference)).digest == made.digest
    assert any("range" in asked.headers for asked in front.asked(digest))


@pytest.mark.parametrize(
    "location",
    [
        "https://a..b/",
        "https://" + "a" * 70 + ".example/",
        "https://[::1",
        "https://xn--/",
        "https://\u2603.example:99999/",
        "https://a:b@/",
        "//",
        "https:",
        "\\\\a\\b",
        "file:///etc/passwd",
        "https://127.0.0.1:1:2/",
        "%zz",
        "/" * 9000,
    ],
)
async def test_a_registry_that_leads_to_no_address_is_refused(front: Front, images: Images, location: str) -> None:
    made = plain_image()
    reference = await put(front.host, "leads:1", made)
    front.spoil(made.layers[0].digest, status(307, {"Location": location}))
    with pytest.raises((ImageError, Unreachable)):
        await images.ensure(reference)


@pytest.mark.parametrize("realm", ["https://a..b/", "https://[::1", "", "file:///etc/passwd", "https://" + "a" * 70])
async def test_a_token_server_that_is_no_address_is_refused(
    front: Front, images: Images, registry: DockerRegistry, realm: str
) -> None:
    reference = await put(front.host, "realm:1", plain_image())
    front.spoil("manifests/", status(401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="a"'}))
    with pytest.raises((ImageError, Unreachable)):
        await images.ensure(reference)
