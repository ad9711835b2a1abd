"""A machine that notes what it gets, and strict readers of it: h11, and llhttp."""

from __future__ import annotations

import asyncio

import h11
import httptools

from bench.torture_suites import Asked

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Link:
    """A connection to the machine, with what came on it during one case."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self.requests: list[Asked] = []
        self.pending = False
        self.closed = False
        self.problem = ""


class Machine:
    """Takes what h11 takes, and answers it with nothing. `requests`: those of one case, as they came; `fields`: each
    one's."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.requests: list[Asked] = []
        self.fields: list[set[tuple[bytes, bytes]]] = []
        self.address = ("127.0.0.1", 0)
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self) -> None:
        """Forget what came until now."""
        self.links = [link for link in self.links if not link.closed]
        self.requests.clear()
        self.fields.clear()
        for link in self.links:
            link.raw.clear()
            link.requests.clear()

    def misread(self) -> str:
        """How the readers of what came differ, or that some of it is no request to one of them; "": they agree."""
        for link in self.links:
            other = Reader(bytes(link.raw))
            problem = link.problem or other.problem
            if not problem and not other.silent and other.requests != [asked[1:] for asked in link.requests]:
                problem = f"h11 reads {link.requests}, llhttp {other.requests}"
            if not problem and link.pending and not link.closed:
                problem = "half a request stays with the machine"
            if problem:
                return f"{problem}: {bytes(link.raw[:300])!r}"
        return ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = Link()
        self.links.append(link)
        left = b""
        try:
            while True:
                events = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
                if left:
                    events.receive_data(left)
                if not await self._request(link, events, reader):
                    break
                writer.write(ANSWER)
                left = events.trailing_data[0]
        except h11.RemoteProtocolError as error:
            if not str(error).startswith("peer closed connection without"):
                link.problem = f"h11: {error}"
        except (ConnectionError, asyncio.CancelledError):
            pass  # the proxy gives a request up
        finally:
            self._tasks.discard(task)
            link.closed = True
            writer.close()

    async def _request(self, link: Link, events: h11.Connection, reader: asyncio.StreamReader) -> bool:
        head: h11.Request | None = None
        body = b""
        while True:
            event = events.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(1 << 16)
                link.raw += data
                link.pending = bool(data)
                events.receive_data(data)
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                asked = Asked(head.method.decode(), head.target.decode("latin-1"), body)
                link.requests.append(asked)
                self.requests.append(asked)
                self.fields.append(set(head.headers))
                link.pending = False
                return True
            else:
                return False


class Reader:
    """Targets and bodies of the requests that llhttp reads. `silent`: one has a method that it does not know."""

    def __init__(self, raw: bytes) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.problem = ""
        self.silent = False
        self._parser: httptools.HttpRequestParser
        while raw:
            self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(raw)
                break
            except httptools.HttpParserUpgrade as end:
                raw = raw[end.args[0] :]  # nobody has agreed to that
            except httptools.HttpParserError as error:
                if str(error).startswith(("Invalid method", "Expected space after method")):
                    self.silent = True
                else:
                    self.problem = f"llhttp: {error}"
                break

    def on_message_begin(self) -> None:
        self._target = self._body = b""

    def on_url(self, target: bytes) -> None:
        self._target += target

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.requests.append((self._target.decode("latin-1"), self._body))


def by_h11(raw: bytes) -> list[tuple[str, bytes]] | None:
    """Targets and bodies of the requests that h11 reads, None: it refuses."""
    requests: list[tuple[str, bytes]] = []
    while raw:
        events = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        events.receive_data(raw)
        target, body = "", b""
        try:
            while not isinstance(event := events.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    target = event.target.decode("latin-1")
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return requests
        except h11.RemoteProtocolError:
            return None
        requests.append((target, body))
        raw = events.trailing_data[0]
    return requests
