// The page of live figures: it asks for a reading each second while somebody sees it, and shows the view that the part
// of the address after # names.
import { get, token } from "./api.js";
import * as calls from "./calls.js";
import { askToken, permitted, tell } from "./change.js";
import { Detail } from "./detail.js";
import { byID, h, s, setAttr, setText, visible } from "./dom.js";
import { Events, Log } from "./events.js";
import { List } from "./list.js";
import { Named } from "./named.js";
import { Store } from "./store.js";
import { clock, countdown, plural } from "./units.js";

const EACH = 1000;
const PATIENT = 5000; // between attempts when there is no answer

const store = new Store();
const log = new Log(() => view?.isEvents || view?.hasEvents ? view.update() : undefined);
let view = null;
let lost = null; // the error of the last attempt
let troubled = ""; // the error that is shown instead of a view
let since = 0; // when it first failed
let attempts = 0;
let shows = null; // the view that the store has rows for
let arrived = true; // the view was shown, and has the focus, since somebody went there
let paused = false;
let version = null; // of the server, when the page was opened
let newer = false;

/* What to show. */

function parts() {
  try {
    return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  } catch {
    return [""]; // not an address that this page made
  }
}

function route(moved) {
  const host = h("div", { class: "view", id: "view" });
  const [page, ...rest] = parts();
  troubled = "";
  view?.close?.();
  document.title = "shapectl";
  if (page === "rule" || page === "pool") {
    view = new Detail(store, host, `${page === "pool" ? "pool " : ""}${rest.join(" ")}`, log);
    view.hasEvents = true;
  } else if (page === "name") view = new Named(store, host, rest[0] ?? "");
  else if (page === "events") {
    view = new Events(log, host);
    view.isEvents = true;
    document.title = "Events – shapectl";
  } else view = new List(store, host, page === "pools", page === "out" ? page : "");
  store.watched = view.key ?? "";
  listen();
  byID("view").replaceWith(host);
  for (const a of document.querySelectorAll("#nav a")) {
    setAttr(a, "aria-current", a.getAttribute("href") === `#/${page === "pools" || page === "events" ? page : page === "" ? "" : "-"}` ? "page" : null);
  }
  arrived = !moved;
  show();
  if (moved) poll();
}

function show() {
  document.body.classList.toggle("stale", lost !== null && store.readings > 0);
  if (store.readings > 0 && troubled) return route(false);
  if (shows === view || view.isEvents) {
    view.update();
    if (!arrived) {
      arrived = true;
      window.scrollTo(0, 0);
      (byID("title") ?? byID("main")).focus({ preventScroll: true });
    }
  }
  else if (lost && store.readings === 0 && troubled !== `${lost.status} ${lost.message}`) {
    troubled = `${lost.status} ${lost.message}`;
    byID("view").replaceChildren(trouble(lost));
  }
  notices();
  status();
}

// trouble is what there is before the first reading, if that fails.
function trouble(err) {
  const content = [];
  if (err.status === 0) {
    content.push(h("h1", null, "No answer from shapectl serve"), h("p", null, "Limits stay in force without it. This page goes on as soon as it answers."), h("code", { class: "command" }, "systemctl status shapectl-serve"));
  } else if (err.wantsToken) {
    content.push(h("h1", null, "Reading needs a token at this address"), h("p", null, visible(err.message)), h("button", { type: "button", class: "primary", onclick: async () => (await askToken("At this address, reading needs the token of shapectl serve, too.")) && poll() }, "Enter the token"));
  } else {
    content.push(h("h1", null, "shapectl cannot read the limits"), h("p", null, visible(err.message)), h("p", null, "Limits stay in force."), h("code", { class: "command" }, "shapectl doctor"));
  }
  return h("div", { class: "card empty" }, s("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" }, s("use", { href: "icon.svg#mark" })), content);
}

/* Notices above the view: each is made once, so that focus stays on its buttons. */

const shown = new Map();

function notice(id, wanted, make, update) {
  if (!wanted) {
    shown.get(id)?.remove();
    shown.delete(id);
    return;
  }
  if (!shown.has(id)) {
    shown.set(id, make());
    byID("notices").append(shown.get(id));
  }
  update?.(shown.get(id));
}

const banner = (tone, text, ...buttons) => h("section", { class: `banner ${tone}`, "aria-label": "Notice" }, h("div", { class: "banner-text" }, text), buttons.length ? h("div", { class: "banner-buttons" }, buttons) : null);

