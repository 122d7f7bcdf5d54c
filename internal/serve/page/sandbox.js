// The sandbox: fields make a request, the model of serve answers, and this draws the answer. It decides over no packet.
import { byID, commandLine, h, setAttr, setText, visible } from "./dom.js";
import { get, post } from "./api.js";
import { LEFT, Plot, RIGHT, ticks } from "./plot.js";
import { bits, bytes, rate as rateText, grouped, percent } from "./units.js";

const MS = 1e6;
const LONGEST_LINK = 8000;
const ROWS = 200;

const LIMIT_KEYS = ["rate", "capacity", "algorithm", "each", "excess", "queue", "ecn-above", "order", "penalty", "overhead", "mpu", "share"];
const SENDER_KEYS = { name: "string", kind: "string", bytes: "number", ecn: "boolean", start_ns: "number", duration_ns: "number", packets: "number", packets_per_second: "number", on_ns: "number", off_ns: "number", rtt_ns: "number" };
const KINDS = { burst: "burst: all at once", steady: "steady", "on-off": "on and off", random: "random", tcp: "TCP, reacts to loss", "tcp-delay": "TCP, reacts to delay" };
const TITLES = { gcra: "GCRA meter", leaky: "Leaky bucket meter", queue: "Queue" };
const COLORS = ["level", "passed", "guarantee", "rtt"];

let catalogue = { presets: [], max_senders: 4 };
let asked = null; // the request that the fields show
let presetName = "";
let changed = 0; // counts changes, to drop answers to older ones
let answer = null;

// clean makes a request of a text from a link: only what the fields know, so that no other text gets in.
function clean(from) {
  const r = { limit: {}, senders: [] };
  for (const key of LIMIT_KEYS) if (typeof from?.limit?.[key] === "string") r.limit[key] = from.limit[key].slice(0, 64);
  for (const s of Array.isArray(from?.senders) ? from.senders.slice(0, catalogue.max_senders) : []) {
    const sender = {};
    for (const [key, type] of Object.entries(SENDER_KEYS)) if (typeof s?.[key] === type) sender[key] = type === "string" ? s[key].slice(0, 32) : s[key];
    if (KINDS[sender.kind]) r.senders.push(sender);
  }
  if (typeof from?.trace === "string" && from.trace) {
    r.trace = from.trace;
    r.senders = [];
  }
  if (from?.unit === "request") r.unit = "request";
  if (from?.direction === "ingress") r.direction = "ingress";
  return r;
}

const copyOf = (r) => structuredClone(r);

// Links: the name of an example, or the request.
const encode = (text) => btoa(String.fromCharCode(...new TextEncoder().encode(text))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
const decode = (text) => new TextDecoder().decode(Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (c) => c.charCodeAt(0)));

function hashOf() {
  if (presetName) return `#${presetName}`;
  const json = JSON.stringify(asked);
  const hash = json.length > LONGEST_LINK ? "" : `#case=${encode(json)}`;
  return hash.length > LONGEST_LINK ? "" : hash;
}

function fromHash() {
  const hash = location.hash.slice(1);
  if (asked && hash && byID(hash)) return history.replaceState(null, "", hashOf() || location.pathname); // the skip link
  const preset = catalogue.presets.find((p) => p.name === hash);
  if (preset) return choose(preset);
  if (hash.startsWith("case=")) {
    try {
      asked = clean(JSON.parse(decode(hash.slice(5))));
      presetName = "";
      build();
      return run();
    } catch {
      wrong("This link is damaged; here is an example instead.");
    }
  }
  choose(catalogue.presets[0]);
}

function choose(preset) {
  asked = copyOf(preset.request);
  asked.senders ??= [];
  presetName = preset.name;
  build();
  run();
}

// Sliders are logarithmic, in 1000 steps.
const STEPS = 1000;
const toStep = (v, lo, hi) => Math.round((STEPS * Math.log(Math.min(Math.max(v, lo), hi) / lo)) / Math.log(hi / lo));
const fromStep = (step, lo, hi) => round2(lo * (hi / lo) ** (step / STEPS));

