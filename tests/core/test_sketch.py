"""A sketch tells in a few bytes which images a worker has, and is bounded however many there are."""

from __future__ import annotations

import msgspec
import pytest
from tests.kit.shelves import an_image

from hawker.catalog.tables.schema import TEXT_MOST
from hawker.core.sketch import LAYERS_MOST, NAMES_MOST, short, sketch


@pytest.mark.parametrize("name", ["nginx", "nginx:latest", "docker.io/nginx", "index.docker.io/library/nginx:latest"])
def test_every_way_to_write_a_reference_has_one_hash(name: str) -> None:
    assert short(name) == short("docker.io/library/nginx:latest")
    assert short(name) != short("docker.io/library/nginx:1")


def test_a_sketch_tells_references_manifests_and_layers() -> None:
    image = an_image(("base", 1000), ("app", 10))
    made = sketch([(("shop:1", "shop:2"), image)])
    assert {short("shop:1"), short("shop:2"), short(image.digest)} == set(made.names)
    assert {short(layer.digest) for layer in image.layers} == set(made.layers)


def test_the_order_in_which_images_were_used_changes_nothing_while_all_fit() -> None:
    one, two = (("a",), an_image(("a", 1))), (("b",), an_image(("b", 1)))
    assert sketch([one, two]) == sketch([two, one])


def test_of_more_images_than_fit_it_tells_those_used_last_and_fits_in_a_row() -> None:
    images = [((f"shop:{n}",), an_image(*((f"{n}/{m}", 1) for m in range(4)))) for n in range(500)]
    made = sketch(images)
    assert (len(made.names), len(made.layers)) == (NAMES_MOST, LAYERS_MOST)
    assert short("shop:0") in made.names
    assert short("shop:499") not in made.names
    assert all(len(msgspec.json.encode(part)) <= TEXT_MOST for part in (made.names, made.layers))
