"""Certificates by ACME: ordered when a name has none, renewed in time, kept in files, never in the way of requests.

    issuer = Issuer(settings, directory, host, certificates, token=..., domain="apps.example", turn=...)
    await issuer.open()
    await issuer.want("web.apps.example")       # until its order is done, or was tried in vain
    issuer.answer("web.apps.example", b"/.well-known/acme-challenge/...")
    await issuer.close()

All proxies of a cluster have one account: its key is made from the cluster's token. The answer to an HTTP-01 challenge
is made of that key alone, so whichever proxy the server asks can give it. Each proxy has certificates of its own, since
their keys go over no wire. Those that are named, and renewals, come in turns: for each name the proxies have an order,
and one begins `TURN_S` after the one before. A name that a user asks for is ordered at once, where it is asked for.

A certificate that was made for an app goes when the app has been gone for a while, with its private key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from hawker.errors import Invalid
from hawker.host import Host
from hawker.proxy.acme_order import Done, Task
from hawker.proxy.certificates import Certificate, Certificates
from hawker.proxy.settings import NAME, AcmeSettings
from hawker.telemetry import get_logger

CHALLENGE = b"/.well-known/acme-challenge/"
TURN_S = 60.0
LOOK_S = 30.0
GONE_S = 3600.0
"""How long an app has been gone when its certificate goes: one that is made anew soon need not order another, of which
there are few a week."""
ORDER_S = 180.0
"""How long an order may take. The library waits for a server's decision for one and a half minutes."""
AT_ONCE = 2
BACK_OFF_S = (60, 300, 1_800, 7_200, 21_600, 86_400)
"""How long a name is left alone after its first failure, and after the next ones: fewer tries than the five an hour
that Let's Encrypt takes."""

