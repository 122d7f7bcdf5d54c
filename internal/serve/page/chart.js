// The page that 'shapectl replay --plot' and 'shapectl report --html' write: page/chart.go puts it behind the modules below, and
// charts before it.
import { byID, h } from "./dom.js";
import { bits, bytes, duration } from "./units.js";
import { fromBegin, Plot } from "./plot.js";

const moment = (ms) => new Date(ms).toLocaleString([], { dateStyle: "short", timeStyle: "short" });

const plots = charts.map(({ name, facts, panel }) => {
  const host = h("div");
  const said = facts && h("dl", null, facts.map(([label, text]) => [label ? h("dt", null, label) : null, h("dd", null, text)]));
  byID("plots").append(h("section", { class: "card" }, h("h2", null, name), host, said));
  const plot = new Plot(host, { label: name, height: 260 });
  const span = 2 * (panel.x.at(-1) ?? 0) - (panel.x.at(-2) ?? 0);
  const time = panel.until ? { x0: panel.since, x1: panel.until, xText: moment } : { x0: 0, x1: span || 1, xTicks: fromBegin, xText: duration };
  plot.draw({ ...panel, ...time, layers: panel.layers.map((l) => ({ ...l, x: panel.x, y: l.y.map((v) => v ?? NaN) })), yText: name === "level" ? bytes : bits });
  return plot;
});
for (const p of plots) p.linked = plots.filter((other) => other !== p);
