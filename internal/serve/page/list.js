// The list of names or rules, worst first, and the tree of pools.
import { Rows, h, name, s, searchField, setAttr, setText, visible } from "./dom.js";
import { drawSpark, spark } from "./plot.js";
import { networkOf, stateText, titleOf } from "./store.js";
import { bits, bitsParts, bytes, grouped, percent, plural, rate } from "./units.js";

const FIRST = 100; // rows that are asked for before somebody wants more
const FEW = 10; // so many pools at the top of the tree begin open
const LINES = 400; // of the tree
const HOLD = 4000; // for so long after the pointer or keyboard was used in the list, its order stays

export const linkTo = (r) => "#/" + (r.kind === "rule" ? ["rule", r.device, r.direction, r.cidr] : [r.kind, r.name]).map(encodeURIComponent).join("/");

const shows = { "": "Everything", dropping: "Dropping now", near: "At or near the rate", busy: "In use", idle: "Idle", out: "Not in force" };

const kinds = { name: "Names", rule: "Rules", pool: "Pools", both: "Rules and pools" };
let kind = ""; // that somebody chose, or that most rules suggest

const choice = (label, id, options, on) => h("select", { id, "aria-label": label, onchange: on }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));

const changed = (el) => el.dispatchEvent(new CustomEvent("changed", { bubbles: true }));

// A Table shows rows of the store: a tree if toggle opens and closes pools.
export class Table {
  #rows; heads = {};

  constructor(label, first, toggle, sort) {
    const head = (id, text, props) => (this.heads[id] = h("th", { scope: "col", role: "columnheader", ...props }, sort ? h("button", { type: "button", class: "sorter", onclick: () => sort(id) }, text) : text));
    this.body = h("tbody", { role: "rowgroup" });
    this.el = h("table", { role: "table", "aria-label": label, tabindex: "-1" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
        head("name", first), head("worst", "State", { class: "col-state" }), head("use", "Use now", { class: "col-use" }),
        head("dropped", "Dropped now", { class: "number col-dropped" }),
        h("th", { scope: "col", role: "columnheader", class: "col-spark" }, "Last minute"), head("level", "Level", { class: "col-level" }))),
      this.body);
    this.#rows = new Rows(this.body, (item) => makeRow(toggle && (() => toggle(item.row))), updateRow);
  }

  // show shows { row, open }.
  show(items) {
    this.#rows.show(items, (item) => item.row.key);
  }
}

// A List is the page of names or rules, or of the tree of pools.
export class List {
  #store; #tree; #host; #limit = FIRST; #order = "worst"; #search; #show; #kind; #open = null;
  #found; #more; #tiles; #empty; #held = 0; #last = []; #table; #holding;

