// What was read of the rules and pools, now and in the last minutes.

const USUAL = 90; // values kept of each that is not idle
const WATCHED = 1800; // and of those that are looked at
const MINUTE = 60;

const poolKey = (name) => `pool/${name}`;
export const keyOf = (r) => (r.kind === "pool" ? poolKey(r.name) : `rule/${r.device}/${r.direction}/${r.cidr}`);

// A Series is the last values, in step with their times.
class Series {
  t = []; passed = []; dropped = []; level = [];

  add(at, values, keep) {
    this.t.push(at);
    for (const name of ["passed", "dropped", "level"]) this[name].push(values[name] ?? NaN);
    if (this.t.length > keep * 1.1) {
      for (const name of ["t", "passed", "dropped", "level"]) this[name].splice(0, this.t.length - keep);
    }
  }
}

// A Row is a rule or pool with figures of now.
class Row {
  series = null;
  watched = false;

  constructor(key) {
    this.key = key;
  }

  update(r, at, order, worst) {
    this.r = r;
    this.order = order; // of the reading: the worst first
    this.foremost = order; // that of the worst row within it
    this.isPool = r.kind === "pool";
    const use = r.use_bits_per_second;
    this.passed = use ?? null;
    this.dropped = r.dropped_bits_per_second ?? null;
    // What a pool itself refused is a part of what was dropped within it.
    this.refused = this.isPool ? r.refused_bits_per_second ?? null : this.dropped;
    this.droppedPercent = r.dropped_percent ?? null;
    this.full = r.capacity_bytes ? r.level_bytes / (r.capacity_bytes + (r.queue_bytes || 0)) : null;
    this.worst = worst; // the fullest bucket of a host or flow
    this.ofRate = r.use_percent !== null && r.use_percent !== undefined ? r.use_percent / 100 : worst;
    this.state = stateOf(this);
    if (this.series || this.passed || this.dropped || r.level_bytes || this.watched) {
      this.series ??= new Series();
      this.series.add(at, { passed: this.passed ?? NaN, dropped: this.dropped ?? NaN, level: worst === null ? r.level_bytes : worst * r.capacity_bytes }, this.watched ? WATCHED : USUAL);
    }
  }

  // minute is the last values of a figure for a small picture.
  minute(figure) {
    return this.series ? this.series[figure].slice(-MINUTE) : [];
  }
}

function stateOf(row) {
  const r = row.r;
  if (r.attached === false) return "out";
  if (row.refused > 0) return "refusing";
  if (r.excess_percent > 0) return "queueing";
  if (row.ofRate >= 0.9) return "near";
  return row.passed > 0 ? "passing" : "idle";
}

const words = { out: "not in force", near: "near its rate", passing: "passing", idle: "idle" };

export function stateText(row) {
  if (row.state === "refusing") return row.isPool ? "refusing" : "dropping";
  if (row.state !== "queueing") return words[row.state];
  if (row.r.red) return "yellow or red packets";
  const excess = row.r.excess ?? "";
  return excess.startsWith("delay") ? "queueing" : excess.startsWith("ecn") || excess.startsWith("mark") ? "marking" : "counting excess";
}

// worstFirst is the order of the readings: docs/top.md says what is worse.
export const worstFirst = (a, b) => a.order - b.order;

const collator = new Intl.Collator("en", { numeric: true });
export const natural = (a, b) => collator.compare(titleOf(a.r), titleOf(b.r)) || collator.compare(a.key, b.key);

// networkOf is the network of a rule; a single address has no length.
export const networkOf = (r) => (r.cidr.endsWith(r.cidr.includes(":") ? "/128" : "/32") ? r.cidr.slice(0, r.cidr.lastIndexOf("/")) : r.cidr);
export const titleOf = (r) => r.name || networkOf(r);
export const placeOf = (r) => (r.kind === "pool" ? "pool" : `${r.device} ${r.direction}${r.name ? ` ${networkOf(r)}` : ""}`);

export class Store {
  rows = new Map();
  children = new Map(); // by pool name, "" for no pool
  buckets = [];
  at = 0; // of the last reading, in ms since 1970
  pending = null; // until when, by performance.now(), an unconfirmed change is in force
  total = { passed: [], dropped: [] };
  readings = 0;
  #watched = "";

  watch(key) {
    this.#watched = key;
    for (const row of this.rows.values()) row.watched = row.key === key;
  }

