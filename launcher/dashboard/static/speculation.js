// The panels of speculative decoding and of the drafter's training; they come before the tables of panels.js.
"use strict";
(() => {
  const { PANELS, format, color, level, overTime, percent } = window.Dash;
  const ARM = "arm ", ARMS_SHOWN = 7;
  const SHADES = ["blue", "orange", "green", "violet", "teal", "rose", "sand"].map(color);
  const STATES = [["busy", "blue"], ["idle", "sand"], ["training", "green"]];
  const OFF = "Off: the servers decode plainly (tlt.enabled, or another rollout backend).";
  const NOT_TRAINED = "Off: no drafter is trained in this run (tlt.train).";

  const off = (store) => (store.speculation.enabled ? null : OFF);
  const untrained = (store) => off(store) || (store.speculation.train ? null : NOT_TRAINED);
  const times = (value) => (value === null ? "–" : `${format(value)} ×`);
  const last = (values) => values[values.length - 1] ?? null;

  /* Tokens per sequence and step, of those that had a draft; a gap where nothing was drafted. */
  const acceptLength = (store) => store.ticks.map((t) => (t.drafts > 0 ? 1 + (t.accepted || 0) / t.drafts : null));

  const armText = (name) => (name === "off" ? "plain" : name);

  /* Share of the decoding time by arm; the rarest arms together. Moments without decoding are empty bars. */
  function armShares(store) {
    const names = Object.keys(store.speculation.arms); // by time, the longest first
    const kept = names.length > ARMS_SHOWN ? names.slice(0, ARMS_SHOWN - 1) : names;
    const sums = store.ticks.map((t) => names.reduce((sum, name) => sum + (t[ARM + name] || 0), 0));
    const from = sums.findIndex((sum) => sum > 0), to = sums.findLastIndex((sum) => sum > 0);
    const sharesOf = (part, t, i) => part.reduce((sum, name) => sum + (t[ARM + name] || 0), 0) / (sums[i] || 1);
    const share = (part) => store.ticks.map((t, i) => (i < from || i > to ? null : sharesOf(part, t, i)));
    const series = kept.map((name, k) => ({ label: armText(name), color: SHADES[k], kind: "bar", values: share([name]) }));
    const rest = names.slice(kept.length);
    return rest.length ? [...series, { label: `${rest.length} others`, color: color("slate"), kind: "bar", values: share(rest) }] : series;
  }

  function bytes(value) {
    if (value === null) return "–";
    const [scale, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]].find(([size]) => value >= size) || [1, "B"];
    return format(value / scale, unit);
  }

  const panels = [
    {
      id: "speculation", title: "Speculation", about: "Accept length: tokens per sequence and step in which something was drafted. Speed: against plain decoding at the speeds measured in this run, since its start.",
      awaits: "the first decoded tokens", empty: off,
      latest: ({ speculation: s }) => [["accept length", s.accept_length === null ? "nothing drafted" : format(s.accept_length)], ["speed", times(s.speedup)]],
      build: (store) => overTime(store, [
        { label: "accept length", color: color("blue"), values: acceptLength(store) },
        { label: "speed against plain", color: color("green"), values: level(store, "speedup"), unit: "×" },
      ], { yLabel: "tokens, ×", refs: [{ y: 1, label: "plain decoding" }] }),
    },
    {
      id: "arms", title: "Decoding time by strategy", about: "As the tuner chose: plain, or drafter, depth (d), width (k) and tokens verified (v).", awaits: "the first decoded tokens", empty: off,
      latest: ({ speculation: s }) => Object.entries(s.arms).slice(0, 2).map(([name, share]) => [armText(name), percent(share)]),
      build: (store) => overTime(store, armShares(store), { yLabel: "share", bars: "stacked" }),
    },
    {
      id: "spot", title: "Servers and drafter training", about: "Idle servers give their KV memory back and train the drafter until work arrives.", awaits: "the coordinator", empty: untrained,
      latest: (store) => STATES.map(([state]) => [state, format(last(level(store, `servers_${state}`)))]),
      build: (store) => overTime(store, STATES.map(([state, shade]) => ({ label: state, color: color(shade), values: level(store, `servers_${state}`), kind: "bar" })), { yLabel: "servers", bars: "stacked" }),
    },
    {
      id: "drafter", title: "Drafter accuracy", about: "How often the policy's token is among the drafter's three likeliest: while training, and on samples held out, where the drafter in use is compared with.",
      awaits: "an idle server to train on", empty: untrained,
      latest: ({ speculation: s }) => [["in use", s.version === null ? "none yet" : `${s.version} on ${s.servers.length} server${s.servers.length === 1 ? "" : "s"}`]],
      build: (store) => overTime(store, [
        { label: "training", color: color("violet"), values: store.ticks.map((t) => t.drafter_top3 ?? null) },
        { label: "held out", color: color("green"), values: store.ticks.map((t) => t.drafter_held_out ?? null) },
        { label: "held out, drafter in use", color: color("orange"), values: store.ticks.map((t) => t.drafter_served ?? null) },
      ], { yLabel: "top-3 accuracy" }),
    },
    {
      id: "drafter_loss", title: "Drafter loss", about: "Of the drafter's training steps.", awaits: "an idle server to train on", empty: untrained,
      latest: (store) => [["steps", format(store.speculation.steps)]],
      build: (store) => overTime(store, [{ label: "loss", color: color("violet"), values: store.ticks.map((t) => t.drafter_loss ?? null) }], { yLabel: "loss" }),
    },
    {
      id: "buffer", title: "Drafter samples", about: "Recorded sequences that can be trained on now, all servers together, and what the buffers hold on disk.", awaits: "the drafter's processes", empty: untrained,
      latest: (store) => [["samples", format(last(level(store, "buffer_samples")))], ["on disk", bytes(last(level(store, "buffer_bytes")))]],
      build: (store) => overTime(store, [{ label: "samples", color: color("teal"), values: level(store, "buffer_samples"), kind: "step", area: true }], { yLabel: "samples" }),
    },
  ];

  PANELS.splice(PANELS.findIndex((panel) => panel.id === "rejections"), 0, ...panels);
})();
