"""Where a registry is reached: the origin of its requests, and where it may lead us.

We talk in the clear (plain HTTP) only to loopback and to hosts that the configuration allows by name. Nothing falls
back to plain HTTP, and no redirect or token server leads to it, nor from elsewhere to this host's own services.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import msgspec

from hawker.errors import ImageError
from hawker.images.settings import ImageSettings

if TYPE_CHECKING:
    import httpx2


class Endpoint(msgspec.Struct, frozen=True):
    """A registry or mirror as it is reached: `origin` such as `https://ghcr.io`, `prefix` before each repository, and
    the `host` that credentials are kept for."""

    origin: str
    host: str
    prefix: str = ""

    def path(self, repository: str, rest: str) -> str:
        return f"/v2/{self.prefix}{repository}/{rest}"


def is_loopback(host: str) -> bool:
    """Whether a name or address (without port) is this host. All addresses of the loopback networks count, and the
    names that RFC 6761 reserves for loopback."""
    host = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def url_of(text: str) -> httpx2.URL:
    import httpx2

    return httpx2.URL(text)


def endpoint(settings: ImageSettings, host: str) -> Endpoint:
    """The endpoint of `host`, `host:port` or, for mirrors, `host/prefix`."""
    host, _, prefix = host.partition("/")
    scheme = "http" if _may_be_plain(settings, host) else "https"
    return Endpoint(origin_of(url_of(f"{scheme}://{host}")), host, f"{prefix.strip('/')}/" if prefix else "")


def _may_be_plain(settings: ImageSettings, host: str) -> bool:
    said = settings.registry(host).insecure
    return is_loopback(url_of(f"//{host}").host) if said is None else said


def host_of(url: httpx2.URL) -> str:
    name = f"[{url.host}]" if ":" in url.host else url.host
    return f"{name}:{url.port}" if url.port is not None else name


def origin_of(url: httpx2.URL) -> str:
    return f"{url.scheme}://{host_of(url)}"


def check_leads(settings: ImageSettings, image: str, to: Endpoint, url: httpx2.URL) -> httpx2.URL:
    """Where a registry may send us, for a blob or a token. Raises `ImageError`."""
    local = is_loopback(url.host)
    if url.scheme not in ("http", "https"):
        raise ImageError(image, f"{to.host} leads to {url.scheme or 'no'}://, which is not followed")
    if local and not is_loopback(url_of(to.origin).host):
        raise ImageError(image, f"{to.host} leads to this host's own {host_of(url)}, which is not followed")
    if url.scheme == "http" and not local and not settings.registry(host_of(url)).insecure:
        raise ImageError(
            image,
            f"{to.host} leads to {host_of(url)} by plain HTTP, which is not followed",
            hint=f'to allow it, set insecure = true in [images.registries."{host_of(url)}"]',
        )
    return url
