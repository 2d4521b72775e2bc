"""The files of the page, and the page as one file with its data inside. No part of it is loaded from elsewhere."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

__all__ = ["ASSETS", "asset", "standalone"]

ASSETS = {
    "style.css": "text/css",
    "charts.js": "text/javascript",
    "panels.js": "text/javascript",
    "speculation.js": "text/javascript",
    "app.js": "text/javascript",
}
PAGE = "index.html"
_DATA_SLOT = "<!-- data -->"


def asset(name: str) -> str:
    """Text of a file of the page (`PAGE` or one of `ASSETS`)."""
    return (files("launcher.dashboard") / "static" / name).read_text(encoding="utf-8")


def standalone(view: dict[str, Any]) -> str:
    """The page with styles, scripts and ``view`` inlined: one HTML file that needs no server and no network."""
    html = asset(PAGE)
    for name in ASSETS:
        if name.endswith(".css"):
            html = _swap(html, f'<link rel="stylesheet" href="{name}">', f"<style>\n{asset(name)}</style>")
        else:
            html = _swap(html, f'<script src="{name}" defer></script>', "")
    data = json.dumps(view, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = "\n".join(f"<script>\n{asset(name)}</script>" for name in ASSETS if name.endswith(".js"))
    return _swap(html, _DATA_SLOT, f'<script type="application/json" id="run-data">{data}</script>\n{scripts}')


def _swap(html: str, old: str, new: str) -> str:
    if html.count(old) != 1:
        raise ValueError(f"{PAGE} must hold {old!r} exactly once, it does {html.count(old)} times")
    return html.replace(old, new)
