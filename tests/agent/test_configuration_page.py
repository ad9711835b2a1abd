"""docs/configuration.md has every setting that an agent reads, with its default."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hawker.agent.settings import AgentSettings, BrokerRole, CatalogSettings, TokenSettings, WorkerRole, read_settings
from hawker.images.settings import ImageSettings, RegistrySettings
from hawker.network.base import Settings as NetworkSettings
from hawker.proxy.embedded.settings import Settings as EmbeddedSettings
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.settings import AcmeSettings, ProxySettings, RouterSettings

PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
TABLES: dict[str, type[msgspec.Struct]] = {
    "": AgentSettings,
    "tokens": TokenSettings,
    "worker": WorkerRole,
    "worker.network": NetworkSettings,
    "images": ImageSettings,
    'images.registries."registry.example:5000"': RegistrySettings,
    "broker": BrokerRole,
    "proxy": ProxySettings,
    "proxy.acme": AcmeSettings,
    "proxy.routing": RouterSettings,
    "proxy.embedded": EmbeddedSettings,
    "proxy.haproxy": HaproxySettings,
    "catalog": CatalogSettings,
}
NOT_SAID = {
    "": set(TABLES),  # tables, by their headings
    "worker": {"network", "settings"},
    "proxy": {"acme", "routing", "embedded", "haproxy"},
    "proxy.embedded": {"region", "token", "name", "trusted", "proxy_protocol"},  # the agent fills them in
    "images": {"registries"},
    "catalog": {"settings"},
    "tokens": {"users"},
}
EXAMPLES = {
    "proxy.backhaul",
    *(f'images.registries."registry.example:5000".{field}' for field in ("username", "password", "insecure")),
}


def file() -> str:
    found = re.search(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def settings(text: str) -> Iterator[tuple[str, str, str]]:
    """Table, name and value of each line, also of those behind `#`."""
    table = ""
    for line in text.splitlines():
        if heading := re.match(r"(?:# )?\[(.+?)\](?: |$)", line):
            table = heading[1]
        elif line and (setting := re.match(r"(?:# )?(\w+) = (.*?)(?:\s+#.*)?$", line)):
            yield table, setting[1], "" if line.startswith("#") else setting[2]


def test_an_agent_reads_the_page_as_it_stands_and_with_all_its_examples(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    for text in file(), re.sub(r"^# (?=\w+ = |\[)", "", file(), flags=re.MULTILINE):
        config.write_text(text)
        assert read_settings(config).name == "ord-1"


def test_each_setting_is_there_once_and_has_its_default() -> None:
    told: dict[str, dict[str, str]] = {table: {} for table in TABLES}
    for table, name, value in settings(file()):
        if table in told:
            assert name not in told[table], f"{table}.{name} is there twice"
            told[table][name] = value
    for table, kind in TABLES.items():
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        assert set(told[table]) == set(fields) - NOT_SAID.get(table, set()), f"[{table}] of docs/configuration.md"
        for name, value in told[table].items():
            if value and not fields[name].required and f"{table}.{name}" not in EXAMPLES:
                assert tomllib.loads(f"it = {value}")["it"] == default(fields[name]), f"{table}.{name}"


def default(field: msgspec.structs.FieldInfo) -> Any:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return list(value) if isinstance(value, tuple) else value
