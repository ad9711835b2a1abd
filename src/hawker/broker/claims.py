"""Idempotency keys: the same key never makes two machines, whichever brokers it reaches.

Brokers share no state, so a key needs a place that decides. That is the key's *arbiter*, one worker of the fleet
(`core.rendezvous`), the same for every broker that knows the same workers. Before an order with a key is confirmed, its
broker claims the key there, durably, for that order; of two that race one gets the claim and the other gives its
reservation back. A claim whose order came to nothing may be replaced, after the worker that held it has said so.

A worker that joins the fleet takes over some keys, so a claim is also looked for on the arbiters before it.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from hawker.broker.fleet import Fleet, PeerError, WorkerLink, ask_each
from hawker.core import rendezvous
from hawker.errors import Conflict, Unreachable
from hawker.host import Host
from hawker.model.machine_calls import ShowMachine
from hawker.model.market import CALL_S, ClaimKey, FindFate
from hawker.model.request_codec import encode
from hawker.model.rows import ClaimRow


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a key so far: its machine's JSON, or the order whose claim may be replaced ("" for none)."""

    machine: bytes = b""
    worker: str = ""
    order: str = ""


class Claims:
    """Looks up and takes claims on their arbiters."""

    def __init__(self, fleet: Fleet, host: Host) -> None:
        self._fleet = fleet
        self._host = host

    async def look(self, owner: str, app: str, key: str, *, without: str = "") -> Known:
        """A key names one order for ever: a machine that its owner has destroyed since is still the answer, as it is.
        `without`: a worker that is no arbiter for this key, since the key is about its silence.

        Raises `Conflict` while another order with this key is in progress, `Unreachable` when nobody can tell.
        """
        claim_id = claim_key(owner, app, key)
        claim = await self._found(claim_id, without)
        if claim is None:
            return Known()
        link = self._fleet.links.get(claim.worker)
        if link is None:
            raise Unreachable(f"the key was used on worker {claim.worker}, which is not in this broker's list")
        fate = (await link.send(FindFate(key=claim.order))).fate
        if fate == "held":
            raise Conflict("an order with this idempotency key is in progress; ask again with the same key")
        if fate in ("released", "unknown"):
            return Known(order=claim.order)
        try:
            machine = await link.send_unread(encode(ShowMachine(app, fate)), CALL_S)
        except PeerError as error:
            raise Conflict(f"the machine of this idempotency key cannot be read: {error.message}") from error
        return Known(machine=machine, worker=link.name)

    async def take(
        self, owner: str, app: str, key: str, worker: str, order: str, replaces: str, *, without: str = ""
    ) -> bool:
        """Claim a key for an order that is reserved. Returns whether that order has it now. Raises `Unreachable` when
        the arbiter does not answer."""
        claim_id = claim_key(owner, app, key)
        request = ClaimKey(id=claim_id, worker=worker, order=order, replaces=replaces)
        claim = await self._arbiters(claim_id, without)[0].send(request)
        return claim is not None and claim.order == order

    async def _found(self, claim_id: str, without: str) -> ClaimRow | None:
        """The claim in force. The arbiter must answer. An earlier arbiter that is gone has taken its claims along."""
        first, *others = self._arbiters(claim_id, without)
        request = ClaimKey(id=claim_id)
        if claim := await first.send(request):
            return claim
        answers, _ = await ask_each(others, request)
        return next(filter(None, answers.values()), None)

    def _arbiters(self, claim_id: str, without: str) -> list[WorkerLink]:
        """The arbiter, then the workers that were the arbiter before others joined. Raises `Unreachable` when no worker
        is known."""
        settled = self._fleet.settled(self._host.now_ms())
        names = rendezvous.ranked(claim_id, [name for name in settled if name != without])
        if not names:
            raise Unreachable("no worker is known that could decide about the key", hint="hawker members")
        return [self._fleet.links[name] for name in names[: rendezvous.LOOKED_AT]]


def claim_key(owner: str, app: str, key: str) -> str:
    """A key belongs to an owner and an app. The same text from another owner, or for another app, is another key."""
    return blake2b("\0".join((owner, app, key)).encode(), digest_size=16).hexdigest()
