"""How clients ask the market in a simulation: over HTTP, each time through another broker."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from hawker.client.connection import Peer
from hawker.client.wire import PeerUnreachable
from hawker.sim.clients.oracle import Oracle

ANSWER_S = 15.0
SETTLE_TRIES = 40
"""How often a call whose end matters is made again."""

_decode = msgspec.json.Decoder().decode


class Answer(msgspec.Struct, frozen=True):
    """`status` 0: none came. `sent` false: the request reached nobody. `request` is the id that it goes by in logs."""

    status: int
    body: Any = None
    sent: bool = True
    broker: str = ""
    request: str = ""

    @property
    def word(self) -> str:
        return str(self.body.get("status", "")) if isinstance(self.body, dict) else ""

    @property
    def definite(self) -> bool:
        return self.status == 200 or 400 <= self.status < 500


class Api:
    """The public API through one of several brokers, drawn anew for each request."""

    def __init__(self, brokers: Mapping[str, tuple[str, int]], token: str, rng: random.Random, oracle: Oracle) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self._peers = {name: Peer(*address, headers=headers) for name, address in brokers.items()}
        self._rng = rng
        self.oracle = oracle

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_S,
        order: bool = False,
    ) -> Answer:
        broker = self._rng.choice(sorted(self._peers))
        raw = b"" if body is None else msgspec.json.encode(body)
        self.oracle.in_flight[broker] += order
        try:
            response = await self._peers[broker].request(
                method, path, body=raw, headers=headers or {}, timeout_s=timeout_s
            )
        except PeerUnreachable as error:
            return Answer(0, broker=broker, sent=error.sent)
        finally:
            self.oracle.in_flight[broker] -= order
        request = response.headers.get("fly-request-id", "")
        try:
            body = _decode(response.body) if response.body else None
        except msgspec.DecodeError:
            body = None
        return Answer(response.status, body, broker=broker, request=request)


def machine_config(program: str, label: str, **fields: Any) -> dict[str, Any]:
    return {"image": "host", "init": {"exec": [program]}, "metadata": {"label": label}, **fields}