function notices() {
  notice("lost", lost !== null && store.readings > 0, () => banner("bad", [h("strong", null, "No figures."), " ", h("span", { class: "why" })]), (el) => {
    setText(el.querySelector(".why"), lost.status === 0 ? `shapectl serve has not answered since ${clock(since)}. Limits stay in force. This page keeps trying.` : `${visible(lost.message)} (since ${clock(since)})`);
  });
  notice("newer", newer, () => banner("", [h("strong", null, "shapectl was updated."), " This page is still the old version."], h("button", { type: "button", onclick: () => location.reload() }, "Reload")));
  const left = store.pending && (store.pending.until - performance.now()) * 1e6;
  notice("pending", store.pending !== null && left > 0, () => banner("warn", [h("strong", null, "A change is not confirmed."), " It reverts in ", h("span", { class: "countdown", role: "timer" }), ". ", h("span", { class: "what" })],
    h("button", { type: "button", class: "primary", onclick: (e) => decide(e.currentTarget, calls.confirmChange, "The change is confirmed.") }, "Confirm"),
    h("button", { type: "button", onclick: (e) => decide(e.currentTarget, calls.rollback, "The change is rolled back.") }, "Roll back")),
  (el) => {
    setText(el.querySelector(".countdown"), countdown(left));
    setText(el.querySelector(".what"), visible(log.changed()));
  });
  const out = store.summary?.not_in_force ?? 0;
  notice("out", out > 0, () => banner("bad", [h("strong"), " ", h("a", { href: "#/out" }, "Show them")]), (el) => {
    setText(el.firstChild.firstChild, `${plural(out, "rule")} ${out === 1 ? "is" : "are"} not in force.`);
  });
}

// decide confirms or rolls back.
async function decide(button, call, done) {
  button.disabled = true;
  try {
    await permitted(call);
    say(done);
    await poll();
  } catch (err) {
    tell("The request failed", err.message);
  }
  button.disabled = false;
}

/* The state of the connection, beside the buttons. */

let saidState = "";

function status() {
  const live = byID("live");
  const state = lost ? "lost" : paused ? "paused" : store.readings ? "live" : "wait";
  setAttr(live, "data-state", state);
  setText(live.firstElementChild, { lost: "no answer", paused: `paused at ${clock(store.at)}`, live: "live", wait: "connecting" }[state]);
  if (state !== saidState && saidState !== "" && saidState !== "wait") {
    say({ lost: "shapectl serve does not answer.", live: "Figures are live.", paused: "Paused." }[state] ?? "");
  }
  saidState = state;
}

// say tells screen readers what happened. Figures that change each second are not said.
function say(text) {
  setText(byID("says"), text);
}

/* Readings. */

let timer = 0;
let polling = null;

// poll takes a reading now, and begins the next one a second after this one began.
function poll() {
  return (polling ??= pollOnce().finally(() => (polling = null)));
}

async function pollOnce() {
  clearTimeout(timer);
  const began = performance.now();
  const hadPending = store.pending !== null;
  const asked = view;
  const query = JSON.stringify(asked.query());
  try {
    // Where the view is of something that has gone, it says so: that needs a reading without it.
    const top = await get("top", asked.query()).catch((err) => (err.status === 404 ? get("top", { top: 1 }) : Promise.reject(err)));
    if (asked !== view || query !== JSON.stringify(view.query())) {
      timer = setTimeout(poll); // somebody wants something else meanwhile
      return;
    }
    store.add(top);
    shows = view;
    const wasLost = lost !== null;
    lost = null;
    attempts = 0;
    if (wasLost || version === null) checkVersion();
  } catch (err) {
    if (lost === null) since = Date.now();
    lost = err;
    attempts++;
  }
  if (!lost && hadPending !== (store.pending !== null)) say(store.pending ? "A change is not confirmed. It reverts unless you confirm it." : "No change is pending.");
  show();
  const wait = !lost && (shows !== view || query !== JSON.stringify(view.query())) ? 0 : lost ? Math.min(PATIENT, EACH * attempts) : Math.max(100, EACH - (performance.now() - began));
  if (!paused && !document.hidden) timer = setTimeout(poll, wait);
}

async function checkVersion() {
  try {
    const now = JSON.stringify(await calls.version());
    version ??= now;
    newer = now !== version;
  } catch { /* the next reading tells that */ }
}

function visibility() {
  clearTimeout(timer);
  if (document.hidden) return log.stop();
  if (!paused) poll();
  listen();
}

// listen follows events only while they are shown: the server watches the kernel for that.
function listen() {
  if (!document.hidden && (view.isEvents || view.hasEvents)) log.listen();
  else log.stop();
}

/* Begin. */

byID("pause").addEventListener("click", (e) => {
  paused = !paused;
  setAttr(e.currentTarget, "aria-pressed", String(paused));
  status();
  if (!paused) poll();
});
byID("key").addEventListener("click", async () => {
  const had = token.get();
  await askToken();
  if (token.get() !== had) poll();
});
byID("skip").addEventListener("click", (e) => {
  e.preventDefault(); // the part after # is the view
  byID("main").focus();
});
document.addEventListener("changed", () => poll());
document.addEventListener("keydown", (e) => {
  if (e.key !== "/" || e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, textarea, select, dialog")) return;
  const search = document.querySelector("#view input[type=search]");
  if (search) {
    e.preventDefault();
    search.focus();
  }
});
document.addEventListener("visibilitychange", visibility);
window.addEventListener("hashchange", () => route(true));
setInterval(() => store.pending && notices(), 500);
route(false);
visibility();
