"""One order of a certificate by ACME (RFC 8555), as a program of its own: `python -m hawker.proxy.acme_order`.

It reads what to do as JSON from its standard input, and writes the outcome as JSON. So certbot's libraries, which wait
for answers and take memory, stay out of the process that serves users' requests, and an order that hangs can be ended.
Whoever serves the name on port 80 answers the challenge: with the account's key that takes no word between the two.
"""

from __future__ import annotations

import sys

import msgspec

TRIES = 3
"""Servers may refuse a good nonce (RFC 8555, 6.5). The library asks once more by itself, and no more than once."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """`directory` is the server's URL, `ca` a file with the authorities that vouch for it, "" for the system's. Keys
    are PEM. Whoever runs this program has agreed to the server's terms."""

    directory: str
    names: list[str]
    account: str
    key: str
    contact: str = ""
    ca: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate and those above it as PEM; or the reason why there is none, and whether the server said that this
    was one request too many."""

    chain: str = ""
    error: str = ""
    limited: bool = False


def ordered(task: Task) -> str:
    """Returns the chain as PEM. Raises whatever the libraries raise."""
    from acme import challenges, client, crypto_util, messages
    from acme.errors import ConflictError
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from josepy.jwa import ES256
    from josepy.jwk import JWKEC

    key = JWKEC(key=load_pem_private_key(task.account.encode(), None))
    trusted: bool = task.ca or True  # type: ignore[assignment]  # requests takes a file as well
    net = client.ClientNetwork(key, alg=ES256, verify_ssl=trusted, user_agent="hawker")
    server = client.ClientV2(client.ClientV2.get_directory(task.directory, net), net)
    terms = messages.NewRegistration.from_data(email=task.contact or None, terms_of_service_agreed=True)
    try:
        server.new_account(terms)
    except ConflictError as known:
        here = messages.RegistrationResource(uri=known.location, body=messages.Registration())
        net.account = server.query_registration(here)
    order = server.new_order(crypto_util.make_csr(task.key.encode(), task.names))
    for authorization in order.authorizations:
        if authorization.body.status == messages.STATUS_VALID:
            continue
        for offered in authorization.body.challenges:
            if isinstance(offered.chall, challenges.HTTP01):
                server.answer_challenge(offered, offered.response(key))
                break
        else:
            raise ValueError(f"the server offers no HTTP-01 for {authorization.body.identifier.value}")
    return str(server.poll_and_finalize(order).fullchain_pem)


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    for _ in range(TRIES):
        try:
            done = Done(chain=ordered(task))
        except Exception as error:  # each is told of where the order came from
            text = _explained(error)
            done = Done(error=text, limited="rateLimited" in text)
        if "badNonce" not in done.error:
            break
    sys.stdout.buffer.write(msgspec.json.encode(done))


def _explained(error: Exception) -> str:
    failed = getattr(error, "failed_authzrs", None)
    if failed:
        return "; ".join(
            f"{each.body.identifier.value}: {challenge.error}"
            for each in failed
            for challenge in each.body.challenges
            if challenge.error is not None
        )
    return f"{error}" or type(error).__name__


if __name__ == "__main__":
    main()
