// One chart class for lines, bars and marks over a common x axis. It knows nothing about runs.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { top: 24, right: 14, bottom: 34, left: 52 };
  const MIN_BAR_PX = 5;

  // ---- numbers ----

  function format(value, unit = "") {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    let text;
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) text = value.toExponential(1).replace("e-", "e−").replace("e+", "e");
    else if (size >= 1e4) {
      const [scale, suffix] = size >= 1e12 ? [1e12, "T"] : size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
      text = trim((value / scale).toFixed(size / scale >= 100 ? 0 : 1)) + suffix;
    } else if (Number.isInteger(value)) text = String(value);
    else text = trim(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3));
    return (text.startsWith("-") ? "−" + text.slice(1) : text) + (unit ? " " + unit : "");
  }

  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

  function clock(seconds) {
    if (!Number.isFinite(seconds)) return "–";
    const s = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    const h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60);
    return h ? `${h}:${pad(m)}:${pad(s % 60)}` : `${m}:${pad(s % 60)}`;
  }

  function niceTicks(low, high, count, steps = [1, 2, 2.5, 5, 10]) {
    const span = high - low || 1, rough = span / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * steps.find((s) => s * power >= rough * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
    return ticks;
  }

  function timeTicks(low, high, count) {
    const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 604800];
    const step = sizes.find((s) => (high - low) / s <= count) || sizes[sizes.length - 1];
    const ticks = [];
    for (let t = Math.ceil(low / step) * step; t <= high; t += step) ticks.push(t);
    return ticks;
  }

  // ---- elements ----

  function svg(tag, attributes = {}, parent = null) {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined) continue;
      if (key === "color") node.style.setProperty("--c", value);
      else if (key === "text") node.textContent = value;
      else node.setAttribute(key, value);
    }
    if (parent) parent.append(node);
    return node;
  }

  function html(tag, options = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (key === "color") node.style.setProperty("--c", value);
      else if (key === "class") node.className = value;
      else node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }

  // ---- a hovered x is shared by all charts of the same axis ----

  const groups = new Map();
  function share(group, x, from) {
    for (const chart of groups.get(group) || []) if (chart !== from) chart.showShared(x);
  }

  /* A spec: { group, xLabel, yLabel, xs: [number], time: bool, series: [{label, color, values, kind, unit}],
     marks: [{x, y, label, color}], refs: [{y, label, color}], log: bool, zero: bool, bars: "stacked"|"grouped",
     strong: (i, size) => label of the bar that stands out in rows i to i + size, note: (i) => [[label, text]] }.
     kind: line (default), step, thin, bar. A null value is a gap. */
  class Chart {
    constructor(holder) {
      this.holder = holder;
      this.svg = svg("svg", { tabindex: 0, role: "img" }, holder);
      this.tip = html("div", { class: "tip", "aria-live": "polite" });
      this.tip.hidden = true;
      holder.append(this.tip);
      this.spec = null;
      this.at = null;
      this.svg.addEventListener("pointermove", (e) => this.point(this.nearest(e.offsetX)));
      this.svg.addEventListener("pointerleave", () => this.point(null));
      this.svg.addEventListener("blur", () => this.point(null));
      this.svg.addEventListener("keydown", (e) => this.key(e));
      new ResizeObserver(() => this.draw()).observe(holder);
    }

    update(spec) {
      this.spec = spec;
      if (!groups.has(spec.group)) groups.set(spec.group, new Set());
      groups.get(spec.group).add(this);
      this.draw();
    }

    draw() {
      const width = this.holder.clientWidth, height = this.holder.clientHeight, spec = this.spec;
      if (!spec || width < 80) return;
      this.bins = binned(spec, (width - MARGIN.left - MARGIN.right) / MIN_BAR_PX);
      this.box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.setAttribute("aria-label", spec.summary || spec.yLabel);
      this.scale();
      this.drawAxes();
      for (const ref of spec.refs || []) this.drawRef(ref);
      if (spec.bars) this.drawBars();
      for (const series of this.bins.series) if (series.kind !== "bar") this.drawLine(series);
      for (const mark of spec.marks || []) this.drawMark(mark);
      this.cross = svg("line", { class: "cross", y1: this.box.top, y2: this.box.bottom, visibility: "hidden" }, this.svg);
      if (this.at !== null) this.point(Math.min(this.at, this.bins.xs.length - 1));
    }

    scale() {
      const { spec, box, bins } = this, xs = bins.xs;
      const half = spec.bars || spec.band ? (xs.length > 1 ? (xs[1] - xs[0]) / 2 : 0.5) : 0;
      const pad = half || (xs.length > 1 ? 0 : 0.5);
      this.x0 = xs[0] - pad;
      this.x1 = xs[xs.length - 1] + pad;
      for (const mark of spec.marks || []) [this.x0, this.x1] = [Math.min(this.x0, mark.x), Math.max(this.x1, mark.x)];
      const [low, high] = extent(spec, bins);
      this.yTicks = spec.log ? logTicks(low, high) : niceTicks(low, high, 4);
      if (!spec.log && this.yTicks.length > 1) {
        const step = this.yTicks[1] - this.yTicks[0];
        this.y0 = Math.min(low, this.yTicks[0]);
        this.y1 = Math.max(high, this.yTicks[this.yTicks.length - 1]);
        if (this.y1 - this.yTicks[this.yTicks.length - 1] > step * 0.35) {
          this.y1 = Math.round((this.yTicks[this.yTicks.length - 1] + step) / step) * step;
          this.yTicks.push(this.y1);
        }
      } else [this.y0, this.y1] = [low, high];
      this.px = (x) => box.left + ((x - this.x0) / (this.x1 - this.x0 || 1)) * (box.right - box.left);
      const f = spec.log ? (y) => Math.log10(Math.max(y, low)) : (y) => y;
      const f0 = f(this.y0), f1 = f(this.y1);
      this.py = (y) => box.bottom - ((f(y) - f0) / (f1 - f0 || 1)) * (box.bottom - box.top);
    }

    drawAxes() {
      const { box, spec } = this;
      for (const y of this.yTicks) {
        const at = Math.round(this.py(y)) + 0.5;
        svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }, this.svg);
        svg("text", { x: box.left - 8, y: at + 4, "text-anchor": "end", text: spec.log ? format(y).replace("1.0e", "1e") : format(y) }, this.svg);
      }
      const base = Math.round(this.py(!spec.log && this.y0 < 0 && this.y1 > 0 ? 0 : this.y0)) + 0.5;
      svg("line", { class: "base", x1: box.left, x2: box.right, y1: base, y2: base }, this.svg);
      const count = Math.max(2, Math.floor((box.right - box.left) / 70));
      const low = Math.max(this.x0, this.bins.xs[0]), high = Math.min(this.x1, this.bins.xs[this.bins.xs.length - 1]);
      const ticks = spec.time ? timeTicks(low, high, count) : niceTicks(low, high, count, [1, 2, 5, 10]).filter(Number.isInteger);
      for (const x of ticks) {
        svg("text", { x: this.px(x), y: box.bottom + 15, "text-anchor": "middle", text: spec.time ? clock(x) : format(x) }, this.svg);
      }
      svg("text", { class: "axis", x: box.right, y: box.bottom + 30, "text-anchor": "end", text: spec.xLabel }, this.svg);
      svg("text", { class: "axis", x: 0, y: 10, text: spec.yLabel }, this.svg);
    }

    drawRef(ref) {
      if (ref.y < this.y0 || ref.y > this.y1) return;
      const y = this.py(ref.y);
      svg("line", { class: "ref", x1: this.box.left, x2: this.box.right, y1: y, y2: y, color: ref.color }, this.svg);
      svg("text", { class: "ref-label", x: this.box.right - 2, y: y - 5, "text-anchor": "end", text: ref.label, color: ref.color }, this.svg);
    }

    drawBars() {
      const { xs } = this.bins, bars = this.bins.series.filter((s) => s.kind === "bar");
      const slot = (this.box.right - this.box.left) / xs.length, gap = slot > 8 ? Math.min(slot * 0.24, 10) : slot > 3 ? 1 : 0;
      const room = slot - gap, stacked = this.spec.bars === "stacked";
      xs.forEach((x, i) => {
        const strong = this.spec.strong ? this.spec.strong(this.bins.index[i], this.bins.size) : null;
        let below = 0;
        bars.forEach((series, k) => {
          const value = series.values[i];
          if (!value) return;
          const from = stacked ? below : 0, to = from + value, width = stacked ? room : room / bars.length;
          const left = this.px(x) - room / 2 + (stacked ? 0 : k * width), top = this.py(to);
          const shrink = !stacked && width > 5 ? 1 : 0;
          svg("rect", {
            class: strong && strong !== series.label ? "bar dim" : "bar", color: series.color,
            x: left, y: top, width: Math.max(0.5, width - shrink), height: Math.max(0.5, this.py(from) - top),
            rx: !stacked && width > 6 ? 1.5 : 0,
          }, this.svg);
          below = to;
        });
      });
    }

    drawLine(series) {
      const { xs } = this.bins;
      let path = "", open = false, first = null, last = null, lone = [], run = 0;
      const close = () => { if (open && run === 1) lone.push(last); open = false; run = 0; };
      xs.forEach((x, i) => {
        const value = series.values[i];
        if (value === null || value === undefined) return close();
        const px = this.px(x).toFixed(1), py = this.py(value).toFixed(1);
        if (!open) path += `M${px} ${py}`;
        else path += (series.kind || "").startsWith("step") ? `H${px}V${py}` : `L${px} ${py}`;
        open = true; run += 1; last = [px, py]; first = first || [px, py];
      });
      close();
      if (!path) return;
      const whole = !path.slice(1).includes("M");
      if (series.area && whole) svg("path", { class: "area", color: series.color, d: `${path}V${this.box.bottom}H${first[0]}Z` }, this.svg);
      svg("path", { class: `series ${series.kind || ""}`, color: series.color, d: path }, this.svg);
      for (const [cx, cy] of lone) svg("circle", { class: "dot", color: series.color, cx, cy, r: 2.5 }, this.svg);
      if (last && !(series.kind || "").includes("thin")) svg("circle", { class: "dot", color: series.color, cx: last[0], cy: last[1], r: 3 }, this.svg);
    }

    drawMark(mark) {
      const node = svg("circle", { class: "mark", color: mark.color, cx: this.px(mark.x), cy: this.py(mark.y), r: 4.5 }, this.svg);
      svg("title", { text: mark.label }, node);
    }

    // ---- reading ----

    nearest(px) {
      if (!this.bins) return null;
      let best = null, distance = Infinity;
      this.bins.xs.forEach((x, i) => {
        const d = Math.abs(this.px(x) - px);
        if (d < distance) [best, distance] = [i, d];
      });
      return best;
    }

    key(event) {
      if (!this.bins) return;
      const last = this.bins.xs.length - 1, at = this.at === null ? last + 1 : this.at;
      const move = { ArrowLeft: at - 1, ArrowRight: this.at === null ? last : at + 1, Home: 0, End: last, Escape: null };
      if (!(event.key in move)) return;
      event.preventDefault();
      this.point(move[event.key] === null ? null : Math.max(0, Math.min(last, move[event.key])));
    }

    point(i) {
      this.at = i;
      this.tip.hidden = i === null;
      this.showLine(i === null ? null : this.bins.xs[i], false);
      share(this.spec.group, i === null ? null : this.bins.xs[i], this);
      if (i !== null) this.fillTip(i);
    }

    showShared(x) {
      if (this.bins) this.showLine(x !== null && x >= this.x0 && x <= this.x1 ? x : null, true);
    }

    showLine(x, shared) {
      if (!this.cross) return;
      this.cross.setAttribute("visibility", x === null ? "hidden" : "visible");
      this.cross.setAttribute("class", shared ? "cross shared" : "cross");
      if (x !== null) for (const side of ["x1", "x2"]) this.cross.setAttribute(side, this.px(x));
    }

    fillTip(i) {
      const { bins, spec } = this, row = bins.index[i], strong = spec.strong ? spec.strong(row, bins.size) : null;
      const lines = bins.series.filter((s) => s.values[i] !== null && s.values[i] !== undefined).map((s) =>
        html("div", { class: strong === s.label ? "strong" : "" },
          html("span", { class: s.kind === "bar" ? "key" : "key line", color: s.color }), s.label,
          html("span", {}, format(s.values[i], s.unit))));
      if (spec.bars === "stacked") lines.reverse();
      const isLast = i === bins.xs.length - 1;
      for (const mark of (spec.marks || []).filter((m) => m.x === bins.xs[i] || (isLast && m.x > bins.xs[i]))) {
        lines.push(html("div", {}, html("span", { class: "key mark", color: mark.color }), mark.label, html("span", {}, format(mark.y))));
      }
      if (spec.note && bins.size === 1) for (const [label, text] of spec.note(row)) lines.push(html("div", {}, label, html("span", {}, text)));
      const end = row + bins.size - 1 < spec.xs.length ? spec.xs[row + bins.size - 1] : spec.xs[spec.xs.length - 1];
      const where = spec.time ? `at ${clock(bins.xs[i])}` : bins.size > 1 ? `steps ${spec.xs[row]}–${end}, mean` : `step ${bins.xs[i]}`;
      this.tip.replaceChildren(html("b", {}, where), ...lines);
      const x = this.px(bins.xs[i]), wide = this.tip.offsetWidth, right = x + 12 + wide <= this.holder.clientWidth;
      this.tip.style.left = `${Math.max(0, right ? x + 12 : x - 12 - wide)}px`;
      this.tip.style.top = "4px";
    }
  }

  /* Bars that would be thinner than a few pixels are averaged over neighbouring steps. */
  function binned(spec, slots) {
    const per = spec.bars === "grouped" ? Math.max(1, spec.series.length) : 1;
    const size = spec.bars ? Math.max(1, Math.ceil((spec.xs.length * per) / Math.max(1, slots))) : 1;
    const starts = [];
    for (let i = 0; i < spec.xs.length; i += size) starts.push(i);
    const mean = (values, i) => {
      const part = values.slice(i, i + size), absent = spec.bars === "stacked" ? 0 : null; // a stage that did not run took no time
      const known = part.map((v) => v ?? absent).filter((v) => v !== null);
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    };
    return {
      size, index: starts,
      xs: size === 1 ? spec.xs : starts.map((i) => mean(spec.xs, i)),
      series: size === 1 ? spec.series : spec.series.map((s) => ({ ...s, values: starts.map((i) => mean(s.values, i)) })),
    };
  }

  function extent(spec, bins) {
    const lines = bins.series.filter((s) => !(spec.bars === "stacked" && s.kind === "bar")).flatMap((s) => s.values);
    const sums = spec.bars === "stacked" ? bins.xs.map((_, i) => bins.series.reduce((t, s) => t + (s.kind === "bar" ? s.values[i] || 0 : 0), 0)) : [];
    const all = [...lines, ...sums, ...(spec.marks || []).map((m) => m.y), ...(spec.refs || []).map((r) => r.y)];
    const known = all.filter((v) => v !== null && v !== undefined && Number.isFinite(v) && (!spec.log || v > 0));
    let low = known.length ? Math.min(...known) : 0, high = known.length ? Math.max(...known) : 1;
    if (spec.log) return [10 ** Math.floor(Math.log10(low || 1e-9) - 0.05), 10 ** Math.ceil(Math.log10(high || 1) + 0.05)];
    if (spec.zero || spec.bars) low = Math.min(0, low);
    if (high === low) [low, high] = [spec.zero ? Math.min(0, low) : low - Math.abs(low || 1) * 0.5, high + Math.abs(high || 1) * 0.5];
    const pad = (high - low) * 0.06;
    return [low === 0 ? 0 : low - pad, high + pad];
  }

  function logTicks(low, high) {
    const from = Math.round(Math.log10(low)), to = Math.round(Math.log10(high)), by = Math.ceil((to - from) / 5) || 1;
    const ticks = [];
    for (let power = from; power <= to; power += by) ticks.push(10 ** power);
    return ticks;
  }

  window.Dash = { Chart, html, format, clock };
})();
