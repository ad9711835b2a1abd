"""Pebble, the ACME server that Let's Encrypt made for tests, with a name server that says 127.0.0.1 to every name."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.authority import Authority
from tests.kit.doors import free_port
from tests.kit.waiting import wait_until


class Pebble:
    """`directory` is its URL, `ca` a file with the authority that its own certificate is from, `trusted` clients that
    trust what it issues."""

    def __init__(self, directory: str, ca: Path, root_url: str) -> None:
        self.directory = directory
        self.ca = ca
        self._root_url = root_url

    def trusted(self, *alpn: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with urllib.request.urlopen(self._root_url, context=ssl.create_default_context(cafile=self.ca)) as root:
            context.load_verify_locations(cadata=root.read().decode())
        if alpn:
            context.set_alpn_protocols(alpn)
        return context


@contextmanager
def running_pebble(directory: Path, http_port: int) -> Iterator[Pebble]:
    """It looks for answers to HTTP-01 at this port."""
    authority = Authority()
    authority.write(directory, "localhost")
    (directory / "ca.pem").write_text(authority.pem)
    api, management, dns, dns_management = (free_port() for _ in range(4))
    config = {
        "listenAddress": f"127.0.0.1:{api}",
        "managementListenAddress": f"127.0.0.1:{management}",
        "certificate": str(directory / "localhost.crt"),
        "privateKey": str(directory / "localhost.key"),
        "httpPort": http_port,
        "tlsPort": free_port(),
    }
    (directory / "pebble.json").write_text(json.dumps({"pebble": config}))
    names = ("-defaultIPv4", "127.0.0.1", "-defaultIPv6", "", "-dns01", f"127.0.0.1:{dns}")
    nothing = [part for name in ("-http01", "-https01", "-tlsalpn01") for part in (name, "")]
    commands = (
        ("pebble-challtestsrv", *names, *nothing, "-management", f"127.0.0.1:{dns_management}"),
        ("pebble", "-config", str(directory / "pebble.json"), "-dnsserver", f"127.0.0.1:{dns}"),
    )
    environment = {**os.environ, "PEBBLE_VA_NOSLEEP": "1", "PEBBLE_AUTHZREUSE": "0"}
    with (directory / "pebble.log").open("wb") as log:
        processes = [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            for command in commands
        ]
    url = f"https://localhost:{api}/dir"
    try:
        trusted = ssl.create_default_context(cafile=directory / "ca.pem")

        def answers() -> bool:
            try:
                with urllib.request.urlopen(url, context=trusted):
                    return True
            except OSError:
                return False

        wait_until(answers, "Pebble answers")
        yield Pebble(url, directory / "ca.pem", f"https://localhost:{management}/roots/0")
    finally:
        for process in processes:
            process.kill()
            process.wait()
