"""The studio's web server: the page, and answers to its script. Texts are streamed as server-sent events.

One request at a time uses the model; a few more may wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import bespoke.report
from bespoke.analysis.preference_map import own_contexts
from bespoke.errors import UserError
from bespoke.generation.generate import Drawing, Line, write
from bespoke.generation.voices import Voice
from bespoke.plain import JsonObject
from bespoke.studio.guard import Guard, TooLarge
from bespoke.studio.map import figures
from bespoke.studio.people import People

HERE = Path(__file__).parent
MOST_VOICES, MOST_LENGTH, MOST_LETTERS = 6, 120, 1000
MOST_USERS = 1000  # named in the page
MOST_WAITING = 4


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class VoiceRequest(_Asked):
    """A voice as the page names it."""

    kind: Literal["user", "anybody", "plain", "person"]
    id: str = Field(default="", max_length=500)
    context: str = Field(default="", max_length=500)


class AskedTexts(_Asked):
    prompt: str = Field(max_length=MOST_LETTERS)
    voices: list[VoiceRequest] = Field(min_length=1, max_length=MOST_VOICES)
    length: int = Field(default=30, ge=1, le=MOST_LENGTH)
    temperature: float = Field(default=0.8, ge=0, le=5)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0, le=2**31)


class AskedPerplexity(_Asked):
    sentence: str = Field(min_length=1, max_length=MOST_LETTERS)
    voices: list[VoiceRequest] = Field(min_length=1, max_length=MOST_VOICES)


class AskedPerson(_Asked):
    name: str = Field(max_length=200)
    sentences: list[str] = Field(max_length=1000)
    context: str = Field(default="", max_length=500)


AskedKind = TypeVar("AskedKind", bound=_Asked)


class Busy(Exception):
    """Too many requests wait for the model."""


class Desk:
    """Lets one request at a time use the model."""

    def __init__(self) -> None:
        self.seat, self.waiting = asyncio.Lock(), 0

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        if self.waiting >= MOST_WAITING:
            raise Busy
        self.waiting += 1
        try:
            await self.seat.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.seat.release()


class Studio:
    """Answers requests with the voices of a run and the people of this machine."""

    def __init__(self, people: People) -> None:
        self.people, self.voices, self.desk = people, people.voices, Desk()

    # -- pages ---------------------------------------------------------------------------------------------------------
    async def page(self, request: Request) -> Response:
        places = [HERE, Path(next(iter(bespoke.report.__path__))) / "templates"]
        pages = Environment(loader=FileSystemLoader(places), autoescape=True, undefined=StrictUndefined)
        limits = {"voices": MOST_VOICES, "length": MOST_LENGTH, "letters": MOST_LETTERS}
        return HTMLResponse(pages.get_template("page.html.jinja").render(limits=limits))

    async def script(self, request: Request) -> Response:
        return Response((HERE / "studio.js").read_text(encoding="utf-8"), media_type="text/javascript")

    async def plotly(self, request: Request) -> Response:
        return Response(_plotly(), media_type="text/javascript")

    # -- answers -------------------------------------------------------------------------------------------------------
    async def facts(self, request: Request) -> Response:
        voices, experiment = self.voices, self.voices.experiment
        users = [] if voices.private else voices.users[:MOST_USERS]
        clients = [experiment.population.index(user) for user in users]
        own = own_contexts(experiment.population, experiment.split.test.support, np.array(clients, dtype=np.int64))
        return JSONResponse({
            "run": voices.path.name, "method": experiment.label, "data": experiment.population.about["name"],
            "pretrained": Path(voices.pretrained).name, "private": voices.private, "contexts": voices.contexts,
            "users": [{"id": user, "context": context} for user, context in zip(users, own)],
            "others": len(voices.users) - len(users), "people": [asdict(person) for person in self.people.all()],
            "folder": str(self.people.folder),
        })  # fmt: skip

    async def map(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(figures, self.people))

    async def texts(self, request: Request) -> Response:
        asked = await _read(request, AskedTexts)
        return StreamingResponse(self._events(asked), media_type="text/event-stream")

    async def _events(self, asked: AskedTexts) -> AsyncIterator[str]:
        try:
            async with self.desk():
                lines = []
                for place, wanted in enumerate(asked.voices):  # a model may have to be made first
                    yield _event("making", {"voice": place})
                    lines.append(Line(await run_in_threadpool(self.voice, wanted), asked.prompt))
                how = Drawing(asked.temperature, top_p=asked.top_p)
                async for piece in iterate_in_threadpool(write(self.voices, lines, how, asked.length, asked.seed)):
                    yield _event("piece", {"voice": piece.line, "text": piece.text, "ended": piece.ended})
                yield _event("end", {})
        except UserError as error:
            yield _event("problem", {"error": str(error)})
        except Busy:
            yield _event("problem", {"error": "others are waiting already; try again in a moment"})

    async def perplexity(self, request: Request) -> Response:
        asked = await _read(request, AskedPerplexity)
        tokens = self.voices.tokens(asked.sentence)
        if len(tokens) < 2:
            raise UserError("the sentence has no words")
        async with self.desk():
            found = [(await run_in_threadpool(self.voice, wanted)) for wanted in asked.voices]
            values = [await run_in_threadpool(voice.perplexity, tokens) for voice in found]
        scored = [{"label": voice.label, "perplexity": value} for voice, value in zip(found, values)]
        return JSONResponse({"tokens": len(tokens) - 1, "voices": scored})

    async def add(self, request: Request) -> Response:
        asked = await _read(request, AskedPerson)
        async with self.desk():
            person = await run_in_threadpool(self.people.add, asked.name, asked.sentences, asked.context)
        return JSONResponse(asdict(person), 201)

    async def delete(self, request: Request) -> Response:
        async with self.desk():
            self.people.delete(request.path_params["id"])
        return JSONResponse({})

    def voice(self, wanted: VoiceRequest) -> Voice:
        """The voice that a request names."""
        voices = self.voices
        context = voices.context(wanted.context) if wanted.context else ""
        if wanted.kind == "user":
            return voices.of_user(voices.user(wanted.id), context)
        if wanted.kind == "person":
            return self.people.voice(wanted.id, context)
        return voices.anybody(context) if wanted.kind == "anybody" else voices.plain()


def studio_app(people: People, token: str, hosts: Collection[str]) -> Starlette:
    """The application; `hosts` are the names by which it may be asked, with their port."""
    studio = Studio(people)
    routes = [
        Route("/", studio.page), Route("/studio.js", studio.script), Route("/plotly.js", studio.plotly),
        Route("/api/facts", studio.facts), Route("/api/map", studio.map),
        Route("/api/texts", studio.texts, methods=["POST"]),
        Route("/api/perplexity", studio.perplexity, methods=["POST"]),
        Route("/api/people", studio.add, methods=["POST"]),
        Route("/api/people/{id}", studio.delete, methods=["DELETE"]),
    ]  # fmt: skip
    answers: dict[Any, Callable[[Request, Exception], Response]] = {
        UserError: lambda request, error: JSONResponse({"error": str(error)}, 400),
        ValidationError: lambda request, error: JSONResponse({"error": _message(error)}, 400),
        TooLarge: lambda request, error: JSONResponse({"error": "too much text at once"}, 413),
        Busy: lambda request, error: JSONResponse({"error": "others are waiting already; try again in a moment"}, 503),
    }
    guard = Middleware(Guard, token=token, hosts=hosts)
    return Starlette(routes=routes, middleware=[guard], exception_handlers=answers)


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


async def _read(request: Request, kind: type[AskedKind]) -> AskedKind:
    return kind.model_validate_json(await request.body())


def _message(error: Exception) -> str:
    assert isinstance(error, ValidationError)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the request'}: {first['msg']}"


def _event(name: str, data: JsonObject) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
