// Events as they happen, and the lists of them.
import { Refusal, stream } from "./api.js";
import { Rows, h, searchField, setAttr, setText, visible } from "./dom.js";
import { clock, grouped } from "./units.js";

const KEPT = 500;
const AGAIN = 5000; // until the page asks again after the stream ended
const RARELY = 60_000; // the same where there is no stream

// which colour the kinds have
const tones = { overflow: "dropping", penalty: "dropping", guarantee: "dropping", "device-gone": "near", "change-begun": "near", "change-expired": "near", "change-reverted": "near", "left-out": "near" };

// A Log keeps the last events.
export class Log {
  all = []; // the newest first
  state = "connecting"; // connecting, live, absent or lost
  problem = "";
  leftOut = 0;
  #number = 0; #abort = null; #changed;

  constructor(changed) {
    this.#changed = changed;
  }

  // listen keeps the stream open while the page is shown.
  async listen() {
    if (this.#abort) return;
    const abort = (this.#abort = new AbortController());
    while (!abort.signal.aborted) {
      try {
        const opened = setTimeout(() => this.#is("live", ""), 1000);
        abort.signal.addEventListener("abort", () => clearTimeout(opened));
        await stream("events", {}, abort.signal, (e) => this.#add(e)).finally(() => clearTimeout(opened));
        this.#is("lost", "");
      } catch (err) {
        if (abort.signal.aborted) break;
        const absent = err instanceof Refusal && err.status !== 0;
        this.#is(absent ? "absent" : "lost", absent ? err.message : "");
      }
      const wait = this.state === "absent" ? RARELY : AGAIN;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
    if (this.#abort === abort) this.#abort = null;
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  #is(state, problem) {
    this.state = state;
    this.problem = problem;
    this.#changed(null);
  }

  // changed says what the last change of rules changed, if that was seen.
  changed() {
    const begun = this.all.findIndex((e) => e.kind === "change-begun");
    return this.all.slice(0, Math.max(begun, 0)).filter((e) => e.kind === "rules-changed").map((e) => `${e.sentence}.`).reverse().slice(0, 5).join(" ");
  }

  #add(e) {
    if (typeof e.kind !== "string") return;
    this.state = "live";
    e.number = this.#number++;
    this.leftOut += e.left_out || 0;
    this.all.unshift(e);
    if (this.all.length > KEPT) this.all.length = KEPT;
    this.#changed(e);
  }
}

// eventList is a list of the first few events that a filter lets through.
export function eventList(log, most) {
  const list = h("ul", { class: "events" });
  const none = h("p", { class: "muted" });
  const rows = new Rows(list, () => h("li", null, h("time"), h("span", { class: "pill" }), h("span", { class: "what" })), (el, e) => {
    const [time, kind, what] = el.children;
    const at = Date.parse(e.time);
    setText(time, clock(at));
    setAttr(time, "datetime", e.time);
    setText(kind, visible(e.kind.replaceAll("-", " ")));
    setAttr(kind, "class", `pill ${tones[e.kind] ?? ""}`);
    setText(what, visible(e.sentence || [e.device, e.direction, e.network, e.key].filter(Boolean).join(" ")) + (e.left_out && e.kind !== "left-out" ? ` (${e.left_out} before it were left out)` : ""));
  });
  return {
    el: h("div", null, list, none),
    update(wanted) {
      const some = [];
      for (const e of log.all) {
        if (wanted(e)) some.push(e);
        if (some.length === most) break;
      }
      rows.show(some, (e) => e.number);
      setText(none, some.length ? "" : says(log));
    },
  };
}

function says(log) {
  switch (log.state) {
    case "absent":
      return `This server sends no events: ${visible(log.problem)}`;
    case "lost":
      return "The stream of events ended. Trying again …";
    case "connecting":
      return "Connecting …";
  }
  return "No events since this page was opened.";
}

// Events is the page of all events.
export class Events {
  #log; #list; #kind; #search; #count; #kinds = "";

  constructor(log, host) {
    this.#log = log;
    this.#list = eventList(log, 200);
    this.#kind = h("select", { "aria-label": "Kind", onchange: () => this.update() }, h("option", { value: "" }, "All kinds"));
    this.#search = h("input", { type: "search", placeholder: "Device, network, host or pool", "aria-label": "Search", oninput: () => this.update() });
    this.#count = h("span");
    host.replaceChildren(
      h("div", { class: "head" }, h("h1", null, "Events"), h("p", { class: "sentence" }, "Overflows, penalties, refused guarantees, changes and devices, as they happen.")),
      h("div", { class: "toolbar", role: "search" }, searchField(this.#search), this.#kind),
      h("section", { class: "card", "aria-label": "Events, the newest first" }, this.#list.el, h("p", { class: "muted small" }, this.#count)));
  }

  query = () => ({ top: 1 }); // for what all pages show

  update() {
    const kinds = [...new Set(this.#log.all.map((e) => e.kind))].sort();
    if (kinds.join() !== this.#kinds) {
      this.#kinds = kinds.join();
      const was = this.#kind.value;
      this.#kind.replaceChildren(h("option", { value: "" }, "All kinds"), ...kinds.map((k) => h("option", { value: k }, visible(k.replaceAll("-", " ")))));
      this.#kind.value = kinds.includes(was) ? was : "";
    }
    const words = this.#search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = this.#kind.value;
    const text = (e) => [e.device, e.direction, e.network, e.name, e.key, e.pool, e.sentence].join(" ").toLowerCase();
    this.#list.update((e) => (!kind || e.kind === kind) && (words.length === 0 || words.every((w) => text(e).includes(w))));
    setText(this.#count, this.#log.leftOut > 0 ? `${grouped(this.#log.leftOut)} events were left out because too many came at once.` : "");
  }
}
