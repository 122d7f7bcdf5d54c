// Plots of lines and areas over time, drawn by uPlot, with a legend that tells the values. Colours are the variables of
// style.css, by their names without the dashes.
import { h, s, setAttr, setText } from "./dom.js";

const LEFT = 60; // of the axis, in pixels
const RIGHT = 12;

// ticks are at most about n round values between lo and hi.
function ticks(lo, hi, n) {
  const span = hi - lo;
  if (!(span > 0)) return [];
  const rough = span / Math.max(1, n);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((v) => v >= rough * 0.999) ?? 10 * power;
  const out = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-6; i++) out.push(i * step);
  return out;
}

// fromBegin are round times since the begin.
export const fromBegin = (lo, hi, n) => ticks(0, hi - lo, n + 2).map((t) => lo + t);

// A Plot draws what draw is given:
//   x0, x1    the range of x
//   yMax      the top of y; else it follows from the values
//   layers    [{ name, color, kind, x, y, text }]: kind is area (from 0), line, points, or ticks from base up to y. y may
//             have NaN for gaps. text(value, i) is the value in the legend. Later layers cover earlier ones.
//   marks     [{ name, color, y, dash }]: horizontal lines, such as a rate
//   xTicks    a function (x0, x1, n); else x is a time in ms.  xText, yText: functions that write a value.  yTicks: a function
//   says      the text of the plot for those who do not see it
export class Plot {
  #host; #frame; #legend; #told; #given = null; #cursor = null; #entries = []; #scale = 0; #plot = null; #is = "";
  linked = []; // plots that have the same cursor

