// What the server said last of the rows that the page shows, and what the page saw of them in the last minutes. The server
// ranks, searches and sums up.

const USUAL = 90; // values kept of each row
const WATCHED = 1800; // and of one that is looked at
const MINUTE = 60;
const FORGET = 120_000; // after so many ms without a value

// keyOf is a rule or pool as the API knows it.
export const keyOf = (r) => (r.kind === "name" ? `name ${r.name}` : r.kind === "pool" ? `pool ${r.name}` : `${r.device} ${r.direction} ${r.cidr}`);

// A Series is the last values, in step with their times.
export class Series {
  t = []; passed = []; dropped = []; level = [];

  add(at, values, keep = WATCHED) {
    if (this.t.at(-1) === at) return;
    this.t.push(at);
    for (const name of ["passed", "dropped", "level"]) this[name].push(values[name] ?? NaN);
    if (this.t.length > keep * 1.1) for (const name of ["t", "passed", "dropped", "level"]) this[name].splice(0, this.t.length - keep);
  }

  minute = (figure) => this[figure].slice(-MINUTE);
}

const words = { out: "not in force", dropping: "dropping", near: "near its rate", busy: "passing", idle: "idle" };

export const stateText = (row) => (row.isPool && row.state === "dropping" ? "refusing" : words[row.state]);

// networkOf is the network of a rule; a single address has no length.
export const networkOf = (r) => (r.cidr.endsWith(r.cidr.includes(":") ? "/128" : "/32") ? r.cidr.slice(0, r.cidr.lastIndexOf("/")) : r.cidr);
export const titleOf = (r) => r.name || networkOf(r);

// rowOf is a rule, pool or name with its figures of now.
function rowOf(r) {
  const isPool = r.kind === "pool";
  const use = r.kind === "name" && r.interval_ns ? r.sides.reduce((sum, side) => sum + (side.use_bits_per_second ?? 0), 0) : r.use_bits_per_second;
  const dropped = r.dropped_bits_per_second ?? null;
  return {
    r, isPool, key: keyOf(r), isName: r.kind === "name", state: r.activity, depth: r.depth, below: r.below,
    passed: use ?? null, dropped, refused: isPool ? r.refused_bits_per_second ?? null : dropped, // a part of what was dropped within it
    full: r.full_percent === null ? null : r.full_percent / 100, ofRate: (r.use_percent ?? 0) / 100,
  };
}

export class Store {
  rows = new Map(); // in the order of the server
  names = []; // rows of names that were asked for by name
  of = 0; // rows there are without a search
  summary = null; // of all rules
  at = 0; // of the last reading, in ms since 1970
  pending = null; // until when, by performance.now(), an unconfirmed change is in force
  total = new Series();
  readings = 0;
  watched = ""; // the key of a row to keep for long
  #series = new Map();

  // add takes an answer.
  add(top) {
    const at = Date.parse(top.time);
    if (!Array.isArray(top.rules) || Number.isNaN(at)) throw new Error("this is no answer of shapectl");
    const names = (top.names ?? []).map((n) => rowOf({ ...n, kind: "name" }));
    const rows = top.rules.map(rowOf);
    this.names = names.filter((n) => n.r.row < 0);
    rows.push(...names.filter((n) => n.r.row >= 0));
    rows.sort((a, b) => a.r.row - b.r.row);
    this.rows = new Map(rows.map((row) => [row.key, row]));
    for (const row of [...rows, ...this.names]) {
      const level = row.full === null || !row.r.capacity_bytes ? NaN : row.full * (row.r.capacity_bytes + (row.r.queue_bytes || 0));
      row.series = this.#series.get(row.key) ?? new Series();
      row.series.add(at, { passed: row.passed, dropped: row.dropped, level }, row.key === this.watched ? WATCHED : USUAL);
      this.#series.set(row.key, row.series);
    }
    for (const [key, series] of this.#series) if (series.t.at(-1) < at - FORGET) this.#series.delete(key);
    this.of = top.of;
    this.summary = top.summary;
    this.total.add(at, { passed: top.summary.passed_bits_per_second, dropped: top.summary.dropped_bits_per_second }, USUAL);
    this.at = at;
    this.readings++;
    this.pending = typeof top.reverts_in_ns === "number" ? { until: performance.now() + top.reverts_in_ns / 1e6 } : null;
  }

  // limiting is what has the rate that limits a rule first: the rule, or else its pool.
  limiting = (row) => (row.r.unlimited && this.rows.get(`pool ${row.r.within}`)) || row;

  // above is the pools over a row, the nearest first.
  above(row) {
    const all = [];
    for (let at = row; at.r.within && (at = this.rows.get(`pool ${at.r.within}`)) && !all.includes(at);) all.push(at);
    return all;
  }
}
