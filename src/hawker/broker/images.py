"""The broker's handlers for images. They choose the workers that a call is about and make one answer of theirs.

Where nobody is named: `pull` goes to every worker that has the image, so that no old meaning of a name is left, and to
one when none has it; `prefetch` to all, or to some of each region; `push` to one that has it; an upload to the worker
that the market would choose. What a call's progress is, each worker tells for itself; the events are passed on as they
come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from hawker.broker.fleet import Fleet, PeerError, WorkerLink, ask_each, check_meant, unreachable
from hawker.broker.offers import book
from hawker.broker.relay import Relay, answer, ask_lists, by
from hawker.client.connection import Response as PeerResponse
from hawker.core.ranking import Policy
from hawker.errors import Conflict, HawkerError, Invalid, NotFound, PreconditionFailed, Unreachable
from hawker.host import Host
from hawker.http.call import Call
from hawker.http.events import EventStream, event
from hawker.http.handlers import Route, on
from hawker.model import image_api
from hawker.model.guest import Guest
from hawker.model.market import Ask, Offer
from hawker.model.op import StreamRequest
from hawker.model.request_codec import Encoded, encode
from hawker.telemetry import get_logger

LOOK_S = 5.0
HEAD_S = 30.0
WAITING_MOST = 64
"""How many events wait for a slow client. The workers' streams wait when there are more."""

_encode = msgspec.json.Encoder().encode


class ImageRelay:
    """Answers the calls of `hawker.model.image_api`."""

    def __init__(self, fleet: Fleet, relay: Relay, host: Host, policy: Policy) -> None:
        self._fleet = fleet
        self._relay = relay
        self._host = host
        self._policy = policy

    def routes(self) -> tuple[Route, ...]:
        return (
            on(image_api.ListImages, self.list_images),
            on(image_api.ShowImage, self.list_images),
            on(image_api.RemoveImage, self.remove),
            on(image_api.PullImage, self.pull),
            on(image_api.PrefetchImage, self.prefetch),
            on(image_api.PushImage, self.push),
            on(image_api.BeginUpload, self.begin_upload),
            on(image_api.Upload, self.upload),
            on(image_api.DropUpload, self.upload),
            on(image_api.ImportImage, self.import_image),
        )

    async def list_images(self, call: Call, request: image_api.ListImages | image_api.ShowImage) -> Any:
        """The workers' lists as one."""
        answers, errors = await self._ask(call, request)
        return answer([entry for entries in answers.values() for entry in entries], unreachable(errors))

    async def remove(self, call: Call, request: image_api.RemoveImage) -> Any:
        """Remove an image where no machine needs it. The refusal is raised when every worker that has it needs it; else
        the answer says what became of it on each."""
        answers, errors = await self._ask(call, request, "DELETE")
        kept = {name: error for name, error in errors.items() if error.status == Conflict.status}
        if not any(answers.values()):
            for error in kept.values():
                raise error
        told = [entry for entries in answers.values() for entry in entries]
        told += [
            msgspec.Raw(_encode(image_api.ImageRemoved(worker=name, removed=False, error=error.message)))
            for name, error in kept.items()
        ]
        return answer(told, unreachable(errors))

    async def pull(self, call: Call, request: image_api.PullImage) -> Any:
        links = self._scope(request.worker, request.region)
        if request.worker is None:
            having = await self._having(links, request.image)
            links = having or [await self._chosen(links, request.image)]
        return await self._events(call, links, request)

    async def prefetch(self, call: Call, request: image_api.PrefetchImage) -> Any:
        links = self._scope(request.worker, request.region)
        if request.worker is None and request.count is None:
            links = await self._keeping(links)
        elif request.worker is None and request.count is not None:
            ranked = [await self._ranked(of_region, request.image) for of_region in _by_region(links)]
            links = [link for found in ranked for link in found[: request.count]]
            if not links:
                raise _nobody(request.image)
        return await self._events(call, links, request)

    async def push(self, call: Call, request: image_api.PushImage) -> Any:
        links = self._scope(request.worker, None)
        if request.worker is None:
            links = (await self._having(links, request.image))[:1]
            if not links:
                raise NotFound(f"no worker has the image {request.image}", hint=f"hawker image pull {request.image}")
        return await self._events(call, links, request)

    async def begin_upload(self, call: Call, request: image_api.BeginUpload) -> Any:
        links = self._scope(request.worker, request.region)
        link = links[0] if request.worker is not None else await self._chosen(links, "")
        return await self._relay.send(link, call)

    async def upload(self, call: Call, request: image_api.Upload | image_api.DropUpload) -> Any:
        return await self._relay.send(self._fleet.link(request.worker), call)

    async def import_image(self, call: Call, request: image_api.ImportImage) -> Any:
        if not request.worker:
            raise Invalid("worker", request.worker, "name the worker that the upload is at")
        return await self._events(call, [self._fleet.link(request.worker)], request)

    # --- which workers -----------------------------------------------------------------------------------------------

    def _scope(self, worker: str | None, region: str | None) -> Sequence[WorkerLink]:
        """Raises `NotFound`."""
        if worker is not None:
            return [self._fleet.link(worker)]
        links = [link for name in self._fleet.regions() for link in self._fleet.in_region(name)]
        if region is not None:
            links = [link for link in links if link.region == region]
            if not links:
                raise NotFound(f"no worker is in region {region}", hint="hawker regions shows the ones there are")
        if not links:
            raise NotFound("there are no workers", hint="hawker workers")
        return links

    async def _named(self, links: Sequence[WorkerLink], image: str) -> dict[str, image_api.Named]:
        """What a name means on each worker that keeps images and answers."""
        answers, errors = await ask_each(links, image_api.NameImage(image=image), LOOK_S)
        if not answers:
            for error in errors.values():
                raise error
        return answers

    async def _having(self, links: Sequence[WorkerLink], image: str) -> Sequence[WorkerLink]:
        named = await self._named(links, image)
        return [link for link in links if named.get(link.name, image_api.Named()).digest]

    async def _keeping(self, links: Sequence[WorkerLink]) -> Sequence[WorkerLink]:
        named = await self._named(links, "")
        return [link for link in links if link.name in named]

    async def _ranked(self, links: Sequence[WorkerLink], image: str) -> Sequence[WorkerLink]:
        """The workers of one region that offer to run the image, best first, as the market ranks them."""
        wanted = Guest().resources()
        ask = Ask(app="", region=links[0].region, image=image or "none", resources=wanted)
        offers = [answer for answer in await book(links, ask) if isinstance(answer, Offer)]
        by_name = {link.name: link for link in links}
        return [by_name[scored.worker] for scored in self._policy.rank(offers, wanted, self._host.rng)]

    async def _chosen(self, links: Sequence[WorkerLink], image: str) -> WorkerLink:
        """The worker that the market would choose in the first region that has one; else any that keeps images."""
        for of_region in _by_region(links):
            if ranked := await self._ranked(of_region, image):
                return ranked[0]
        keeping = await self._keeping(links)
        if not keeping:
            raise _nobody(image)
        return keeping[0]

    # --- their answers -----------------------------------------------------------------------------------------------

    async def _ask(
        self,
        call: Call,
        request: image_api.ListImages | image_api.ShowImage | image_api.RemoveImage,
        method: str = "GET",
    ) -> tuple[dict[str, list[msgspec.Raw]], dict[str, HawkerError]]:
        """Make the call at each worker. When none can answer, the error is raised; a worker without images is left out
        unless it is the only one."""
        answers, errors = await ask_lists(call, self._scope(request.worker, request.region), method)
        if not answers:
            for error in sorted(errors.values(), key=lambda error: error.status == PreconditionFailed.status):
                raise error
        return answers, errors

    async def _events(
        self, call: Call, links: Sequence[WorkerLink], request: StreamRequest[image_api.ImageEvent]
    ) -> EventStream:
        """The events of the workers. A refusal of a single worker is raised; of several, each refusal is an event."""
        sent = encode(request)
        sent = sent._replace(headers={**sent.headers, **by(call)})
        if len(links) > 1:
            return EventStream(_merged(links, sent))
        events = _told(links[0], sent)
        await anext(events)
        return EventStream(events)


