"""The check of a dashboard page in a real browser, for synthetic and real runs."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from launcher.dashboard import Dashboard
from tests.e2e.browser import Page, open_page

__all__ = ["CHARTS", "assert_dashboard_ok", "read_points"]

POINTS = (
    "Object.fromEntries([...document.querySelectorAll('[data-chart]')].map(n => [n.dataset.chart, +n.dataset.points]))"
)
CHARTS = {
    *("reward", "loss", "generation", "training", "stages", "tree", "loads", "staleness", "mismatch", "queue"),
    *("speculation", "arms", "spot", "drafter", "drafter_loss", "buffer", "rejections", "processes", "events"),
}
# A run without rejections is a good run; by default no drafter is trained.
MAY_BE_EMPTY = {"rejections", "spot", "drafter", "drafter_loss", "buffer"}
DRAWN = "document.body.dataset.rendered"


def assert_dashboard_ok(run_dir: Path, may_be_empty: frozenset[str] = frozenset(MAY_BE_EMPTY)) -> dict[str, int]:
    """Serve the page of a run, open it, and check it; returns the number of data points by chart."""
    return asyncio.run(_check_served(run_dir, may_be_empty))


async def _check_served(run_dir: Path, may_be_empty: frozenset[str]) -> dict[str, int]:
    dashboard = Dashboard(run_dir)
    url = await dashboard.start()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            async with open_page(url, Path(profile)) as page:
                points = await read_points(page)
                assert all(request.startswith(url) for request in page.requests), page.requests
    finally:
        await dashboard.stop()
    assert set(points) == CHARTS
    assert not [chart for chart in CHARTS - may_be_empty if not points[chart]], points
    return points


async def read_points(page: Page) -> dict[str, int]:
    """Points by chart once the page has drawn; fails on whatever the page complained about."""
    await page.wait_for(DRAWN)
    points = json.loads(await page.evaluate(f"JSON.stringify({POINTS})"))
    assert page.problems == []
    return points