  // add takes a reading. It returns false for one that it has already.
  add(top) {
    const at = Date.parse(top.time);
    const rules = top.rules ?? [];
    if (!Array.isArray(rules) || Number.isNaN(at)) throw new Error("this is no answer of shapectl");
    if (at === this.at) return false;
    const worst = new Map();
    this.buckets = top.fullest_buckets ?? [];
    for (const b of this.buckets) {
      const key = keyOf(b);
      worst.set(key, Math.max(worst.get(key) ?? 0, (b.full_percent ?? 0) / 100));
    }
    const left = this.rows;
    this.rows = new Map();
    this.children = new Map();
    let passed = 0;
    let dropped = 0;
    for (const r of rules) {
      const key = keyOf(r);
      const row = left.get(key) ?? new Row(key);
      row.watched = key === this.#watched;
      row.update(r, at, this.rows.size, worst.get(key) ?? null);
      this.rows.set(key, row);
      const above = r.within || "";
      if (!this.children.has(above)) this.children.set(above, []);
      this.children.get(above).push(row);
      if (!row.isPool) {
        passed += row.passed || 0;
        dropped += row.dropped || 0;
      }
    }
    for (const row of this.rows.values()) for (const pool of this.above(row)) pool.foremost = Math.min(pool.foremost, row.order);
    push(this.total.passed, passed);
    push(this.total.dropped, dropped);
    this.at = at;
    this.readings++;
    this.pending = typeof top.reverts_in_ns === "number" ? { until: performance.now() + top.reverts_in_ns / 1e6 } : null;
    return true;
  }

  get ruleCount() {
    let n = 0;
    for (const row of this.rows.values()) if (!row.isPool) n++;
    return n;
  }

  // limiting is what has the rate that limits a rule first: the rule, or else its pool.
  limiting(row) {
    return (row.r.unlimited && this.rows.get(poolKey(row.r.within))) || row;
  }

  // above is the pools over a row, the nearest first.
  above(row) {
    const all = [];
    for (let at = this.rows.get(poolKey(row.r.within)); row.r.within && at && !all.includes(at); at = this.rows.get(poolKey(at.r.within))) all.push(at);
    return all;
  }
}

function push(list, value) {
  list.push(value);
  if (list.length > MINUTE) list.shift();
}

// matcher makes a test of rows from what somebody searches for: words of names, notes, plans, devices and networks, or an
// address, which its networks contain.
export function matcher(search) {
  const parts = search.toLowerCase().split(/\s+/).filter(Boolean).map((word) => ({ word, address: address(word) }));
  return (row) => parts.every(({ word, address: wanted }) => {
    const r = row.r;
    if (wanted && r.cidr && contains(r.cidr, wanted)) return true;
    return [r.name, r.note, r.plan, r.within, r.device, r.direction, r.cidr].some((text) => text && text.toLowerCase().includes(word));
  });
}

// address is the bits of an IP address; null for any other text.
function address(text) {
  const v4 = /^(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})$/.exec(text);
  if (v4) {
    const bytes = v4.slice(1).map(Number);
    return bytes.every((b) => b < 256) ? { bits: 32, value: bytes.reduce((sum, b) => sum * 256n + BigInt(b), 0n) } : null;
  }
  if (!/^[0-9a-f:]+$/.test(text) || !text.includes(":")) return null;
  const halves = text.split("::");
  const words = halves.map((half) => (half === "" ? [] : half.split(":")));
  const given = words.flat().length;
  if (halves.length > 2 || (halves.length === 1 ? given !== 8 : given > 7) || words.flat().some((w) => !/^[0-9a-f]{1,4}$/.test(w))) return null;
  const all = halves.length === 1 ? words[0] : [...words[0], ...Array(8 - given).fill("0"), ...words[1]];
  return { bits: 128, value: all.reduce((sum, w) => sum * 65536n + BigInt(`0x${w}`), 0n) };
}

const networks = new Map(); // that were parsed already

function contains(cidr, wanted) {
  let net = networks.get(cidr);
  if (net === undefined) {
    const [text, length] = cidr.split("/");
    const base = address(text);
    net = base && { ...base, length: BigInt(length ?? base.bits) };
    if (networks.size > 50_000) networks.clear();
    networks.set(cidr, net);
  }
  if (!net || net.bits !== wanted.bits) return false;
  const rest = BigInt(net.bits) - net.length;
  return net.value >> rest === wanted.value >> rest;
}
