// The page that 'shapectl replay --plot' writes: page/chart.go puts it behind the modules below, and panels before it.
import { byID, h } from "./dom.js";
import { bits, bytes, duration } from "./units.js";
import { fromBegin, Plot } from "./plot.js";

const plots = Object.entries(panels).map(([name, panel]) => {
  const host = h("div");
  byID("plots").append(h("section", { class: "card" }, h("h2", null, name), host));
  const plot = new Plot(host, { label: name, height: 260 });
  const span = 2 * (panel.x.at(-1) ?? 0) - (panel.x.at(-2) ?? 0);
  plot.draw({ ...panel, x0: 0, x1: span || 1, layers: panel.layers.map((l) => ({ ...l, x: panel.x, y: l.y })), xTicks: fromBegin, xText: duration, yText: name === "rate" ? bits : bytes });
  return plot;
});
for (const p of plots) p.linked = plots.filter((other) => other !== p);
