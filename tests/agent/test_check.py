"""What `hawker agent --check` finds beyond a file's words: with it an agent that begins anew would be no more."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent.test_proxy_settings import BROKER, WORKER, read

import hawker
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


PROXY = '[proxy]\nlisten = { "80" = "127.0.0.1:1" }\n'


@pytest.mark.parametrize(
    ("text", "module"),
    [
        (BROKER, "broker/api.py"),
        (BROKER, "catalog/gossip/node.py"),
        (BROKER + PROXY, "proxy/service.py"),
        (WORKER, "worker/daemon.py"),
        (WORKER + 'drivers = ["process"]\n', "worker/drivers/process.py"),
        (WORKER + 'drivers = ["container"]\n', "worker/drivers/container/driver.py"),
        (WORKER + 'drivers = ["microvm"]\n', "worker/drivers/microvm/driver.py"),
        (WORKER + 'drivers = ["container"]\n', "network/manager.py"),
    ],
)
def test_it_finds_a_module_of_each_role_that_cannot_be_imported(tmp_path: Path, text: str, module: str) -> None:
    """As half an installation leaves it: the agent that serves would end for a program that cannot start."""
    package = tmp_path / "hawker"
    shutil.copytree(Path(hawker.__file__).parent, package, copy_function=os.symlink)
    (package / module).unlink()
    (package / module).write_text("def broken(:\n")
    read(tmp_path, text)
    command = (sys.executable, "-m", "hawker", "agent", "--config", tmp_path / "agent.toml", "--check")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert f"SyntaxError: invalid syntax ({Path(module).name}" in done.stderr


def test_it_finds_a_driver_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="there is no such driver") as caught:
        check(read(tmp_path, WORKER + 'drivers = ["submarine"]\n'))
    assert caught.value.field == "worker.drivers"


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
