"""The dashboard: one page of plain HTML, CSS and JavaScript, served from this folder.

The page holds no figures and no secret; it asks ``/status`` for them every two seconds. Where that
needs the admin token, the page asks for it, keeps it in the browser tab's session storage, and
sends it as the ``Authorization`` header, never in a URL. It loads nothing from anywhere else, which
the browser is told to enforce. Charts are SVG by some hundred lines of our own: no framework, no
build step, no network needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo2p2p.net.ports import Response

_FOLDER: Final = Path(__file__).parent
_TYPES: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def dashboard_file(name: str) -> Response | None:
    """Return the answer for one file of the page, or ``None`` if it has none of this name."""
    content_type = _TYPES.get(name)
    if content_type is None:
        return None
    return Response(200, (_FOLDER / name).read_bytes(), HEADERS, content_type)
