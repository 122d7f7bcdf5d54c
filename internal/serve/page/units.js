// Numbers as the command line writes them (internal/report): 10mbit, 1.25 MB, 87%.

// si is a number with three digits, in thousands of a unit.
function si(v, names) {
  let unit = 0;
  while (v >= 999.5 && unit < names.length - 1) {
    v /= 1000;
    unit++;
  }
  const decimals = v >= 99.95 || unit === 0 ? 0 : v >= 9.995 ? 1 : 2;
  return [v.toFixed(decimals), names[unit]];
}

const byteNames = [" B", " kB", " MB", " GB", " TB", " PB", " EB"];
const bitNames = ["bit", "kbit", "mbit", "gbit", "tbit"];
const countNames = ["", "k", "M", "G", "T", "P", "E"];

const known = (v) => v !== null && v !== undefined && !Number.isNaN(v);
const text = (v, names, round = 0.5) => (!known(v) ? "–" : v < round ? "0" : si(v, names).join(""));

// bits is a measured rate: 9.87mbit. rate is one that was set: 10mbit, exactly.
export const bits = (v) => text(v, bitNames);
export const bytes = (v) => text(v, byteNames);
export const count = (v) => text(v, countNames);
export const bitsParts = (v) => (!known(v) || v < 0.5 ? [known(v) ? "0" : "–", known(v) ? "bit" : ""] : si(v, bitNames));

export const rate = (v) => (known(v) ? rateParts(v).join("") : "unlimited");

export function rateParts(v) {
  let unit = 0;
  while (v >= 1000 && v % 1 === 0 && unit < bitNames.length - 1) {
    v /= 1000;
    unit++;
  }
  return [String(v), bitNames[unit]];
}

// asRate is a rate in bit/s of what somebody typed, for a comparison; NaN where only the command line can tell.
export function asRate(given) {
  const m = /^(\d+(?:\.\d+)?)([kmgt]?)bit$/i.exec(given.trim());
  return m ? Number(m[1]) * { "": 1, k: 1e3, m: 1e6, g: 1e9, t: 1e12 }[m[2].toLowerCase()] : NaN;
}

export function percent(p) {
  if (!known(p)) return "–";
  if (p <= 0) return "0%";
  if (p < 0.1) return "<0.1%";
  return (p < 9.95 ? p.toFixed(1) : p.toFixed(0)) + "%";
}

// duration is a time of some nanoseconds, with two or three digits.
export function duration(ns) {
  if (!known(ns)) return "–";
  if (ns === 0) return "0";
  if (ns < 1e3) return `${Math.round(ns)} ns`;
  if (ns < 1e6) return `${digits(ns / 1e3)} µs`;
  if (ns < 1e9) return `${digits(ns / 1e6)} ms`;
  if (ns < 60e9) return `${digits(ns / 1e9)} s`;
  const s = Math.round(ns / 1e9);
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

const digits = (v) => (v < 9.95 ? v.toFixed(1) : v.toFixed(0));

// countdown is the time left of some nanoseconds: 1:05.
export function countdown(ns) {
  const s = Math.max(0, Math.ceil(ns / 1e9));
  const tail = String(s % 60).padStart(2, "0");
  const min = Math.floor(s / 60);
  return min < 60 ? `${min}:${tail}` : `${Math.floor(min / 60)}:${String(min % 60).padStart(2, "0")}:${tail}`;
}

// clock is a time of day, of milliseconds since 1970.
export function clock(ms, seconds = true) {
  const d = new Date(ms);
  const two = (n) => String(n).padStart(2, "0");
  return `${two(d.getHours())}:${two(d.getMinutes())}${seconds ? ":" + two(d.getSeconds()) : ""}`;
}

// plural is "1 rule" or "2 000 rules".
export function plural(n, thing) {
  return `${grouped(n)} ${thing}${n === 1 ? "" : "s"}`;
}

export const grouped = (n) => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
