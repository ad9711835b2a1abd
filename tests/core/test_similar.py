"""Which images somebody may have meant: other tags first, then names that are spelled much like it."""

from __future__ import annotations

import pytest

from hawker.core.similar import SHOWN_MOST, similar_images

HERE = ["docker.io/library/shop:1", "docker.io/library/shop:2", "docker.io/acme/nginx:1.27", "r.example:5000/shop:3"]


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("shop:9", ["shop:1", "shop:2", "r.example:5000/shop:3"]),
        ("r.example:5000/shop", ["r.example:5000/shop:3", "shop:1", "shop:2"]),
        ("shopp:1", ["shop:1", "shop:2", "r.example:5000/shop:3"]),
        ("nginx", ["acme/nginx:1.27"]),
        ("postgres:17", []),
        ("shop:2", []),
    ],
)
def test_what_is_there_and_much_like_it_is_named_as_people_write_it(wanted: str, meant: list[str]) -> None:
    assert similar_images(wanted, HERE) == meant


def test_of_many_some_are_named() -> None:
    assert len(similar_images("shop:x", [f"shop:{n}" for n in range(100)])) == SHOWN_MOST
    assert similar_images("shop:x", ["shop@sha256:" + "0" * 64]) == []
