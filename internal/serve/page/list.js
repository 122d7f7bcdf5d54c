// The list of rules, worst first, and the tree of pools.
import { Rows, h, name, s, searchField, setAttr, setText, visible } from "./dom.js";
import { drawSpark, spark } from "./plot.js";
import { matcher, natural, placeOf, stateText, titleOf, worstFirst } from "./store.js";
import { bits, bitsParts, bytes, grouped, percent, plural, rate } from "./units.js";

const FIRST = 100; // rows that are shown before somebody asks for more
const HOLD = 4000; // for so long after the pointer or keyboard was used in the list, its order stays

export const linkTo = (r) => "#/" + (r.kind === "pool" ? ["pool", r.name] : ["rule", r.device, r.direction, r.cidr]).map(encodeURIComponent).join("/");

const orders = {
  worst: { of: worstFirst, down: true },
  name: { of: natural, down: false },
  use: { of: (a, b) => (b.passed || 0) - (a.passed || 0) || natural(a, b), down: true },
  dropped: { of: (a, b) => (b.dropped || 0) - (a.dropped || 0) || natural(a, b), down: true },
  level: { of: (a, b) => (b.full ?? b.worst ?? 0) - (a.full ?? a.worst ?? 0) || natural(a, b), down: true },
};

const shows = {
  all: ["Everything", () => true],
  dropping: ["Dropping now", (row) => row.refused > 0],
  near: ["At or near the rate", (row) => row.state === "near" || row.state === "queueing" || row.refused > 0],
  busy: ["In use", (row) => row.passed > 0 || row.dropped > 0],
  idle: ["Idle", (row) => row.state === "idle"],
  out: ["Not in force", (row) => row.state === "out"],
};

const kinds = { rule: "Rules", pool: "Pools", both: "Rules and pools" };

const choice = (label, id, options, on) => h("select", { id, "aria-label": label, onchange: on }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));

// A List is the page of rules, or of the tree of pools.
export class List {
  #store; #tree; #limit = FIRST; #order = "worst"; #down = true; #search; #show; #kind; #open = new Set(); #shut = new Set();
  #rows; #found; #more; #tiles; #empty; #held = 0; #last = []; #table; #heads = {}; #holding;

