"""Prometheus' text format. Imports nothing heavy: the router uses it too."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CONTENT_TYPE", "Sample", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, str, str, list[tuple[dict[str, str], float]]]
"""Name, type, help, [(labels, value)]."""


def render(samples: Iterable[Sample]) -> str:
    lines: list[str] = []
    for name, kind, text, values in samples:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in values:
            inner = ",".join(f'{k}="{_escape(v)}"' for k, v in labels.items())
            lines.append(f"{name}{{{inner}}} {value:.10g}" if inner else f"{name} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
