// The page of a name, such as a subscriber: all rules that have it, and the pools above them.
import { h, name, setText, visible } from "./dom.js";
import { rateLayers } from "./detail.js";
import { Table } from "./list.js";
import { Plot } from "./plot.js";
import { Series, stateText } from "./store.js";
import { bits, clock, percent, plural, rate } from "./units.js";

const MOST = 200; // rows
const SHOWN = 300_000; // of the plots, in ms
const sides = ["egress", "ingress"];

export class Named {
  key; #store; #host; #name; #parts = null; #series = { egress: new Series(), ingress: new Series() };

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
      this.#host.replaceChildren(h("div", { class: "card empty" }, h("h1", null, "No rule has this name now"), h("p", null, name(this.#name), " may have been removed or renamed."), h("a", { class: "button", href: "#/" }, "All rules")));
      return;
    }
    this.#parts ??= this.#build();
    const p = this.#parts;
    const { r } = row;
    document.title = `${visible(r.name).slice(0, 60)} – shapectl`;
    setText(p.pill, stateText(row));
    p.pill.setAttribute("class", `pill ${row.state}`);
    const rates = sides.filter((d) => r[d]).map((d) => `${d} ${r[d].rate_bits_per_second === null ? "without one rate" : rate(r[d].rate_bits_per_second)} in ${plural(r[d].rules, "rule")}`);
    setText(p.sentence, visible([rates.join(", "), r.plan && `plan ${r.plan}`, row.dropped > 0 && `${percent(r.dropped_percent)} of packets dropped`].filter(Boolean).join("; ")));
    const rows = [...this.#store.rows.values()];
    p.table.show(rows.map((one) => ({ row: one, open: true })));
    for (const d of sides) {
      p[d].el.hidden = !r[d];
      if (!r[d]) continue;
      const dropped = rows.filter((one) => one.r.direction === d).reduce((sum, one) => sum + (one.dropped ?? 0), 0);
      const all = this.#series[d];
      all.add(this.#store.at, { passed: r[d].use_bits_per_second, dropped });
      const offered = all.passed.map((v, i) => v + all.dropped[i]);
      p[d].plot.draw({
        x0: Math.max(Math.min(all.t[0], this.#store.at - 15_000), this.#store.at - SHOWN), x1: this.#store.at, xText: (v) => clock(v),
        ...rateLayers({ rate_bits_per_second: r[d].rate_bits_per_second, each: "all" }, all.t, all.passed, offered),
        says: `Now ${bits(r[d].use_bits_per_second)} pass and ${bits(dropped)} are dropped.`,
      });
    }
  }

  #build() {
    const p = { pill: h("span", { class: "pill" }), sentence: h("p", { class: "sentence" }), table: new Table("Rules and pools", "Pool or rule", () => {}) };
    const plots = sides.map((d) => {
      const host = h("div");
      p[d] = { el: h("section", { class: "card", "aria-labelledby": `${d}-title` }, h("h2", { id: `${d}-title` }, d === "egress" ? "Egress" : "Ingress"), host) };
      p[d].plot = new Plot(host, { label: d, height: 200 });
      return p[d].el;
    });
    [p.egress.plot.linked, p.ingress.plot.linked] = [[p.ingress.plot], [p.egress.plot]];
    this.#host.replaceChildren(
      h("div", { class: "head" }, h("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, h("a", { href: "#/" }, "All rules")), h("h1", { tabindex: "-1", id: "title" }, name(this.#name), p.pill), p.sentence),
      h("div", { class: "pair" }, plots),
      h("section", { class: "card list", "aria-label": "Rules, and the pools above them" }, p.table.el));
    return p;
  }
}
