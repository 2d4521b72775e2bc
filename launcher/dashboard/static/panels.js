// What the page shows: one entry per panel. To add a chart, add an entry whose `build` turns the store into a chart spec.
"use strict";
(() => {
  const { html, format, clock } = window.Dash;
  const color = (name) => `var(--${name})`;
  const RANKS = ["blue", "orange", "green", "violet", "teal", "rose", "sand", "slate"].map(color);
  const STAGES = {
    rollout: ["rollout wait", "blue"], batcher: ["batcher wait", "teal"], logprob: ["log-probs", "violet"],
    advantages: ["advantages", "rose"], update: ["update", "orange"], publish: ["publish", "green"], checkpoint: ["checkpoint", "sand"],
  };
  const EVENTS_SHOWN = 12;
  const stageLabel = (stage) => (STAGES[stage] || [stage])[0];
  const BOUND_TEXT = { rollout: "rollout", batcher: "batcher", logprob: "log-probs", advantages: "advantages", update: "update", publish: "weight publish", checkpoint: "checkpoint" };

  const column = (steps, key) => steps.map((s) => s[key]);
  const has = (values) => values.some((v) => v !== null && v !== undefined);
  const latest = (steps, key) => { for (let i = steps.length - 1; i >= 0; i--) if (steps[i][key] !== null && steps[i][key] !== undefined) return steps[i][key]; return null; };

  /* A chart over steps; null when nothing was measured yet, so that the panel shows what it waits for. Steps that have
     none of the values at either end are left out. */
  function overSteps(store, series, options = {}) {
    const known = (i) => series.some((s) => s.values[i] !== null && s.values[i] !== undefined);
    const rows = store.steps.map((_, i) => i).filter(known);
    if (!rows.length) return null;
    const [from, to] = [rows[0], rows[rows.length - 1] + 1];
    const cut = store.steps.slice(from, to);
    return {
      group: "step", xLabel: "training step", xs: column(cut, "step"), rows: cut,
      series: series.filter((s) => has(s.values)).map((s) => ({ ...s, values: s.values.slice(from, to) })),
      ...options,
      note: options.note ? (i) => options.note(cut[i]) : undefined,
      strong: options.strong ? (i, size) => mostCommon(cut.slice(i, i + size).map(options.strong)) : undefined,
    };
  }

  function mostCommon(labels) {
    const counts = new Map();
    for (const label of labels) counts.set(label, (counts.get(label) || 0) + 1);
    return [...counts].reduce((best, entry) => (entry[1] > best[1] ? entry : best))[0];
  }

  function overTime(store, series, options = {}) {
    const ticks = store.ticks.filter((_, i) => series.some((s) => s.values[i] !== null));
    if (!ticks.length) return null;
    const at = new Map(store.ticks.map((t, i) => [t.i, i]));
    return {
      group: "time", time: true, zero: true, xLabel: "running time", xs: ticks.map((t) => (t.i + 0.5) * store.tickS),
      series: series.map((s) => ({ ...s, values: ticks.map((t) => s.values[at.get(t.i)]) })).filter((s) => has(s.values)), ...options,
    };
  }

  /* Levels hold until the next report. */
  function level(store, key) {
    let last = null;
    return store.ticks.map((t) => (last = t[key] ?? last));
  }

  const PANELS = [
    {
      id: "reward", title: "Reward", about: "Mean over the episodes of each training batch; circles are greedy evaluations.", awaits: "the first training batch",
      latest: (store) => [["latest", format(latest(store.steps, "reward"))]],
      build: (store) => overSteps(store, [{ label: "batch mean", color: color("blue"), values: column(store.steps, "reward"), area: true }], {
        yLabel: "reward", zero: true, note: (s) => (s.episodes ? [["episodes", format(s.episodes)]] : []),
        marks: store.evals.filter((e) => e.reward !== null && e.step !== null).map((e) => ({ x: e.step, y: e.reward, label: `evaluation ${e.tag}`, color: color("orange") })),
      }),
      legend: (spec) => (spec.marks.length ? [{ label: "greedy evaluation", color: color("orange"), key: "mark" }] : []),
    },
    {
      id: "loss", title: "Loss", about: "Policy loss, averaged over the optimizer steps of a training step.", awaits: "the first optimizer step",
      latest: (store) => [["latest", format(latest(store.steps, "loss"))], ["gradient norm", format(latest(store.steps, "grad_norm"))]],
      build: (store) => overSteps(store, [{ label: "loss", color: color("violet"), values: column(store.steps, "loss") }], {
        yLabel: "loss",
        note: (s) => [["gradient norm", s.grad_norm], ["entropy", s.entropy], ["clipped", s.clip_ratio], ["approx. KL", s.approx_kl], ["learning rate", s.lr]]
          .filter(([, v]) => v !== null).map(([k, v]) => [k, k === "learning rate" ? v.toExponential(1).replace("e-", "e−") : format(v)]),
      }),
    },
    {
      id: "generation", title: "Rollout throughput", about: "Tokens generated per second, all servers together.", awaits: "the servers' first tokens",
      latest: (store) => [["mean", format(average(store.ticks.map((t) => t.generated)), "tok/s")]],
      build: (store) => overTime(store, [
        { label: "generated", color: color("blue"), values: store.ticks.map((t) => t.generated ?? null), unit: "tok/s", area: true },
      ], { yLabel: "tokens/s" }),
    },
    {
      id: "training", title: "Training throughput", about: "Row tokens per second: of all ranks: over the seconds of computing (log-probs, advantages, update), and over whole steps.", awaits: "the first finished step",
      latest: (store) => [["while computing", format(store.now.tokens_per_s, "tok/s")]],
      build: (store) => overSteps(store, [
        { label: "while computing", color: color("orange"), values: column(store.steps, "tokens_per_s"), unit: "tok/s" },
        { label: "whole step", color: color("violet"), values: column(store.steps, "step_tokens_per_s"), unit: "tok/s" },
      ], { yLabel: "tokens/s", zero: true, note: (s) => (s.row_tokens ? [["row tokens", format(s.row_tokens)]] : []) }),
    },
    {
      id: "stages", title: "Time per stage", about: "Seconds of each step. The stage that bounds the step is in full colour.", awaits: "the first finished step",
      latest: (store) => [["step", format(latest(store.steps, "step_s"), "s")]],
      build: (store) => overSteps(store, store.stageNames.map((name) => ({
        label: stageLabel(name), color: color((STAGES[name] || [0, "slate"])[1]), kind: "bar", unit: "s",
        values: store.steps.map((s) => s.stage_s[name] ?? null),
      })), {
        yLabel: "seconds", bars: "stacked", strong: (s) => (s.bound ? stageLabel(s.bound) : null),
        note: (s) => [["whole step", format(s.step_s, "s")], ["bounded by", BOUND_TEXT[s.bound] || "–"]],
      }),
      strong: (store) => (store.now.bound ? stageLabel(store.now.bound) : null),
    },
    {
      id: "tree", title: "Tree ratio", about: "Tokens of all rows per token that is computed: what sharing prefixes saves.", awaits: "the first training batch",
      latest: (store) => [["latest", format(latest(store.steps, "tree_ratio") ?? latest(store.steps, "batch_ratio"), "×")]],
      build: (store) => overSteps(store, [
        { label: "whole batch", color: color("slate"), values: column(store.steps, "batch_ratio"), kind: "thin", unit: "×" },
        { label: "as trained, cut over ranks", color: color("green"), values: column(store.steps, "tree_ratio"), unit: "×" },
      ], { yLabel: "ratio", zero: true, note: (s) => (s.row_tokens ? [["row tokens", format(s.row_tokens)], ["computed", format(s.tree_tokens)]] : []) }),
    },
    {
      id: "loads", title: "Load per rank", about: "Partition cost of each data-parallel rank; the heaviest one sets the pace.", awaits: "the first partition",
      latest: (store) => {
        const ratios = store.steps.map((s) => imbalance(s.loads)).filter((v) => v !== null);
        return [["heaviest / mean", ratio(ratios.length ? ratios[ratios.length - 1] : null)]];
      },
      build: (store) => {
        const ranks = [...new Set(store.steps.flatMap((s) => Object.keys(s.loads)))].sort((a, b) => rankOf(a) - rankOf(b));
        return overSteps(store, ranks.map((rank, k) => ({
          label: `rank ${rankOf(rank)}`, color: RANKS[k % RANKS.length], kind: "bar", values: store.steps.map((s) => s.loads[rank] ?? null),
        })), { yLabel: { flops: "cost (FLOP)", tree_tokens: "cost (tokens)", time: "cost (s)" }[store.run.cost_unit] || "cost", bars: "grouped", note: (s) => [["heaviest / mean", ratio(imbalance(s.loads))]] });
      },
    },
    {
      id: "staleness", title: "Staleness", about: "Policy versions between a token's sampling and its training.", awaits: "the first training batch",
      latest: (store) => [["largest", format(largest(store.steps, "staleness_max"))], ["mixed versions", percent(latest(store.steps, "mixed_share"))]],
      build: (store) => overSteps(store, [
        { label: "largest", color: color("rose"), values: column(store.steps, "staleness_max"), kind: "step" },
        { label: "mean", color: color("teal"), values: column(store.steps, "staleness_mean") },
      ], {
        yLabel: "versions", zero: true, note: (s) => (s.mixed_share === null ? [] : [["span two versions", percent(s.mixed_share)]]),
        refs: store.run.staleness_bound === null ? [] : [{ y: store.run.staleness_bound, label: `bound ${store.run.staleness_bound} (${store.run.staleness_policy || "policy unknown"})` }],
      }),
    },
    {
      id: "mismatch", title: "Log-prob mismatch", about: "Between server and trainer, for tokens whose whole context is of one version.", awaits: "the first comparable tokens",
      latest: (store) => [["largest", format(largest(store.steps, "mismatch_max"))]],
      build: (store) => overSteps(store, [
        { label: "largest", color: color("rose"), values: column(store.steps, "mismatch_max") },
        { label: "mean", color: color("teal"), values: column(store.steps, "mismatch_mean") },
      ], { yLabel: "nats", log: true, refs: [{ y: 1e-3, label: "1e−3" }], note: (s) => (s.mismatch_tokens ? [["tokens compared", format(s.mismatch_tokens)]] : []) }),
    },
    {
      id: "queue", title: "Queues", about: "Episodes in flight, groups ready to train, and requests on the servers.", awaits: "the first episodes",
      latest: (store) => [["in flight", format(level(store, "in_flight").pop() ?? null)], ["ready", format(level(store, "ready").pop() ?? null)]],
      build: (store) => overTime(store, [
        { label: "episodes in flight", color: color("blue"), values: level(store, "in_flight"), kind: "step" },
        { label: "groups ready", color: color("green"), values: level(store, "ready"), kind: "step" },
        { label: "requests running", color: color("orange"), values: level(store, "running"), kind: "step thin" },
        { label: "requests waiting", color: color("rose"), values: level(store, "waiting"), kind: "step thin" },
      ], { yLabel: "count" }),
    },
    { id: "rejections", title: "Rejected episodes", about: "Counted by cause; never turned into a reward of 0.", table: rejections },
    { id: "processes", title: "Processes", about: "As the launcher started and lost them.", table: processes },
    { id: "events", title: "Events", about: "The latest starts, exits and phases.", wide: true, table: events },
  ];

  const rankOf = (source) => Number((source.match(/\d+$/) || [0])[0]);
  const percent = (share) => (share === null || share === undefined ? "–" : format(share * 100) + " %");
  const ratio = (value) => (value === null ? "–" : `${value.toFixed(3)} ×`);
  const average = (values) => { const known = values.filter((v) => v !== null && v !== undefined); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
  const largest = (steps, key) => steps.reduce((best, s) => (s[key] !== null && (best === null || s[key] > best) ? s[key] : best), null);
  function imbalance(loads) {
    const values = Object.values(loads).filter((v) => v !== null), mean = values.reduce((a, b) => a + b, 0) / values.length;
    return values.length && mean > 0 ? Math.max(...values) / mean : null;
  }

  // ---- panels that are not charts: return [node, number of data points] ----

  function rejections(store) {
    const causes = Object.entries(store.rejected).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
    if (!causes.length) return [waiting("None so far."), 0];
    const most = causes[0][1];
    const rows = causes.flatMap(([cause, count]) => {
      const fill = html("div");
      fill.style.width = `${(100 * count) / most}%`;
      return [html("span", {}, cause.replaceAll("_", " ")), html("div", { class: "track" }, fill), html("span", { class: "count" }, format(count))];
    });
    return [html("div", { class: "rows" }, ...rows), causes.length];
  }

  function table(heads, rows) {
    const head = heads.map(([text, kind]) => html("th", { class: kind || "", scope: "col" }, text));
    return html("div", { class: "scroll" }, html("table", {}, html("thead", {}, html("tr", {}, ...head)), html("tbody", {}, ...rows)));
  }

  function processes(store) {
    if (!store.processes.length) return [waiting("Waiting for the launcher to start processes."), 0];
    const rows = store.processes.map((p) => html("tr", {}, html("td", {}, p.name),
      html("td", {}, html("span", { class: `state ${p.state}` }, p.state)), cell(p.pid ?? "–"), cell(p.restarts), html("td", { class: "text" }, p.last_exit)));
    return [table([["process"], ["state"], ["pid", "num"], ["restarts", "num"], ["last exit"]], rows), store.processes.length];
  }

  function events(store) {
    if (!store.events.length) return [waiting("Nothing has happened yet."), 0];
    const start = store.events[0].t;
    const rows = store.events.slice(-EVENTS_SHOWN).reverse().map((e) => html("tr", {}, html("td", { class: "num" }, clock(e.t - start)),
      html("td", {}, e.process), html("td", {}, e.name.replace("/", " ")), html("td", { class: "text" }, e.message)));
    return [table([["time", "num"], ["process"], ["event"], ["detail"]], rows), rows.length];
  }

  const waiting = (text) => html("div", { class: "plot" }, html("div", { class: "empty" }, text));
  const cell = (value) => html("td", { class: "num" }, String(value));

  Object.assign(window.Dash, { PANELS, BOUND_TEXT, latest, largest, percent, color, level, overTime });
})();
