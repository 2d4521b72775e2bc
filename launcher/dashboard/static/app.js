// Keeps the store in step with the server (or with the data inside the file) and draws header and panels.
"use strict";
(() => {
  const { Chart, PANELS, BOUND_TEXT, html, format, clock, latest, largest } = window.Dash;
  const POLL_MS = 2000, POLL_ENDED_MS = 10000, TIMEOUT_MS = 8000, MAX_RETRY_MS = 16000;
  const byId = (id) => document.getElementById(id);

  const store = { cursor: null, run: {}, now: {}, stageNames: [], steps: [], ticks: [], tickS: 0, evals: [], rejected: {}, speculation: {}, processes: [], events: [] };
  const rows = { steps: new Map(), ticks: new Map() };

  /* A view holds what changed; `full` starts over. */
  function merge(view) {
    if (view.full) { rows.steps.clear(); rows.ticks.clear(); }
    if (view.tick_s !== store.tickS) rows.ticks.clear();
    for (const step of view.steps) rows.steps.set(step.step, step);
    for (const tick of view.ticks) rows.ticks.set(tick.i, tick);
    Object.assign(store, {
      cursor: view.cursor, run: view.run, now: view.now, stageNames: view.stages, tickS: view.tick_s, evals: view.evals,
      rejected: view.rejected, speculation: view.speculation, processes: view.processes, events: view.events,
      steps: [...rows.steps.values()].sort((a, b) => a.step - b.step), ticks: [...rows.ticks.values()].sort((a, b) => a.i - b.i),
    });
  }

  // ---- header ----

  const isLive = () => ["preparing", "running"].includes(store.run.status);

  function drawHeader() {
    const { run, now, steps } = store;
    const total = run.total_steps || 0, done = run.step || 0;
    document.title = `${total ? `${done}/${total} · ` : ""}${run.name} · AReaL-DTA`;
    byId("run-name").textContent = run.name;
    byId("run-status").textContent = run.status || "no state yet";
    byId("run-status").dataset.status = run.status || "";
    byId("run-phase").textContent = isLive() && run.phase ? run.phase : "";
    byId("run-dir").textContent = run.dir;
    const heard = run.quiet_s === null ? "no metrics yet" : isLive() ? `last heard ${run.quiet_s < 5 ? "just now" : clock(run.quiet_s) + " ago"}` : "";
    byId("run-meta").textContent = [run.elapsed_s === null ? "" : `elapsed ${clock(run.elapsed_s)}`, run.epoch ? `launch ${run.epoch + 1}` : "", heard].filter(Boolean).join(" · ");
    byId("run-cause").hidden = !run.cause;
    byId("run-cause").textContent = run.cause || "";
    const bar = byId("progress");
    bar.setAttribute("aria-valuemax", total || 1);
    bar.setAttribute("aria-valuenow", done);
    byId("progress-fill").style.width = `${total ? Math.min(100, (100 * done) / total) : 0}%`;
    byId("tiles").replaceChildren(...tiles(run, now, steps, done, total));
  }

  function tiles(run, now, steps, done, total) {
    const rewards = steps.map((s) => s.reward).filter((v) => v !== null), first = mean(rewards.slice(0, 5)), last = mean(rewards.slice(-5));
    const boundS = now.bound && now.stages ? now.stages[now.bound] : null, stale = largest(steps, "staleness_max");
    const over = run.staleness_bound !== null && stale !== null && stale > run.staleness_bound;
    const rejected = Object.values(store.rejected).reduce((a, b) => a + b, 0);
    return [
      tile("Step", `${done}${total ? " / " + total : ""}`, remaining(run, steps, done, total)),
      tile("Reward", format(last), rewards.length > 5 ? `last five; first five ${format(first)}` : "mean of the steps so far"),
      tile("Training throughput", format(now.tokens_per_s, "tok/s"), "row tokens per second of computing, last five steps"),
      tile("Bounded by", BOUND_TEXT[now.bound] || "–", boundS === null ? "no finished step yet" : `${format(boundS, "s")} of each step`),
      tile("Tree ratio", format(latest(steps, "tree_ratio") ?? latest(steps, "batch_ratio"), "×"), "row tokens per token computed"),
      tile("Largest staleness", format(stale), run.staleness_bound === null ? "no bound known" : `bound ${run.staleness_bound}`, over ? "bad" : ""),
      tile("Episodes", format(now.episodes), now.episodes ? episodeText(now.episode_means) : "none finished yet"),
      tile("Restarts", format(run.restarts), `${format(rejected)} rejected${run.metrics_dropped ? `, ${format(run.metrics_dropped)} metrics dropped` : ""}`, run.restarts > 0 ? "warn" : ""),
    ];
  }

  function tile(label, value, note, tone = "") {
    return html("div", { class: `tile ${tone}` }, html("dt", {}, label), html("dd", { class: "value" }, value), html("dd", { class: "note" }, note));
  }

  function remaining(run, steps, done, total) {
    if (!isLive()) return run.status || "";
    const recent = mean(steps.slice(-5).map((s) => s.step_s).filter((v) => v !== null));
    return total > done && recent !== null ? `about ${clock((total - done) * recent)} left` : "running";
  }

  function episodeText(means) {
    const parts = [["turns", "turns"], ["episode_s", "s"]].filter(([key]) => key in means).map(([key, unit]) => `${format(means[key])} ${unit}`);
    return parts.length ? `mean ${parts.join(", ")}` : "finished";
  }

  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  // ---- panels ----

  const views = PANELS.map((panel) => {
    const head = html("div", { class: "panel-head" }, html("h2", { id: `title-${panel.id}` }, panel.title));
    const node = html("section", { class: panel.wide ? "panel wide" : "panel", id: `panel-${panel.id}`, "aria-labelledby": `title-${panel.id}`, "data-chart": panel.id, "data-points": "0", "data-state": "empty" }, head);
    const view = { panel, node, latest: html("span", { class: "latest" }) };
    head.append(view.latest);
    if (panel.about) head.append(html("p", { class: "about" }, panel.about));
    if (panel.table) view.body = html("div");
    else {
      view.legend = html("ul", { class: "legend" });
      view.body = html("div", { class: "plot" });
      view.empty = html("div", { class: "empty" });
      node.append(view.legend);
    }
    node.append(view.body);
    byId("panels").append(node);
    if (!panel.table) { view.chart = new Chart(view.body); view.body.append(view.empty); }
    return view;
  });

  function drawPanel(view) {
    const { panel, node } = view;
    if (panel.table) {
      const [content, count] = panel.table(store);
      view.body.replaceChildren(content);
      return mark(node, count);
    }
    const spec = panel.build(store);
    view.empty.hidden = spec !== null;
    view.chart.svg.style.visibility = spec ? "visible" : "hidden";
    const why = spec === null && panel.empty ? panel.empty(store) : null;
    view.empty.textContent = why || `${isLive() || !store.run.status ? "Waiting for" : "This run ended before"} ${panel.awaits}.`;
    view.latest.replaceChildren(...(spec && panel.latest ? readings(panel.latest(store)) : []));
    view.legend.replaceChildren(...(spec ? legend(panel, spec) : []));
    const count = spec ? spec.series.reduce((n, s) => n + s.values.filter((v) => v !== null && v !== undefined).length, 0) + (spec.marks || []).length : 0;
    mark(node, count);
    if (!spec) return;
    const said = panel.latest ? panel.latest(store).map(([k, v]) => `${k} ${v}`).join(", ") : "";
    view.chart.update({ ...spec, summary: `${panel.title} by ${spec.xLabel}, ${spec.xs.length} points; ${said}` });
  }

  function mark(node, count) {
    node.dataset.points = String(count);
    node.dataset.state = count ? "data" : "empty";
  }

  const readings = (pairs) => pairs.flatMap(([label, value], i) => [i ? " · " : "", label + " ", html("b", {}, value)]);

  function legend(panel, spec) {
    const strong = panel.strong ? panel.strong(store) : null;
    const items = [...spec.series.map((s) => ({ label: s.label, color: s.color, key: s.kind === "bar" ? "" : "line" })), ...(panel.legend ? panel.legend(spec) : [])];
    if (items.length < 2) return [];
    return items.map((item) => html("li", { class: item.label === strong ? "strong" : "" }, html("span", { class: `key ${item.key || ""}`, color: item.color }), item.label + (item.label === strong ? " (bound)" : "")));
  }

  function draw() {
    drawHeader();
    views.forEach(drawPanel);
    document.body.dataset.rendered = String(Number(document.body.dataset.rendered || 0) + 1);
  }

  // ---- data ----

  function say(text) {
    byId("banner").hidden = !text;
    byId("banner").textContent = text;
  }

  let failures = 0, timer = null;

  async function poll() {
    clearTimeout(timer);
    let wait = POLL_MS;
    try {
      const answer = await fetch(`api/run${store.cursor ? `?since=${encodeURIComponent(store.cursor)}` : ""}`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const view = await answer.json();
      failures = 0;
      merge(view);
      draw();
      say((view.warnings || []).join(" · "));
      if (!isLive() && store.run.status) wait = POLL_ENDED_MS;
    } catch (error) {
      failures += 1;
      wait = Math.min(MAX_RETRY_MS, POLL_MS * 2 ** (failures - 1));
      say(`Connection lost (${error.message}); retrying in ${Math.round(wait / 1000)} s`);
    }
    if (!document.hidden) timer = setTimeout(poll, wait);
  }

  const inside = byId("run-data");
  if (inside) {
    const view = JSON.parse(inside.textContent);
    merge(view);
    draw();
    say((view.warnings || []).join(" · "));
  } else {
    document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
    poll();
  }
})();
