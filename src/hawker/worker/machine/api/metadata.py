"""The worker's handlers for machines' metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hawker.errors import NotFound
from hawker.http.app import Handler
from hawker.http.call import Call
from hawker.model import api
from hawker.model.config import check_config, check_size
from hawker.model.rows import MachineRow
from hawker.worker.machine.operations import Machines
from hawker.worker.request import request_of


class MetadataApi:
    """Handlers by operation in `handlers()`. `row` is a request's machine."""

    def __init__(self, machines: Machines, row: Callable[[Call], MachineRow]) -> None:
        self._machines = machines
        self._row = row

    def handlers(self) -> dict[str, Handler]:
        return {
            "Machines_show_metadata": self.show,
            "Machines_replace_metadata": self.replace,
            "Machines_merge_metadata": self.merge,
            "Machines_show_metadata_key": self.show_key,
            "Machines_update_metadata": self.set_key,
            "Machines_delete_metadata": self.delete_key,
        }

    async def show(self, call: Call) -> Any:
        return check_config(self._row(call).config).metadata

    async def show_key(self, call: Call) -> Any:
        metadata = check_config(self._row(call).config).metadata
        key = call.path("key")
        if key not in metadata:
            raise NotFound(f"metadata key {key} not found")
        return api.MetadataValue(value=metadata[key])

    async def replace(self, call: Call) -> Any:
        body = call.read(api.SetMetadata)
        await self._edit(call, body.metadata, body.machine_version or "", keep=False)

    async def merge(self, call: Call) -> Any:
        body = call.read(api.SetMetadata)
        await self._edit(call, body.metadata, body.machine_version or "", keep=True)

    async def set_key(self, call: Call) -> Any:
        await self._edit(call, {call.path("key"): call.read(api.SetMetadataValue).value}, "", keep=True)

    async def delete_key(self, call: Call) -> Any:
        row, key = self._row(call), call.path("key")

        def edit(old: dict[str, str]) -> dict[str, str]:
            return {k: v for k, v in old.items() if k != key}

        await self._machines.set_metadata(row.app, row.id, request_of(call), edit)

    async def _edit(self, call: Call, new: dict[str, str], version: str, *, keep: bool) -> None:
        row = self._row(call)

        def edit(old: dict[str, str]) -> dict[str, str]:
            metadata = {**(old if keep else {}), **new}
            check_size({**row.config, "metadata": metadata})
            return metadata

        await self._machines.set_metadata(row.app, row.id, request_of(call), edit, version=version)