// round2 has two digits, so that sliders give values that people would write.
function round2(v) {
  const power = 10 ** (Math.floor(Math.log10(v)) - 1);
  return Number((Math.round(v / power) * power).toPrecision(3));
}

let ids = 0;

// slide is a slider with a field. read is the text of the field; lo, hi its bounds as numbers; write makes a text of a
// number of the slider; number is the number of a text, or null where only the answer tells (then place is called).
function slide({ label, text, lo, hi, write, number, hint, option, onText }) {
  const id = `f${++ids}`;
  const field = h("input", { id, type: "text", value: text, inputmode: number ? "decimal" : null, spellcheck: "false", autocapitalize: "off", "data-option": option ?? null, "aria-describedby": hint ? `${id}h` : null });
  const range = h("input", { type: "range", min: 0, max: STEPS, step: 1, "aria-label": label, "aria-valuetext": text });
  const place = (v) => {
    if (document.activeElement !== range && v > 0) range.value = toStep(v, lo, hi);
  };
  range.addEventListener("input", () => {
    field.value = write(fromStep(Number(range.value), lo, hi));
    range.setAttribute("aria-valuetext", field.value);
    onText(field.value);
  });
  field.addEventListener("input", () => {
    if (number) place(number(field.value));
    range.setAttribute("aria-valuetext", field.value);
    onText(field.value);
  });
  if (number) place(number(text));
  const el = h("div", { class: "slide" }, h("div", { class: "row" }, h("label", { for: id }, label), field), range, hint && h("p", { class: "hint small muted", id: `${id}h` }, hint));
  return { el, field, range, place };
}

function choice({ label, value, options, option, onValue }) {
  const id = `f${++ids}`;
  const select = h("select", { id, "data-option": option ?? null }, Object.entries(options).map(([v, text]) => h("option", { value: v }, text)));
  if (!(value in options)) select.append(h("option", { value }, visible(value)));
  select.value = value;
  select.addEventListener("change", () => onValue(select.value));
  return h("div", { class: "field" }, h("label", { for: id }, label), select);
}

function entry({ label, value, option, placeholder, onText }) {
  const id = `f${++ids}`;
  const input = h("input", { id, type: "text", value, placeholder: placeholder ?? null, spellcheck: "false", autocapitalize: "off", "data-option": option ?? null });
  input.addEventListener("input", () => onText(input.value));
  return h("div", { class: "field" }, h("label", { for: id }, label), input);
}

// number is a field for a number in a unit.
function number({ label, value, onNumber, min = 0 }) {
  const id = `f${++ids}`;
  const input = h("input", { id, type: "number", value, min, step: "any", inputmode: "decimal" });
  input.addEventListener("input", () => {
    if (input.value !== "" && input.validity.valid) onNumber(Number(input.value));
  });
  return h("div", { class: "field" }, h("label", { for: id }, label), input);
}

const numberOf = (text) => {
  const v = Number(text);
  return text.trim() !== "" && v > 0 ? v : null;
};
const isRequests = () => asked.unit === "request" && asked.senders.length > 0;
const requestBytes = () => asked.senders[0]?.bytes || 1000;

let placed = {}; // sliders that the answer places

function set(option, value) {
  if (value === "" || value === undefined) delete asked.limit[option];
  else asked.limit[option] = value;
  touched();
}

// touched asks the model again.
function touched() {
  presetName = "";
  showExamples();
  run();
}

function build() {
  placed = {};
  wrong("");
  showExamples();
  byID("limit").replaceChildren(buildLimit(), buildQueue());
  buildLoad();
  byID("add").hidden = Boolean(asked.trace) || asked.senders.length >= catalogue.max_senders;
  byID("paste").hidden = Boolean(asked.trace);
  const preset = catalogue.presets.find((p) => p.name === presetName);
  if (preset) setText(byID("why"), preset.why);
}

