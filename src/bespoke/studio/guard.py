"""Checks every request to the studio: token, origin, size, and response headers for the browser.

The token comes with the address that the terminal shows, behind `#`, which a browser sends to nobody; the page's script
sends it in a header. So no other page can make a browser ask in the user's name, and no log has the token. The Host
header has to be the studio's own: else a page of another name that resolves to this machine could ask (DNS rebinding).
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 64 * 1024  # of a request
HEADERS = {
    # 'unsafe-inline' of styles alone: Plotly writes some while it draws
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class TooLarge(Exception):
    """A request exceeds the size limit."""


@dataclass
class Guard:
    """An ASGI application that requires a token, except for static pages and scripts, which hold no data."""

    app: ASGIApp
    token: str
    hosts: Collection[str]  # as in the Host header, with the port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refused(scope)
        await (refused or self.app)(scope, _limited(receive), answer)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self.hosts:
            return _no(421, "this studio is asked by the address that the terminal shows, and by no other name")
        if not scope["path"].startswith("/api/"):
            return None
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return _no(401, "the token is missing or wrong; open the address that the terminal shows")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return _no(413, f"a request has at most {MOST_BYTES:,} bytes")
        return None


def _no(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)


def _limited(receive: Receive) -> Receive:
    """Limits the size of a body while it is read: a request may come without a length."""
    read = 0

    async def some() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MOST_BYTES:
            raise TooLarge
        return message

    return some
