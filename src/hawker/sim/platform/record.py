"""What happened in a simulation, in order: a digest over all of it, and the last events to look at.

Two runs are the same run when their digests are equal. Every delivery, commit and outside effect is noted with its
time, its node and its content. What is noted must not depend on a hash seed, an address in memory or a real clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b

SHOWN = 120  # characters of an event's content


class Record:
    """`now` gives the virtual time. `count` is the number of events so far, `kinds` how many of each kind.

    `tell`, when set, is called with the number and the text of every event: that is a trace.
    """

    def __init__(self, now: Callable[[], float], *, kept: int = 200) -> None:
        self._now = now
        self._hash = blake2b(digest_size=16)
        self._last: deque[tuple[int, float, str, str, bytes]] = deque(maxlen=kept)
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.tell: Callable[[int, str], None] | None = None

    def note(self, kind: str, node: str, what: str | bytes = b"") -> None:
        """`kind` is one word, `node` whom it happened to."""
        now = self._now()
        raw = what.encode() if isinstance(what, str) else what
        self._hash.update(b"%.9f %b %b %d " % (now, kind.encode(), node.encode(), len(raw)))
        self._hash.update(raw)
        self.count += 1
        self.kinds[kind] += 1
        self._last.append((self.count, now, kind, node, raw))
        if self.tell:
            self.tell(self.count, _line(now, kind, node, raw))

    def digest(self) -> str:
        return self._hash.hexdigest()

    def last(self) -> list[str]:
        """The last events, oldest first, each led by its number."""
        return [f"{number} {_line(at_s, kind, node, raw)}" for number, at_s, kind, node, raw in self._last]


def _line(at_s: float, kind: str, node: str, raw: bytes) -> str:
    text = raw[: 4 * SHOWN].decode(errors="replace")
    text = "".join(c if c.isprintable() else "." for c in text)
    if len(text) > SHOWN:
        text = f"{text[:SHOWN]}... ({len(raw)} bytes)"
    return f"{at_s:.6f} {node} {kind} {text}".rstrip()