function buildLimit() {
  const l = asked.limit;
  const requests = isRequests();
  const of = requestBytes();
  const perRequest = 8 * of;
  const rate = requests
    ? slide({ label: "Requests a second", text: "", lo: 1, hi: 1000, option: "rate", number: numberOf, write: String, onText: (t) => set("rate", numberOf(t) ? `${Math.round(numberOf(t) * perRequest)}bit` : t || "0") })
    : slide({ label: "Rate", text: l.rate ?? "", lo: 8e3, hi: 1e9, option: "rate", write: (v) => rateText(Math.round(v)), onText: (t) => set("rate", t) });
  const capacity = requests
    ? slide({ label: "Burst, requests", text: "", lo: 1, hi: 1000, option: "capacity", number: numberOf, write: (v) => String(Math.max(1, Math.round(v))), onText: (t) => set("capacity", numberOf(t) ? `${Math.round(numberOf(t) * of)}b` : t || "0") })
    : slide({ label: "Burst", text: l.capacity ?? "", lo: 1514, hi: 16 * 2 ** 20, option: "capacity", write: (v) => (v >= 2048 ? `${Math.round(v / 1024)}kb` : `${Math.round(v)}b`), onText: (t) => set("capacity", t) });
  placed.rate = (o) => {
    const v = o.summary.rate_bits_per_second;
    rate.place(requests ? v / perRequest : v);
    if (requests && document.activeElement !== rate.field && document.activeElement !== rate.range) rate.field.value = trim(v / perRequest);
  };
  placed.capacity = (o) => {
    const v = o.summary.capacity_bytes;
    capacity.place(requests ? v / of : v);
    capacity.field.placeholder = requests ? trim(v / of) : bytes(v);
    if (requests && document.activeElement !== capacity.field && document.activeElement !== capacity.range) capacity.field.value = trim(v / of);
  };
  return h("fieldset", null, h("legend", null, "Limit"),
    rate.el, capacity.el,
    h("div", { class: "two" },
      choice({ label: "Meters: excess is", option: "excess", value: l.excess ?? "drop", options: { drop: "dropped", ecn: "marked (ECN)", pass: "only counted" }, onValue: (v) => set("excess", v) }),
      choice({ label: "Leaky: penalty", option: "penalty", value: l.penalty ?? "none", options: { none: "none", fill: "fill", "100ms": "100 ms", "1s": "1 s", "10s": "10 s" }, onValue: (v) => set("penalty", v === "none" ? "" : v) }),
      choice({ label: "A bucket for", option: "each", value: l.each ?? "all", options: { all: "all together", host: "each sender" }, onValue: (v) => set("each", v === "all" ? "" : v) }),
      choice({ label: "Fair shares", option: "share", value: l.share ?? "none", options: { none: "none", host: "of each sender" }, onValue: (v) => set("share", v === "none" ? "" : v) }),
    ));
}

function buildQueue() {
  const l = asked.limit;
  const leaky = l.algorithm === "leaky";
  const length = slide({ label: "Length", text: l.queue ?? "", lo: 1, hi: 9000, option: "queue", write: (v) => `${Math.round(v)}ms`, onText: (t) => set("queue", t) });
  placed.queue = (o) => {
    length.place((o.summary.queue_bytes * 8e3) / o.summary.rate_bits_per_second);
    length.field.placeholder = bytes(o.summary.queue_bytes);
  };
  return h("fieldset", null, h("legend", null, "Queue"),
    choice({ label: "Algorithm", option: "algorithm", value: l.algorithm ?? "gcra", options: { gcra: "gcra: the burst leaves at once", leaky: "leaky: never faster than the rate" }, onValue: (v) => { set("algorithm", v); build(); } }),
    leaky ? h("p", { class: "small muted" }, "The burst is the length of the queue.") : length.el,
    h("div", { class: "two" },
      entry({ label: "ECN mark beyond", option: "ecn-above", value: l["ecn-above"] ?? "", placeholder: "half", onText: (t) => set("ecn-above", t) }),
      !leaky && choice({ label: "Order", option: "order", value: l.order ?? "fifo", options: { fifo: "fifo", "sparse-first": "sparse first" }, onValue: (v) => set("order", v === "fifo" ? "" : v) }),
    ));
}

