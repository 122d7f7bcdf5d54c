// The page of a name, such as a subscriber: all rules that have it, and the pools above them.
import { h, name, setText, visible } from "./dom.js";
import { rateLayers } from "./detail.js";
import { Table } from "./list.js";
import { Plot } from "./plot.js";
import { Series, stateText } from "./store.js";
import { bits, clock, percent, plural, rate } from "./units.js";

const MOST = 200; // rows
const SHOWN = 300_000; // of the plots, in ms
const titleOf = (side) => `${side.device} ${side.direction}`;

export class Named {
  key; #store; #host; #name; #parts = null; #sides = new Map(); // by title

  constructor(store, host, name) {
    this.#store = store;
    this.#host = host;
    this.#name = name;
    this.key = `name ${name}`;
  }

  query = () => ({ by: "tree", name: this.#name, most: MOST });

  update() {
    const [row] = this.#store.names;
    if (!row) {
      this.#parts = null;
      this.#sides.clear();
      this.#host.replaceChildren(h("div", { class: "card empty" }, h("h1", null, "No rule has this name now"), h("p", null, name(this.#name), " may have been removed or renamed."), h("a", { class: "button", href: "#/" }, "All rules")));
      return;
    }
    this.#parts ??= this.#build();
    const p = this.#parts;
    const { r } = row;
    document.title = `${visible(r.name).slice(0, 60)} – shapectl`;
    setText(p.pill, stateText(row));
    p.pill.setAttribute("class", `pill ${row.state}`);
    const rates = r.sides.map((side) => `${titleOf(side)} ${side.rate_bits_per_second === null ? "without one rate" : rate(side.rate_bits_per_second)} in ${plural(side.rules, "rule")}`);
    setText(p.sentence, visible([rates.join(", "), r.plan && `plan ${r.plan}`, row.dropped > 0 && `${percent(r.dropped_percent)} of packets dropped`].filter(Boolean).join("; ")));
    const rows = [...this.#store.rows.values()];
    p.table.show(rows.map((one) => ({ row: one, open: true })));
    for (const [title, side] of this.#sides) if (!r.sides.some((one) => titleOf(one) === title)) side.el.remove(), this.#sides.delete(title);
    for (const one of r.sides) {
      const side = this.#sides.get(titleOf(one)) ?? this.#side(titleOf(one));
      const dropped = rows.filter(({ r }) => r.device === one.device && r.direction === one.direction).reduce((sum, row) => sum + (row.dropped ?? 0), 0);
      const all = side.series;
      all.add(this.#store.at, { passed: one.use_bits_per_second, dropped });
      const offered = all.passed.map((v, i) => v + all.dropped[i]);
      side.plot.draw({
        x0: Math.max(Math.min(all.t[0], this.#store.at - 15_000), this.#store.at - SHOWN), x1: this.#store.at, xText: (v) => clock(v),
        ...rateLayers({ rate_bits_per_second: one.rate_bits_per_second, each: "all" }, all.t, all.passed, offered),
        says: `Now ${bits(one.use_bits_per_second)} pass and ${bits(dropped)} are dropped.`,
      });
    }
  }

  // side adds the plot of a side.
  #side(title) {
    const host = h("div");
    const side = { series: new Series(), el: h("section", { class: "card", "aria-label": visible(title) }, h("h2", null, visible(title)), host), plot: new Plot(host, { label: title, height: 200 }) };
    this.#sides.set(title, side);
    this.#parts.plots.append(side.el);
    const plots = [...this.#sides.values()].map(({ plot }) => plot);
    for (const plot of plots) plot.linked = plots.filter((other) => other !== plot);
    return side;
  }

  #build() {
    const p = { pill: h("span", { class: "pill" }), sentence: h("p", { class: "sentence" }), table: new Table("Rules and pools", "Pool or rule", () => {}), plots: h("div", { class: "pair" }) };
    this.#host.replaceChildren(
      h("div", { class: "head" }, h("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, h("a", { href: "#/" }, "All rules")), h("h1", { tabindex: "-1", id: "title" }, name(this.#name), p.pill), p.sentence),
      p.plots,
      h("section", { class: "card list", "aria-label": "Rules, and the pools above them" }, p.table.el));
    return p;
  }
}