  constructor(store, host, tree) {
    this.#store = store;
    this.#tree = tree;
    const again = () => {
      this.#limit = FIRST;
      this.#held = 0;
      this.update();
    };
    this.#search = h("input", { type: "search", id: "search", placeholder: "Name, plan, pool, device or address", "aria-label": "Search", autocomplete: "off", spellcheck: "false", oninput: again });
    this.#show = choice("Show", "show", Object.fromEntries(Object.entries(shows).map(([k, v]) => [k, v[0]])), again);
    this.#kind = choice("Rules or pools", "kind", kinds, again);
    const head = (id, text, props) => {
      const button = h("button", { type: "button", class: "sorter", onclick: () => this.#sortBy(id) }, text);
      return (this.#heads[id] = h("th", { scope: "col", role: "columnheader", ...props }, button));
    };
    const body = h("tbody", { role: "rowgroup" });
    this.#table = h("table", { role: "table", "aria-label": tree ? "Pools and their members" : "Rules", tabindex: "-1" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
        head("name", tree ? "Pool or rule" : "Rule"), head("worst", "State", { class: "col-state" }), head("use", "Use now", { class: "col-use" }),
        head("dropped", "Dropped now", { class: "number col-dropped" }),
        h("th", { scope: "col", role: "columnheader", class: "col-spark" }, "Last minute"), head("level", "Level", { class: "col-level" }))),
      body);
    this.#found = h("span");
    this.#holding = h("span");
    this.#more = h("button", { type: "button", onclick: () => { this.#limit += FIRST; this.update(); } });
    this.#empty = h("div");
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
      h("section", { class: "card list", "aria-label": tree ? "Pools" : "Rules" }, this.#table, this.#empty,
        h("div", { class: "summary" }, this.#found, this.#holding, this.#more)));
    this.#rows = new Rows(body, (item) => makeRow(this.#tree && (() => this.#toggle(item.row.key))), updateRow);
  }

  #sortBy(id) {
    if (this.#order === id && id !== "worst") this.#down = !this.#down;
    else [this.#order, this.#down] = [id, orders[id].down];
    this.#held = 0;
    this.update();
  }

  #toggle(key) {
    for (const [set, other] of [[this.#shut, this.#open]]) {
      if (set.has(key)) {
        set.delete(key);
        other.add(key);
      } else {
        set.add(key);
        other.delete(key);
      }
    }
    this.#held = 0;
    this.update();
  }

  #compare() {
    const { of, down } = orders[this.#order];
    return this.#down === down ? of : (a, b) => of(b, a);
  }

  update() {
    const store = this.#store;
    this.#tiles.update();
    const matches = matcher(this.#search.value);
    const shown = shows[this.#show.value][1];
    const searched = this.#search.value.trim() !== "" || this.#show.value !== "all";
    const wanted = (row) => shown(row) && matches(row);
    let items;
    let of;
    if (this.#tree) {
      items = this.#branches(wanted, searched);
      of = items.length;
    } else {
      const kind = this.#kind.value;
      const all = [...store.rows.values()].filter((row) => kind === "both" || row.isPool === (kind === "pool"));
      of = all.length;
      items = this.#ordered(all.filter(wanted)).map((row) => ({ row, depth: 0 }));
    }
    const few = items.slice(0, this.#limit);
    this.#rows.show(few, (item) => item.row.key);
    for (const [id, th] of Object.entries(this.#heads)) setAttr(th, "aria-sort", id === this.#order ? (this.#down ? "descending" : "ascending") : null);

    const thing = this.#tree ? "lines" : kinds[this.#kind.value].toLowerCase();
    setText(this.#found, items.length === of && few.length === of ? `${grouped(of)} ${of === 1 ? thing.replace(/s$/, "") : thing}` : `${grouped(few.length)} of ${grouped(items.length)}${items.length === of ? "" : ` found, of ${grouped(of)}`} ${thing}`);
    setText(this.#holding, performance.now() < this.#held && this.#order === "worst" ? "order held while you use the list" : "");
    this.#more.hidden = few.length === items.length;
    setText(this.#more, `Show ${grouped(Math.min(FIRST, items.length - few.length))} more`);
    this.#table.hidden = items.length === 0;
    this.#showEmpty(items.length === 0, of);
  }

  // #ordered sorts rows. While somebody is in the list, those that were there keep their places.
  #ordered(rows) {
    if (performance.now() < this.#held && this.#last.length > 0) {
      const place = new Map(this.#last.map((key, i) => [key, i]));
      const end = this.#last.length;
      const by = this.#compare();
      return rows.sort((a, b) => (place.get(a.key) ?? end) - (place.get(b.key) ?? end) || by(a, b));
    }
    rows.sort(this.#compare());
    this.#last = rows.map((row) => row.key);
    return rows;
  }

  // #branches are pools with what is within them below. A search keeps the pools above what it found.
  #branches(wanted, searched) {
    const store = this.#store;
    const items = [];
    const found = new Map();
    const has = (row, above) => {
      if (found.has(row.key)) return found.get(row.key);
      let any = wanted(row);
      if (row.isPool && !above.has(row.key)) {
        above.add(row.key);
        for (const child of store.children.get(row.r.name) ?? []) any = has(child, above) || any;
        above.delete(row.key);
      }
      found.set(row.key, any);
      return any;
    };
    const compare = this.#order === "worst" ? (a, b) => a.foremost - b.foremost : this.#compare();
    const grow = (rows, depth, above) => {
      const left = (searched ? rows.filter((row) => has(row, above)) : [...rows]).sort(compare);
      for (const row of left) {
        const within = row.isPool ? store.children.get(row.r.name) ?? [] : [];
        // Deep and wide trees begin closed, as nobody reads thousands of lines.
        const open = !this.#shut.has(row.key) && (this.#open.has(row.key) || searched || (depth < 2 && within.length <= 50));
        items.push({ row, depth, within: within.length, open });
        if (open && within.length > 0 && depth < 20 && !above.has(row.key)) grow(within, depth + 1, new Set(above).add(row.key));
      }
    };
    grow((store.children.get("") ?? []).filter((row) => row.isPool), 0, new Set());
    return items;
  }

  #showEmpty(none, of) {
    const why = !none ? "" : (of === 0 && !this.#tree) || (this.#tree && ![...this.#store.rows.values()].some((row) => row.isPool)) ? (this.#store.rows.size === 0 ? "no rules" : "no pools") : "not found";
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

export const isEach = (r) => r.kind !== "pool" && !r.unlimited && Boolean(r.each) && r.each !== "all";

// rateNow is the rate that packets meet: of a pool with a cluster, the lease or the safe share.
export const rateNow = (r) => r.lease_bits_per_second ?? r.safe_bits_per_second ?? r.rate_bits_per_second;

// ratesOf is that rate; with colours also the peak rate, or the excess rate that comes on top.
export const ratesOf = (r) => rate(rateNow(r)) + (r.pir_bits_per_second ? `/${rate(r.pir_bits_per_second)}` : r.eir_bits_per_second ? `+${rate(r.eir_bits_per_second)}` : "");

// rateText is that rate and who has it, as 'show --tree' says it.
export function rateText(r) {
  if (r.rate_bits_per_second === null) return r.within ? "as pool" : "unlimited";
  return ratesOf(r) + (isEach(r) ? `${r.each.startsWith("/") ? " each " : "/"}${r.each}` : "");
}

function updateRow(el, { row, depth, within, open }) {
  const r = row.r;
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
  const place = [placeOf(r), r.plan && `plan ${r.plan}`, depth === 0 && r.within && `within ${r.within}`].filter(Boolean).join(" · ");
  setText(who.querySelector(".place"), visible(place));
  const twig = who.querySelector(".twig");
  if (twig) {
    who.style.paddingLeft = "";
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
  const share = r.use_percent;
  setText(figures.lastChild, share !== null && share !== undefined ? `${percent(share)} of ${rateText(r)}` : rateText(r));
  fillBar(bar, row.ofRate, row.state);
  setAttr(dropped, "class", row.dropped > 0 ? "number col-dropped any" : "number col-dropped");
  setText(dropped.firstChild, row.dropped > 0 ? bits(row.dropped) : "");
  setText(dropped.lastChild, row.dropped > 0 ? (row.droppedPercent !== null ? `${percent(row.droppedPercent)} of packets` : "") : row.dropped === 0 ? "0" : "–");
  drawSpark(sparkCell.firstChild, row.minute("passed"), row.minute("dropped"), 60, row.isPool || r.use_percent === null ? 0 : (rateNow(r) ?? 0) / 4);
  const [text, levelBar] = level.firstChild.children;
  setText(text, row.worst !== null ? `fullest ${percent(row.worst * 100)}` : row.full === null ? "" : r.level_bytes === 0 ? "empty" : percent(row.full * 100));
  setAttr(text, "title", r.capacity_bytes ? `${bytes(r.level_bytes)} of ${bytes(r.capacity_bytes)}` : null);
  fillBar(levelBar, row.worst ?? row.full, "level");
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
    const { passed, dropped } = this.#store.total;
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
    setAttr(parts.dropped.el, "class", off > 0 ? "tile refusing" : "tile");
    drawSpark(parts.passed.spark, passed, null, 60);
    drawSpark(parts.dropped.spark, passed.map(() => 0), dropped, 60);
    let dropping = 0;
    let near = 0;
    let pools = 0;
    let out = 0;
    for (const row of this.#store.rows.values()) {
      if (row.isPool) {
        pools++;
        continue;
      }
      if (row.dropped > 0) dropping++;
      else if (row.state === "near") near++;
      if (row.state === "out") out++;
    }
    const rules = this.#store.ruleCount;
    figure(parts.worst.figure, [grouped(dropping), ""]);
    setText(parts.worst.more, near > 0 ? `${grouped(near)} near ${near === 1 ? "its" : "their"} rate` : "none near its rate");
    figure(parts.rules.figure, [grouped(rules - out), ""]);
    setText(parts.rules.more, out > 0 ? `${grouped(out)} not in force` : pools > 0 ? plural(pools, "pool") : "no pools");
  }
}