function buildLoad() {
  byID("senders").replaceChildren(...(asked.trace !== undefined ? [buildTrace()] : asked.senders.map(buildSender)));
}

function buildTrace() {
  const id = `f${++ids}`;
  const area = h("textarea", { id, spellcheck: "false", "data-option": "trace" });
  area.value = asked.trace;
  area.addEventListener("input", () => {
    asked.trace = area.value;
    touched();
  });
  return h("fieldset", null,
    h("legend", null, "Trace", h("button", { type: "button", class: "quiet", onclick: () => { delete asked.trace; asked.senders = [newSender()]; touched(); build(); } }, "Remove")),
    h("div", { class: "field" }, h("label", { for: id }, "Lines of time_ns,bytes"), area));
}

const newSender = () => ({ kind: "steady", bytes: requestBytes(), packets_per_second: isRequests() ? 10 : 200, duration_ns: 2e9 });

function buildSender(s, i) {
  const label = s.name ? visible(s.name) : asked.senders.length > 1 ? `Sender ${i + 1}` : "Sender";
  const tcp = s.kind.startsWith("tcp");
  const things = asked.unit === "request" ? "requests" : "packets";
  const change = (key, scale = 1) => (v) => {
    s[key] = scale === 1 ? v : Math.round(v * scale);
    touched();
  };
  const kind = choice({ label: "Load", value: s.kind, options: KINDS, onValue: (v) => {
    s.kind = v;
    if (v !== "burst") {
      s.packets_per_second ??= 200;
      s.duration_ns ??= 2e9;
    } else s.packets ??= 20;
    if (v === "on-off") {
      s.on_ns ??= 100 * MS;
      s.off_ns ??= 400 * MS;
    }
    if (v.startsWith("tcp")) {
      s.rtt_ns ??= 30 * MS;
      s.packets_per_second = Math.max(s.packets_per_second, 5000);
    }
    touched();
    build();
  } });
  const perSecond = () => slide({ label: tcp ? `At most ${things} a second` : `${things[0].toUpperCase()}${things.slice(1)} a second`, text: String(s.packets_per_second), lo: 1, hi: 100_000, number: numberOf, write: String, onText: (t) => numberOf(t) && change("packets_per_second")(numberOf(t)) }).el;
  const size = slide({ label: asked.unit === "request" ? "Bytes of a request" : "Packet size, bytes", text: String(s.bytes), lo: 40, hi: 9000, number: numberOf, write: (v) => String(Math.round(v)), onText: (t) => {
    if (!numberOf(t)) return;
    s.bytes = Math.round(numberOf(t));
    touched();
  } });
  return h("fieldset", null,
    h("legend", null, label, asked.senders.length > 1 && h("button", { type: "button", class: "quiet", "aria-label": `Remove ${label}`, onclick: () => { asked.senders.splice(i, 1); touched(); build(); } }, "Remove")),
    kind,
    s.kind === "burst"
      ? slide({ label: `${things[0].toUpperCase()}${things.slice(1)} at once`, text: String(s.packets), lo: 1, hi: 2000, number: numberOf, write: (v) => String(Math.round(v)), onText: (t) => numberOf(t) && change("packets", 1)(Math.round(numberOf(t))) }).el
      : perSecond(),
    asked.unit === "request" ? null : size.el,
    s.kind === "on-off" && h("div", { class: "two" },
      number({ label: "On, ms", value: s.on_ns / MS, onNumber: change("on_ns", MS) }),
      number({ label: "Off, ms", value: s.off_ns / MS, onNumber: change("off_ns", MS) })),
    h("div", { class: "two" },
      number({ label: "Begins at, ms", value: (s.start_ns ?? 0) / MS, onNumber: change("start_ns", MS) }),
      s.kind !== "burst" && number({ label: "Lasts, ms", value: s.duration_ns / MS, onNumber: change("duration_ns", MS) }),
      tcp && number({ label: "Round trip, ms", value: s.rtt_ns / MS, onNumber: change("rtt_ns", MS) })),
    asked.unit === "request" ? null : checkbox("Packets allow ECN marks", s.ecn ?? false, (v) => change("ecn")(v)));
}

