"""What `hawker agent --check` finds beyond a file's words: with it an agent that begins anew would be no more."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.agent.test_proxy_settings import BROKER, read

from hawker.agent.running import check
from hawker.errors import Invalid


@pytest.mark.parametrize(
    ("roles", "field"),
    [
        ('[proxy]\nengine = "haproxy"\nhaproxy = { program = "no-such" }\n', "proxy.haproxy.program"),
        ('[proxy]\nengine = "haproxy"\nhaproxy = { directory = "/tmp/%s" }\n' % ("x" * 99), "proxy.haproxy.directory"),
        ('[proxy]\nembedded = { access_log = "/no/such/log" }\n', "proxy.embedded.access_log"),
        ('[proxy]\ncertificates = "/no/such/directory"\n', "proxy.certificates"),
        ('[proxy]\ntraces = "collector:4318"\n', "proxy.traces"),
        ('[catalog]\nadvertise = "no-such.invalid:4281"\n', "catalog.advertise"),
    ],
)
def test_it_finds_what_is_not_there(tmp_path: Path, roles: str, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        check(read(tmp_path, BROKER + roles))
    assert caught.value.field == field


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_it_finds_addresses_that_somebody_else_has(tmp_path: Path, host: str) -> None:
    """Whose agent asks may have them itself, under that name or another."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        settings = read(tmp_path, f'[broker]\nlisten = "{host}:{port}"\nworkers = ["a@ord=127.0.0.1:1"]\n')
        with pytest.raises(Invalid, match="in use") as caught:
            check(settings, [("127.0.0.1", port + 1)])
        assert caught.value.field == "broker.listen"
        for held in ("127.0.0.1", "0.0.0.0", host):
            check(settings, [(held, port)])
        check(settings)  # an operator asks, beside the agent that has it
