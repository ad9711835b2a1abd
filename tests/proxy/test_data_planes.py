"""Data planes are chosen by name; other packages bring theirs."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from tests.kit.fleets import REGION, Fleet
from tests.kit.raw_http import Upstream, User, hello

from hawker.errors import Invalid
from hawker.host import live
from hawker.proxy import planes
from hawker.proxy.service import Proxy, check
from hawker.proxy.settings import ProxySettings

TOY = """
from hawker.errors import Invalid
from hawker.proxy.planes import EMBEDDED

class Toy:
    made = []

    def check(self, settings, files):
        if not settings.domain.endswith(".toy"):
            raise Invalid("proxy.domain", settings.domain, "toys have names below .toy")

    def make(self, parts):
        self.made.append(parts)
        return EMBEDDED.make(parts)

    async def end_left(self, settings, files): ...

FACTORY = Toy()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_plane.py").write_text(TOY)
    at = tmp_path / "toy-1.dist-info"
    at.mkdir()
    (at / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (at / "entry_points.txt").write_text("[hawker.data_planes]\ntoy = toy_plane:FACTORY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_plane", raising=False)


@pytest.mark.usefixtures("installed")
async def test_another_package_brings_a_data_plane_by_an_entry_point(tmp_path: Path) -> None:
    settings = ProxySettings(listen={"80": "127.0.0.1:0"}, domain="apps.toy", engine="toy")
    settings.check()
    check(settings, tmp_path)
    fleet, upstream = Fleet(tmp_path), Upstream(hello)
    await upstream.open()
    proxy = await Proxy.open(settings, fleet.replica, live(), region=REGION, token="secret")
    try:
        user = await User.at(proxy.listening[80])
        assert (await user.ask("GET / | Host: web.apps.toy")).status == 404
        await user.close()
        assert [parts.proxy for parts in sys.modules["toy_plane"].FACTORY.made] == [settings]
    finally:
        await proxy.close()
        await upstream.close()


@pytest.mark.usefixtures("installed")
def test_it_says_itself_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"proxy\.domain"):
        check(ProxySettings(engine="toy", domain="apps.example"), tmp_path)


@pytest.mark.usefixtures("installed")
def test_one_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(Invalid, match=r'proxy\.engine: "envoy" .*embedded or haproxy or toy'):
        ProxySettings(engine="envoy").check()


@pytest.mark.usefixtures("installed")
def test_hawkers_own_names_stay_its_own(tmp_path: Path) -> None:
    (tmp_path / "toy-1.dist-info" / "entry_points.txt").write_text(
        "[hawker.data_planes]\nembedded = toy_plane:FACTORY\n"
    )
    assert planes.factory("embedded") is planes.EMBEDDED


def test_the_ones_of_pyproject_are_hawkers_own() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, at in project["entry-points"]["hawker.data_planes"].items():
        module, _, attribute = at.partition(":")
        assert getattr(import_module(module), attribute) is planes.factory(name)