  // A bare plot has neither an axis of x nor a legend: it belongs to another one.
  constructor(host, { label, height = 208, bare = false }) {
    this.#host = host;
    this.bare = bare;
    this.#frame = h("div", { class: "plot-frame", tabindex: bare ? null : "0", role: "group", "aria-label": bare ? label : `${label}: arrow keys read values` });
    this.#frame.style.setProperty("--plot-height", `${height}px`);
    this.#legend = h("ul", { class: "legend", hidden: bare });
    this.#told = h("output", { class: "hidden" });
    host.classList.add("plot");
    host.replaceChildren(this.#frame, this.#legend, this.#told);
    this.label = label;
    this.height = height;
    this.#frame.addEventListener("blur", () => this.cursorAt(null));
    this.#frame.addEventListener("keydown", (e) => this.#key(e));
    new ResizeObserver(() => (this.#plot ? this.#plot.setSize({ width: this.#frame.clientWidth, height }) : this.#given && this.draw(this.#given))).observe(this.#frame);
    document.addEventListener("theme", () => this.#plot?.redraw());
  }

  draw(given) {
    const g = (this.#given = { layers: [], marks: [], xText: String, yText: String, ...given });
    if (this.#frame.clientWidth < 2 * LEFT) return;
    const is = JSON.stringify([Boolean(g.xTicks), ...g.layers.map((l) => [l.color, l.kind])]);
    const data = joined(g.layers);
    if (this.#is === is) this.#plot.setData(data);
    else {
      this.#plot?.destroy();
      this.#is = is;
      this.#plot = new uPlot(this.#options(g), data, this.#frame);
    }
    const { canvas } = this.#plot.ctx;
    setAttr(canvas, "role", "img");
    setAttr(canvas, "aria-label", `${this.label}. ${g.says ?? ""}`);
    this.#showLegend(g);
  }

  #options(g) {
    const color = (name) => getComputedStyle(this.#host).getPropertyValue(`--${name}`).trim();
    const axis = (more) => ({ stroke: () => color("muted"), font: `12px ${getComputedStyle(this.#host).fontFamily}`, ticks: { stroke: () => color("line"), size: 4 }, ...more });
    return {
      width: this.#frame.clientWidth, height: this.height, padding: [this.bare ? 2 : 12, RIGHT, 0, 0], ms: 1, legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: !g.xTicks, range: () => [this.#given.x0, this.#given.x1] }, y: { range: () => [0, this.#top(this.#given)] } },
      axes: [
        axis({ show: !this.bare, size: 26, gap: 4, space: 84, grid: { show: false }, values: (u, all) => all.map((v) => (u.valToPos(v, "x") + LEFT > u.width - 24 ? "" : this.#given.xText(v))), ...(g.xTicks && { splits: (u, _, lo, hi) => this.#given.xTicks(lo, hi, Math.max(2, Math.floor(u.width / 84))) }) }),
        axis({ size: LEFT, gap: 4, space: 44, grid: { stroke: () => color("line"), width: 1 }, ...(g.yTicks && { splits: g.yTicks }), values: (_, all) => all.map((v) => short(this.#given.yText(v))) }),
      ],
      series: [{}, ...g.layers.map((l) => ({
        stroke: () => color(l.color), width: l.width ?? 1.75,
        ...(l.kind === "area" && { fill: () => color(`${l.color}-soft`) }),
        ...(l.kind === "ticks" && { width: 0, pxAlign: 0, fill: () => color(l.color), fillTo: l.base, paths: uPlot.paths.bars({ size: [1, 1.25, 1.25] }) }),
        ...(l.kind === "points" ? { paths: () => null, points: { show: true, size: 5, width: 0, fill: () => color(l.color) } } : { points: { show: false } }),
      }))],
      hooks: {
        draw: [(u) => {
          for (const m of this.#given.marks) {
            const y = u.valToPos(m.y, "y", true);
            if (y < u.bbox.top) continue;
            u.ctx.save();
            u.ctx.strokeStyle = color(m.color);
            u.ctx.lineWidth = 1.5 * devicePixelRatio;
            u.ctx.setLineDash((m.dash ?? []).map((n) => n * devicePixelRatio));
            u.ctx.beginPath();
            u.ctx.moveTo(u.bbox.left, y);
            u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
            u.ctx.stroke();
            u.ctx.restore();
          }
        }],
        setCursor: [(u) => this.cursorAt(u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x"))],
      },
    };
  }

  // cursorAt shows the values at x, null for the last ones, here and in linked plots.
  cursorAt(x) {
    for (const plot of [this, ...this.linked]) {
      if (!plot.#plot || plot.#cursor === x) continue;
      plot.#cursor = x;
      plot.#plot.setCursor({ left: x === null ? -10 : plot.#plot.valToPos(x, "x"), top: 0 }, false);
      plot.#showLegend(plot.#given);
    }
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

  // #top is the top of y: above all other values. It falls only when much lower, as a scale that jumps is hard to read.
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
    if (most > this.#scale || most < this.#scale / 2) this.#scale = most;
    return this.#scale;
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

// joined are the values of layers by a common x, as uPlot wants them: null is a gap, and undefined no value.
function joined(layers) {
  const y = (l) => l.y.map((v) => (Number.isNaN(v) ? null : v));
  if (layers.every((l) => l.x === layers[0].x)) return [layers[0]?.x ?? [], ...layers.map(y)];
  return uPlot.join(layers.map((l) => {
    const x = [...l.x];
    const least = (x.at(-1) - x[0]) * 1e-9; // each x of a layer is there once: a level jumps
    for (let i = 1; i < x.length; i++) if (x[i] <= x[i - 1]) x[i] = x[i - 1] + least;
    return [x, y(l)];
  }));
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

function swatch(l) {
  const box = s("svg", { class: "swatch", viewBox: "0 0 14 10", "aria-hidden": "true" });
  const mark = l.kind === "area"
    ? s("rect", { width: 14, height: 10, rx: 2 })
    : l.kind === "points" ? s("circle", { cx: 7, cy: 5, r: 3.5 }) : s("path", { d: "M0 5H14", "stroke-width": 2.5, "stroke-dasharray": l.dash?.join(" ") });
  mark.style[l.kind === "line" ? "stroke" : "fill"] = `var(--${l.color})`;
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