function checkbox(label, checked, onValue) {
  const box = h("input", { type: "checkbox", checked });
  box.addEventListener("change", () => onValue(box.checked));
  return h("label", { class: "check" }, box, label);
}

const trim = (v) => String(Number(v.toPrecision(6)));

function showExamples() {
  for (const b of byID("examples").querySelectorAll("button")) setAttr(b, "aria-pressed", String(b.dataset.name === presetName));
  if (!presetName) setText(byID("why"), "Your own case. The link contains all values.");
}

function wrong(text) {
  const el = byID("wrong");
  setText(el, visible(text));
  el.hidden = text === "";
  for (const field of document.querySelectorAll("[data-option]")) {
    setAttr(field, "aria-invalid", text !== "" && text.replace(/^sandbox: /, "").startsWith(field.dataset.option) ? "true" : null);
  }
}

let waiting = 0;
let busy = false;

// run asks the model soon: at most one request is under way, and the last one counts.
function run() {
  changed++;
  clearTimeout(waiting);
  waiting = setTimeout(send, 30);
}

async function send() {
  if (busy) return;
  const of = changed;
  busy = true;
  byID("results").setAttribute("aria-busy", "true");
  try {
    answer = await post("sandbox", asked);
    if (of === changed) wrong("");
    show();
  } catch (err) {
    if (of === changed) wrong(err.message);
  }
  busy = false;
  if (of !== changed) return send();
  byID("results").removeAttribute("aria-busy");
  history.replaceState(null, "", hashOf() || location.pathname);
  tell();
}

let telling = 0;

// tell tells the result to screen readers when the fields have been left alone.
function tell() {
  clearTimeout(telling);
  telling = setTimeout(() => answer && setText(byID("told"), `${answer.says} ${answer.limits.map((o) => `${TITLES[o.name]}: ${o.says || o.error}`).join(" ")}`), 900);
}

const panels = {};

function show() {
  const ok = answer.limits.filter((o) => !o.error);
  setText(byID("says"), answer.says || ok[0]?.says || "");
  const until = Math.max(1, ...ok.map((o) => o.until_ns));
  const from = Math.min(...ok.map((o) => o.from_ns), until - 1);
  for (const o of answer.limits) {
    panels[o.name] ??= new Panel(o.name);
    panels[o.name].show(o, from, until);
  }
  const all = Object.values(panels);
  for (const p of all) p.level.linked = all.filter((other) => other !== p).map((other) => other.level);
  const [meter, , queue] = answer.limits;
  if (!meter.error) {
    placed.rate?.(meter);
    placed.capacity?.(meter);
  }
  if (!queue.error) placed.queue?.(queue);
  const share = (o) => percent((100 * o.summary.passed_packets) / Math.max(1, o.summary.offered_packets));
  setText(byID("peek"), `Passed: ${ok.map((o) => `${o.name} ${bytes(o.summary.passed_bytes)} (${share(o)})`).join(" · ")}  ↓`); // TCP offers more, the more passes
}

// time writes a time on the clock of the load.
const time = (from, span) => (ns) => {
  const t = ns - from;
  if (span >= 2e9) return `${trim(Math.round(t / 1e6) / 1e3)} s`;
  if (span >= 2e6) return `${trim(Math.round(t / 1e3) / 1e3)} ms`;
  return `${trim(Math.round(t) / 1e3)} µs`;
};

// fromBegin are round times since the begin of the load.
const fromBegin = (lo, hi, n) => ticks(0, hi - lo, n + 2).map((t) => lo + t);

