"""The regions that have a name and a place on the map, by the codes the public API uses. Others may be configured."""

from __future__ import annotations

from math import asin, cos, radians, sin, sqrt

import msgspec


class Place(msgspec.Struct, frozen=True):
    """A region's city, coordinates in degrees, and continent (`geo`), which works as an alias in orders."""

    name: str
    latitude: float
    longitude: float
    geo: str


PLACES: dict[str, Place] = {
    "ams": Place("Amsterdam, Netherlands", 52.37, 4.9, "eu"),
    "arn": Place("Stockholm, Sweden", 59.65, 17.92, "eu"),
    "bom": Place("Mumbai, India", 19.08, 72.88, "apac"),
    "cdg": Place("Paris, France", 48.86, 2.35, "eu"),
    "dfw": Place("Dallas, Texas (US)", 32.78, -96.81, "na"),
    "ewr": Place("Secaucus, NJ (US)", 40.79, -74.06, "na"),
    "fra": Place("Frankfurt, Germany", 50.12, 8.68, "eu"),
    "gru": Place("Sao Paulo, Brazil", -23.55, -46.63, "sa"),
    "iad": Place("Ashburn, Virginia (US)", 39.02, -77.54, "na"),
    "jnb": Place("Johannesburg, South Africa", -26.2, 28.04, "africa"),
    "lax": Place("Los Angeles, California (US)", 33.94, -118.41, "na"),
    "lhr": Place("London, United Kingdom", 51.52, -0.14, "eu"),
    "mad": Place("Madrid, Spain", 40.42, -3.7, "eu"),
    "nrt": Place("Tokyo, Japan", 35.62, 139.75, "apac"),
    "ord": Place("Chicago, Illinois (US)", 41.88, -87.64, "na"),
    "scl": Place("Santiago, Chile", -33.45, -70.67, "sa"),
    "sin": Place("Singapore, Singapore", 1.37, 103.8, "apac"),
    "sjc": Place("San Jose, California (US)", 37.35, -121.96, "na"),
    "syd": Place("Sydney, Australia", -33.87, 151.21, "apac"),
    "yyz": Place("Toronto, Canada", 43.64, -79.39, "na"),
}

ALIASES = {"us": "na", "usa": "na"}


def place(code: str) -> Place:
    """The place of a region; one that is not on the map is called by its code and lies nowhere."""
    return PLACES.get(code, Place(code, 0.0, 0.0, ""))


def angle(one: Place, other: Place) -> float:
    """The angle between two places, seen from the centre of the earth, in radians (haversine formula)."""
    north, east = radians(other.latitude - one.latitude), radians(other.longitude - one.longitude)
    along = cos(radians(one.latitude)) * cos(radians(other.latitude)) * sin(east / 2) ** 2
    return 2 * asin(min(1.0, sqrt(sin(north / 2) ** 2 + along)))


def expand(wanted: str, regions: list[str]) -> list[str]:
    """Regions, in order of preference, that a comma list of codes and aliases (`any`, `eu`, `na`...) stands for.

    `regions` are those that exist here, nearest first. A code that does not exist is kept: the order for it is refused.
    """
    found: list[str] = []
    for part in [p.strip() for p in wanted.split(",") if p.strip()] or ["any"]:
        geo = ALIASES.get(part, part)
        if part == "any":
            found += regions
        elif geo in {p.geo for p in PLACES.values() if p.geo}:
            found += [r for r in regions if place(r).geo == geo]
        else:
            found.append(part)
    return list(dict.fromkeys(found))
