// Plots of lines and areas over time, on a canvas, with a legend that tells the values. Colours are the variables of
// style.css, by their names without the dashes.
import { h, s, setAttr, setText } from "./dom.js";

export const LEFT = 60; // of the axis, in pixels
export const RIGHT = 12;
const TOP = 12;
const BOTTOM = 22;

// ticks are at most about n round values between lo and hi.
export function ticks(lo, hi, n) {
  const span = hi - lo;
  if (!(span > 0)) return [];
  const rough = span / Math.max(1, n);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((v) => v >= rough * 0.999) ?? 10 * power;
  const out = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-6; i++) out.push(i * step);
  return out;
}

// timeTicks are round times of day between lo and hi, in milliseconds.
export function timeTicks(lo, hi, n) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400].map((v) => v * 1000);
  const step = steps.find((v) => (hi - lo) / v <= n) ?? 86400e3;
  const zone = new Date(lo).getTimezoneOffset() * 60e3;
  const out = [];
  for (let at = Math.ceil((lo - zone) / step) * step + zone; at <= hi; at += step) out.push(at);
  return out;
}

// A Plot draws what draw is given:
//   x0, x1    the range of x
//   yMax      the top of y; else it follows from the values
//   layers    [{ name, color, kind, x, y, base, text }]: kind is area, line, step or points. y may have NaN for gaps.
//             An area is between base (an array, or 0) and y. text(value, i) is the value in the legend.
//             Those without a name are not in the legend.
//   marks     [{ name, color, y, dash }]: horizontal lines, such as a rate
//   xTicks    a function (x0, x1, n), ticks by default;  xText, yText: functions that write a value
//   says      the text of the plot for those who do not see it
export class Plot {
  #host; #frame; #canvas; #legend; #told; #given = null; #cursor = null; #queued = false; #entries = []; #scale = 0;
  linked = []; // plots that have the same cursor