// A Panel shows what one limit did.
class Panel {
  constructor(name) {
    const title = TITLES[name];
    this.name = name;
    this.tally = h("div", { class: "tally" });
    this.error = h("p", { class: "banner warn", hidden: true });
    this.says = h("p");
    this.sentence = h("p", { class: "small muted" });
    const level = h("div");
    const rates = h("div");
    this.level = new Plot(level, { label: `${title}: level`, height: 176 });
    this.rates = new Plot(rates, { label: `${title}: rate`, height: 176 });
    this.ratesBox = h("div", null, h("h3", null, "Rate"), rates);
    this.lanes = h("canvas", { class: "lanes", role: "img" });
    level.querySelector(".legend").before(this.lanes); // on the same axis
    this.plots = h("div", { class: "plots" }, h("div", null, h("h3", null, "Level of the bucket"), level), this.ratesBox);
    this.command = h("code", { class: "command" });
    this.copy = h("button", { type: "button", "aria-label": `Copy the command for ${title}` }, "Copy");
    this.copy.addEventListener("click", () => copy(this.command.textContent, this.copy));
    this.run = h("div", { class: "run" }, this.command, this.copy);
    this.noCommand = h("p", { class: "small muted" });
    this.rows = h("tbody");
    this.caption = h("caption", { class: "small muted" });
    this.details = h("details", null, h("summary", null, "Packet by packet"), h("div", { class: "packets", tabindex: "0", role: "region", "aria-label": `${title}: packets` },
      h("table", null, this.caption, h("thead", null, h("tr", null, ["Time", "Bytes", "Verdict", "Level before", "after", "Departs"].map((t, i) => h("th", { scope: "col", class: i === 2 ? null : "number" }, t)))), this.rows)));
    this.details.addEventListener("toggle", () => this.showRows());
    this.body = h("div", { class: "panel" }, this.plots, this.says, this.sentence, this.run, this.noCommand, this.details);
    byID("panels").append(h("section", { class: "card panel", "aria-label": title }, h("div", { class: "head" }, h("h2", null, title), this.tally), this.error, this.body));
    new ResizeObserver(() => this.paintLanes()).observe(this.lanes);
    document.addEventListener("theme", () => this.paintLanes());
  }

  show(o, from, until) {
    this.o = o;
    this.from = from;
    this.until = until;
    this.error.hidden = !o.error;
    this.body.hidden = Boolean(o.error);
    setText(this.error, visible(o.error ?? ""));
    if (o.error) return this.tally.replaceChildren();
    const s = o.summary;
    const pill = (n, what, kind) => n > 0 && h("span", { class: `pill ${kind}` }, `${grouped(n)} ${what}`);
    this.tally.replaceChildren(...[
      pill(s.passed_packets - s.delayed_packets, "passed", "busy"), pill(s.delayed_packets, "delayed", "near"),
      pill(s.marked_packets, "marked", "marked"), pill(s.dropped_packets, "dropped", "dropping"),
    ].filter(Boolean));
    setText(this.says, visible(o.says));
    setText(this.sentence, o.sentence);
    this.run.hidden = !o.command;
    if (this.command.textContent !== o.command) this.command.replaceChildren(...commandLine(o.command));
    this.noCommand.hidden = Boolean(o.command);
    setText(this.noCommand, o.command ? "" : `No rule can have this limit: ${visible(o.no_command ?? "")}`);
    this.showLevel(o);
    this.showRates(o);
    this.paintLanes();
    this.showRows();
  }

