"""What drivers of images must do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.kit.drivers import PATH, Opened
from tests.kit.oci import directory
from tests.kit.tiers import full

from hawker.errors import ImageError
from hawker.worker.drivers.base import File, Root, StartFailed, Tmpfs


class Imaged:
    """For drivers of images."""

    async def test_an_image_is_prepared_again_and_again_and_a_missing_one_is_refused(self, driver: Opened) -> None:
        await driver.driver.prepare(driver.image)
        await driver.driver.prepare(driver.image)
        with pytest.raises(ImageError):
            await driver.driver.prepare("no-such-image")
        one = replace(driver.shell("true"), image="no-such-image")
        with pytest.raises(ImageError):
            await driver.driver.start(one)
        assert await driver.driver.recover() == []

    async def test_a_program_sees_its_image_and_nothing_of_the_host(self, driver: Opened) -> None:
        there = await driver.run(driver.shell("head -n 1 /etc/passwd; cd /; ls -d bin lib usr/lib 2>/dev/null; true"))
        assert there == ["root:x:0:0:root:/root:/bin/sh", "bin"]

    async def test_command_environment_directory_and_user_are_the_images_where_nothing_else_is_said(
        self, driver: Opened
    ) -> None:
        image = driver.add_image(
            "configured",
            {
                "entrypoint": ("sh", "-c", 'echo "$@"; echo $A $B $HOME; pwd; id -u; id -g; id -G', "sh"),
                "cmd": ("from", "image"),
                "env": (f"PATH={PATH}", "A=image", "B=image"),
                "user": "user",
                "working_dir": "/srv/app",
            },
            [directory("srv"), directory("srv/app")],
        )
        plain = replace(driver.spec(), image=image, env={"B": "machine"})
        common = ["image machine /home/user", "/srv/app", "1000", "1000", "1000 2000"]
        assert await driver.run(plain) == ["from image", *common]
        other = replace(driver.spec(), image=image, env={"B": "machine"}, cmd=("other",))
        assert await driver.run(other) == ["other", *common]
        alone = replace(driver.spec(), image=image, env={}, entrypoint=("id", "-u"), user="0:2000")
        assert await driver.run(alone) == ["0"]
        whole = replace(driver.spec("id", "-g"), image=image, user="0:2000")
        assert await driver.run(whole) == ["2000"]

    async def test_an_unknown_user_is_refused(self, driver: Opened) -> None:
        with pytest.raises(StartFailed, match="nobody-knows"):
            await driver.driver.start(replace(driver.shell("true"), user="nobody-knows"))
        assert await driver.driver.recover() == []

    async def test_a_command_beside_it_has_its_user_and_environment(self, driver: Opened) -> None:
        one = replace(driver.spec("sleep", "60", COLOUR="red"), user="user")
        await driver.driver.start(one)
        done = await driver.driver.exec(one.key, ["sh", "-c", "id -u; echo $COLOUR $HOME"], timeout_s=20)
        assert done.stdout == b"1000\nred /home/user\n"

    async def test_files_are_there_before_the_program(self, driver: Opened) -> None:
        files = [
            File(path="/etc/app/with space.conf", content=b"one\n"),
            File(path="/bin/tool", content=b"#!/bin/sh\necho two\n", mode=0o755),
        ]
        one = replace(driver.shell("cat '/etc/app/with space.conf'; tool; stat -c %a /bin/tool"), files=files)
        assert await driver.run(one) == ["one", "two", "755"]

    async def test_a_tmpfs_is_bounded(self, driver: Opened) -> None:
        script = (  # without what head says on the other stream: lines of two have no order
            "grep -c ' /cache tmpfs ' /proc/mounts; head -c 9000000 /dev/zero 2>/dev/null > /cache/a || echo full; "
            "wc -c < /cache/a"
        )
        lines = await driver.run(replace(driver.shell(script), tmpfs=[Tmpfs(path="/cache", size_mib=4)]))
        assert lines == ["1", "full", str(4 << 20)]

    async def test_a_read_only_root_cannot_be_written_to(self, driver: Opened) -> None:
        one = replace(
            driver.shell("echo a > /a || echo refused; echo b > /tmp/b && echo written"), root=Root(read_only=True)
        )
        one = replace(one, tmpfs=[Tmpfs(path="/tmp", size_mib=1)])
        lines = await driver.run(one)
        assert "refused" in lines
        assert "written" in lines

    async def test_each_start_finds_the_image_as_it_is_unless_the_root_is_kept(self, driver: Opened) -> None:
        script = "ls /etc/motd /new 2>/dev/null; rm -f /etc/passwd; echo a > /etc/motd; echo b > /new; ls / | wc -l"
        first = driver.shell(script)
        once = await driver.run(first)
        await driver.driver.destroy(first.key)
        assert await driver.run(replace(first, key=f"{first.key}2")) == once
        kept = replace(driver.shell(script), root=Root(persist=True))
        await driver.run(kept)
        await driver.driver.destroy(kept.key)
        again = replace(
            driver.shell("ls /etc/motd /new; ls /etc/passwd || echo gone"), root=kept.root, machine=kept.machine
        )
        lines = await driver.run(again)
        assert "/etc/motd" in lines
        assert "/new" in lines
        assert "gone" in lines
        await driver.driver.destroy(again.key)
        await driver.driver.purge(kept.machine)
        anew = replace(driver.shell("ls /new || echo gone"), root=kept.root, machine=kept.machine)
        assert "gone" in await driver.run(anew)

    @pytest.mark.parametrize("persist", [False, *full(True)])
    async def test_a_machine_that_fills_its_disk_meets_its_bound(self, driver: Opened, persist: bool) -> None:
        script = (  # without what dd says on the other stream: lines of two have no order
            "dd if=/dev/zero of=/big bs=1M count=40 2>/dev/null || echo full; rm /big; echo room > /small && cat /small"
        )
        one = replace(driver.shell(script), root=Root(size_mib=32, persist=persist))
        lines = await driver.run(one)
        assert lines == ["full", "room"]

    async def test_it_has_a_name(self, driver: Opened) -> None:
        script = "hostname; grep -c named /etc/hosts"
        assert await driver.run(replace(driver.shell(script), hostname="named")) == ["named", "1"]
        one = driver.shell("hostname")
        assert await driver.run(one) == [one.machine]
