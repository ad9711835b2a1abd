"""The containers of a supervisor: those on their way, and what the next supervisor does with what it finds of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hawker.supervisor.calls import DiscardContainer, MakeContainer, MakeTree, ReleaseContainer
from hawker.supervisor.common import Common
from hawker.supervisor.container import CONTAINER, Container, clear_directory
from hawker.supervisor.instance import Instance, Record
from hawker.supervisor.making import ContainerMaking, Making
from hawker.supervisor.roots import Roots
from hawker.supervisor.tree import TREE, Tree, TreeMaking
from hawker.supervisor.wire import Ask, Refused


class Containers:
    """`register` takes a container whose program runs."""

    kinds = (CONTAINER, TREE)

    def __init__(self, common: Common, register: Callable[[Instance], None]) -> None:
        self._common = common
        self._register = register
        self.roots = Roots(common.directory, common.children, common.trash)
        self._makings: dict[str, Making[Any]] = {}

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._makings)

    def make(self, request: MakeContainer | MakeTree, ask: Ask) -> None:
        making: Making[Any]
        if isinstance(request, MakeTree):
            making = TreeMaking(request, ask.connection, self._common, self.roots)
        else:
            making = ContainerMaking(request, ask.connection, self._common, self.roots)
        if making.key in self._makings:
            raise Refused("Refused", f"{making.key} is being made")
        self._makings[making.key] = making
        making.begin(lambda pid: ask.answer({"pid": pid}), partial(self._failed, making, ask))

    def release(self, request: ReleaseContainer, ask: Ask) -> None:
        making = self._get(request.key)

        def started(container: Container) -> None:
            del self._makings[making.key]
            self._register(container)
            ask.answer(container.shown())

        making.release(started, partial(self._failed, making, ask))

    def discard(self, request: DiscardContainer, ask: Ask) -> None:
        making = self._get(request.key)

        def gone(kind: str, why: str) -> None:
            del self._makings[making.key]
            ask.answer(None)

        making.end(gone)

    def forsake(self, *, every: bool = False) -> None:
        """Remove those whose daemon is gone: nobody will release them."""
        for making in list(self._makings.values()):
            if every or not making.connection.open:
                making.end(partial(self._failed, making, None))

    def recorded(self, record: Record, mark: str) -> Container:
        container: Container
        if record.kind == TREE:
            container = tree = Tree(record, self._common.files, mark, self._common.groups)
            tree.common = self._common
        else:
            container = Container(record, self._common.files, mark, self._common.groups)
        container.roots, container.children = self.roots, self._common.children
        return container

    def clear_unrecorded(self, instances: Iterable[Instance]) -> None:
        """Remove directories and roots of containers that were on their way."""
        running = [i for i in instances if isinstance(i, Container) and i.exit is None]
        kept = {container.directory for container in running}
        for directory in self._common.files.directories():
            if directory not in kept:
                try:
                    clear_directory(directory)
                except OSError:  # the others all the same
                    traceback.print_exc()
        self.roots.keep_only(container.root for container in running)

    def _get(self, key: str) -> Making[Any]:
        making = self._makings.get(key)
        if making is None:
            raise Refused("UnknownInstance", f"{key} is not being made")
        return making

    def _failed(self, making: Making[Any], ask: Ask | None, kind: str, why: str) -> None:
        self._makings.pop(making.key, None)
        if ask:
            ask.refuse(kind, why)