  showLevel(o) {
    const size = asked.unit === "request" ? requestBytes() : 0;
    const text = size ? (v) => trim(Math.round((v / size) * 100) / 100) : bytes;
    const layers = o.levels.map((l, i) => ({
      name: o.levels.length > 1 ? visible(o.senders[l.bucket].name || `sender ${l.bucket + 1}`) : "level", color: COLORS[i % COLORS.length],
      kind: o.levels.length > 1 ? "line" : "area", x: l.time_ns, y: l.level_bytes,
    }));
    const p = o.packets;
    const pick = (name, color, count, keep, y) => {
      const at = p.verdict.map((_, i) => i).filter(keep);
      if (at.length) layers.push({ name, color, kind: "points", radius: 2.5, x: at.map((i) => p.time_ns[i]), y: at.map(y), text: () => grouped(count) });
    };
    const bump = (i) => Math.min(p.level_before_bytes[i] + p.bytes[i], o.full_bytes * 1.06);
    pick("marked", "delayed", o.summary.marked_packets, (i) => p.verdict[i] === "mark", (i) => p.level_bytes[i]);
    pick("dropped", "refused", o.summary.dropped_packets, (i) => p.verdict[i] === "drop", bump);
    const marks = [{ name: o.name === "queue" ? "full" : "burst", color: "ceiling", y: o.full_bytes, dash: [6, 4] }];
    if (o.name === "queue" && o.burst_bytes > 0 && o.burst_bytes < o.full_bytes) marks.push({ name: "burst, then the queue", color: "muted", y: o.burst_bytes, dash: [2, 3] });
    const yMax = 1.08 * Math.max(o.full_bytes, o.summary.highest_level_bytes);
    this.level.draw({ yMax, x0: this.from, x1: this.until, layers, marks, xTicks: fromBegin, xText: time(this.from, this.until - this.from), yText: text, says: o.says });
  }

  // showRates shows what passes over time, in parts with some packets each.
  showRates(o) {
    const enough = o.summary.offered_packets >= 100;
    this.ratesBox.hidden = !enough;
    if (!enough) return;
    const b = o.bins;
    const each = Math.max(6, Math.ceil((b.offered_bytes.length * 8) / o.summary.offered_packets));
    const x = [];
    const offered = [];
    const passed = [];
    for (let i = 0; i < b.offered_bytes.length; i += each) {
      const sum = (from) => from.slice(i, i + each).reduce((a, v) => a + v, 0);
      const width = Math.min(each, b.offered_bytes.length - i) * b.width_ns;
      x.push(o.from_ns + i * b.width_ns + width / 2);
      offered.push((sum(b.offered_bytes) * 8e9) / width);
      passed.push((sum(b.passed_bytes) * 8e9) / width);
    }
    this.rates.draw({
      x0: this.from, x1: this.until, xTicks: fromBegin, xText: time(this.from, this.until - this.from), yText: bits,
      layers: [{ name: "offered", color: "refused", kind: "line", x, y: offered }, { name: o.name === "queue" ? "leaves" : "passes", color: "passed", kind: "area", x, y: passed }],
      marks: [{ name: "rate", color: "ceiling", y: o.summary.rate_bits_per_second, dash: [6, 4], text: rateText(o.summary.rate_bits_per_second) }],
      says: `${percent((100 * o.summary.passed_bytes) / Math.max(1, o.summary.offered_bytes))} of the bytes pass.`,
    });
  }

  // paintLanes draws a tick for each arrival, departure and drop, on the time of the level above.
  paintLanes() {
    const o = this.o;
    const width = this.lanes.clientWidth;
    const height = this.lanes.clientHeight;
    if (!o || o.error || width < 90) return;
    const dots = window.devicePixelRatio || 1;
    this.lanes.width = Math.round(width * dots);
    this.lanes.height = Math.round(height * dots);
    const style = getComputedStyle(this.lanes);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const c = this.lanes.getContext("2d");
    c.setTransform(dots, 0, 0, dots, 0, 0);
    c.font = `12px ${style.fontFamily}`;
    c.textBaseline = "middle";
    const w = width - LEFT - RIGHT;
    const px = (ns) => LEFT + ((ns - this.from) / (this.until - this.from)) * w;
    const p = o.packets;
    // Of many packets, parts of the time have a tick, so that none is missing.
    const b = o.bins;
    const parts = (counts) => counts.map((n, i) => (n > 0 ? o.from_ns + (i + 0.5) * b.width_ns : null));
    const few = !o.thinned;
    const lanes = [
      ["arrive", () => "muted", few ? p.time_ns : parts(b.offered_packets)],
      ["depart", (i) => (few && p.verdict[i] === "mark" ? "delayed" : "passed"), few ? p.depart_ns : parts(b.passed_packets)],
      ["drop", () => "refused", few ? p.time_ns.map((t, i) => (p.verdict[i] === "drop" ? t : null)) : parts(b.dropped_packets)],
    ];
    const tick = few ? 1.25 : Math.max(1.25, w / b.offered_packets.length);
    const lane = height / lanes.length;
    lanes.forEach(([name, colorOf, times], n) => {
      const y = n * lane;
      c.fillStyle = color("muted");
      c.textAlign = "right";
      c.fillText(name, LEFT - 8, y + lane / 2);
      c.fillStyle = color("sunken");
      c.fillRect(LEFT, y + 2, w, lane - 4);
      times.forEach((t, i) => {
        if (t === null) return;
        c.fillStyle = color(colorOf(i));
        c.fillRect(Math.min(px(t), LEFT + w - tick), y + 2, tick, lane - 4);
      });
    });
    const s = o.summary;
    setAttr(this.lanes, "aria-label", `${s.offered_packets} arrive, ${s.passed_packets} depart, ${s.dropped_packets} are dropped.`);
  }

