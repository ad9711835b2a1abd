"""The worker's handlers for machines' metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hawker.errors import NotFound
from hawker.http.call import Call
from hawker.http.handlers import Route, on
from hawker.model import api
from hawker.model import machine_calls as calls
from hawker.model.call_bases import AnyOfMachine, OfMachine
from hawker.model.config import check_config, check_size
from hawker.model.rows import MachineRow
from hawker.services import Service
from hawker.worker.machine.operations import Machines
from hawker.worker.request import request_of


class MetadataApi(Service):
    """`row` is a request's machine."""

    def __init__(self, machines: Machines, row: Callable[[AnyOfMachine], MachineRow]) -> None:
        self._machines = machines
        self._row = row

    def routes(self) -> tuple[Route, ...]:
        return (
            on(calls.ShowMetadata, self.show),
            on(calls.ReplaceMetadata, self.replace),
            on(calls.MergeMetadata, self.merge),
            on(calls.ShowMetadataKey, self.show_key),
            on(calls.SetMetadataKey, self.set_key),
            on(calls.DeleteMetadataKey, self.delete_key),
        )

    async def show(self, call: Call, request: calls.ShowMetadata) -> Any:
        return check_config(self._row(request).config).metadata

    async def show_key(self, call: Call, request: calls.ShowMetadataKey) -> Any:
        metadata = check_config(self._row(request).config).metadata
        if request.key not in metadata:
            raise NotFound(f"metadata key {request.key} not found")
        return api.MetadataValue(value=metadata[request.key])

    async def replace(self, call: Call, request: calls.ReplaceMetadata) -> Any:
        await self._edit(call, request, request.metadata, request.machine_version or "", keep=False)

    async def merge(self, call: Call, request: calls.MergeMetadata) -> Any:
        await self._edit(call, request, request.metadata, request.machine_version or "", keep=True)

    async def set_key(self, call: Call, request: calls.SetMetadataKey) -> Any:
        await self._edit(call, request, {request.key: request.value}, "", keep=True)

    async def delete_key(self, call: Call, request: calls.DeleteMetadataKey) -> Any:
        row = self._row(request)

        def edit(old: dict[str, str]) -> dict[str, str]:
            return {k: v for k, v in old.items() if k != request.key}

        await self._machines.set_metadata(row.app, row.id, request_of(call), edit)

    async def _edit(
        self, call: Call, request: OfMachine[None], new: dict[str, str], version: str, *, keep: bool
    ) -> None:
        row = self._row(request)

        def edit(old: dict[str, str]) -> dict[str, str]:
            metadata = {**(old if keep else {}), **new}
            check_size({**row.config, "metadata": metadata})
            return metadata

        await self._machines.set_metadata(row.app, row.id, request_of(call), edit, version=version)
