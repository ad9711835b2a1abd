"""What of nftables is there, as the product's own library reads it."""

from __future__ import annotations

from hawker.network import ruleset
from hawker.network.base import NetworkError
from hawker.network.nft import Library


def filters(prefix: str) -> list[str]:
    """Tables of nftables whose names begin so, and their elements."""
    try:
        library = Library()
    except OSError:
        return []
    found = []
    try:
        for each in library.run('{"nftables": [{"list": {"tables": null}}]}'):
            table = each.get("table")
            if not (table and table["name"].startswith(prefix)):
                continue
            family, name = table["family"], table["name"]
            found.append(f"table {family} {name}")
            for item in library.run(f"list table {family} {name}"):
                for it in (item.get("set") or item.get("map") or {}).get("elem", ()) if _of_machines(item) else ():
                    found.append(f"element {family} {name} {it}")
    except NetworkError:  # no nftables in this kernel, no right to it, or a table that has just gone
        return found
    finally:
        library.close()
    return found


def _of_machines(item: dict[str, dict[str, str]]) -> bool:
    shown = item.get("set") or item.get("map") or {}
    return shown.get("name") in ruleset.DYNAMIC