  showRows() {
    const o = this.o;
    if (!this.details.open || !o || o.error) return;
    const p = o.packets;
    const at = time(this.from, this.until - this.from);
    const shown = Math.min(ROWS, p.time_ns.length);
    const rows = [];
    for (let i = 0; i < shown; i++) {
      const cell = (text, kind = "number") => h("td", { class: kind }, text);
      rows.push(h("tr", null, cell(at(p.time_ns[i])), cell(grouped(p.bytes[i])), cell(p.verdict[i], `v-${p.verdict[i]}`),
        cell(grouped(p.level_before_bytes[i])), cell(grouped(p.level_bytes[i])), cell(p.depart_ns[i] === null ? "–" : at(p.depart_ns[i]))));
    }
    setText(this.caption, `${o.thinned ? "Some of the" : shown < p.time_ns.length ? "The first" : "All"} packets: ${grouped(shown)} of ${grouped(o.summary.offered_packets)}`);
    this.rows.replaceChildren(...rows);
  }
}

async function copy(text, button) {
  const was = button.textContent;
  let done = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS or permission there is no clipboard: the text is selected when it is clicked.
    done = "Select it";
  }
  setText(button, done);
  setText(byID("told"), done);
  setTimeout(() => setText(button, was), 1500);
}

function addExamples() {
  const group = (label, presets) => h("div", { class: "example-group", role: "group", "aria-label": label }, h("span", { class: "label" }, label),
    h("div", { class: "chips" }, presets.map((p) => h("button", { type: "button", "data-name": p.name, "aria-pressed": "false", onclick: () => choose(p) }, p.title))));
  byID("examples").append(
    group("Textbook", catalogue.presets.filter((p) => p.request.unit === "request")),
    group("Networks", catalogue.presets.filter((p) => p.request.unit !== "request")),
  );
}

// Where the fields hide the results, a button tells the most important of them.
new IntersectionObserver(([seen]) => {
  byID("peek").hidden = seen.isIntersecting || seen.boundingClientRect.top < 0;
}).observe(byID("results"));
byID("peek").addEventListener("click", () => {
  byID("results").scrollIntoView();
  byID("results").focus({ preventScroll: true });
});

byID("controls").addEventListener("submit", (e) => e.preventDefault());
byID("add").addEventListener("click", () => {
  asked.senders.push(newSender());
  touched();
  build();
});
byID("paste").addEventListener("click", () => {
  delete asked.unit;
  asked.senders = [];
  asked.trace = "# time_ns,bytes\n0,1000\n25000000,1000\n50000000,1000\n";
  touched();
  build();
  document.querySelector("textarea")?.focus();
});
byID("link").addEventListener("click", () => copy(location.href, byID("link")));
addEventListener("hashchange", fromHash);

try {
  catalogue = await get("sandbox");
  addExamples();
  fromHash();
} catch (err) {
  wrong(`The server does not answer: ${err.message}`);
}
