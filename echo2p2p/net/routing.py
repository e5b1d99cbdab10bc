"""Which route answers a request, and the refusals that every HTTP server of ours gives alike.

The aiohttp server and the simulated one share this file, so that a path that is served in
simulation is served in production, and a 404 reads the same in both.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from echo2p2p.net.ports import Journal, Request, Response, Route
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Refusal

HANDLER_FAILED: Final = "http.handler_failed"
"""Event of either server: a handler raised."""

REASON_NO_SUCH_PATH: Final = "no_such_path"
REASON_WRONG_METHOD: Final = "wrong_method"
REASON_BODY_TOO_LONG: Final = "body_too_long"
REASON_BODY_TOO_SLOW: Final = "body_too_slow"
REASON_ENCODED: Final = "encoded_body"
REASON_TOO_MUCH: Final = "too_much_at_once"
REASON_BUSY: Final = "busy"
REASON_CLOSING: Final = "closing"
REASON_BUG: Final = "internal_error"


def refusal(
    status: int,
    reason: str,
    detail: str,
    *,
    retry_after_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an answer whose body is an encoded `Refusal`.

    ``retry_after_s`` also becomes the ``Retry-After`` header, in whole seconds, rounded up.
    """
    all_headers = dict(headers or {})
    if retry_after_s is not None:
        all_headers["Retry-After"] = str(math.ceil(retry_after_s))
    body = codec.encode(Refusal(reason=reason, detail=detail, retry_after_s=retry_after_s))
    return Response(status, body, all_headers)


def body_too_long(route: Route) -> Response:
    """Return the 413 of ``route``."""
    return refusal(
        413,
        REASON_BODY_TOO_LONG,
        f"{route.path} takes at most {route.body_bytes_max} bytes: send less at a time",
    )


def too_much_at_once() -> Response:
    """Return the 429 of whoever has too many bytes of bodies under way already."""
    detail = "too many bytes of yours are under way: send one body after the other"
    return refusal(429, REASON_TOO_MUCH, detail, retry_after_s=1.0)


def look_at_head(route: Route, head: Request) -> str | Response:
    """Decide from a request's head whether its body is read at all.

    Returns:
        Whose bytes it counts towards (empty: nobody's in particular), or the refusal.
    """
    encoding = head.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        detail = f"bodies are not inflated: send it without Content-Encoding {encoding[:20]!r}"
        return refusal(415, REASON_ENCODED, detail)
    return "" if route.admit is None else route.admit(head)


def note_failed(journal: Journal, route: Route, error: Exception) -> None:
    """Journal the bug that a handler, or the rest of its answer, has just raised."""
    journal.event(
        HANDLER_FAILED,
        method=route.method,
        path=route.path,
        cause=f"{type(error).__name__}: {error}",
        exception="".join(traceback.format_exception(error)),
    )


def handler_failed() -> Response:
    """Return the 500 that stands for a bug of ours; the cause is in the server's journal."""
    return refusal(
        500,
        REASON_BUG,
        "the server failed on this request; its journal has the cause",
        retry_after_s=5.0,
    )


def closing() -> Response:
    """Return the 503 of a server that stops while a handler is at work."""
    return refusal(503, REASON_CLOSING, "the server is closing: ask again", retry_after_s=1.0)


@dataclass(frozen=True)
class Match:
    """The route that answers, and what its ``{name}`` parts stand for in this path."""

    route: Route
    parts: Mapping[str, str] = field(default_factory=dict)


class Router:
    """Finds routes: literal paths by a table, templates one after the other in their order."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._literal: dict[str, dict[str, Route]] = {}
        self._templates: dict[tuple[str, ...], dict[str, Route]] = {}
        for route in routes:
            assert route.path.startswith("/"), route.path
            if "{" in route.path:
                by_method = self._templates.setdefault(tuple(route.path.split("/")), {})
            else:
                by_method = self._literal.setdefault(route.path, {})
            assert route.method not in by_method, f"two routes for {route.method} {route.path}"
            by_method[route.method] = route

    def find(self, method: str, path: str) -> Match | Response:
        """Return the route for a decoded ``path``, or the 404 or 405 to be sent."""
        by_method = self._literal.get(path)
        parts: dict[str, str] = {}
        if by_method is None:
            by_method, parts = self._find_template(path)
        if by_method is None:
            return refusal(404, REASON_NO_SUCH_PATH, "nothing is served under this path")
        route = by_method.get(method)
        if route is None:
            allowed = ", ".join(sorted(by_method))
            return refusal(
                405, REASON_WRONG_METHOD, f"use {allowed} here", headers={"Allow": allowed}
            )
        return Match(route, parts)

    def _find_template(self, path: str) -> tuple[dict[str, Route] | None, dict[str, str]]:
        pieces = path.split("/")
        for template, by_method in self._templates.items():
            if len(template) != len(pieces):
                continue
            parts: dict[str, str] = {}
            for wanted, piece in zip(template, pieces, strict=True):
                if wanted.startswith("{") and wanted.endswith("}") and piece:
                    parts[wanted[1:-1]] = piece
                elif wanted != piece:
                    break
            else:
                return by_method, parts
        return None, {}
