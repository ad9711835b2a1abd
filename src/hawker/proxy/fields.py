"""Header fields that proxies of a cluster have among themselves. What users and machines send of them is taken off."""

from __future__ import annotations

TOKEN = b"hawker-backhaul"
"""The cluster's token: without it a proxy answers nothing."""
APP = b"hawker-app"
PORT = b"hawker-port"
"""The public port."""
MACHINE = b"hawker-machine"
"""The machine that is to take the request; empty: the proxy chooses one of the region."""
ANYWHERE = MACHINE, b""
HOPS = b"hawker-hops"
"""How many proxies the request went through."""
WAIT = b"hawker-wait"
"""How long the request may be held from now on, in milliseconds: what is left of the time that the edge gives it.
Without this field the proxy that gets the request decides."""
SENT = b"hawker-sent"
"""How many machines have got something of the request and did not answer it, for the proxy that chooses the next
one."""
ELSEWHERE = b"hawker-elsewhere"
"""An answer of status 421 says with this field why the request has to go elsewhere."""
LOAD = b"hawker-load"
"""An answer says with this field what the machine has in flight, and its limits."""
TIMING = b"hawker-timing"
"""The only one of these fields that users may send: the answer then says what took how long."""
HANDED = b"hawker-handed"
"""What a machine said when it handed this request on."""
