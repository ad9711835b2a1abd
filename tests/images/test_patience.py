"""What a registry that means harm may take of a host: little time, little memory, and nobody else's turn."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.kit.front import Front, hold
from tests.kit.images import images, opened, plain_image
from tests.kit.registry import DockerRegistry, front, put, registry
from tests.kit.waiting import until

from hawker.errors import Unreachable
from hawker.images.auth import TOKEN_BYTES_MAX, TOKENS_MAX, Tokens, read_token
from hawker.images.http import considerate

__all__ = ["front", "images", "registry"]


async def test_a_registry_that_stalls_takes_no_other_s_turn(
    front: Front, registry: DockerRegistry, tmp_path: Path
) -> None:
    stuck, fine = plain_image(), plain_image(b"fine" * (128 << 10))
    reference = await put(front.host, "stuck:1", stuck)
    gate = asyncio.Event()
    front.spoil(stuck.layers[0].digest, hold(gate, after=1000))
    async with Front(registry.port) as other, opened(tmp_path / "images", parallel=1) as images:
        waiting = asyncio.ensure_future(images.ensure(reference))
        await until(lambda: bool(front.asked(stuck.layers[0].digest)))
        assert (await images.ensure(await put(other.host, "fine:1", fine))).digest == fine.digest
        assert not waiting.done()
        gate.set()
        await waiting


async def test_a_registry_whose_answer_never_begins_is_given_up(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not over.is_set() and not writer.transport.is_closing():
            writer.write(b"x")
            await asyncio.wait([ending], timeout=0.02)
        writer.close()

    ending = asyncio.ensure_future(over.wait())
    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, opened(tmp_path / "images", attempts=2, read_timeout_s=0.1) as images:
        with pytest.raises(Unreachable, match="did not begin to answer within"):
            await images.ensure(f"{host}/slow:1")
        over.set()
        await ending


ASKING = """
import asyncio, socket, sys, threading
from pathlib import Path
from tests.kit.images import opened

code, directory = int(sys.argv[1]), Path(sys.argv[2])
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))

def answer():
    while True:
        asked, whence = server.recvfrom(512)
        server.sendto(asked[:2] + bytes((0x81, 0x80 | code)) + asked[4:6] + bytes(6) + asked[12:], whence)

async def ask():
    async with opened(directory / "images", attempts=2) as images:
        try:
            await images.ensure("registry.example/shop:1")
        except Exception as error:
            print(type(error).__name__, error)

threading.Thread(target=answer, daemon=True).start()
asyncio.run(ask())
"""
"""Asks for an image where the only name server is this program's own, which says `code` (RFC 1035, 4.1.1)."""
NAME_ERROR, SERVER_FAILURE = 3, 2
ALONE = 'ip link set lo up && mount --bind "$1" /etc/resolv.conf && shift && exec "$@"'


@pytest.mark.root
@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (NAME_ERROR, "ImageError", "Name or service not known"),
        (SERVER_FAILURE, "Unreachable", "Temporary failure in name resolution"),
    ],
    ids=["unknown", "failing"],
)
def test_a_name_that_name_servers_do_not_know_is_final_and_a_failure_of_theirs_is_not(
    code: int, error: str, said: str, tmp_path: Path
) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions attempts:1\n")
    argv = ["unshare", "--mount", "--net", "sh", "-c", ALONE, "sh", str(resolver)]
    asking = [sys.executable, "-c", ASKING, str(code), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*argv, *asking], capture_output=True, text=True, env=environment)
    name, _, why = done.stdout.partition(" ")
    assert (name, said in why) == (error, True), done


async def test_tiny_pieces_leave_others_their_turn() -> None:
    async def tiny() -> AsyncGenerator[bytes, None]:
        for _ in range(6400):
            yield b"x"

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    assert len(b"".join([piece async for piece in considerate(tiny())])) == 6400
    task.cancel()
    assert turns >= 90


def test_of_tokens_the_newest_are_kept_and_none_that_is_endless() -> None:
    tokens = Tokens()
    for number in range(TOKENS_MAX + 10):
        tokens.put("https://r.example", str(number), "Bearer x", 100.0)
    assert tokens.get("https://r.example", "9", 0.0) is None
    assert tokens.get("https://r.example", "10", 0.0) == "Bearer x"
    assert read_token(b'{"token":"%s"}' % (b"x" * TOKEN_BYTES_MAX)) is not None
    assert read_token(b'{"token":"%s"}' % (b"x" * (TOKEN_BYTES_MAX + 1))) is None
