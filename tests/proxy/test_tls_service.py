"""A whole proxy with certificates: from its settings to an app that speaks TLS."""

from __future__ import annotations

from pathlib import Path

from tests.kit.authority import Authority
from tests.kit.doors import TOKEN, free_port, house
from tests.kit.http2 import User2
from tests.kit.raw_http import User
from tests.kit.waiting import until

import hawker.host
from hawker.proxy.service import Proxy
from hawker.proxy.settings import ProxySettings

PORTS = [{"port": 80, "handlers": ["http"], "force_https": True}, {"port": 443, "handlers": ["tls", "http"]}]


async def test_an_app_that_sleeps_is_woken_over_tls_and_http2(tmp_path: Path) -> None:
    authority = Authority()
    authority.write(tmp_path / "certificates", "web.localhost", days=10)
    own = free_port()
    settings = ProxySettings(
        listen={"80": "127.0.0.1:0", "443": "127.0.0.1:0"},
        certificates=str(tmp_path / "certificates"),
        tcp="127.0.0.1",
    )
    async with house(tmp_path) as it:
        await it.machine("web", service={"ports": [*PORTS, {"port": own, "handlers": ["tls"]}]})
        assert it.agent.catalog is not None
        proxy = await Proxy.open(settings, it.agent.catalog.view, hawker.host.live(), region="ord", token=TOKEN)
        try:
            user2 = await User2.at(proxy.listening[443], authority.client("h2"), "web.localhost")
            assert (await user2.ask("GET / | :authority: web.localhost")).body == b"ok"
            await user2.close()
            user = await User.at(proxy.listening[80])
            answer = await user.ask("GET /a | Host: web.localhost")
            assert (answer.status, answer["location"]) == (301, "https://web.localhost/a")
            await user.close()
            ports = proxy.ports
            assert ports is not None
            await until(lambda: own in ports.opened)
            user = await User.at(ports.opened[own], "", authority.client(), "web.localhost")
            assert (await user.ask("GET / | Host: web.localhost")).body == b"ok"
            await user.close()
            assert proxy.health().certificates == {"web.localhost": "the certificate ends in 9 days"}
        finally:
            await proxy.close()
