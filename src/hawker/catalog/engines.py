"""Finds the catalog's engine by its name: the built-in one, or another package's entry point `hawker.catalogs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hawker.catalog.base import Catalog, MakeCatalog, Site
from hawker.errors import Invalid
from hawker.plugins import installed

GROUP = "hawker.catalogs"
GOSSIP = "gossip"


def make(engine: str, site: Site) -> Catalog:
    """Raises `Invalid` for an engine that does not exist or does not take its settings."""
    maker = load(engine)
    try:
        return maker(site)
    except TypeError as error:
        remedy = f"the engine {engine} does not take this: {error}"
        raise Invalid(f"catalog.{engine}", dict(site.settings), remedy) from error


def load(engine: str) -> MakeCatalog:
    """Import an engine. Raises `Invalid` when there is none of this name."""
    if engine == GOSSIP:
        from hawker.catalog.gossip.node import Node

        return Node
    others: Mapping[str, Any] = installed(GROUP, (GOSSIP,))
    if engine not in others:
        raise Invalid("catalog.engine", engine, f"there is no such engine; there are {', '.join((GOSSIP, *others))}")
    return cast(MakeCatalog, others[engine].load())