async def _told(link: WorkerLink, sent: Encoded) -> AsyncGenerator[bytes, None]:
    """A worker's events and signs of life, each whole, after an empty one when it has taken the call. Raises what it
    refuses. A worker that breaks off before its last word gets one."""
    rest, taken, ended = b"", False, False
    try:
        async with link.peer.stream(
            sent.method, sent.target, body=sent.body, headers=sent.headers, timeout_s=HEAD_S
        ) as stream:
            if stream.status != 200:
                whole = b"".join([chunk async for chunk in stream.chunks])
                check_meant(link.name, stream.status)
                raise PeerError(PeerResponse(stream.status, stream.headers, whole))
            taken = True
            yield b""
            async for chunk in stream.chunks:
                *events, rest = (rest + chunk).split(b"\n\n")
                for each in events:
                    ended = ended or each.startswith((b"event: done", b"event: error"))
                    yield each + b"\n\n"
        if not ended:
            raise Unreachable(f"{link.name} broke off before the end", hint="what it was about may go on there")
    except HawkerError as error:
        if not taken:
            raise
        if not ended:
            yield event("error", failed(link.name, error))


async def _merged(links: Sequence[WorkerLink], sent: Encoded) -> AsyncGenerator[bytes, None]:
    """The events of all workers as they come, until each has ended."""
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_MOST)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(_follow(link, sent, waiting), name=f"images {link.name}") for link in links]
    left = len(tasks)
    try:
        while left:
            found = await waiting.get()
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(link: WorkerLink, sent: Encoded, to: asyncio.Queue[bytes | None]) -> None:
    try:
        async with aclosing(_told(link, sent)) as events:
            async for each in events:
                if each:
                    await to.put(each)
    except HawkerError as error:
        await to.put(event("error", failed(link.name, error)))
    except Exception as error:
        _logger.exception("images.relay_failed", worker=link.name)
        await to.put(event("error", failed(link.name, HawkerError(f"internal error: {type(error).__name__}"))))
    await to.put(None)


def _by_region(links: Sequence[WorkerLink]) -> list[list[WorkerLink]]:
    regions = dict.fromkeys(link.region for link in links)
    return [[link for link in links if link.region == region] for region in regions]


def failed(worker: str, error: HawkerError) -> image_api.ImageFailed:
    details = error.details
    hint = error.hint or (details.get("hint", "") if isinstance(details, dict) else "")
    return image_api.ImageFailed(worker=worker, error=error.message, status=error.code, hint=hint)


def _nobody(image: str) -> PreconditionFailed:
    what = f"image {image}" if image else "images"
    return PreconditionFailed(f"no worker that answers can take {what}", hint="hawker doctor, on a worker's host")


_logger = get_logger()
