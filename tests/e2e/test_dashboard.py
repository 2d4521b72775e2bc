"""The page in a real browser: every chart has data, nothing is reported as an error, nothing is loaded from elsewhere.

`assert_dashboard_ok` serves to check the page of a real run as well. Not covered: browsers other than Chromium.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from launcher.dashboard import Dashboard
from launcher.report import write_report
from tests.e2e.browser import Page, open_page
from tests.e2e.dashboard_check import CHARTS, assert_dashboard_ok, read_points
from tests.e2e.synthetic_run import RANKS, STEPS, write_synthetic_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    write_synthetic_run(path)
    return path


def test_every_chart_of_a_finished_run_has_data_and_the_page_is_silent(run_dir):
    points = assert_dashboard_ok(run_dir, may_be_empty=frozenset())
    assert points["reward"] == STEPS + 2  # and both evaluations
    assert points["loads"] == STEPS * RANKS


def test_a_live_page_follows_the_run_answers_to_the_keyboard_and_survives_the_loss_of_its_server(tmp_path):
    asyncio.run(_live(tmp_path))


async def _live(tmp_path: Path) -> None:
    run_dir, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    write_synthetic_run(run_dir)
    state = json.loads((run_dir / "state.json").read_text())
    (run_dir / "state.json").unlink()  # as before a launch has written any: the page polls fast
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.unlink()
    dashboard = Dashboard(run_dir)
    url = await dashboard.start()
    async with open_page(url, tmp_path / "profile", width=390, dark=True) as page:
        assert set((await read_points(page)).values()) == {0}
        assert "Waiting for" in await page.evaluate("document.querySelector('#panel-loss .empty').textContent")
        metrics.write_text("".join(lines[: len(lines) // 2]))
        await page.wait_for("+document.querySelector('[data-chart=loss]').dataset.points > 3")
        half = await read_points(page)
        with metrics.open("a") as file:
            file.writelines(lines[len(lines) // 2 :])
        await page.wait_for(f"+document.querySelector('[data-chart=loss]').dataset.points === {STEPS}")
        assert half["loss"] < STEPS
        await _use_keyboard(page)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page overflows a phone"
        (run_dir / "state.json").write_text(json.dumps({**state, "status": "failed", "cause": "trainer.1 died"}))
        await page.wait_for("document.querySelector('#run-cause').textContent.includes('trainer.1 died')")
        await dashboard.stop()
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # poll now
        await page.wait_for("document.querySelector('#banner').textContent.startsWith('Connection lost')")


async def _use_keyboard(page: Page) -> None:
    await page.evaluate("document.querySelector('#panel-stages svg').focus()")
    tip = "document.querySelector('#panel-stages .tip')"
    for key in ("End", "ArrowLeft"):
        await page.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        await page.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)
    assert f"step {STEPS - 2}" in await page.evaluate(f"{tip}.textContent")
    assert await page.evaluate("document.querySelector('#panel-reward .cross').getAttribute('visibility')") == "visible"
    await page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    assert await page.evaluate(f"{tip}.hidden")


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        ("tlt:\n  enabled: false\n  train: false\n", {"speculation": "Off:", "arms": "Off:", "spot": "Off:"}),
        (
            "tlt:\n  enabled: true\n  train: false\n",
            {"speculation": "ended before", "drafter": "no drafter"},
        ),
    ],
)
def test_panels_say_whether_speculation_is_off_or_has_nothing_to_show(tmp_path, wanted, texts):
    write_synthetic_run(tmp_path, steps=1)
    config, metrics = tmp_path / "config.yaml", tmp_path / "metrics.jsonl"
    config.write_text(config.read_text().partition("tlt:")[0] + wanted)
    kept = [line for line in metrics.read_text().splitlines(True) if '"tlt/' not in line and '"drafter/' not in line]
    metrics.write_text("".join(kept))
    out = tmp_path / "report.html"
    write_report(tmp_path, out)

    async def read() -> dict[str, str]:
        async with open_page(out.as_uri(), tmp_path / "profile") as page:
            await read_points(page)
            shown = {name: f"document.querySelector('#panel-{name} .empty').textContent" for name in texts}
            return {name: await page.evaluate(code) for name, code in shown.items()}

    shown = asyncio.run(read())
    for name, text in texts.items():
        assert text in shown[name]


def test_the_report_is_one_file_that_needs_no_network(run_dir, tmp_path):
    out = tmp_path / "report.html"
    write_report(run_dir, out)

    async def check() -> tuple[dict[str, int], list[str]]:
        async with open_page(out.as_uri(), tmp_path / "profile") as page:
            return await read_points(page), page.requests

    points, requests = asyncio.run(check())
    assert set(points) == CHARTS and all(points.values())
    assert [r for r in requests if not r.startswith("data:")] == [out.as_uri()]