  constructor(host, { label, height = 208 }) {
    this.#host = host;
    this.#canvas = h("canvas", { role: "img" });
    this.#frame = h("div", { class: "plot-frame", tabindex: "0", role: "group", "aria-label": `${label}: arrow keys read values` }, this.#canvas);
    this.#frame.style.setProperty("--plot-height", `${height}px`);
    this.#legend = h("ul", { class: "legend" });
    this.#told = h("output", { class: "hidden" });
    host.classList.add("plot");
    host.replaceChildren(this.#frame, this.#legend, this.#told);
    this.label = label;

    const at = (e) => this.#x(e.clientX - this.#frame.getBoundingClientRect().left);
    this.#frame.addEventListener("pointermove", (e) => this.cursorAt(at(e)));
    this.#frame.addEventListener("pointerdown", (e) => this.cursorAt(at(e)));
    this.#frame.addEventListener("pointerleave", () => this.cursorAt(null));
    this.#frame.addEventListener("blur", () => this.cursorAt(null));
    this.#frame.addEventListener("keydown", (e) => this.#key(e));
    new ResizeObserver(() => this.#redraw()).observe(this.#frame);
    document.addEventListener("theme", () => this.#redraw());
  }

  draw(given) {
    this.#given = { layers: [], marks: [], xTicks: ticks, xText: String, yText: String, ...given };
    this.#redraw();
  }

  // cursorAt shows the values at x, null for the last ones, here and in linked plots.
  cursorAt(x) {
    for (const plot of [this, ...this.linked]) {
      plot.#cursor = x;
      plot.#redraw();
    }
  }

  #redraw() {
    if (this.#queued) return;
    this.#queued = true;
    requestAnimationFrame(() => {
      this.#queued = false;
      if (this.#given && this.#host.isConnected) this.#paint();
    });
  }

  #x(pixel) {
    const g = this.#given;
    if (!g) return null;
    const width = this.#frame.clientWidth - LEFT - RIGHT;
    return g.x0 + ((Math.min(Math.max(pixel, LEFT), LEFT + width) - LEFT) / width) * (g.x1 - g.x0);
  }

  #key(e) {
    const g = this.#given;
    const xs = g?.layers[0]?.x;
    if (!xs?.length) return;
    let i = this.#cursor === null ? xs.length - 1 : nearest(xs, this.#cursor);
    const far = Math.max(1, Math.round(xs.length / 10));
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far, Home: -xs.length, End: xs.length }[e.key];
    if (e.key === "Escape") return this.cursorAt(null);
    if (!step) return;
    e.preventDefault();
    i = Math.min(Math.max(i + step, 0), xs.length - 1);
    this.cursorAt(xs[i]);
    setText(this.#told, `${g.xText(xs[i])}: ` + g.layers.filter((l) => l.name).map((l) => `${l.name} ${value(l, nearest(l.x, xs[i]), g)}`).join(", "));
  }

  // #top is the top of y: a round value above all others. It falls only when much lower, as a scale that jumps is hard to read.
  #top(g) {
    if (g.yMax) return g.yMax;
    let most = 0;
    for (const l of g.layers) {
      for (let i = 0; i < l.y.length; i++) if (l.x[i] >= g.x0 && l.y[i] > most) most = l.y[i];
    }
    // A limit far above all use would leave nothing to see.
    const used = most;
    for (const m of g.marks) if (m.y <= 4 * used || used === 0) most = Math.max(most, m.y);
    most = (most || 1) * 1.08;
    if (most > this.#scale || most < this.#scale / 2) {
      const t = ticks(0, most, 4);
      this.#scale = Math.max(most, t.at(-1) ?? 0);
    }
    return this.#scale;
  }

  #paint() {
    const g = this.#given;
    const width = this.#frame.clientWidth;
    const height = this.#frame.clientHeight;
    if (width < LEFT + RIGHT + 10) return;
    const dots = window.devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * dots) || this.#canvas.height !== Math.round(height * dots)) {
      this.#canvas.width = Math.round(width * dots);
      this.#canvas.height = Math.round(height * dots);
    }
    const style = getComputedStyle(this.#host);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const c = this.#canvas.getContext("2d");
    c.setTransform(dots, 0, 0, dots, 0, 0);
    c.clearRect(0, 0, width, height);

    const top = this.#top(g);
    const w = width - LEFT - RIGHT;
    const y0 = height - BOTTOM;
    const px = (x) => LEFT + ((x - g.x0) / (g.x1 - g.x0)) * w;
    const py = (y) => y0 - (y / top) * (y0 - TOP);

    c.font = `12px ${style.fontFamily}`;
    c.lineWidth = 1;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const t of ticks(0, top, Math.max(2, Math.floor((y0 - TOP) / 44)))) {
      c.strokeStyle = color(t === 0 ? "strong-line" : "line");
      line(c, LEFT, Math.round(py(t)) + 0.5, width - RIGHT, Math.round(py(t)) + 0.5);
      c.fillStyle = color("muted");
      c.fillText(short(g.yText(t)), LEFT - 8, py(t));
    }
    c.textBaseline = "alphabetic";
    c.textAlign = "center";
    for (const t of g.xTicks(g.x0, g.x1, Math.max(2, Math.floor(w / 84)))) {
      const text = g.xText(t);
      const half = c.measureText(text).width / 2;
      c.fillStyle = color("muted");
      c.fillText(text, Math.min(Math.max(px(t), LEFT + half - 8), width - half), height - 5);
      c.strokeStyle = color("line");
      line(c, Math.round(px(t)) + 0.5, y0, Math.round(px(t)) + 0.5, y0 + 4);
    }

    c.save();
    c.beginPath();
    c.rect(LEFT, 0, w, y0 + 1);
    c.clip();
    c.lineJoin = "round";
    for (const l of g.layers) paintLayer(c, l, px, py, color);
    for (const m of g.marks) {
      if (!(m.y <= top)) continue;
      c.strokeStyle = color(m.color);
      c.lineWidth = 1.5;
      c.setLineDash(m.dash ?? []);
      line(c, LEFT, py(m.y), width - RIGHT, py(m.y));
      c.setLineDash([]);
    }
    if (this.#cursor !== null && this.#cursor >= g.x0) {
      c.strokeStyle = color("strong-line");
      c.lineWidth = 1;
      const at = Math.round(px(this.#cursor)) + 0.5;
      line(c, at, TOP, at, y0);
    }
    c.restore();
    this.#showLegend(g);
    setAttr(this.#canvas, "aria-label", `${this.label}. ${g.says ?? ""}`);
  }

  #showLegend(g) {
    const all = [
      ...g.layers.filter((l) => l.name).map((l) => ({ ...l, dash: undefined, says: value(l, this.#cursor === null ? l.x.length - 1 : nearest(l.x, this.#cursor), g) })),
      ...g.marks.map((m) => ({ ...m, kind: "line", says: m.text ?? g.yText(m.y) })),
    ];
    const same = all.length === this.#entries.length - 1 && all.every((l, i) => this.#entries[i].name === l.name && this.#entries[i].color === l.color);
    if (!same) {
      this.#entries = all.map((l) => ({ name: l.name, color: l.color, text: h("b") }));
      this.#entries.push({ text: h("span", { class: "when" }) });
      this.#legend.replaceChildren(
        ...all.map((l, i) => h("li", null, swatch(l), `${l.name} `, this.#entries[i].text)),
        h("li", null, this.#entries.at(-1).text),
      );
    }
    all.forEach((l, i) => setText(this.#entries[i].text, l.says));
    setText(this.#entries.at(-1).text, this.#cursor === null ? "" : `at ${g.xText(this.#cursor)}`);
  }
}

// short leaves out the zeros of a round value: 50.0mbit is 50mbit beside a line.
const short = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

function value(l, i, g) {
  const v = l.y[i];
  if (v === undefined || Number.isNaN(v)) return "–";
  return l.text ? l.text(v, i) : g.yText(v);
}

// nearest is the index of the value that is nearest to x, of sorted ones.
function nearest(xs, x) {
  let lo = 0;
  let hi = xs.length - 1;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (xs[mid] < x) lo = mid + 1;
    else hi = mid;
  }
  return lo > 0 && x - xs[lo - 1] < xs[lo] - x ? lo - 1 : lo;
}

function line(c, x0, y0, x1, y1) {
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1, y1);
  c.stroke();
}

// runs are the ranges of indices without a gap.
function* runs(y) {
  let from = -1;
  for (let i = 0; i <= y.length; i++) {
    const there = i < y.length && !Number.isNaN(y[i]);
    if (there && from < 0) from = i;
    if (!there && from >= 0) {
      yield [from, i];
      from = -1;
    }
  }
}

function paintLayer(c, l, px, py, color) {
  c.strokeStyle = color(l.color);
  c.fillStyle = color(l.kind === "area" ? `${l.color}-soft` : l.color) || color(l.color);
  c.lineWidth = l.width ?? 1.75;
  if (l.kind === "points") {
    for (let i = 0; i < l.x.length; i++) {
      if (Number.isNaN(l.y[i])) continue;
      c.beginPath();
      c.arc(px(l.x[i]), py(l.y[i]), l.radius ?? 2.5, 0, 7);
      c.fill();
    }
    return;
  }
  c.setLineDash(l.dash ?? []);
  for (const [from, to] of runs(l.y)) {
    const trace = (y, i, first) => {
      if (first) return c.moveTo(px(l.x[i]), py(y(i)));
      if (l.kind === "step") c.lineTo(px(l.x[i]), py(y(i - 1)));
      c.lineTo(px(l.x[i]), py(y(i)));
    };
    const upper = (i) => l.y[i];
    if (l.kind === "area") {
      c.beginPath();
      for (let i = from; i < to; i++) trace(upper, i, i === from);
      for (let i = to - 1; i >= from; i--) c.lineTo(px(l.x[i]), py(l.base ? l.base[i] : 0));
      c.fill();
    }
    if (to - from === 1) {
      c.fillStyle = color(l.color);
      c.beginPath();
      c.arc(px(l.x[from]), py(l.y[from]), 2, 0, 7);
      c.fill();
      continue;
    }
    c.beginPath();
    for (let i = from; i < to; i++) trace(upper, i, i === from);
    c.stroke();
  }
  c.setLineDash([]);
}

function swatch(l) {
  const box = s("svg", { class: "swatch", viewBox: "0 0 14 10", "aria-hidden": "true" });
  const mark = l.kind === "area"
    ? s("rect", { width: 14, height: 10, rx: 2 })
    : l.kind === "points" ? s("circle", { cx: 7, cy: 5, r: 3.5 }) : s("path", { d: "M0 5H14", "stroke-width": 2.5, "stroke-dasharray": l.dash?.join(" ") });
  mark.style[l.kind === "line" || l.kind === "step" || !l.kind ? "stroke" : "fill"] = `var(--${l.color})`;
  box.append(mark);
  return box;
}

// spark makes a small picture of what passed and, on top of that, was refused. It has no text: the row has the values.
export function spark() {
  return s("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" },
    ["refused", "passed"].flatMap((name) => [s("path", { class: `${name} fill` }), s("path", { class: `${name} line` })]));
}

// drawSpark draws values, of which there will be full; the first few grow into their place. top is the value of the upper
// edge, at least.
export function drawSpark(svg, passed, refused, full, top = 0) {
  const n = Math.max(full / 4, passed.length);
  let most = top;
  for (let i = 0; i < passed.length; i++) most = Math.max(most, (passed[i] || 0) + (refused?.[i] || 0));
  const x = (i) => ((100 * (n - passed.length + i)) / (n - 1)).toFixed(1);
  const draw = (fill, line, any, at) => {
    let d = "";
    if (any && passed.length > 1 && most > 0) {
      for (let i = 0; i < passed.length; i++) d += `${i ? "L" : "M"}${x(i)} ${(27 - (25 * (at(i) || 0)) / most).toFixed(1)}`;
    }
    setAttr(line, "d", d);
    setAttr(fill, "d", d && `${d}L100 28L${x(0)} 28Z`);
  };
  const [above, aboveLine, below, belowLine] = svg.children;
  draw(above, aboveLine, refused?.some((v) => v > 0), (i) => (passed[i] || 0) + (refused[i] || 0));
  draw(below, belowLine, passed.some((v) => v > 0), (i) => passed[i]);
}