_TOKEN = re.compile(rb"[A-Za-z0-9_-]{16,256}")
_ORDER_OF_P256 = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Issuer:
    """`problems` tell by name why orders failed."""

    def __init__(
        self,
        settings: AcmeSettings,
        directory: Path,
        host: Host,
        certificates: Certificates,
        *,
        token: str,
        domain: str,
        turn: Callable[[str], int],
        gone: Callable[[Collection[str]], Collection[str]] = lambda apps: (),
        look_s: float = LOOK_S,
        gone_s: float = GONE_S,
    ) -> None:
        """`directory` is the issuer's, `live` below it that of its certificates. `turn` says how many proxies come
        before this one for a name. `gone`: of these apps, those that are known not to be there."""
        self.live = directory / "live"
        self.problems: dict[str, str] = {}
        self._settings = settings
        self._directory = directory
        self._host = host
        self._certificates = certificates
        self._token = token
        self._suffix = f".{domain}"
        self._turn = turn
        self._gone = gone
        self._look_s = look_s
        self._gone_s = gone_s
        self._account: ec.EllipticCurvePrivateKey
        self._thumbprint = b""
        self._names: dict[str, int] = {}  # since when each is known, Unix milliseconds; 0: order it at once
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}  # by the loop's clock
        self._gone_since: dict[str, float] = {}  # names, of the loop's clock
        self._orders: dict[str, asyncio.Task[None]] = {}
        self._recent: deque[float] = deque()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises `OSError` when its directory cannot be written."""
        self._account = await asyncio.to_thread(self._account_key)
        self._thumbprint = thumbprint(self._account)
        now = self._host.now_ms()
        self._names |= dict.fromkeys(self._settings.names, now)
        if self._settings.automatic:
            kept = [path.name for path in self.live.iterdir()] if self.live.exists() else []
            self._names |= {name: now for name in kept if self.manages(name)}
        self._task = asyncio.create_task(self._run(), name="acme")

    async def close(self) -> None:
        tasks = [*self._orders.values(), *([self._task] if self._task else [])]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def manages(self, name: str) -> bool:
        return name in self._settings.names or (self._settings.automatic and bool(self._app_of(name)))

    def _app_of(self, name: str) -> str:
        """The app that has this name, whether there is one or not; "": it is no app's."""
        below = name.removesuffix(self._suffix) if name.endswith(self._suffix) else ""
        return below if "." not in below and NAME.fullmatch(name) is not None else ""

    def answer(self, host: str, target: bytes) -> bytes | None:
        """The answer to a request over plain HTTP that is a challenge of an ACME server; None: it is no challenge."""
        token = target.removeprefix(CHALLENGE)
        if token == target or _TOKEN.fullmatch(token) is None or not self.manages(host):
            return None
        return token + b"." + self._thumbprint

    async def want(self, name: str) -> None:
        """A user asks for this name, and there is no certificate. Returns once its order is over, one way or
        another."""
        if self._task is None or not self.manages(name) or self._covered(name):
            return
        self._names[name] = 0
        order = self._orders.get(name) or self._begin(name)
        if order is not None:
            await asyncio.wait((order,))

    # --- when --------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._forget()
                for name in list(self._names):
                    if name not in self._orders:
                        self._begin(name)
            except Exception:  # without this loop nothing is renewed
                _logger.exception("acme.fault", cause="a fault of ours")
            try:
                async with asyncio.timeout(self._look_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    def _begin(self, name: str) -> asyncio.Task[None] | None:
        """Order a certificate for this name, if it is time."""
        now = asyncio.get_running_loop().time()
        if self._host.now_ms() < self._due_ms(name) or now < self._not_before.get(name, 0.0):
            return None
        while self._recent and self._recent[0] <= now - 3600:
            self._recent.popleft()
        if len(self._recent) >= self._settings.orders_per_hour:
            self.problems[name] = "there were as many orders in this hour as the settings allow"
            return None
        self._recent.append(now)
        order = self._orders[name] = asyncio.create_task(self._order(name), name=f"order {name}")
        order.add_done_callback(lambda _: self._orders.pop(name, None))
        return order

    def _due_ms(self, name: str) -> int:
        """A certificate is renewed two thirds into its life. One that no user asked for is renewed when it is this
        proxy's turn."""
        own = self._own(name)
        if own is None and self._covered(name):
            return 1 << 62  # somebody put a certificate there by hand
        since = self._names[name]
        at = since if own is None else own.begins_ms + (own.ends_ms - own.begins_ms) * 2 // 3
        if at:
            at += round(self._turn(name) * TURN_S * 1000)
        return at

    def _own(self, name: str) -> Certificate | None:
        return next((each for each in self._certificates.all if each.name == name and name in each.names), None)

    def _covered(self, name: str) -> bool:
        return self._certificates.covers(name)

    async def _forget(self) -> None:
        """The names of apps that have been gone for long, with all that is kept of them."""
        now = asyncio.get_running_loop().time()
        apps = {self._app_of(name): name for name in self._names if name not in self._settings.names}
        lost = [apps[app] for app in self._gone(apps)]
        self._gone_since = {name: self._gone_since.get(name, now) for name in lost}
        over = [name for name in lost if now - self._gone_since[name] >= self._gone_s and name not in self._orders]
        for name in over:
            for kept in (self._names, self._gone_since, self.problems, self._failures, self._not_before):
                kept.pop(name, None)
            try:
                await asyncio.to_thread(self._remove, name)
            except OSError as error:
                self._names[name] = self._host.now_ms()  # once more
                self.problems[name] = f"its app is gone, and its certificate cannot be removed: {error}"
                continue
            _logger.info("acme.removed", name=name, cause="its app is gone")
        if over:
            await self._certificates.look()

    # --- and how -----------------------------------------------------------------------------------------------------

    async def _order(self, name: str) -> None:
        async with self._slots:
            key = _pem(ec.generate_private_key(ec.SECP256R1()))
            settings = self._settings
            task = Task(
                directory=settings.directory,
                names=[name],
                account=_pem(self._account),
                key=key,
                contact=settings.contact,
                ca=settings.ca,
            )
            try:
                done = await _run_order(task)
                if not done.error:
                    await asyncio.to_thread(self._keep, name, done.chain, key)
                    await self._certificates.look()
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                done = Done(error=f"what came cannot be kept: {error}")
        if not done.error:
            _logger.info("acme.issued", name=name, cause="an order")
            for kept in (self.problems, self._failures, self._not_before):
                kept.pop(name, None)
            return
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        step = len(BACK_OFF_S) if done.limited else failures
        wait_s = BACK_OFF_S[min(step, len(BACK_OFF_S)) - 1] * (1 + self._host.rng.random() / 4)
        self._not_before[name] = asyncio.get_running_loop().time() + wait_s
        self.problems[name] = f"no certificate by ACME: {done.error}"
        _logger.warning("acme.failed", name=name, error=done.error, again_s=round(wait_s), cause="an order")

    def _keep(self, name: str, chain: str, key: str) -> None:
        """A link to a new directory takes the old one's place in one step, whenever this is cut off."""
        Certificate(name, chain.encode(), key.encode())
        versions = self._directory / "versions"
        for directory in (versions, self.live):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = versions / f"{name}.{self._host.ulid()}"
        made.mkdir(mode=0o700)
        for file, text in (("fullchain.pem", chain), ("privkey.pem", key)):
            _write(made / file, text)
        link = versions / f"{made.name}.link"
        link.symlink_to(Path("..") / "versions" / made.name)
        os.replace(link, self.live / name)
        for old in versions.glob(f"{name}.??????????????????????????"):
            if old != made:
                shutil.rmtree(old, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Create the link that others read first. The issuer leaves alone what is not as `_keep` makes it: somebody
        else put it there."""
        if not (self.live / name).is_symlink():
            return
        (self.live / name).unlink()
        for old in (self._directory / "versions").glob(f"{name}.??????????????????????????"):
            shutil.rmtree(old)

    def _account_key(self) -> ec.EllipticCurvePrivateKey:
        """The account's key is made of the cluster's token. Without a token the key is in a file."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._token:
            about = b"hawker: account at " + self._settings.directory.encode()
            seed = HKDF(hashes.SHA256(), 48, None, about).derive(self._token.encode())
            return ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER_OF_P256 - 1) + 1, ec.SECP256R1())
        path = self._directory / "account.pem"
        if not path.exists():
            new = path.with_suffix(".new")
            _write(new, _pem(ec.generate_private_key(ec.SECP256R1())))
            os.replace(new, path)
        key = load_pem_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise Invalid("proxy.acme", str(path), "the account's key is of another kind; remove the file")
        return key


def thumbprint(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The thumbprint of the key's public half (RFC 7638)."""
    numbers = key.public_key().public_numbers()
    x, y = (_base64(number.to_bytes(32, "big")).decode() for number in (numbers.x, numbers.y))
    text = f'{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}'
    return _base64(hashlib.sha256(text.encode()).digest())


async def _run_order(task: Task) -> Done:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "hawker.proxy.acme_order"), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(ORDER_S):
            out, err = await process.communicate(msgspec.json.encode(task))
    except TimeoutError:
        return Done(error=f"the server took longer than {ORDER_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        return Done(error=f"the program for orders failed: {err.decode(errors='replace')[-500:]}")
    return msgspec.json.decode(out, type=Done)


def _write(path: Path, text: str) -> None:
    """Write a file to the disk that its owner alone may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


_logger = get_logger()
