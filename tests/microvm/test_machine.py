"""What a guest is told to become a machine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from pyroute2.netlink import NLM_F_ACK
from pyroute2.netlink.rtnl.marshal import MarshalRtnl

from hawker.model.image import ImageConfig
from hawker.network.base import Attachment
from hawker.worker.drivers.base import Dns, File, InstanceSpec, Limits, Mount, Root, StartFailed, Tmpfs
from hawker.worker.drivers.microvm import start_message

SPEC = InstanceSpec(
    key="run/step",
    machine="00000000000001",
    image="app",
    argv=("serve", "--port", "80"),
    env={"A": "1"},
    limits=Limits(cpu_millis=1000, memory_mib=256, pids=77),
)
ATTACHMENT = Attachment(
    interface="hk0",
    mac="02:00:00:00:00:05",
    address6="fdaa:0:1::2",
    gateway6="fe80::1",
    address4="10.9.0.5",
    gateway4="169.254.1.1",
    gateway_mac="02:68:6b:00:00:01",
    resolver="fdaa::3",
    mtu=1420,
)


def told(attachment: Attachment | None = None, config: ImageConfig = ImageConfig(), **changed: Any) -> list[Any]:  # noqa: B008
    return start_message.told(replace(SPEC, **changed), config, attachment, clock_ns=5, seed=b"seed")


def values(pairs: list[Any], word: str) -> list[Any]:
    return [value for name, value in pairs if name == word]


def file(pairs: list[Any], path: str) -> bytes:
    (found,) = [v for v in values(pairs, "file") if v.partition(b"\0")[0].endswith(b" " + path.encode())]
    content: bytes = found.partition(b"\0")[2]
    return content


def test_clock_and_randomness_come_first_and_the_root_before_what_lies_in_it() -> None:
    words = [name for name, _ in told(ATTACHMENT, tmpfs=[Tmpfs(path="/t", size_mib=1)], root=Root(read_only=True))]
    assert words[:3] == ["clock", "seed", "disks"]
    order = ["disks", "netlink", "file", "tmpfs", "readonly", "environment", "argument"]
    assert [words.index(word) for word in order] == sorted(words.index(word) for word in order)


def test_the_program_is_told_as_it_is() -> None:
    pairs = told(config=ImageConfig(env=("B=image", "A=image"), working_dir="/srv", user="web:web"))
    assert values(pairs, "argument") == ["serve", "--port", "80"]
    assert {"A=1", "B=image"} <= set(values(pairs, "environment"))
    assert values(pairs, "cwd") == values(pairs, "directory") == ["/srv"]
    assert values(pairs, "user") == ["web:web"]
    assert values(pairs, "pids") == [77]


def test_home_is_left_to_the_guest_unless_somebody_says_it() -> None:
    assert not [e for e in values(told(), "environment") if e.startswith("HOME=")]
    assert "HOME=/h" in values(told(env={"HOME": "/h"}), "environment")
    assert "HOME=/i" in values(told(config=ImageConfig(env=("HOME=/i",))), "environment")


def test_name_service_is_the_hosts_unless_the_machine_names_its_own() -> None:
    assert file(told(ATTACHMENT), "/etc/resolv.conf") == b"nameserver fdaa::3\n"
    dns = Dns(nameservers=["1.1.1.1", "9.9.9.9"], searches=["a.b"], options=["ndots:2"])
    asked = b"nameserver 1.1.1.1\nnameserver 9.9.9.9\nsearch a.b\noptions ndots:2\n"
    assert file(told(ATTACHMENT, dns=dns), "/etc/resolv.conf") == asked
    assert b"fdaa:0:1::2\tnamed\n" in file(told(ATTACHMENT, hostname="named"), "/etc/hosts")


def test_every_machine_has_an_identity_of_its_own_that_stays() -> None:
    one, again, other = (file(told(machine=m), "/etc/machine-id") for m in ("a", "a", "b"))
    assert one == again != other
    assert len(bytes.fromhex(one.decode())) == 16


def test_files_of_the_configuration_go_over_ours() -> None:
    pairs = told(files=[File(path="/etc/hosts", content=b"mine", mode=0o600)])
    assert values(pairs, "file")[-1] == b"600 /etc/hosts\0mine"


def test_directories_of_the_host_are_refused() -> None:
    with pytest.raises(StartFailed, match=r"mounts \(/data\): a microVM takes no directories"):
        told(mounts=[Mount(source="/srv", path="/data")])


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(StartFailed, match="names no program"):
        told(argv=())


def test_without_a_network_only_the_loopback_is_there() -> None:
    (message,) = map(decoded, values(told(), "netlink"))
    assert (message["index"], message["flags"] & 1) == (1, 1)
    assert values(told(), "write") == []


def test_the_network_is_set_up_without_asking_anybody() -> None:
    """As pyroute2 reads the messages."""
    messages = [decoded(raw) for raw in values(told(ATTACHMENT), "netlink")]
    assert all(message["header"]["flags"] & NLM_F_ACK for message in messages)
    kinds = [message["event"] for message in messages]
    assert kinds == ["RTM_NEWLINK"] * 3 + ["RTM_NEWADDR", "RTM_NEWNEIGH", "RTM_NEWROUTE", "RTM_NEWROUTE"] * 2
    card, up = messages[1:3]
    assert (card.get_attr("IFLA_ADDRESS"), card.get_attr("IFLA_MTU")) == ("02:00:00:00:00:05", 1420)
    assert up["flags"] & 1
    for address, neighbour, near, far, ours, gateway, length in (
        (*messages[3:7], "fdaa:0:1::2", "fe80::1", 128),
        (*messages[7:11], "10.9.0.5", "169.254.1.1", 32),
    ):
        assert (address.get_attr("IFA_ADDRESS"), address["prefixlen"], address["index"]) == (ours, length, 2)
        assert neighbour.get_attr("NDA_DST") == gateway
        assert neighbour.get_attr("NDA_LLADDR") == "02:68:6b:00:00:01"
        assert (near.get_attr("RTA_DST"), near["dst_len"], near.get_attr("RTA_OIF")) == (gateway, length, 2)
        assert (far.get_attr("RTA_DST"), far["dst_len"], far.get_attr("RTA_GATEWAY")) == (None, 0, gateway)


def decoded(raw: bytes) -> Any:
    (message,) = MarshalRtnl().parse(raw)
    return message
