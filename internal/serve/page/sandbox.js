// The sandbox: fields make a request, the model of serve answers, and this draws the answer. It decides over no packet.
import { byID, commandLine, h, setAttr, setText, visible } from "./dom.js";
import { get, post } from "./api.js";
import { fromBegin, Plot } from "./plot.js";
import { bits, bytes, rate as rateText, grouped, percent } from "./units.js";

const MS = 1e6;
const LONGEST_LINK = 8000;
const ROWS = 200;
const MAX_SENDERS = 4;

const LIMIT_KEYS = ["rate", "capacity", "algorithm", "each", "excess", "queue", "ecn-above", "order", "penalty", "overhead", "mpu", "share"];
const SENDER_KEYS = { name: "string", kind: "string", bytes: "number", ecn: "boolean", start_ns: "number", duration_ns: "number", packets: "number", packets_per_second: "number", on_ns: "number", off_ns: "number", rtt_ns: "number" };
const KINDS = { burst: "burst: all at once", steady: "steady", "on-off": "on and off", random: "random", tcp: "TCP, reacts to loss", "tcp-delay": "TCP, reacts to delay" };
const TITLES = { gcra: "GCRA meter", leaky: "Leaky bucket meter", queue: "Queue" };
const COLORS = ["level", "passed", "guarantee", "rtt"];

let presets = [];
let asked = null; // the request that the fields show
let presetName = "";
let changed = 0; // counts changes, to drop answers to older ones
let answer = null;

