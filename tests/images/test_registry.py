"""Images from registries: what Debian's docker-registry serves, who may have it, and who is asked in the clear.

Each ends in the right tree, or in a clear refusal with nothing left. What goes wrong on the way is in `test_transfers`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx2
import pytest
from tests.kit.front import Front, redirect, status
from tests.kit.images import images, left, opened, plain_image, settings
from tests.kit.oci import Made, directory, file, image, index, layer, opaque, tree_of, whiteout
from tests.kit.registry import (
    HTPASSWD,
    IDENTITY,
    PASSWORD,
    USER,
    DockerRegistry,
    TokenServer,
    front,
    put,
    registry,
    write_tls,
)

from hawker.errors import ImageError, ImageNotFound, Unreachable
from hawker.images.endpoint import check_leads, endpoint
from hawker.images.service import Images
from hawker.images.settings import RegistrySettings
from hawker.model.image import Platform

__all__ = ["front", "images", "registry"]

# What there is


async def test_layers_of_every_compression_with_whiteouts_become_trees(
    registry: DockerRegistry, images: Images
) -> None:
    made = image(
        [
            layer([directory("etc"), file("etc/a", b"1"), file("etc/b", b"2"), directory("d"), file("d/old")], "gzip"),
            layer([whiteout("etc/a"), file("etc/c", b"3")], "zstd"),
            layer([opaque("d"), file("d/new", b"4")], ""),
        ],
        {
            "Cmd": ["/bin/x"],
            "Env": ["A=1", "broken"],
            "User": "1000",
            "StopSignal": "SIGINT",
            "ExposedPorts": {"80/tcp": {}},
        },
    )
    reference = await put(registry.host, "layers:1", made)
    kept = await images.ensure(reference)
    assert kept.digest == made.digest
    assert kept.config.cmd == ("/bin/x",)
    assert kept.config.env == ("A=1",)
    assert (kept.config.user, kept.config.stop_signal, kept.config.exposed) == ("1000", "SIGINT", ("80/tcp",))
    top, middle, bottom = (tree_of(tree) for tree in images.layers(kept))
    assert bottom == {"etc": "d755", "etc/a": "f644 1", "etc/b": "f644 2", "d": "d755", "d/old": "f644 "}
    assert middle == {"etc": "d755", "etc/a": "20000 0 0", "etc/c": "f644 3"}
    assert top == {"d": "d755", "d/new": "f644 4"}


async def test_docker_s_own_media_types_are_the_same_to_us(registry: DockerRegistry, images: Images) -> None:
    made = image([layer([file("a", b"1")], docker=True)], docker=True)
    listed = index([(made, {"os": "linux", "architecture": "amd64"})], docker=True)
    reference = await put(registry.host, "docker:1", listed)
    assert (await images.ensure(reference)).digest == made.digest


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (Platform(architecture="amd64"), "amd64"),
        (Platform(architecture="arm64", variant="v8"), "arm64"),
        (Platform(architecture="arm", variant="v7"), "armv6"),
    ],
)
async def test_of_an_index_the_image_for_this_platform_is_fetched(
    registry: DockerRegistry, tmp_path: Path, platform: Platform, expected: str
) -> None:
    def of(name: str, architecture: str, variant: str = "") -> tuple[Made, dict[str, str]]:
        made = image([layer([file("which", name.encode())])], architecture=architecture, variant=variant)
        return made, {"os": "linux", "architecture": architecture, **({"variant": variant} if variant else {})}

    attestation = image([layer([file("x")])], architecture="unknown", os="unknown")
    made = index(
        [
            (attestation, {"os": "unknown", "architecture": "unknown"}),
            of("armv6", "arm", "v6"),
            of("armv8", "arm", "v8"),
            of("arm64", "arm64", "v8"),
            of("amd64", "amd64"),
        ]
    )
    reference = await put(registry.host, "platforms:1", made)
    async with opened(tmp_path / "images", platform=platform) as images:
        kept = await images.ensure(reference)
        assert (images.layers(kept)[0] / "which").read_text() == expected
        assert images.find(f"{reference.rpartition(':')[0]}@{made.digest}") is None  # asked for by tag alone
        assert await images.ensure(f"{reference.rpartition(':')[0]}@{made.digest}") == kept


async def test_an_image_for_other_platforms_alone_is_refused_and_they_are_named(
    registry: DockerRegistry, images: Images
) -> None:
    made = image([layer([file("a")])], architecture="arm64", variant="v8")
    reference = await put(registry.host, "foreign:1", index([(made, {"os": "linux", "architecture": "arm64"})]))
    with pytest.raises(ImageError, match="not there for linux/amd64; its platforms: linux/arm64"):
        await images.ensure(reference)
    reference = await put(registry.host, "foreign:2", made)
    with pytest.raises(ImageError, match="made for linux/arm64/v8, and this worker is linux/amd64"):
        await images.ensure(reference)
    assert left(images) == []


async def test_an_image_that_is_not_there_is_not_found(registry: DockerRegistry, images: Images) -> None:
    with pytest.raises(ImageNotFound, match="manifest unknown"):
        await images.ensure(f"{registry.host}/nothing:1")


async def test_a_tag_means_what_it_meant_until_pull_asks_again(front: Front, images: Images) -> None:
    old, new = image([layer([file("a", b"1")])]), image([layer([file("a", b"2")])])
    reference = await put(front.host, "moving:1", old)
    assert (await images.ensure(reference)).digest == old.digest
    await put(front.host, "moving:1", new)
    asked = len(front.requests)
    assert (await images.ensure(reference)).digest == old.digest
    assert len(front.requests) == asked
    assert (await images.pull(reference)).digest == new.digest
    assert (await images.ensure(reference)).digest == new.digest
    assert images.find(old.digest) is not None


async def test_an_image_may_be_described_without_fetching_its_layers(front: Front, images: Images) -> None:
    made = plain_image()
    reference = await put(front.host, "described:1", made)
    assert not images.missing(reference).known
    assert (await images.describe(reference)).digest == made.digest
    missing = images.missing(reference)
    assert (missing.known, missing.bytes) == (True, len(made.layers[0].blob))
    assert missing.transfer_ms > 0
    assert front.asked(made.layers[0].digest) == []
    await images.ensure(reference)
    assert images.missing(reference).bytes == 0


# Who may


async def test_a_token_is_asked_for_once_and_only_with_the_credentials_given(tmp_path: Path) -> None:
    async with TokenServer(tmp_path) as tokens:
        registry = DockerRegistry(tmp_path / "registry", tokens.auth)
        registry.start()
        try:
            made = image([layer([file("a", b"1")]), layer([file("b", b"2")])])
            pushed = {"Authorization": f"Bearer {tokens.token(['repository:private/app:pull,push'])}"}
            reference = await put(registry.host, "private/app:1", made, pushed)
            async with opened(tmp_path / "none") as images:
                with pytest.raises(ImageError, match="which refuses one"):
                    await images.ensure(reference)
                assert left(images) == []
            credentials = {registry.host: RegistrySettings(username=USER, password=PASSWORD)}
            async with opened(tmp_path / "some", registries=credentials) as images:
                assert (await images.ensure(reference)).digest == made.digest
            assert tokens.granted == 1
            assert tokens.asked[-1] == {"service": ["registry.test"], "scope": ["repository:private/app:pull"]}
        finally:
            registry.stop()


async def test_a_token_that_has_expired_for_the_registry_is_asked_for_anew(tmp_path: Path) -> None:
    async with TokenServer(tmp_path, lasts_s=300) as tokens:
        registry = DockerRegistry(tmp_path / "registry", tokens.auth)
        registry.start()
        try:
            made = plain_image()
            pushed = {"Authorization": f"Bearer {tokens.token(['repository:app:pull,push'])}"}
            async with Front(registry.port) as front:
                reference = await put(front.host, "app:1", made, pushed)
                challenge = f'Bearer realm="{tokens.realm}",service="registry.test",scope="repository:app:pull"'
                front.spoil(made.layers[0].digest, status(401, {"WWW-Authenticate": challenge}), times=1)
                credentials = {front.host: RegistrySettings(username=USER, password=PASSWORD)}
                async with opened(tmp_path / "images", registries=credentials) as images:
                    await images.ensure(reference)
            assert tokens.granted == 2
        finally:
            registry.stop()


async def test_an_identity_token_is_exchanged_for_others(tmp_path: Path) -> None:
    async with TokenServer(tmp_path) as tokens:
        registry = DockerRegistry(tmp_path / "registry", tokens.auth)
        registry.start()
        try:
            made = image([layer([file("a", b"1")])])
            pushed = {"Authorization": f"Bearer {tokens.token(['repository:app:pull,push'])}"}
            reference = await put(registry.host, "app:1", made, pushed)
            async with opened(tmp_path / "one", registries={registry.host: RegistrySettings(token=IDENTITY)}) as images:
                assert (await images.ensure(reference)).digest == made.digest
            assert tokens.granted == 1
            wrong = {registry.host: RegistrySettings(token="somebody else")}
            async with opened(tmp_path / "two", registries=wrong) as images:
                with pytest.raises(ImageError, match="which refuses one"):
                    await images.ensure(reference)
        finally:
            registry.stop()


async def test_a_password_is_given_to_who_asks_for_it_and_docker_s_file_may_have_it(tmp_path: Path) -> None:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    auth = {"htpasswd": {"realm": "here", "path": str(tmp_path / "htpasswd")}}
    registry = DockerRegistry(tmp_path / "registry", auth)
    registry.start()
    try:
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        made = image([layer([file("a", b"1")])])
        reference = await put(registry.host, "app:1", made, {"Authorization": f"Basic {secret}"})
        docker = tmp_path / "config.json"
        async with opened(tmp_path / "images", docker_config=str(docker)) as images:
            with pytest.raises(ImageError, match="knows nobody without credentials") as refused:
                await images.ensure(reference)
            assert registry.host in refused.value.hint
            docker.write_text(json.dumps({"auths": {f"http://{registry.host}/v1/": {"auth": secret}}}))
            assert (await images.ensure(reference)).digest == made.digest
        wrong = {registry.host: RegistrySettings(username=USER, password="wrong")}
        async with opened(tmp_path / "wrong", registries=wrong) as images:
            with pytest.raises(ImageError, match="denies access: authentication required"):
                await images.ensure(reference)
    finally:
        registry.stop()


async def test_credentials_do_not_follow_a_redirect_to_another_host(registry: DockerRegistry, tmp_path: Path) -> None:
    made = plain_image()
    async with Front(registry.port, basic=(USER, PASSWORD)) as front, Front(registry.port) as storage:
        await put(storage.host, "redirected:1", made)
        front.spoil("blobs/", redirect(lambda asked: f"http://{storage.host}{asked.target}"))
        credentials = {front.host: RegistrySettings(username=USER, password=PASSWORD)}
        async with opened(tmp_path / "images", registries=credentials) as images:
            assert (await images.ensure(f"{front.host}/redirected:1")).digest == made.digest
        assert all("authorization" not in asked.headers for asked in storage.requests)
        assert len(storage.asked("blobs/")) == 2  # the configuration and the layer


# In the clear


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("127.9.9.9", "http://127.9.9.9"),
        ("[::1]:5000", "http://[::1]:5000"),
        ("localhost", "http://localhost"),
        ("registry.localhost:5000", "http://registry.localhost:5000"),
        ("allowed.example:5000", "http://allowed.example:5000"),
        ("registry.example", "https://registry.example"),
        ("registry.example:443", "https://registry.example"),
        ("localhost.example", "https://localhost.example"),
        ("10.0.0.1:5000", "https://10.0.0.1:5000"),
        ("[2001:db8::1]:5000", "https://[2001:db8::1]:5000"),
        ("strict.localhost", "https://strict.localhost"),
    ],
)
def test_plain_http_is_for_loopback_and_who_is_allowed_by_name(host: str, origin: str) -> None:
    said = {
        "allowed.example:5000": RegistrySettings(insecure=True),
        "strict.localhost": RegistrySettings(insecure=False),
    }
    assert endpoint(settings(registries=said), host).origin == origin


async def test_a_registry_that_must_use_tls_and_does_not_is_not_asked_in_the_clear(
    front: Front, tmp_path: Path
) -> None:
    reference = await put(front.host, "clear:1", image([layer([file("a")])]))
    front.requests.clear()
    said = {front.host: RegistrySettings(insecure=False)}
    async with opened(tmp_path / "images", registries=said, attempts=1, connect_timeout_s=0.2) as strict:
        with pytest.raises(Unreachable):
            await strict.ensure(reference)
    assert front.requests == []


async def test_a_credential_helper_that_fails_is_named_where_credentials_are_needed_and_only_there(
    registry: DockerRegistry, tmp_path: Path
) -> None:
    made = plain_image()
    docker = tmp_path / "config.json"
    docker.write_text('{"credsStore": "nowhere"}')
    reference = await put(registry.host, "helped:1", made)
    async with (
        Front(registry.port, basic=(USER, PASSWORD)) as private,
        opened(tmp_path / "images", docker_config=str(docker)) as images,
    ):
        with pytest.raises(ImageError, match=r"without credentials: docker-credential-nowhere, .* is not in PATH"):
            await images.ensure(reference.replace(registry.host, private.host))
        assert (await images.ensure(reference)).digest == made.digest


async def test_tls_is_trusted_when_its_authority_is(tmp_path: Path) -> None:
    tls = write_tls(tmp_path)
    registry = DockerRegistry(tmp_path / "registry", tls=tls)
    registry.start()
    try:
        made = image([layer([file("a", b"1")])])
        reference = await put(registry.host, "app:1", made, ca=tls["certificate"])
        strict = {registry.host: RegistrySettings(insecure=False)}
        async with opened(tmp_path / "one", registries=strict, attempts=1) as images:
            with pytest.raises(Unreachable, match="certificate verify failed"):
                await images.ensure(reference)
        trusted = {registry.host: RegistrySettings(insecure=False, ca=tls["certificate"])}
        async with opened(tmp_path / "two", registries=trusted) as images:
            assert (await images.ensure(reference)).digest == made.digest
        others = {registry.host: strict[registry.host], "other.example": trusted[registry.host]}
        async with opened(tmp_path / "three", registries=others, attempts=1) as images:
            with pytest.raises(Unreachable, match="certificate verify failed"):  # it vouches for the other alone
                await images.ensure(reference)
    finally:
        registry.stop()


@pytest.mark.parametrize(
    ("leads", "problem"),
    [
        ("https://storage.example/x", ""),
        ("https://registry.example/v2/x", ""),
        ("http://allowed.example/x", ""),
        ("http://storage.example/x", "by plain HTTP"),
        ("http://registry.example/x", "by plain HTTP"),
        ("http://127.0.0.1:4281/v1/apps", "this host's own 127.0.0.1:4281"),
        ("https://localhost/x", "this host's own localhost"),
        ("http://[::1]:80/x", "this host's own"),
        ("ftp://storage.example/x", "leads to ftp://"),
        ("//", "leads to no://"),
    ],
)
def test_where_a_registry_may_send_us(leads: str, problem: str) -> None:
    given = settings(registries={"allowed.example": RegistrySettings(insecure=True)})
    to = endpoint(given, "registry.example")
    if not problem:
        assert check_leads(given, "x", to, httpx2.URL(leads)) == httpx2.URL(leads)
        return
    with pytest.raises(ImageError, match=problem):
        check_leads(given, "x", to, httpx2.URL(leads))


async def test_no_redirect_leads_to_plain_http_or_to_another_scheme(front: Front, images: Images) -> None:
    made = plain_image()
    reference = await put(front.host, "leads:1", made)
    for location, problem in (
        ("http://storage.example/blob", "leads to storage.example by plain HTTP"),
        ("file:///etc/passwd", "leads to file://"),
    ):
        front.heal()
        front.spoil("blobs/", redirect(lambda asked, location=location: location))  # type: ignore[misc]
        with pytest.raises(ImageError, match=problem):
            await images.ensure(reference)
    front.heal()
    front.spoil("blobs/", redirect(lambda asked: asked.target))
    with pytest.raises(ImageError, match="redirects more than 5 times"):
        await images.ensure(reference)
    assert left(images) == []
