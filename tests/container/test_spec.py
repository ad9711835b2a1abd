"""What is asked of a container runtime: the specification of OCI, from a machine's own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.model.image import ImageConfig
from hawker.supervisor.mounts import IdMap
from hawker.worker.drivers.base import InstanceSpec, Limits, Mount, Root, Tmpfs
from hawker.worker.drivers.container.command import Command, NoCommand, resolve
from hawker.worker.drivers.container.spec import CAPABILITIES, INIT, BadSpec, Place, resources, runtime_spec
from hawker.worker.drivers.container.users import User

LIMITS = Limits(cpu_millis=250, memory_mib=64, pids=32)
PLACE = Place(rootfs="/m/rootfs", init="/cache/init", cgroup="/hawker/m")
IDS = IdMap(1 << 20)


def instance(**more: Any) -> InstanceSpec:
    return msgspec.structs.replace(
        InstanceSpec(key="r/launch", machine="abc", image="img", env={}, limits=LIMITS), **{"argv": ("prog",), **more}
    )


def made(
    spec: InstanceSpec | None = None,
    user: User = User(),  # noqa: B008  # frozen
    place: Place = PLACE,
    *,
    ids: IdMap | None = IDS,
    runtime: Literal["crun", "runc"] = "crun",
    cgroups: Literal["v1", "v2", ""] = "v1",
    nofile: int = 20_000,
    architecture: str = "x86_64",
) -> dict[str, Any]:
    spec = spec or instance()
    return runtime_spec(
        spec,
        Command(argv=tuple(spec.argv), env={"A": "1"}, cwd="/srv", user=""),
        user,
        place,
        ids=ids,
        hard_limits={"RLIMIT_NOFILE": nofile},
        runtime=runtime,
        cgroups=cgroups,
        architecture=architecture,
    )


def destinations(spec: dict[str, Any]) -> list[str]:
    return [mount["destination"] for mount in spec["mounts"]]


def options(spec: dict[str, Any], path: str) -> list[str]:
    (found,) = [mount["options"] for mount in spec["mounts"] if mount["destination"] == path]
    return list(found)


# --- the command line, the environment, the directory -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "entrypoint", "cmd", "expected"),
    [
        ((), (), (), ("/entry", "-a", "serve")),  # the image's
        ((), (), ("other",), ("/entry", "-a", "other")),  # another cmd for the image's entrypoint
        ((), ("mine",), (), ("mine",)),  # an entrypoint of one's own drops the image's cmd
        ((), ("mine",), ("x",), ("mine", "x")),
        (("all", "of", "it"), ("mine",), ("x",), ("all", "of", "it")),
    ],
)
def test_entrypoint_and_cmd_are_joined_as_docker_does(
    argv: tuple[str, ...], entrypoint: tuple[str, ...], cmd: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    image = ImageConfig(entrypoint=("/entry", "-a"), cmd=("serve",))
    assert resolve(instance(argv=argv, entrypoint=entrypoint, cmd=cmd), image).argv == expected


def test_nothing_to_run_is_said_with_a_remedy() -> None:
    with pytest.raises(NoCommand, match=r"img names no program.*config\.init\.exec"):
        resolve(instance(argv=()), ImageConfig())


def test_a_machines_environment_goes_over_the_images_and_that_over_what_every_machine_has() -> None:
    image = ImageConfig(env=("PATH=/image", "LANG=C", "no equals sign", "=x"))
    env = resolve(instance(env={"LANG": "de"}, hostname="h", tty=True), image, home="/home/u").env
    assert env == {"PATH": "/image", "HOME": "/home/u", "HOSTNAME": "h", "TERM": "xterm", "LANG": "de"}


@pytest.mark.parametrize(
    ("written", "cwd"), [("", "/"), ("srv", "/srv"), ("/a/../b/./c/", "/b/c"), ("//x", "/x"), ("../..", "/")]
)
def test_the_directory_is_absolute_and_plain(written: str, cwd: str) -> None:
    assert resolve(instance(), ImageConfig(working_dir=written)).cwd == cwd


@pytest.mark.parametrize("written", ["/proc/self/fd/7", "proc/1", "/x/../proc", "/a\0b"])
def test_a_directory_that_leads_through_the_runtime_is_refused(written: str) -> None:
    with pytest.raises(NoCommand, match="working directory"):
        resolve(instance(), ImageConfig(working_dir=written))


def test_a_nul_in_the_environment_or_the_command_line_is_refused() -> None:
    with pytest.raises(NoCommand, match="environment"):
        resolve(instance(env={"A": "a\0b"}), ImageConfig())
    with pytest.raises(NoCommand, match="command"):
        resolve(instance(argv=("a\0b",)), ImageConfig())


@given(st.text(), st.lists(st.text()), st.lists(st.text()), st.dictionaries(st.text(), st.text()))
def test_whatever_an_image_says_what_comes_of_it_can_be_run_or_is_refused(
    directory: str, entrypoint: list[str], env: list[str], own: dict[str, str]
) -> None:
    image = ImageConfig(entrypoint=tuple(entrypoint), env=tuple(env), working_dir=directory)
    try:
        command = resolve(instance(argv=(), env=own), image)
    except NoCommand:
        return
    assert command.argv
    assert command.cwd.startswith("/")
    assert "/../" not in command.cwd + "/"
    assert not command.cwd.startswith("//")
    assert not any("\0" in text for text in (*command.argv, *command.env, *command.env.values(), command.cwd))


# --- the specification ------------------------------------------------------------------------------------------------


def test_the_program_runs_under_the_init_as_its_user_without_new_privileges() -> None:
    process = made(user=User(uid=10, gid=20, groups=(30, 40)))["process"]
    assert process["args"] == [INIT, "--status-fd", "3", "--", "prog"]
    assert process["user"] == {"uid": 10, "gid": 20, "additionalGids": [30, 40]}
    assert (process["noNewPrivileges"], process["cwd"], process["env"]) == (True, "/srv", ["A=1"])


def test_root_has_the_twelve_capabilities_an_ordinary_user_none_and_nobody_hands_them_on() -> None:
    as_root, as_user = made()["process"]["capabilities"], made(user=User(uid=1))["process"]["capabilities"]
    assert as_root["effective"] == as_root["permitted"] == as_root["bounding"] == list(CAPABILITIES)
    assert (as_user["effective"], as_user["permitted"]) == ([], [])
    for capabilities in (as_root, as_user):
        assert not capabilities.keys() & {"inheritable", "ambient"}
    assert not {"CAP_SYS_ADMIN", "CAP_NET_RAW", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_SYS_PTRACE"} & set(CAPABILITIES)


@pytest.mark.parametrize(("nofile", "expected"), [(1024, 1024), (1 << 20, 65536)])
def test_limits_of_processes_stay_within_the_hosts(nofile: int, expected: int) -> None:
    limits = {limit["type"]: (limit["soft"], limit["hard"]) for limit in made(nofile=nofile)["process"]["rlimits"]}
    assert limits == {"RLIMIT_NOFILE": (expected, expected), "RLIMIT_CORE": (0, 0)}


def test_with_ids_there_is_a_user_namespace_of_its_own_range() -> None:
    linux = made()["linux"]
    assert {"type": "user"} in linux["namespaces"]
    assert linux["uidMappings"] == linux["gidMappings"] == [{"containerID": 0, "hostID": 1 << 20, "size": 65536}]
    without = made(ids=None)["linux"]
    assert {"type": "user"} not in without["namespaces"]
    assert "uidMappings" not in without
    assert {"pid", "ipc", "uts", "mount", "network", "cgroup"} == {each["type"] for each in without["namespaces"]}


def test_a_user_beyond_the_machines_range_is_refused_by_name() -> None:
    with pytest.raises(BadSpec, match="100000"):
        made(user=User(uid=100000))
    assert made(user=User(uid=100000), ids=None)


def test_crun_gets_the_filter_and_runc_the_list() -> None:
    crun, runc = made(runtime="crun"), made(runtime="runc")
    assert (set(crun["annotations"]), "seccomp" in crun["linux"]) == ({"run.oci.seccomp_bpf_data"}, False)
    assert (runc["annotations"], "seccomp" in runc["linux"]) == ({}, True)


def test_shared_cpus_weigh_and_dedicated_ones_are_also_a_bound() -> None:
    shared, dedicated = resources(LIMITS), resources(dataclasses.replace(LIMITS, dedicated=True))
    assert (shared["cpu"]["shares"], shared["cpu"].get("quota", -1)) == (256, -1)
    assert dedicated["cpu"] == {"shares": 256, "period": 100_000, "quota": 25_000}
    assert shared["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
    assert resources(LIMITS, swap=False)["memory"] == {"limit": 64 << 20}
    assert shared["pids"] == {"limit": 32}


def test_devices_are_denied_but_for_a_few() -> None:
    first, *rest = made()["linux"]["resources"]["devices"]
    assert first == {"allow": False, "access": "rwm"}
    assert all(rule["allow"] and rule["type"] == "c" and rule["access"] == "rw" for rule in rest)
    assert {(rule["major"], rule.get("minor")) for rule in rest} >= {(1, 3), (1, 8), (136, None)}


def test_without_control_groups_there_are_no_limits() -> None:
    assert not made(cgroups="")["linux"].keys() & {"resources", "cgroupsPath"}


def test_volumes_and_tmpfs_are_mounted_outside_in_and_files_last() -> None:
    spec = instance(
        mounts=[Mount(source="/h/deep", path="/data/a/b", read_only=True), Mount(source="/h/data", path="/data")],
        tmpfs=[Tmpfs(path="/data/a", size_mib=5)],
    )
    place = msgspec.structs.replace(PLACE, files={"/data/f": "/m/f0"}, mounts={"/h/data": "/m/idmapped"})
    specification = made(spec, place=place)
    assert destinations(specification)[-4:] == ["/data", "/data/a", "/data/a/b", "/data/f"]
    assert {"rw", "nosuid", "nodev"} <= set(options(specification, "/data"))
    assert "ro" in options(specification, "/data/a/b")
    assert {"size=5m", "mode=1777", "nodev"} <= set(options(specification, "/data/a"))
    assert "ro" in options(specification, "/data/f")
    sources = {mount["destination"]: mount["source"] for mount in specification["mounts"]}
    assert (sources["/data"], sources["/data/a/b"], sources["/data/f"]) == ("/m/idmapped", "/h/deep", "/m/f0")


@pytest.mark.parametrize("path", ["/", "relative", "", "/proc/x", "/sys", "/dev/null", "/a/../proc", "/x\0"])
def test_nothing_is_mounted_over_the_kernels_trees_or_the_root(path: str) -> None:
    with pytest.raises(BadSpec):
        made(instance(tmpfs=[Tmpfs(path=path, size_mib=1)]))
    with pytest.raises(BadSpec):
        made(instance(mounts=[Mount(source="/h", path=path)]))
    with pytest.raises(BadSpec):
        made(place=msgspec.structs.replace(PLACE, files={path: "/m/f"}))


def test_shared_memory_may_be_another_size() -> None:
    assert "size=256m" in made(instance(tmpfs=[Tmpfs(path="/dev/shm", size_mib=256)]))["mounts"][-1]["options"]


def test_what_tells_of_the_host_is_hidden_or_read_only() -> None:
    linux = made()["linux"]
    assert {"/proc/kcore", "/proc/keys", "/sys/firmware"} <= set(linux["maskedPaths"])
    assert {"/proc/sys", "/proc/sysrq-trigger"} <= set(linux["readonlyPaths"])
    assert "ro" in options(made(), "/sys")
    assert "ro" in options(made(), "/sys/fs/cgroup")
    assert "ro" in options(made(), INIT)


def test_a_read_only_root_and_a_name_are_passed_on() -> None:
    specification = made(instance(root=Root(read_only=True), hostname="web"))
    assert (specification["root"], specification["hostname"]) == ({"path": "/m/rootfs", "readonly": True}, "web")
    assert made()["hostname"] == "abc"


def test_on_an_architecture_whose_system_calls_are_not_known_nothing_is_run() -> None:
    with pytest.raises(BadSpec, match="riscv64"):
        made(architecture="riscv64")


def test_it_is_json() -> None:
    assert json.loads(json.dumps(made(runtime="runc")))["ociVersion"] == "1.0.2"
