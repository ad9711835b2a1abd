"""MicroVMs in their apps' networks, on a host and an internet in network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Opened, opened, spec
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.site import HOST6, INTERNET4, PORT, Site, Try
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import microvms, warmed
from tests.kit.waiting import eventually

from hawker.worker.drivers.base import InstanceSpec, Network, Port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.usefixtures("guests"),
    pytest.mark.skipif(bool(missing_for_namespaces()), reason=missing_for_namespaces()),
]


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site


def server(driver: Opened, number: int, host: int, publish: tuple[Port, ...] = ()) -> InstanceSpec:
    """A web server that says its host's name, in the network of this number."""
    address = f"fdaa:0:{number:x}:0:1:0:{host:x}:2"
    script = f"mkdir /www; hostname > /www/index.html; exec busybox httpd -f -p [::]:{PORT} -h /www"
    network = Network(number=number, address=address, publish=publish)
    return replace(driver.shell(script), hostname=f"m{number}{host}", network=network)


async def asked(driver: Opened, one: InstanceSpec, address: str, port: int = PORT) -> str:
    """What a machine gets from a web server, "" for nothing."""
    ask = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 3 busybox nc {address} {port} | tail -n 1"
    done = await driver.driver.exec(one.key, ["sh", "-c", ask], timeout_s=10)
    return done.stdout.decode().strip()


def answering(site: Site, where: str) -> None:
    """Something there that answers whoever connects."""
    listener = site.listen(where)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                there, _ = listener.accept()
                with there:
                    there.sendall(b"nobody home\n")

    threading.Thread(target=answer, daemon=True).start()


def address(one: InstanceSpec) -> str:
    assert one.network is not None
    return one.network.address


def test_machines_of_an_app_reach_each_other_and_nobody_elses(site: Site, tmp_path: Path) -> None:
    network = site.worker("first")
    answering(site, "internet")

    async def main() -> None:
        images = UnpackedImages(tmp_path / "images")
        made = microvms(tmp_path / "driver", images, network=network)
        async with opened(made, "busybox", images.add) as driver:
            await warmed(made, tmp_path / "driver", spec().limits, network=True)
            published = (Port(protocol="tcp", internal_port=PORT, host_port=8001),)
            one, two, other = server(driver, 7, 1, published), server(driver, 7, 2), server(driver, 8, 3)
            for each in (one, two, other):
                await driver.driver.start(each)

            async def serves() -> bool:
                return await asked(driver, one, "::1") == "m71" and await asked(driver, one, address(two)) == "m72"

            await eventually(serves, "a neighbour of the same app is reached")
            assert await asked(driver, two, address(one)) == "m71"
            forbidden = [(other, address(one)), (one, address(other)), (one, HOST6)]
            got = await asyncio.gather(*(asked(driver, by, where) for by, where in forbidden))
            assert got == ["", "", ""]
            attached = network.plan(made._guests[one.key].record.wanted)  # type: ignore[arg-type]
            shown = await driver.driver.exec(one.key, ["cat", "/etc/resolv.conf"], timeout_s=10)
            assert shown.stdout.decode() == f"nameserver {attached.resolver}\n"
            assert await asked(driver, one, INTERNET4) == "nobody home"

            tried = Try("internet", "203.0.113.1", 8001)
            assert site.reached([tried]) == {tried}, "its published port leads to it"

            await driver.suspending.suspend(one.key)
            assert attached.interface not in devices(site)
            await driver.suspending.resume(one.key)
            assert await asked(driver, two, address(one)) == "m71"

            for each in (one, two, other):
                await driver.driver.destroy(each.key, force=True)
            assert [name for name in devices(site) if name.startswith("hk")] == []

    site.run(main())


def devices(site: Site) -> set[str]:
    return {line.split(": ")[1].split("@")[0] for line in site.ip("host", "-o link show").splitlines()}