// clean makes a request of a text from a link: only what the fields know, so that no other text gets in.
function clean(from) {
  const r = { limit: {}, senders: [] };
  for (const key of LIMIT_KEYS) if (typeof from?.limit?.[key] === "string") r.limit[key] = from.limit[key].slice(0, 64);
  for (const s of Array.isArray(from?.senders) ? from.senders.slice(0, MAX_SENDERS) : []) {
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
  const preset = presets.find((p) => p.name === hash);
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
  choose(presets[0]);
}

function choose(preset) {
  asked = structuredClone(preset.request);
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

const input = (props, onInput) => h("input", { id: `f${++ids}`, type: "text", spellcheck: "false", autocapitalize: "off", oninput: (e) => onInput(e.target), ...props });

// field is a control with a label.
const field = (label, control) => h("div", { class: "field" }, h("label", { for: control.id }, label), control);

// slide is a slider with a field. text is that of the field; lo, hi its bounds as numbers; write makes a text of a
// number of the slider; number is the number of a text, or null where only the answer tells (then place is called).
function slide({ label, text, lo, hi, write, number, option, onText }) {
  const tell = () => range.setAttribute("aria-valuetext", field.value);
  const place = (v) => {
    if (document.activeElement !== range && v > 0) range.value = toStep(v, lo, hi);
  };
  const field = input({ value: text, inputmode: number && "decimal", "data-option": option }, () => {
    if (number) place(number(field.value));
    tell();
    onText(field.value);
  });
  const range = input({ type: "range", min: 0, max: STEPS, step: 1, "aria-label": label, "aria-valuetext": text }, () => {
    field.value = write(fromStep(Number(range.value), lo, hi));
    tell();
    onText(field.value);
  });
  if (number) place(number(text));
  return { el: h("div", { class: "slide" }, h("div", { class: "row" }, h("label", { for: field.id }, label), field), range), field, range, place };
}

function choice({ label, value, options, option, onValue }) {
  const select = h("select", { id: `f${++ids}`, "data-option": option, onchange: () => onValue(select.value) }, Object.entries(options).map(([v, text]) => h("option", { value: v }, text)));
  if (!(value in options)) select.append(h("option", { value }, visible(value)));
  select.value = value;
  return field(label, select);
}

// number is a field for a number in a unit.
const number = (label, value, onNumber) => field(label, input({ type: "number", value, min: 0, step: "any", inputmode: "decimal" }, (e) => {
  if (e.value !== "" && e.validity.valid) onNumber(Number(e.value));
}));

const numberOf = (text) => {
  const v = Number(text);
  return text.trim() !== "" && v > 0 ? v : null;
};
const isRequests = () => asked.unit === "request" && asked.senders.length > 0;
const requestBytes = () => asked.senders[0]?.bytes || 1000;

let placed = {}; // sliders that the answer places

function set(option, value) {
  if (value === "") delete asked.limit[option];
  else asked.limit[option] = value;
  touched();
}

// change is a change that other fields depend on.
const change = (doIt) => () => {
  doIt();
  touched();
  build();
};

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
  byID("add").hidden = Boolean(asked.trace) || asked.senders.length >= MAX_SENDERS;
  byID("paste").hidden = Boolean(asked.trace);
  const preset = presets.find((p) => p.name === presetName);
  if (preset) setText(byID("why"), preset.why);
}

// amount is a slider of the limit: a number of requests, of so many units of the command line, or what that takes.
function amount(option, label, lo, hi, write, requestLabel, unit, per) {
  const l = asked.limit;
  const requests = isRequests();
  const s = requests
    ? slide({ label: requestLabel, text: "", lo: 1, hi: 1000, option, number: numberOf, write, onText: (t) => set(option, numberOf(t) ? `${Math.round(numberOf(t) * per)}${unit}` : t || "0") })
    : slide({ label, text: l[option] ?? "", lo, hi, option, write, onText: (t) => set(option, t) });
  placed[option] = (v) => {
    const text = trim(v / per);
    s.place(requests ? v / per : v);
    if (option !== "rate") s.field.placeholder = requests ? text : bytes(v);
    if (requests && document.activeElement !== s.field && document.activeElement !== s.range) s.field.value = text;
  };
  return s.el;
}

// option is a choice of an option of the limit. The first one is the default.
function option(option, label, options) {
  const usual = Object.keys(options)[0];
  return choice({ label, option, value: asked.limit[option] ?? usual, options, onValue: (v) => set(option, v === usual ? "" : v) });
}

function buildLimit() {
  const of = requestBytes();
  const requests = isRequests();
  return h("fieldset", null, h("legend", null, "Limit"),
    amount("rate", "Rate", 8e3, 1e9, requests ? String : (v) => rateText(Math.round(v)), "Requests a second", "bit", 8 * of),
    amount("capacity", "Burst", 1514, 16 * 2 ** 20, (v) => (requests ? String(Math.max(1, Math.round(v))) : v >= 2048 ? `${Math.round(v / 1024)}kb` : `${Math.round(v)}b`), "Burst, requests", "b", of),
    h("div", { class: "two" },
      option("excess", "Meters: excess is", { drop: "dropped", ecn: "marked (ECN)", pass: "only counted" }),
      option("penalty", "Leaky: penalty", { none: "none", fill: "fill", "100ms": "100 ms", "1s": "1 s", "10s": "10 s" }),
      option("each", "A bucket for", { all: "all together", host: "each sender" }),
      option("share", "Fair shares", { none: "none", host: "of each sender" }),
    ));
}

function buildQueue() {
  const l = asked.limit;
  const leaky = l.algorithm === "leaky";
  const length = slide({ label: "Length", text: l.queue ?? "", lo: 1, hi: 9000, option: "queue", write: (v) => `${Math.round(v)}ms`, onText: (t) => set("queue", t) });
  placed.queue = (v, rate) => {
    length.place((v * 8e3) / rate);
    length.field.placeholder = bytes(v);
  };
  const mark = input({ value: l["ecn-above"] ?? "", placeholder: "half", "data-option": "ecn-above" }, (e) => set("ecn-above", e.value));
  return h("fieldset", null, h("legend", null, "Queue"),
    choice({ label: "Algorithm", option: "algorithm", value: l.algorithm ?? "gcra", options: { gcra: "gcra: the burst leaves at once", leaky: "leaky: never faster than the rate" }, onValue: (v) => change(() => (l.algorithm = v))() }),
    leaky ? h("p", { class: "small muted" }, "The burst is the length of the queue.") : length.el,
    h("div", { class: "two" }, field("ECN mark beyond", mark), !leaky && option("order", "Order", { fifo: "fifo", "sparse-first": "sparse first" })));
}

function buildLoad() {
  byID("senders").replaceChildren(...(asked.trace !== undefined ? [buildTrace()] : asked.senders.map(buildSender)));
}

function buildTrace() {
  const area = h("textarea", { id: `f${++ids}`, spellcheck: "false", "data-option": "trace", value: asked.trace, oninput: () => {
    asked.trace = area.value;
    touched();
  } });
  const remove = change(() => {
    delete asked.trace;
    asked.senders = [newSender()];
  });
  return h("fieldset", null, h("legend", null, "Trace", h("button", { type: "button", class: "quiet", onclick: remove }, "Remove")), field("Lines of time_ns,bytes", area));
}

const newSender = () => ({ kind: "steady", bytes: requestBytes(), packets_per_second: isRequests() ? 10 : 200, duration_ns: 2e9 });

function buildSender(s, i) {
  const label = s.name ? visible(s.name) : asked.senders.length > 1 ? `Sender ${i + 1}` : "Sender";
  const tcp = s.kind.startsWith("tcp");
  const requests = asked.unit === "request";
  const things = requests ? "Requests" : "Packets";
  const put = (key, value) => {
    s[key] = value;
    touched();
  };
  const whole = (v) => String(Math.round(v));
  const slider = (key, label, lo, hi, write) => slide({ label, text: String(s[key]), lo, hi, number: numberOf, write, onText: (t) => numberOf(t) && put(key, Number(write(numberOf(t)))) }).el;
  const ms = (key, label) => number(label, (s[key] ?? 0) / MS, (v) => put(key, Math.round(v * MS)));
  const kind = choice({ label: "Load", value: s.kind, options: KINDS, onValue: (kind) => change(() => {
    const usual = { packets: 20, packets_per_second: 200, duration_ns: 2e9, on_ns: 100 * MS, off_ns: 400 * MS, rtt_ns: 30 * MS };
    Object.assign(s, { ...usual, ...s, kind });
    if (kind.startsWith("tcp")) s.packets_per_second = Math.max(s.packets_per_second, 5000);
  })() });
  const box = h("input", { type: "checkbox", checked: s.ecn, onchange: () => put("ecn", box.checked) });
  return h("fieldset", null,
    h("legend", null, label, asked.senders.length > 1 && h("button", { type: "button", class: "quiet", "aria-label": `Remove ${label}`, onclick: change(() => asked.senders.splice(i, 1)) }, "Remove")),
    kind,
    s.kind === "burst" ? slider("packets", `${things} at once`, 1, 2000, whole) : slider("packets_per_second", tcp ? `At most ${things.toLowerCase()} a second` : `${things} a second`, 1, 100_000, String),
    !requests && slider("bytes", "Packet size, bytes", 40, 9000, whole),
    s.kind === "on-off" && h("div", { class: "two" }, ms("on_ns", "On, ms"), ms("off_ns", "Off, ms")),
    h("div", { class: "two" }, ms("start_ns", "Begins at, ms"), s.kind !== "burst" && ms("duration_ns", "Lasts, ms"), tcp && ms("rtt_ns", "Round trip, ms")),
    !requests && h("label", { class: "check" }, box, "Packets allow ECN marks"));
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
  const from = Math.min(asked.trace ? Infinity : 0, ...ok.flatMap((o) => o.packets.time_ns));
  const until = Math.max(from + 1, ...ok.map((o) => end(o, from)));
  for (const o of answer.limits) {
    panels[o.name] ??= new Panel(o.name);
    panels[o.name].show(o, from, until);
  }
  const plots = Object.values(panels).flatMap((p) => [p.level, p.lanes, p.rates]);
  for (const p of plots) p.linked = plots.filter((other) => other !== p);
  const [meter, , queue] = answer.limits;
  if (!meter.error) {
    placed.rate?.(meter.summary.rate_bits_per_second);
    placed.capacity?.(meter.summary.capacity_bytes);
  }
  if (!queue.error) placed.queue?.(queue.summary.queue_bytes, queue.summary.rate_bits_per_second);
  const share = (o) => percent((100 * o.summary.passed_packets) / Math.max(1, o.summary.offered_packets));
  setText(byID("peek"), `Passed: ${ok.map((o) => `${o.name} ${bytes(o.summary.passed_bytes)} (${share(o)})`).join(" · ")}  ↓`); // TCP offers more, the more passes
}

const empties = (o, i) => o.packets.time_ns[i] + (o.packets.level_bytes[i] * 8e9) / o.summary.rate_bits_per_second;

// end is somewhat after the last packet of a limit, so that the picture shows how the bucket goes on.
function end(o, from) {
  const { time_ns: times, depart_ns: departs } = o.packets;
  const last = Math.max(from, ...times, ...departs);
  return Math.min(Math.max(last, ...times.map((_, i) => empties(o, i))), last > from ? last + (last - from) / 20 : Infinity);
}

// levels are the level of each bucket as a line: it rises with each packet, and falls at the rate. They are keyed by
// the first sender of the bucket.
function levels(o, until) {
  const p = o.packets;
  const lines = new Map();
  const add = (line, at, level) => {
    line.x.push(at);
    line.y.push(level);
  };
  const fall = (line, to, level) => {
    if (level === 0 && p.level_bytes[line.last] > 0) add(line, Math.min(empties(o, line.last), to), 0);
    add(line, to, level);
  };
  p.time_ns.forEach((at, i) => {
    const bucket = o.summary.each === "all" ? 0 : p.sender[i];
    if (!lines.has(bucket)) lines.set(bucket, { x: [], y: [] });
    const line = lines.get(bucket);
    fall(line, Math.max(at, line.x.at(-1) ?? at), p.level_before_bytes[i]);
    add(line, at, p.level_bytes[i]);
    line.last = i;
  });
  for (const line of lines.values()) fall(line, until, Math.max(0, ((empties(o, line.last) - until) * o.summary.rate_bits_per_second) / 8e9));
  return lines;
}

// time writes a time on the clock of the load.
const time = (from, span) => (ns) => {
  const t = ns - from;
  if (span >= 2e9) return `${trim(Math.round(t / 1e6) / 1e3)} s`;
  if (span >= 2e6) return `${trim(Math.round(t / 1e3) / 1e3)} ms`;
  return `${trim(Math.round(t) / 1e3)} µs`;
};

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
    const lanes = h("div");
    this.lanes = new Plot(lanes, { label: `${title}: packets`, height: 70, bare: true });
    level.querySelector(".legend").before(lanes); // on the same axis
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
  }

  show(o, from, until) {
    this.o = o;
    this.x = { x0: from, x1: until, xTicks: fromBegin, xText: time(from, until - from) };
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
    this.showLanes(o);
    this.showRates(o);
    this.showRows();
  }

  showLevel(o) {
    const s = o.summary;
    const p = o.packets;
    const size = asked.unit === "request" ? requestBytes() : 0;
    const lines = [...levels(o, this.x.x1)];
    const layers = lines.map(([bucket, { x, y }], i) => ({
      name: lines.length > 1 ? visible(asked.senders[bucket]?.name || `sender ${bucket + 1}`) : "level", color: COLORS[i % COLORS.length], kind: lines.length > 1 ? "line" : "area", x, y,
    }));
    const queue = o.name === "queue";
    const burst = queue && s.algorithm === "leaky" ? 0 : s.capacity_bytes;
    const full = burst + s.queue_bytes;
    const pick = (name, color, count, verdict, y) => {
      const at = p.verdict.map((_, i) => i).filter((i) => p.verdict[i] === verdict);
      if (at.length) layers.push({ name, color, kind: "points", x: at.map((i) => p.time_ns[i]), y: at.map(y), text: () => grouped(count) });
    };
    pick("marked", "delayed", s.marked_packets, "mark", (i) => p.level_bytes[i]);
    pick("dropped", "refused", s.dropped_packets, "drop", (i) => Math.min(p.level_before_bytes[i] + p.bytes[i], full * 1.06));
    const marks = [{ name: queue ? "full" : "burst", color: "ceiling", y: full, dash: [6, 4] }];
    if (burst > 0 && burst < full) marks.push({ name: "burst, then the queue", color: "muted", y: burst, dash: [2, 3] });
    this.level.draw({ ...this.x, yMax: 1.08 * Math.max(full, s.highest_level_bytes), layers, marks, yText: size ? (v) => trim(Math.round((v / size) * 100) / 100) : bytes, says: o.says });
  }

  // showLanes shows a tick for each arrival, departure and drop, on the time of the level above.
  showLanes(o) {
    const s = o.summary;
    const p = o.packets;
    const names = ["drop", "depart", "arrive"];
    const lane = (name, color, times, is = () => true) => {
      const x = times.filter((t, i) => t !== null && is(i)).sort((a, b) => a - b); // a sparse flow overtakes
      const base = names.indexOf(name);
      return { color, kind: "ticks", x, y: x.map(() => base + 0.85), base: base + 0.15 };
    };
    this.lanes.draw({
      ...this.x, yMax: names.length, yTicks: () => names.map((_, i) => i + 0.5), yText: (v) => names[Math.floor(v)],
      layers: [
        lane("arrive", "muted", p.time_ns), lane("depart", "passed", p.depart_ns), lane("depart", "delayed", p.depart_ns, (i) => p.verdict[i] === "mark"),
        lane("drop", "refused", p.time_ns, (i) => p.verdict[i] === "drop"),
      ],
      says: `${s.offered_packets} arrive, ${s.passed_packets} depart, ${s.dropped_packets} are dropped.`,
    });
  }

  // showRates shows what passes over time.
  showRates(o) {
    const s = o.summary;
    this.ratesBox.hidden = s.offered_packets < 100;
    if (this.ratesBox.hidden) return;
    const x = o.rates.x.map((v) => v + o.rates.start_ns);
    this.rates.draw({
      ...this.x, yText: bits, layers: o.rates.layers.map((l) => ({ ...l, x })), marks: o.rates.marks.map((m) => ({ ...m, text: rateText(m.y) })),
      says: `${percent((100 * s.passed_bytes) / Math.max(1, s.offered_bytes))} of the bytes pass.`,
    });
  }

  showRows() {
    const o = this.o;
    if (!this.details.open || !o || o.error) return;
    const p = o.packets;
    const at = this.x.xText;
    const shown = Math.min(ROWS, p.time_ns.length);
    const rows = [];
    for (let i = 0; i < shown; i++) {
      const cell = (text, kind = "number") => h("td", { class: kind }, text);
      rows.push(h("tr", null, cell(at(p.time_ns[i])), cell(grouped(p.bytes[i])), cell(p.verdict[i], `v-${p.verdict[i]}`),
        cell(grouped(p.level_before_bytes[i])), cell(grouped(p.level_bytes[i])), cell(p.depart_ns[i] === null ? "–" : at(p.depart_ns[i]))));
    }
    setText(this.caption, `${shown < p.time_ns.length ? "The first" : "All"} packets: ${grouped(shown)} of ${grouped(o.summary.offered_packets)}`);
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
    group("Textbook", presets.filter((p) => p.request.unit === "request")),
    group("Networks", presets.filter((p) => p.request.unit !== "request")),
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
byID("add").addEventListener("click", change(() => asked.senders.push(newSender())));
byID("paste").addEventListener("click", () => {
  change(() => {
    delete asked.unit;
    asked.senders = [];
    asked.trace = "# time_ns,bytes\n0,1000\n25000000,1000\n50000000,1000\n";
  })();
  document.querySelector("textarea")?.focus();
});
byID("link").addEventListener("click", () => copy(location.href, byID("link")));
addEventListener("hashchange", fromHash);

try {
  presets = await get("sandbox");
  addExamples();
  fromHash();
} catch (err) {
  wrong(`The server does not answer: ${err.message}`);
}
