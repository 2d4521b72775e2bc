"""Records folded into the page's view, and the server around it. Not covered here: what a browser makes of it."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from areal_dta.metrics import MetricRecord
from launcher.dashboard import Dashboard, DashboardError
from launcher.dashboard.model import RunModel
from launcher.dashboard.page import standalone
from launcher.dashboard.timeline import GAP_S, Timeline
from launcher.report import write_report
from launcher.run_files import RunFileError, RunFiles
from tests.e2e.synthetic_run import RANKS, STEPS, write_synthetic_run

FILES = RunFiles(Path("run"), state={"status": "running", "started_at": 90.0}, launch={"dp": 2})


def record(
    t: float, proc: str, name: str, value: float | None = None, step: int | None = None, **labels
) -> MetricRecord:
    kind = "event" if value is None else "value"
    return MetricRecord(t, proc, kind, name, value, step, labels)


# ---- time axis ----


def test_an_amount_is_spread_over_the_interval_in_which_it_arose():
    timeline = Timeline(width_s=2.0)
    timeline.spread(1.0, 5.0, "tokens", 40.0, revision=1)
    assert {i: b.amounts["tokens"] for i, b in timeline.buckets.items()} == {0: 10.0, 1: 20.0, 2: 10.0}


def test_the_grid_coarsens_instead_of_growing_and_keeps_every_amount():
    timeline = Timeline(width_s=1.0, max_buckets=8)
    for second in range(100):
        timeline.spread(second, second + 1, "tokens", 5.0, revision=second)
        timeline.gauge(second + 0.5, "level", second, revision=second)
    assert timeline.width_s == 16.0 and len(timeline.buckets) <= 8
    assert sum(b.amounts["tokens"] for b in timeline.buckets.values()) == pytest.approx(500.0)
    assert timeline.buckets[0].gauges["level"] == 15


def test_the_time_in_which_nothing_ran_is_cut_out():
    timeline = Timeline()
    assert timeline.place(1000.0) == 0.0
    assert timeline.place(1010.0) == 10.0
    assert timeline.place(1010.0 + GAP_S + 5000.0) == 10.0
    assert timeline.place(1010.0 + GAP_S + 5003.0) == 13.0
    assert timeline.place(900.0) == 0.0  # another process's clock


# ---- the model ----


def test_a_view_without_cursor_is_whole_and_one_with_cursor_holds_what_changed():
    model = RunModel()
    model.add([record(100.0, "trainer.0", "train/loss", 1.0, 0), record(101.0, "trainer.0", "train/loss", 2.0, 1)])
    first = model.view(FILES, now=110.0)
    assert first["full"] and [s["step"] for s in first["steps"]] == [0, 1]
    model.add([record(102.0, "trainer.0", "train/loss", 3.0, 1), record(103.0, "trainer.0", "train/loss", 4.0, 2)])
    second = model.view(FILES, 110.0, first["cursor"])
    assert not second["full"] and [(s["step"], s["loss"]) for s in second["steps"]] == [(1, 3.0), (2, 4.0)]
    assert model.view(FILES, 110.0, second["cursor"])["steps"] == []


@pytest.mark.parametrize("cursor", ["other:5:0", "nonsense", "a:b", ""])
def test_a_cursor_of_another_server_gets_everything(cursor):
    model = RunModel()
    model.add([record(100.0, "trainer.0", "train/loss", 1.0, 0)])
    view = model.view(FILES, 110.0, cursor)
    assert view["full"] and len(view["steps"]) == 1


def test_increments_add_up_to_the_whole_view():
    """The rates of the newest ticks come later: a page that polls must end with what a page that opens now gets."""
    model, ticks, steps, cursor = RunModel(), {}, {}, None
    records = [record(100.0 + 0.5 * i, "server.0", "server/generated_tokens", 10.0 * i) for i in range(400)]
    records += [record(300.0 + i, "trainer.0", "train/loss", float(i), i) for i in range(5)]
    for start in range(0, len(records), 37):
        model.add(records[start : start + 37])
        view = model.view(FILES, 500.0, cursor)
        cursor = view["cursor"]
        ticks |= {t["i"]: t for t in view["ticks"]}
        steps |= {s["step"]: s for s in view["steps"]}
    whole = model.view(FILES, 500.0)
    assert sorted(ticks.values(), key=lambda t: t["i"]) == whole["ticks"]
    assert list(steps.values()) == whole["steps"]
    assert {t["generated"] for t in whole["ticks"][:-1] if "generated" in t} == {20.0}
    assert sum(t.get("generated", 0.0) for t in whole["ticks"]) * model.timeline.width_s == pytest.approx(3990.0)


def test_generated_tokens_of_a_restarted_server_are_neither_negative_nor_lost():
    model = RunModel()
    totals = [(100.0, 0.0), (102.0, 200.0), (104.0, 400.0), (106.0, 50.0), (112.0, 50.0)]
    model.add([record(t, "server.0", "server/generated_tokens", total) for t, total in totals])
    rates = [t.get("generated", 0.0) for t in model.view(FILES, 120.0)["ticks"]]
    assert sum(rates) * model.timeline.width_s == pytest.approx(450.0)


def test_levels_are_summed_over_servers():
    model = RunModel()
    model.add([record(100.0, "server.0", "server/running", 3), record(100.1, "server.1", "server/running", 4)])
    assert model.view(FILES, 101.0)["ticks"][0]["running"] == 7


def test_processes_tell_their_restarts_and_deaths_and_all_end_with_the_run():
    model = RunModel()
    model.add(
        [
            record(100.0, "launcher", "process/start", process="server.0", pid=5),
            record(100.0, "launcher", "process/start", process="batcher", pid=6),
            replace(record(101.0, "launcher", "process/exit", process="server.0", code=-9), message="died"),
        ]
    )
    rows = {p["name"]: p for p in model.view(FILES, 101.0)["processes"]}
    assert rows["server.0"]["state"] == "died" and rows["server.0"]["last_exit"] == "died"
    model.add([record(102.0, "launcher", "process/restart", process="server.0", pid=7)])
    rows = {p["name"]: p for p in model.view(FILES, 102.0)["processes"]}
    assert (rows["server.0"]["state"], rows["server.0"]["pid"], rows["server.0"]["restarts"]) == ("running", 7, 1)
    model.add([record(103.0, "launcher", "process/exit", process="batcher", code=-15, stopped=True)])
    rows = {p["name"]: p for p in model.view(FILES, 103.0)["processes"]}
    assert (rows["batcher"]["state"], rows["server.0"]["state"]) == ("ended", "running")
    ended = model.view(RunFiles(Path("run"), state={"status": "finished"}), 103.0)["processes"]
    assert {p["state"] for p in ended} == {"ended"}


def test_a_loss_that_is_not_finite_is_a_gap_and_an_empty_run_is_a_view(tmp_path):
    model = RunModel()
    empty = model.view(RunFiles(tmp_path), 1.0)
    assert empty["steps"] == [] and empty["now"]["bound"] is None and empty["run"]["elapsed_s"] is None
    model.add([MetricRecord(1.0, "trainer.0", "value", "train/loss", None, 0, message="nan")])
    assert model.view(FILES, 2.0)["steps"][0]["loss"] is None


def test_elapsed_time_stops_with_the_run():
    model = RunModel()
    model.add([record(100.0, "trainer.0", "train/loss", 1.0, 0)])
    assert model.view(FILES, 150.0)["run"]["elapsed_s"] == 60.0
    ended = RunFiles(Path("run"), state={"status": "failed", "started_at": 90.0, "updated_at": 120.0})
    assert model.view(ended, 9999.0)["run"]["elapsed_s"] == 30.0


# ---- speculation and the drafter's training ----


def spec_report(t: float, server: str, drafts: int, accepted: int, loss: float, **seconds: float) -> list[MetricRecord]:
    return [
        record(t, server, "tlt/draft_steps", drafts),
        record(t, server, "tlt/accepted_tokens", accepted),
        record(t, server, "tlt/loss_to_plain", loss),
        *(record(t, server, "tlt/seconds", spent, arm=arm) for arm, spent in seconds.items()),
    ]


def test_speculation_is_shown_by_time_and_in_sum_over_all_servers_and_their_restarts():
    model = RunModel()
    model.add(spec_report(100.0, "server.0", 10, 10, 0.0, off=1.0))
    model.add(spec_report(101.0, "server.0", 30, 40, -0.5, off=1.0, ngram=1.0))
    model.add(spec_report(102.0, "server.1", 0, 0, 0.0, off=2.0))
    model.add(spec_report(103.0, "server.0", 10, 0, 0.0, off=0.5))  # started again
    model.add([record(130.0, "server.0", "server/running", 0)])  # the clock goes on
    view = model.view(FILES, 140.0)
    assert view["speculation"]["accept_length"] == 1 + 40 / 40
    assert view["speculation"]["speedup"] == pytest.approx((4.5 + 0.5 * 2.0) / 4.5)
    assert view["speculation"]["arms"] == {"off": pytest.approx(3.5 / 4.5), "ngram": pytest.approx(1 / 4.5)}
    ticks, width_s = view["ticks"], model.timeline.width_s
    assert sum(t.get("drafts", 0) for t in ticks) * width_s == pytest.approx(40)
    assert sum(t.get("accepted", 0) for t in ticks) * width_s == pytest.approx(40)
    assert sum(t.get("arm off", 0) for t in ticks) * width_s == pytest.approx(3.5)
    assert [t["speedup"] for t in ticks if "speedup" in t] == pytest.approx([1.5, 5.5 / 4.5], abs=1e-4)


def test_the_training_of_the_drafter_is_followed_and_its_routine_stays_out_of_the_events():
    model, training = RunModel(), RunFiles(Path("run"), config={"rollout": {"backend": "embedded:d2"}})
    model.add([record(100.0, "coordinator", "drafter/servers", 2, state="training")])
    model.add(
        [record(100.0, "drafter.0", "drafter/buffer_bytes", 5), record(100.0, "drafter.1", "drafter/buffer_bytes", 7)]
    )
    model.add(
        [record(100.0, "drafter.0", "drafter/loss", 2.5, 40), record(100.0, "drafter.0", "drafter/top3", 0.5, 40)]
    )
    model.add([replace(record(101.0, "drafter.0", "drafter/published", version="d40"), message="server.0,server.1")])
    model.add([replace(record(102.0, "drafter.0", "drafter/published", version="d50"), message="")])  # nobody took it
    model.add([record(102.0, "drafter.0", "drafter/resting"), record(102.0, "coordinator", "drafter/round_ended")])
    view = model.view(training, 103.0)
    [tick] = view["ticks"][:1]
    assert (tick["servers_training"], tick["buffer_bytes"], tick["drafter_loss"], tick["drafter_top3"]) == (
        2,
        12,
        2.5,
        0.5,
    )
    shown = view["speculation"]
    assert (shown["version"], shown["servers"], shown["steps"]) == ("d40", ["server.0", "server.1"], 40)
    assert [e["name"] for e in view["events"]] == ["drafter/published", "drafter/published"]


@pytest.mark.parametrize(
    ("backend", "tlt", "enabled", "train"),
    [
        ("embedded:d1", {"enabled": True, "train": True}, True, True),
        ("embedded:d1", {"enabled": False, "train": False}, False, False),
        ("sglang:d1", {"enabled": True, "train": False}, False, False),
        ("embedded:d1", {}, False, False),  # a run of before there was such a section
    ],
)
def test_the_page_knows_whether_speculation_is_off_or_has_nothing_to_show_yet(backend, tlt, enabled, train):
    files = RunFiles(Path("run"), config={"rollout": {"backend": backend}, "tlt": tlt})
    shown = RunModel().view(files, 1.0)["speculation"]
    assert (shown["enabled"], shown["train"]) == (enabled, train)
    assert shown["accept_length"] is None and shown["speedup"] is None and shown["arms"] == {}


# ---- server and report ----


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    write_synthetic_run(path)
    return path


def test_the_server_sends_page_view_and_increments_and_lets_nothing_in_from_elsewhere(run_dir):
    async def visit() -> None:
        dashboard = Dashboard(run_dir)
        url = await dashboard.start()
        assert url.startswith("http://127.0.0.1:")
        try:
            async with aiohttp.ClientSession() as session:
                async with session.get(url) as page:
                    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
                    assert "<main" in await page.text()
                async with session.get(f"{url}api/run") as answer:
                    view = await answer.json()
                async with session.get(f"{url}api/run", params={"since": view["cursor"]}) as answer:
                    increment = await answer.json()
                async with session.get(f"{url}../state.json") as answer:
                    assert answer.status == 404
        finally:
            await dashboard.stop()
        assert len(view["steps"]) == STEPS and len(view["steps"][0]["loads"]) == RANKS and view["warnings"] == []
        assert not increment["full"] and increment["steps"] == []

    asyncio.run(visit())


def test_with_a_key_only_those_who_have_it_get_in(run_dir):
    async def visit() -> list[int]:
        dashboard = Dashboard(run_dir, api_key="se&cret")
        url = await dashboard.start("127.0.0.1")
        base, _, query = url.partition("?")
        assert query == "key=se%26cret"
        try:
            jar = aiohttp.CookieJar(unsafe=True)  # "unsafe": cookies of a numeric host
            async with aiohttp.ClientSession() as stranger, aiohttp.ClientSession(cookie_jar=jar) as guest:
                bearer = {"Authorization": "Bearer se&cret"}
                visits = [(stranger, base, {}), (stranger, f"{base}api/run?key=wrong", {}), (stranger, base, bearer)]
                codes = []
                for session, address, headers in [*visits, (guest, url, {}), (guest, f"{base}api/run", {})]:
                    async with session.get(address, headers=headers) as answer:
                        codes.append(answer.status)
            return codes
        finally:
            await dashboard.stop()

    assert asyncio.run(visit()) == [401, 401, 200, 200, 200]


def test_a_taken_port_and_a_missing_run_are_errors_with_a_remedy(run_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(DashboardError, match="--port"):
            asyncio.run(Dashboard(run_dir).start(port=taken.getsockname()[1]))
    with pytest.raises(RunFileError):
        Dashboard(tmp_path / "nowhere")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "some-name"])
def test_without_a_key_other_machines_are_not_let_in(run_dir, host):
    with pytest.raises(DashboardError, match=r"runtime\.api_key"):
        asyncio.run(Dashboard(run_dir).start(host))


def test_a_damaged_file_is_told_on_the_page_and_what_was_read_before_stays(tmp_path):
    from launcher.dashboard.source import RunSource

    write_synthetic_run(tmp_path, steps=2)
    source = RunSource(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    view = source.view()
    assert view["run"]["status"] == "finished" and len(view["steps"]) == 2
    assert "state.json" in view["warnings"][0] and "1 damaged" in view["warnings"][1]


def test_the_report_holds_the_data_and_no_text_of_the_run_can_break_out_of_it(run_dir, tmp_path):
    write_report(run_dir, tmp_path / "sub" / "report.html")
    text = (tmp_path / "sub" / "report.html").read_text()
    data = text.partition('id="run-data">')[2].partition("</script>")[0]
    assert len(json.loads(data)["steps"]) == STEPS
    assert 'src="' not in text and '<link rel="stylesheet"' not in text
    evil = standalone({"run": {"cause": "</script><script>alert(1)</script>"}})
    assert "<script>alert(1)" not in evil