  constructor(store, host, tree, show) {
    this.#store = store;
    this.#tree = tree;
    this.#host = host;
    const again = () => {
      this.#limit = FIRST;
      this.#ask();
    };
    this.#search = h("input", { type: "search", id: "search", placeholder: "Name, plan, pool, device or address", "aria-label": "Search", autocomplete: "off", spellcheck: "false", oninput: again });
    this.#show = choice("Show", "show", shows, again);
    this.#show.value = show;
    this.#kind = choice("Names, rules or pools", "kind", kinds, () => {
      kind = this.#kind.value;
      again();
    });
    this.#table = new Table(tree ? "Pools and their members" : "Rules", tree ? "Pool or rule" : "Name or rule", tree && ((row) => this.#toggle(row.r.name)), (id) => {
      this.#order = id;
      this.#ask();
    });
    this.#found = h("span");
    this.#holding = h("span");
    this.#more = h("button", { type: "button", onclick: () => { this.#limit += FIRST; this.#ask(); } }, "Show more");
    this.#empty = h("div");
    const body = this.#table.body;
    const hold = () => { this.#held = performance.now() + HOLD; };
    for (const kind of ["pointermove", "focusin", "keydown", "touchstart"]) body.addEventListener(kind, hold, { passive: true });
    body.addEventListener("pointerleave", () => { this.#held = 0; });

    this.#tiles = new Tiles(store);
    host.replaceChildren(
      h("h1", { class: "hidden" }, tree ? "Pools" : "Rules, worst first"),
      this.#tiles.el,
      h("div", { class: "toolbar", role: "search" },
        searchField(this.#search),
        this.#show, tree ? null : this.#kind),
      h("section", { class: "card list", "aria-label": tree ? "Pools" : "Rules" }, this.#table.el, this.#empty,
        h("div", { class: "summary" }, this.#found, this.#holding, this.#more)));
  }

  // query is what to ask of the server. One row more than is shown tells that there are more.
  query() {
    const common = { sort: this.#order, search: this.#search.value.trim(), show: this.#show.value, top: this.#limit + 1 };
    if (this.#tree) return { by: "tree", kind: "pool", most: LINES, open: ["", ...(this.#open ?? [])], ...common };
    const of = kind || "name";
    return { by: of === "name" ? "name" : "network", kind: of === "name" || of === "both" ? "" : of, ...common };
  }

  #ask() {
    this.#held = 0;
    changed(this.#host);
  }

  #toggle(pool) {
    if (!this.#open.delete(pool)) this.#open.add(pool);
    this.#ask();
  }

  // #begin chooses what to show first: names if most rules have some, and the pools within the topmost ones if these are few.
  #begin() {
    const { rules, named } = this.#store.summary;
    if (this.#tree && this.#open === null) {
      const top = [...this.#store.rows.values()].filter((row) => row.isPool);
      this.#open = new Set(top.length > FEW ? [] : top.map((row) => row.r.name));
      if (this.#open.size > 0) this.#ask();
    } else if (!this.#tree && kind === "" && rules > 0) {
      kind = 2 * named > rules ? "name" : "rule";
      if (kind === "rule") this.#ask();
    }
    this.#kind.value = kind || "name";
  }

  update() {
    const store = this.#store;
    this.#begin();
    this.#tiles.update();
    const searched = this.#search.value.trim() !== "" || this.#show.value !== "";
    const all = [...store.rows.values()];
    const items = (this.#tree ? all : this.#ordered(all).slice(0, this.#limit)).map((row) => ({ row, open: searched || this.#open?.has(row.r.name) }));
    this.#table.show(items);
    for (const [id, th] of Object.entries(this.#table.heads)) setAttr(th, "aria-sort", id === this.#order ? (id === "name" ? "ascending" : "descending") : null);

    const more = this.#tree ? all.length === LINES || items.some(({ row, open }) => open && all.filter((o) => o.r.within === row.r.name).length > this.#limit) : all.length > this.#limit;
    const thing = this.#tree ? "lines" : kinds[this.#kind.value].toLowerCase();
    const shown = `${more ? "the first " : ""}${plural(items.length, thing.replace(/s$/, ""))}`;
    setText(this.#found, this.#tree ? shown : searched ? `${shown} found, of ${grouped(store.of)}` : more ? `${grouped(items.length)} of ${grouped(store.of)} ${thing}` : shown);
    setText(this.#holding, performance.now() < this.#held && this.#order === "worst" ? "order held while you use the list" : "");
    this.#more.hidden = !more || (this.#tree && all.length === LINES);
    this.#table.el.hidden = items.length === 0;
    this.#showEmpty(items.length > 0 ? "" : store.summary.rules + store.summary.pools === 0 ? "no rules" : this.#tree && store.summary.pools === 0 ? "no pools" : "not found");
  }

  // #ordered is the order of the server. While somebody is in the list, rows that were there keep their places.
  #ordered(rows) {
    if (performance.now() < this.#held) {
      const place = new Map(this.#last.map((key, i) => [key, i]));
      const end = this.#last.length;
      return rows.sort((a, b) => (place.get(a.key) ?? end) - (place.get(b.key) ?? end));
    }
    this.#last = rows.map((row) => row.key);
    return rows;
  }

  #showEmpty(why) {
    if (this.#empty.dataset.why === why) return;
    this.#empty.dataset.why = why;
    this.#empty.replaceChildren(...emptyOf(why));
  }
}

function emptyOf(why) {
  switch (why) {
    case "":
      return [];
    case "not found":
      return [h("div", { class: "empty" }, h("h2", null, "Nothing matches"), h("p", null, "Try fewer words. An address finds the networks that contain it."))];
    case "no pools":
      return [h("div", { class: "empty" }, h("h2", null, "No pools yet"), h("p", null, "A pool is one rate that several rules share, such as an uplink or a subscriber with IPv4 and IPv6."),
        h("code", { class: "command" }, "shapectl set uplink --new --rate 1gbit --share member"))];
  }
  return [h("div", { class: "empty" },
    s("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" }, s("use", { href: "icon.svg#mark" })),
    h("h2", null, "No limits yet"), h("p", null, "Nothing is limited in this network namespace. This command limits each address in a network to 10mbit:"),
    h("code", { class: "command" }, "shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host"),
    h("p", null, "To try a limit first, use the ", h("a", { href: "sandbox" }, "sandbox"), "."))];
}

function makeRow(toggle) {
  const link = h("a");
  const el = h("tr", { role: "row" },
    h("th", { scope: "row", role: "rowheader", class: "who" },
      h("div", { class: "who-line" }, toggle ? h("button", { type: "button", class: "twig", onclick: toggle }, s("svg", { viewBox: "0 0 12 12", fill: "none", stroke: "currentColor", "stroke-width": 2, "aria-hidden": "true" }, s("path", { d: "m4 2 4 4-4 4" }))) : null, link),
      h("span", { class: "place" })),
    h("td", { role: "cell", class: "col-state" }, h("span", { class: "pill" })),
    h("td", { role: "cell", class: "col-use" }, h("div", { class: "use-cell" }, h("div", { class: "figures" }, h("span"), h("span", { class: "muted small" })), h("span", { class: "bar", "aria-hidden": "true" }, h("span")))),
    h("td", { role: "cell", class: "number col-dropped" }, h("b"), h("span", { class: "share" })),
    h("td", { role: "cell", class: "col-spark" }, spark()),
    h("td", { role: "cell", class: "col-level" }, h("div", { class: "level-cell" }, h("span"), h("span", { class: "bar level", "aria-hidden": "true" }, h("span")))));
  return el;
}

export const isEach = (r) => r.kind === "rule" && !r.unlimited && Boolean(r.each) && r.each !== "all";

// rateNow is the rate that packets meet: of a pool with a cluster, the lease or the safe share.
export const rateNow = (r) => r.lease_bits_per_second ?? r.safe_bits_per_second ?? r.rate_bits_per_second;

// ratesOf is that rate; with colours also the peak rate, or the excess rate that comes on top.
export const ratesOf = (r) => rate(rateNow(r)) + (r.pir_bits_per_second ? `/${rate(r.pir_bits_per_second)}` : r.eir_bits_per_second ? `+${rate(r.eir_bits_per_second)}` : "");

// rateText is that rate and who has it, as 'show --tree' says it.
export function rateText(r) {
  if (r.rate_bits_per_second === null) return r.within ? "as pool" : "unlimited";
  return ratesOf(r) + (isEach(r) ? `${r.each.startsWith("/") ? " each " : "/"}${r.each}` : "");
}

// placeOf says where a rule is, or what a name stands for.
function placeOf(r) {
  if (r.kind === "pool") return `pool with ${plural(r.below, "member")}`;
  if (r.kind === "rule") return `${r.device} ${r.direction}${r.name ? ` ${networkOf(r)}` : ""}`;
  return r.sides.map((side) => `${side.device} ${side.direction} ${bits(side.use_bits_per_second)}`).join(" · ");
}

// sidesText is the rates of a name: 50mbit, or 50mbit/10mbit.
const sidesText = (r) => r.sides.map((side) => (side.rate_bits_per_second === null ? "no one rate" : rate(side.rate_bits_per_second))).join("/");

function updateRow(el, { row, open }) {
  const { r, depth } = row;
  const within = row.isPool ? row.below : 0;
  setAttr(el, "class", `state-${row.state}`);
  const [who, state, use, dropped, sparkCell, level] = el.children;
  const link = who.querySelector("a");
  const title = visible(titleOf(r));
  if (link.dataset.title !== title) {
    link.dataset.title = title;
    link.replaceChildren(name(titleOf(r)));
    link.title = title;
    link.href = linkTo(r);
  }
  const pools = row.isName ? [...new Set(r.sides.flatMap((side) => side.pools))].join(", ") : depth === 0 && r.within;
  const place = [placeOf(r), r.plan && `plan ${r.plan}`, pools && `within ${pools}`].filter(Boolean).join(" · ");
  setText(who.querySelector(".place"), visible(place));
  const twig = who.querySelector(".twig");
  if (twig) {
    who.firstChild.style.marginLeft = `${depth * 1.25}rem`;
    who.lastChild.style.marginLeft = `${depth * 1.25 + 2}rem`;
    setAttr(twig, "class", within ? "twig" : "twig none");
    setAttr(twig, "aria-expanded", within ? String(open) : null);
    setAttr(twig, "aria-label", `${title}: ${plural(within, "member")}`);
  }
  const pill = state.firstChild;
  setText(pill, stateText(row));
  setAttr(pill, "class", `pill ${row.state}`);

  const [figures, bar] = use.firstChild.children;
  setText(figures.firstChild, bits(row.passed));
  const of = row.isName ? sidesText(r) : rateText(r);
  setText(figures.lastChild, r.use_percent === null ? of : `${percent(r.use_percent)} of ${of}`);
  fillBar(bar, row.ofRate, row.state);
  setAttr(dropped, "class", row.dropped > 0 ? "number col-dropped any" : "number col-dropped");
  setText(dropped.firstChild, row.dropped > 0 ? bits(row.dropped) : "");
  setText(dropped.lastChild, row.dropped > 0 ? (r.dropped_percent === null ? "" : `${percent(r.dropped_percent)} of packets`) : row.dropped === 0 ? "0" : "–");
  drawSpark(sparkCell.firstChild, row.series.minute("passed"), row.series.minute("dropped"), 60, row.isPool || row.isName || r.use_percent === null ? 0 : (rateNow(r) ?? 0) / 4);
  const [text, levelBar] = level.firstChild.children;
  setText(text, row.full === null ? "" : isEach(r) ? `fullest ${percent(row.full * 100)}` : row.full === 0 ? "empty" : percent(row.full * 100));
  setAttr(text, "title", r.capacity_bytes ? `${bytes(r.level_bytes)} of ${bytes(r.capacity_bytes)}` : null);
  fillBar(levelBar, row.full, "level");
}

export function fillBar(bar, share, state) {
  setAttr(bar, "class", `bar ${state}`);
  bar.firstChild.style.width = `${Math.min(100, Math.max(0, (share || 0) * 100)).toFixed(1)}%`;
}

// Tiles are the figures of all rules together.
class Tiles {
  #store; #parts = {};

  constructor(store) {
    this.#store = store;
    const tile = (id, label, pictured) => {
      const part = { figure: h("dd", { class: "figure" }), more: h("dd", { class: "muted small" }), spark: pictured ? spark() : null };
      this.#parts[id] = part;
      return (part.el = h("div", { class: "tile" }, h("dt", null, label), part.figure, part.more, part.spark));
    };
    this.el = h("dl", { class: "tiles", "aria-label": "All rules together" },
      tile("passed", "Passed now", true), tile("dropped", "Dropped now", true), tile("worst", "Rules dropping"), tile("rules", "Rules in force"));
  }

  update() {
    const passed = this.#store.total.minute("passed");
    const dropped = this.#store.total.minute("dropped");
    const { rules, pools, not_in_force: out, dropping, near } = this.#store.summary;
    const parts = this.#parts;
    const figure = (el, [value, unit]) => {
      if (el.childNodes.length === 0) el.append(h("span"), h("span", { class: "unit" }));
      setText(el.firstChild, value);
      setText(el.lastChild, unit);
    };
    const off = dropped.at(-1) || 0;
    const all = off + (passed.at(-1) || 0);
    figure(parts.passed.figure, bitsParts(passed.at(-1)));
    figure(parts.dropped.figure, bitsParts(off));
    setText(parts.passed.more, "\u00a0");
    setText(parts.dropped.more, all > 0 ? `${percent((100 * off) / all)} of offered` : "\u00a0");
    setAttr(parts.dropped.el, "class", off > 0 ? "tile dropping" : "tile");
    drawSpark(parts.passed.spark, passed, null, 60);
    drawSpark(parts.dropped.spark, passed.map(() => 0), dropped, 60);
    figure(parts.worst.figure, [grouped(dropping), ""]);
    setText(parts.worst.more, near > 0 ? `${grouped(near)} near ${near === 1 ? "its" : "their"} rate` : "none near its rate");
    figure(parts.rules.figure, [grouped(rules - out), ""]);
    setText(parts.rules.more, out > 0 ? `${grouped(out)} not in force` : pools > 0 ? plural(pools, "pool") : "no pools");
  }
}
