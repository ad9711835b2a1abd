"""A host's images: what is here, what it means, what is kept and what goes."""

from __future__ import annotations

from tests.kit.images import have, images
from tests.kit.oci import file, image, layer, tree_of, whiteout

from hawker.images.service import Images

__all__ = ["images"]


async def test_an_image_that_is_here_is_found_by_name_and_by_digest(images: Images) -> None:
    made = image([layer([file("a", b"1"), file("b", b"2")]), layer([whiteout("a"), file("c", b"3")], "zstd")])
    kept = await have(images, made, "web:1")
    assert kept.digest == made.digest
    assert images.find("web:1") == images.find("docker.io/library/web:1") == images.find(made.digest) == kept
    assert images.find("web:2") is None
    top, bottom = images.layers(kept)
    assert tree_of(bottom) == {"a": "f644 1", "b": "f644 2"}
    assert tree_of(top) == {"a": "20000 0 0", "c": "f644 3"}
