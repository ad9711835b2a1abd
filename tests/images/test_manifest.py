"""Reading manifests, indexes and configurations: what is taken, and what is refused by its name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.oci import file, image, index, layer

from hawker.errors import ImageError, Invalid
from hawker.images.manifest import (
    CONFIG,
    DOCKER_CONFIG,
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEX,
    LAYER,
    MANIFEST,
    Index,
    Manifest,
    chain_ids,
    choose,
    digest_of,
    read_config,
    read_manifest,
    runs_on,
)
from hawker.model.image import Platform
from hawker.model.values import ImageRef

DIGEST = "sha256:" + "a" * 64
AMD64 = Platform(architecture="amd64")


def manifest(**changes: Any) -> bytes:
    """One that is right but for the changes; None leaves a member out."""
    made: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": DIGEST, "size": 2},
        "layers": [{"mediaType": f"{LAYER}+gzip", "digest": DIGEST, "size": 3}],
    }
    return json.dumps({name: value for name, value in {**made, **changes}.items() if value is not None}).encode()


def one_layer(**changes: Any) -> list[dict[str, Any]]:
    return [{"mediaType": f"{LAYER}+gzip", "digest": DIGEST, "size": 3, **changes}]


@pytest.mark.parametrize("sent", [MANIFEST, f"{MANIFEST}; charset=utf-8", "", "application/json", "text/plain"])
@pytest.mark.parametrize("said", [MANIFEST, None])
def test_a_manifest_is_known_by_what_it_was_sent_as_or_calls_itself(sent: str, said: str | None) -> None:
    read = read_manifest("x", sent, manifest(mediaType=said))
    assert isinstance(read, Manifest)
    assert [layer.digest for layer in read.layers] == [DIGEST]
    assert read.media_type == MANIFEST


def test_docker_s_schema_2_reads_as_well() -> None:
    config = {"mediaType": DOCKER_CONFIG, "digest": DIGEST, "size": 2}
    assert isinstance(read_manifest("x", DOCKER_MANIFEST, manifest(mediaType=DOCKER_MANIFEST, config=config)), Manifest)
    assert isinstance(read_manifest("x", DOCKER_LIST, b'{"schemaVersion":2,"manifests":[]}'), Index)


@pytest.mark.parametrize(
    ("sent", "data", "problem"),
    [
        (MANIFEST, b"", "cannot be read"),
        (MANIFEST, b"[]", "cannot be read"),
        (MANIFEST, b"\xff", "cannot be read"),
        (MANIFEST, b"[" * 100_000, "cannot be read"),
        (MANIFEST, b" " * (4 << 20) + b"{}", "more than 4194304 bytes"),
        (MANIFEST, manifest(schemaVersion=3), "schema version 3"),
        (MANIFEST, manifest(schemaVersion=1), "schema 1"),
        ("application/vnd.docker.distribution.manifest.v1+prettyjws", b"{}", "schema 1"),
        (INDEX, manifest(), "calls itself .*manifest.* and was sent as .*index"),
        (MANIFEST, manifest(manifests=[]), "an index and a manifest at once"),
        ("application/vnd.example", manifest(mediaType=None), "media type application/vnd.example"),
        (INDEX, manifest(mediaType=None), "its index has no manifests"),
        (MANIFEST, manifest(config=None), "has no config"),
        (MANIFEST, manifest(layers=None), "has no layers"),
        (MANIFEST, manifest(config={"mediaType": "application/vnd.example+json", "digest": DIGEST, "size": 2}), "else"),
        (MANIFEST, manifest(config={"mediaType": CONFIG, "digest": DIGEST, "size": 5 << 20}), "5242880 bytes"),
        (MANIFEST, manifest(layers=one_layer(mediaType="application/vnd.example")), "media type application/vnd.exam"),
        (MANIFEST, manifest(layers=one_layer(mediaType=f"{LAYER}+encrypted")), "encrypted"),
        (MANIFEST, manifest(layers=one_layer(digest="sha512:" + "a" * 128)), 'digest "sha512'),
        (MANIFEST, manifest(layers=one_layer(digest="sha256:../../etc")), "digest"),
        (MANIFEST, manifest(layers=one_layer(size=-1)), "-1 bytes"),
        (MANIFEST, manifest(layers=one_layer(size=1 << 50)), "bytes"),
        (MANIFEST, manifest(layers=one_layer(size="3")), "cannot be read"),
        (MANIFEST, manifest(layers=one_layer() * 128), "128 layers"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said(sent: str, data: bytes, problem: str) -> None:
    with pytest.raises(ImageError, match=problem) as refused:
        read_manifest("web:1", sent, data)
    assert str(refused.value).startswith("image web:1: ")
    assert len(str(refused.value)) < 400


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(ImageError):
        read_manifest("x", "", data)


_members = st.sampled_from(
    ["schemaVersion", "mediaType", "config", "layers", "manifests", "digest", "size", "platform"]
)
_values = st.none() | st.booleans() | st.integers() | st.sampled_from([MANIFEST, INDEX, CONFIG, DIGEST, ""])
_documents = st.dictionaries(
    _members,
    st.recursive(_values, lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(_members, deeper)),
    max_size=6,
)


@given(_documents.map(lambda document: json.dumps({"schemaVersion": 2, **document}).encode()))
def test_any_document_is_read_or_refused(data: bytes) -> None:
    try:
        read = read_manifest("x", "", data)
    except ImageError:
        return
    assert isinstance(read, Manifest | Index)


@pytest.mark.parametrize(
    ("offered", "wanted", "runs"),
    [
        (Platform(architecture="arm64"), Platform(architecture="arm64", variant="v8"), True),
        (Platform(architecture="arm64", variant="v9"), Platform(architecture="arm64", variant="v8"), False),
        (Platform(architecture="arm", variant="v6"), Platform(architecture="arm", variant="v7"), True),
        (Platform(architecture="arm", variant="v7"), Platform(architecture="arm", variant="v6"), False),
        (Platform(architecture="arm"), Platform(architecture="arm", variant="v7"), True),
        (Platform(architecture="amd64", variant="v3"), Platform(architecture="amd64"), False),
        (Platform(architecture="amd64", variant="v1"), Platform(architecture="amd64"), True),
        (Platform(os="windows", architecture="amd64"), Platform(architecture="amd64"), False),
        (Platform(architecture="riscv64"), Platform(architecture="riscv64"), True),
        (Platform(architecture="386"), Platform(architecture="amd64"), False),
    ],
)
def test_which_variants_run_where(offered: Platform, wanted: Platform, runs: bool) -> None:
    assert runs_on(offered, wanted) is runs


def test_of_variants_the_best_that_runs_is_taken() -> None:
    made = {v: image([layer([file(v)])], architecture="amd64", variant=v) for v in ("v1", "v2", "v3")}
    listed = index([(one, {"os": "linux", "architecture": "amd64", "variant": v}) for v, one in made.items()])
    read = read_manifest("x", INDEX, listed.manifest)
    assert isinstance(read, Index)
    assert choose("x", read, Platform(architecture="amd64", variant="v2")).digest == made["v2"].digest
    assert choose("x", read, AMD64).digest == made["v1"].digest


def test_an_entry_without_a_platform_is_taken_when_it_is_the_only_one() -> None:
    entry = {"mediaType": MANIFEST, "digest": DIGEST, "size": 10}
    alone = read_manifest("x", INDEX, json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    two = read_manifest("x", INDEX, json.dumps({"schemaVersion": 2, "manifests": [entry, entry]}).encode())
    assert isinstance(alone, Index)
    assert isinstance(two, Index)
    assert choose("x", alone, AMD64).digest == DIGEST
    with pytest.raises(ImageError, match="its platforms: none at all"):
        choose("x", two, AMD64)


def configuration(**changes: Any) -> bytes:
    made: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": None, "Entrypoint": ["/a"], "Labels": None, "ExposedPorts": {"53/udp": {}}},
        "rootfs": {"type": "layers", "diff_ids": [DIGEST]},
    }
    return json.dumps({**made, **changes}).encode()


def read(data: bytes, layers: int = 1) -> Any:
    made = manifest(
        config={"mediaType": CONFIG, "digest": digest_of(data), "size": len(data)}, layers=one_layer() * layers
    )
    parsed = read_manifest("web:1", MANIFEST, made)
    assert isinstance(parsed, Manifest)
    return read_config("web:1", DIGEST, parsed, data, AMD64)


def test_a_configuration_becomes_an_image() -> None:
    made = read(configuration())
    assert made.config.entrypoint == ("/a",)
    assert made.config.exposed == ("53/udp",)
    assert made.layers[0].diff_id == DIGEST
    assert made.size == 3
    assert read(configuration(config=None)).config.cmd == ()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (configuration(architecture="arm64"), "made for linux/arm64, and this worker is linux/amd64"),
        (configuration(os="windows"), "made for windows/amd64"),
        (configuration(rootfs={"type": "layers", "diff_ids": []}), "has 1 layers, and its configuration names 0"),
        (configuration(rootfs={"type": "squashfs", "diff_ids": [DIGEST]}), "made of squashfs"),
        (configuration(rootfs={"type": "layers", "diff_ids": ["../x"]}), 'diff_id 0 of its configuration is "../x"'),
        (configuration(config={"Cmd": "sh"}), r"cannot be read: .*\$\.config\.Cmd"),
        (b"x", "its configuration cannot be read"),
        (configuration(config={"Labels": {"x": "y" * 300_000}}), "have 300321 bytes; 262144 may be"),
        (configuration(config={"Env": ["A=B"] * 5000}), "have 335192 bytes"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(data: bytes, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read(data)


def test_a_configuration_has_the_digest_that_the_manifest_gives() -> None:
    parsed = read_manifest("web:1", MANIFEST, manifest())
    assert isinstance(parsed, Manifest)
    with pytest.raises(ImageError, match="its configuration is corrupt"):
        read_config("web:1", DIGEST, parsed, configuration(), AMD64)


def test_chain_ids_are_those_of_the_specification() -> None:
    """config.md: ChainID(A|B) = Digest(ChainID(A) + " " + DiffID(B))."""
    a, b = digest_of(b"a"), digest_of(b"b")
    assert chain_ids([]) == []
    assert chain_ids([a, b]) == [a, digest_of(f"{a} {b}".encode())]


# References


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("nginx", "registry-1.docker.io/library/nginx:latest"),
        ("ghcr.io/a/b__c/d-e:V1.2", "ghcr.io/a/b__c/d-e:V1.2"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("[::1]:5000/x", "[::1]:5000/x:latest"),
        (f"a/b@{DIGEST}", f"registry-1.docker.io/a/b@{DIGEST}"),
        (f"a/b:1@{DIGEST}", f"registry-1.docker.io/a/b:1@{DIGEST}"),
    ],
)
def test_a_reference_is_completed_and_reads_as_itself(text: str, complete: str) -> None:
    assert str(ImageRef.checked(text)) == complete
    assert str(ImageRef.checked(complete)) == complete


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "Nginx",
        "a//b",
        "/a",
        "a/",
        "a:",
        "a:-x",
        "a:" + "x" * 129,
        "a@sha256:ab",
        "a@",
        "a b",
        "../../etc",
        "reg_istry.example/x",
        "registry.example:port/x",
        "registry.example:5000/X",
        "http://registry.example/x",
        "a/b\n",
        "x" * 600,
    ],
)
def test_a_reference_that_is_none_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(Invalid, match=r"^image: "):
        ImageRef.checked(text)


@given(st.text(max_size=60))
def test_any_reference_is_complete_or_refused(text: str) -> None:
    try:
        ref = ImageRef.checked(text)
    except Invalid:
        return
    assert str(ImageRef.checked(str(ref))) == str(ref)
