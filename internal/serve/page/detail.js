// The page of one rule or pool.
import * as calls from "./calls.js";
import { confirmRate, permitted, reverts } from "./change.js";
import { Rows, h, name, setAttr, setText, visible } from "./dom.js";
import { eventList } from "./events.js";
import { fillBar, isEach, linkTo, rateNow, ratesOf, rateText } from "./list.js";
import { Plot } from "./plot.js";
import { networkOf, stateText, titleOf } from "./store.js";
import { bits, bitsParts, bytes, clock, count, duration, grouped, percent, plural, rate, rateParts } from "./units.js";

const BUCKETS = 20;
const TALKERS = 20;
const MEMBERS = 20;
const RTT_AGAIN = 5000; // until the server has other round-trip times, if it measures all the time
const SHORTEST = 15_000; // the least time in a plot, in ms
const MEASURING = "Measuring slows packets down a little, so it needs";
const COUNTS = "Counts packets while you look. That slows them down a little.";
const MEASURES = "Measures TCP round-trip times while you look. That slows packets down a little.";
const LOOK = 3000; // how often buckets are read

// The longer times come from the history of the server.
const ranges = { "1 min": { seconds: 60 }, "5 min": { seconds: 300 }, "1 h": { seconds: 3600, since: "1h" }, "24 h": { seconds: 86400, since: "24h" } };

export class Detail {
  key; #store; #host; #events; #parts = null; #range = ranges["1 min"]; #past = null; #looked = 0; #looking = false; #closed = false; #facts = "";

  constructor(store, host, key, events) {
    this.#store = store;
    this.key = key;
    this.#host = host;
    this.#events = events;
  }

  // query is the rule or pool with the pools above it and its members.
  query = () => ({ by: "tree", of: this.key, top: MEMBERS + 1 });

  close() {
    this.#closed = true;
  }

  update() {
    const row = this.#store.rows.get(this.key);
    if (!row) {
      this.#parts = null;
      this.#host.replaceChildren(h("div", { class: "card empty" }, h("h1", null, "There is no such rule now"),
        h("p", null, visible(this.key), " may have been removed or renamed."), h("a", { class: "button", href: "#/" }, "All rules")));
      return;
    }
    this.#parts ??= this.#build(row);
    this.#show(row);
    this.#plots(row);
    this.#members(row);
    this.#look(row);
    this.#parts.events.update((e) => (row.isPool ? e.pool === row.r.name : e.device === row.r.device && e.direction === row.r.direction && (e.network === row.r.cidr || !e.network)));
  }

  #build(row) {
    const p = { tiles: {} };
    const r = row.r;
    const tile = (id, label) => {
      const t = { figure: h("dd", { class: "figure" }, h("span"), h("span", { class: "unit" })), more: h("dd", { class: "muted small" }), bar: h("dd", { class: "bar", "aria-hidden": "true" }, h("span")) };
      p.tiles[id] = t;
      return (t.el = h("div", { class: "tile" }, h("dt", null, label), t.figure, t.more, t.bar));
    };
    p.crumbs = h("nav", { class: "crumbs", "aria-label": "Breadcrumb" });
    p.title = h("h1", { tabindex: "-1", id: "title" }, h("span", null, r.name ? name(r.name) : h("span", null, networkOf(r))), (p.pill = h("span", { class: "pill" })));
    p.sentence = h("p", { class: "sentence" });
    p.chips = h("div", { class: "chips" });
    p.pending = h("div");

    p.ranges = h("div", { class: "segments", role: "group", "aria-label": "Time shown" }, Object.entries(ranges).map(([text, range]) =>
      h("button", { type: "button", "aria-pressed": String(range === this.#range), onclick: (e) => {
        this.#range = range;
        this.#past = null;
        for (const b of p.ranges.children) setAttr(b, "aria-pressed", String(b === e.currentTarget));
        this.update();
      } }, text)));
    const rates = h("div");
    const levels = h("div");
    p.plots = h("div", { class: "col" },
      h("section", { class: "card", "aria-labelledby": "rates-title" }, h("div", { class: "card-head" }, h("h2", { id: "rates-title" }, "Offered, passed and dropped"), p.ranges), rates, (p.past = h("p", { class: "muted small" }))),
      (p.levels = h("section", { class: "card", "aria-labelledby": "levels-title" }, h("h2", { id: "levels-title" }, isEach(r) ? "Level of the fullest bucket" : "Level of the bucket"), levels)));
    p.ratePlot = new Plot(rates, { label: "Offered, passed and dropped", height: 260 });
    p.levelPlot = new Plot(levels, { label: "Level of the bucket", height: 130 });
    [p.ratePlot.linked, p.levelPlot.linked] = [[p.levelPlot], [p.ratePlot]];

    // Buckets of hosts and flows, or members of a pool.
    const body = h("tbody");
    p.within = h("section", { class: "card within", "aria-labelledby": "within-title" });
    if (row.isPool) {
      p.members = new Rows(body, () => h("tr", null, h("th", { scope: "row", class: "key" }, h("a")), h("td", { class: "number" }), h("td", { class: "number" })), (el, m) => {
        const link = el.firstChild.firstChild;
        setText(link, visible([titleOf(m.r), !m.isPool && m.r.name ? networkOf(m.r) : "", m.isPool ? "" : m.r.direction].filter(Boolean).join(" ")));
        setAttr(link, "href", linkTo(m.r));
        setText(el.children[1], bits(m.passed));
        setText(el.children[2], m.dropped > 0 ? bits(m.dropped) : "");
      });
      p.more = h("p", { class: "muted small" });
      p.within.append(h("h2", { id: "within-title" }, "Members"), h("div", { class: "scroll" }, h("table", { class: "mini" },
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Member"), h("th", { scope: "col", class: "number" }, "Use"), h("th", { scope: "col", class: "number" }, "Dropped"))), body)), p.more);
    } else if (isEach(r)) {
      p.bucketRows = new Rows(body, () => h("tr", null, h("th", { scope: "row", class: "key" }, name("")), h("td", { class: "number wide" }, h("span"), h("span", { class: "bar level", "aria-hidden": "true" }, h("span"))), h("td", { class: "end" }, h("button", { type: "button", class: "quiet" }, "Explain"))), (el, b) => {
        setText(el.firstChild.firstChild, visible(b.key));
        const limit = this.#store.rows.get(this.key)?.r;
        const part = (level, of) => (of ? level / of : 0);
        const full = Math.max(part(b.level_bytes, limit?.capacity_bytes), part(b.pps_level_packets, limit?.pps_burst_packets), part(b.new_flows_level, limit?.new_flows_burst));
        const level = limit?.capacity_bytes ? percent(100 * full) : bytes(b.level_bytes);
        setText(el.children[1].firstChild, b.quota_left_bytes === null ? level : `${level}; ${bytes(b.quota_used_bytes)} used, ${bytes(b.quota_left_bytes)} left`);
        setAttr(el.children[1], "title", bytes(b.level_bytes));
        fillBar(el.children[1].lastChild, full, "level");
        const ask = el.children[2].firstChild;
        setAttr(ask, "aria-label", `Explain ${visible(b.key)}`);
        ask.onclick = () => this.#explain(addressIn(b.key));
      });
      p.more = h("p", { class: "muted small" });
      p.within.append(h("h2", { id: "within-title" }, "Fullest buckets"), h("div", { class: "scroll" }, h("table", { class: "mini" },
        h("thead", null, h("tr", null, h("th", { scope: "col" }, r.each === "flow" ? "Flow" : "Host"), h("th", { scope: "col", class: "number wide" }, "Full"), h("th", { scope: "col", class: "end" }, h("span", { class: "hidden" }, "Explain")))), body)), p.more);
    } else p.within.hidden = true;
    p.facts = h("dl", { class: "facts" });
    p.events = eventList(this.#events, 8);
    const side = h("div", { class: "col side" }, this.#form(row),
      h("section", { class: "card", "aria-labelledby": "events-title" }, h("h2", { id: "events-title" }, "Recent events"), p.events.el));
    const more = h("div", { class: "col" }, this.#why(row), row.isPool ? null : [this.#who(row), this.#hurt(row)], p.within,
      h("section", { class: "card", "aria-labelledby": "facts-title" }, h("h2", { id: "facts-title" }, "Totals since it was set"), p.facts));

    this.#host.replaceChildren(
      h("div", { class: "head" }, p.crumbs, p.title, p.sentence, p.chips),
      h("dl", { class: "tiles", "aria-label": "Now" }, tile("passed", "Passed now"), tile("refused", row.isPool ? "Refused by this pool" : "Dropped now"), tile("share", "Rate"), tile("level", "Level")),
      h("div", { class: "detail" }, p.plots, side, more));
    return p;
  }

  #form(row) {
    const { r, isPool } = this.#store.limiting(row);
    const field = h("input", { id: "new-rate", inputmode: "text", onfocus: () => field.select(), autocomplete: "off", spellcheck: "false", "aria-describedby": "rate-hint", value: r.rate_bits_per_second === null ? "" : rate(r.rate_bits_per_second) });
    const revert = h("select", { id: "revert" }, Object.entries(reverts).map(([value, text]) => h("option", { value }, text)), h("option", { value: "" }, "never"));
    revert.value = "60s";
    const form = h("form", { class: "rate-form", onsubmit: async (e) => {
      e.preventDefault();
      const here = this.#store.rows.get(this.key);
      const now = here && this.#store.limiting(here).r;
      const wanted = field.value.trim();
      if (!now || wanted === "" || (now.rate_bits_per_second !== null && wanted === rate(now.rate_bits_per_second))) {
        field.focus();
        return;
      }
      if (await confirmRate(now, wanted, revert.value)) this.#host.dispatchEvent(new CustomEvent("changed", { bubbles: true }));
    } },
      h("div", { class: "row" },
        h("div", { class: "field" }, h("label", { for: "new-rate" }, "New rate"), field),
        h("div", { class: "field" }, h("label", { for: "revert" }, "Reverts after"), revert)),
      h("span", { class: "hint muted small", id: "rate-hint" }, "For example 20mbit or 1.5mbit. ", isEach(r) ? "Each bucket gets this rate. " : "", "Buckets and counters are kept."),
      h("button", { type: "submit" }, "Change …"));
    return h("section", { class: "card", "aria-labelledby": "form-title" }, h("h2", { id: "form-title" }, isPool && !row.isPool ? ["Change the rate of pool ", name(r.name)] : "Change the rate"), form);
  }

  #why(row) {
    const r = row.r;
    const said = h("div", { class: "said", "aria-live": "polite" });
    const ask = h("button", { type: "submit" }, "Explain");
    const field = row.isPool ? null : h("input", { id: "explain-address", autocomplete: "off", spellcheck: "false", value: firstOf(r.cidr) });
    const run = async () => {
      ask.disabled = true;
      said.replaceChildren(h("p", { class: "muted" }, "Counting packets for a second …"));
      try {
        said.replaceChildren(h("pre", { tabindex: "0", role: "region", "aria-label": "Explanation" }, visibleLines(await calls.explain(r, field?.value.trim()))));
      } catch (err) {
        said.replaceChildren(h("p", { role: "alert" }, visible(err.message)));
      }
      ask.disabled = false;
    };
    this.#explain = (address) => {
      if (field) field.value = address;
      said.scrollIntoView({ block: "nearest" });
      run();
    };
    return h("section", { class: "card", "aria-labelledby": "why-title" }, h("h2", { id: "why-title" }, row.isPool ? "What limits this pool?" : "What limits an address?"),
      h("form", { class: "ask", onsubmit: (e) => {
        e.preventDefault();
        run();
      } }, field ? [h("label", { class: "hidden", for: "explain-address" }, "Address"), field] : null, ask), said);
  }

  #explain = () => {};

  // #who counts the packets of hosts, or of a host's flows, while somebody wants to see them: that costs each packet something.
  #who(row) {
    let host = ""; // whose flows are shown
    let on = false;
    let busy = false;
    const said = h("p", { class: "muted small", role: "status" }, COUNTS);
    const sum = h("p", { class: "muted small" }); // changes too often to be read out
    const back = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => choose("") }, "All hosts");
    const head = h("th", { scope: "col" }, "Host");
    const body = h("tbody");
    const table = h("div", { class: "scroll", hidden: true }, h("table", { class: "mini" }, h("thead", null, h("tr", null, head,
      h("th", { scope: "col", class: "number" }, "Offered"), h("th", { scope: "col", class: "number" }, "Passed"), h("th", { scope: "col", class: "number" }, "Full"))), body));
    const lines = new Rows(body, () => h("tr", null, h("th", { scope: "row", class: "key" }, h("span"), h("button", { type: "button", class: "link" })), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "number" })), (el, one) => {
      const [text, link] = el.firstChild.children;
      text.hidden = host === "";
      link.hidden = host !== "";
      setText(host === "" ? link : text, visible(one.key));
      setAttr(link, "aria-label", `Flows of ${visible(one.key)}`);
      link.onclick = () => choose(one.key);
      [bits(one.offered_bits_per_second), bits(one.passed_bits_per_second), one.full_percent === null ? "–" : percent(one.full_percent)].forEach((cell, i) => setText(el.children[i + 1], cell));
    });
    const choose = (one) => {
      host = one;
      back.hidden = host === "";
      setText(head, host === "" ? "Host" : "Flow");
      lines.show([], (o) => o.key);
      table.hidden = true;
      setText(sum, "");
      setText(said, host === "" ? "Counting packets …" : `Counting the packets of ${visible(host)} …`);
      if (host !== "") back.focus();
      if (!on) button.click();
    };
    const run = async () => {
      busy = true;
      if (table.hidden) setText(said, "Counting packets …");
      while (on && !this.#closed && !document.hidden) {
        const asked = host;
        try {
          const one = await permitted(() => calls.talkers(row.r, asked, TALKERS), MEASURING);
          if (asked !== host) continue;
          const all = one?.talkers ?? [];
          lines.show(all, (o) => o.key);
          table.hidden = all.length === 0;
          const what = host === "" ? "hosts" : `flows of ${visible(host)}`;
          setText(said, [all.length === 0 ? "No traffic now." : `The busiest ${what}.`, visible(one?.note ?? "")].filter(Boolean).join(" "));
          setText(sum, all.length === 0 ? "" : [`Offered in total: ${bits(one.offered_bits_per_second)}.`, one.left_out ? `${grouped(one.left_out)} more are not listed.` : ""].join(" "));
        } catch (err) {
          setText(said, visible(err.message));
          on = false;
        }
      }
      on = busy = false;
      setAttr(button, "aria-pressed", "false");
      setText(button, "Count");
    };
    const button = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
      on = !on;
      setAttr(button, "aria-pressed", String(on));
      setText(button, on ? "Stop" : "Count");
      if (on && !busy) run();
    } }, "Count");
    return h("section", { class: "card", "aria-labelledby": "who-title" }, h("div", { class: "card-head" }, h("h2", { id: "who-title" }, "Who uses it now?"), h("div", { class: "buttons" }, back, button)), said, table, sum);
  }

  // #hurt measures round-trip times while somebody wants to see them, as that costs each packet something.
  #hurt(row) {
    const found = { t: [], limited: [], free: [] };
    const host = h("div");
    const said = h("p", { class: "muted small", role: "status" });
    const hosts = h("tbody");
    const table = h("div", { class: "scroll", hidden: true }, h("table", { class: "mini" }, h("thead", null, h("tr", null,
      h("th", { scope: "col" }, "Host"), h("th", { scope: "col", class: "number" }, "While limited"), h("th", { scope: "col", class: "number" }, "Otherwise"), h("th", { scope: "col", class: "number" }, "Resent"))), hosts));
    const lines = new Rows(hosts, () => h("tr", null, h("th", { scope: "row", class: "key" }), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "number" })), (el, one) => {
      [visible(one.host || "all"), duration(rtt(one.limited)), duration(rtt(one.not_limited)), again(one)].forEach((text, i) => setText(el.children[i], text));
    });
    let plot = null;
    let on = false;
    let running = true; // the server measures all the time; unless it says otherwise
    const button = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
      on = !on;
      setAttr(button, "aria-pressed", String(on));
      setText(button, on ? "Stop" : "Measure");
      if (on && !busy) run();
    } }, "Measure");
    let busy = false;
    const run = async () => {
      busy = true;
      setText(said, "Measuring TCP round-trip times …");
      while ((on || running) && !this.#closed) {
        try {
          if (running && document.hidden) {
            await sleep(RTT_AGAIN);
            continue;
          }
          if (document.hidden) break;
          const one = await (running ? calls.roundTrips(row.r, true) : permitted(() => calls.roundTrips(row.r, false), MEASURING));
          if (one === undefined) {
            running = false;
            if (!on) setText(said, MEASURES);
            continue;
          }
          button.hidden = running;
          found.t.push(this.#store.at);
          found.limited.push(rtt(one?.limited) ?? NaN);
          found.free.push(rtt(one?.not_limited) ?? NaN);
          setText(said, one ? "Median TCP round-trip time between this device and the receivers." : "No TCP round trips measured yet.");
          if (one) plot ??= new Plot(host, { label: "Round-trip time", height: 130 });
          plot?.draw({ x0: Math.max(found.t[0] - 1000, this.#store.at - 300_000), x1: this.#store.at, xText: (v) => clock(v), yText: duration,
            layers: [{ name: "while limited", color: "refused", kind: "line", x: found.t, y: found.limited }, { name: "otherwise", color: "rtt", kind: "line", x: found.t, y: found.free }],
            says: one ? `While limited ${duration(rtt(one.limited))}, otherwise ${duration(rtt(one.not_limited))}.` : "" });
          table.hidden = !one;
          if (one) lines.show([one, ...(one.hosts ?? []).slice(0, BUCKETS)], (o) => o.host);
          if (running) await sleep(RTT_AGAIN);
        } catch (err) {
          setText(said, visible(err.message));
          if (running && found.t.length > 0 && err.status === 0) await sleep(RTT_AGAIN); // the server may come back
          else if (running) running = false;
          else on = false;
        }
      }
      on = busy = false;
      setAttr(button, "aria-pressed", "false");
      setText(button, "Measure");
      button.hidden = false;
    };
    run();
    return h("section", { class: "card", "aria-labelledby": "hurt-title" }, h("div", { class: "card-head" }, h("h2", { id: "hurt-title" }, "Does the limit hurt?"), button), said, host, table);
  }

  #show(row) {
    const p = this.#parts;
    const r = row.r;
    setText(p.pill, stateText(row));
    setAttr(p.pill, "class", `pill ${row.state}`);
    setText(p.sentence, visible(describe(r)));
    const figure = (id, [value, unit], more, share, state) => {
      const t = p.tiles[id];
      setText(t.figure.firstChild, value);
      setText(t.figure.lastChild, unit);
      setText(t.more, more || "\u00a0");
      t.bar.hidden = share === undefined;
      if (share !== undefined) fillBar(t.bar, share, state);
    };
    figure("passed", bitsParts(row.passed), r.guarantee_bits_per_second ? `${bits(r.borrowed_bits_per_second)} borrowed` : "");
    const dropped = row.isPool ? (row.dropped > 0 ? `${bits(row.dropped)} dropped in total` : "") : r.dropped_percent !== null && row.dropped > 0 ? `${percent(r.dropped_percent)} of packets` : "";
    figure("refused", bitsParts(row.refused), dropped);
    setAttr(p.tiles.refused.el, "class", row.refused > 0 ? "tile dropping" : "tile");
    const used = r.use_percent ?? null;
    figure("share", r.rate_bits_per_second === null ? [rateText(r), ""] : r.red ? [ratesOf(r), ""] : rateParts(rateNow(r)), isEach(r) ? `for each ${r.each}` : used === null ? "" : `${percent(used)} used`, used === null ? undefined : used / 100, row.state);
    const { full } = row;
    figure("level", full === null ? ["–", ""] : [percent(full * 100).replace("%", ""), "% full"], isEach(r) ? "of the fullest bucket" : r.capacity_bytes ? `${bytes(r.level_bytes)} of ${bytes(r.capacity_bytes)}` : "no bucket", full ?? undefined, "level");

    const above = this.#store.above(row).reverse();
    const path = above.map((a) => a.key).join() + r.name;
    if (p.crumbs.dataset.path !== path) {
      p.crumbs.dataset.path = path;
      const links = above.map((a) => h("a", { href: linkTo(a.r) }, name(a.r.name)));
      if (r.name && !row.isPool) links.push(h("a", { href: linkTo({ kind: "name", name: r.name }) }, "all rules of ", name(r.name)));
      p.crumbs.replaceChildren(h("a", { href: row.isPool || above.length ? "#/pools" : "#/" }, row.isPool || above.length ? "Pools" : "All rules"),
        ...links.flatMap((a) => [h("span", { class: "sep", "aria-hidden": "true" }), a]));
      document.title = `${visible(titleOf(r)).slice(0, 60)} – shapectl`;
    }
    const chips = [r.device && `${r.device} ${r.direction}`, r.name && r.cidr && networkOf(r), r.plan && `plan ${r.plan}`, r.note, isEach(r) && `for each ${r.each}`,
      r.share && r.share !== "none" && `fair shares by ${r.share}`, r.guarantee_bits_per_second && `${rate(r.guarantee_bits_per_second)} guaranteed`, r.excess && !r.unlimited && `excess: ${r.excess}`, r.red && `green: ${r.green}, yellow: ${r.yellow}, red: ${r.red}`, r.algorithm].filter(Boolean);
    if (p.chips.dataset.is !== chips.join("\n")) {
      p.chips.dataset.is = chips.join("\n");
      p.chips.replaceChildren(...chips.map((text) => h("span", { class: "chip" }, name(text))));
    }

    const traffic = (packets, b) => (packets ? `${bytes(b)} in ${count(packets)} packets` : "nothing");
    const facts = [["passed", traffic(r.passed_packets, r.passed_bytes)], [row.isPool ? "dropped in total" : "dropped", traffic(r.dropped_packets, r.dropped_bytes)],
      row.isPool && ["refused by this pool", traffic(r.refused_packets, r.refused_bytes)],
      ...["green", "yellow", "red"].map((c) => r.red && [c, traffic(r[`${c}_packets`], r[`${c}_bytes`])]),
      r.excess_packets && !row.isPool && !r.red && r.excess_packets !== r.dropped_packets && ["excess", traffic(r.excess_packets, r.excess_bytes)], r.delayed_packets && ["queued", traffic(r.delayed_packets, r.delayed_bytes)],
      r.marked_packets && ["marked", `${count(r.marked_packets)} packets`], r.guarantee_bits_per_second && ["guaranteed", traffic(r.guaranteed_packets, r.guaranteed_bytes)], r.guarantee_bits_per_second && ["borrowed", traffic(r.borrowed_packets, r.borrowed_bytes)],
      r.capacity_bytes && ["burst", burst(r)], r.pbs_bytes && ["peak burst", bytes(r.pbs_bytes)], r.ebs_bytes && ["excess burst", bytes(r.ebs_bytes)], r.queue_bytes && ["queue", `${bytes(r.queue_bytes)}, at most ${duration(r.longest_wait_ns)}`],
      r.contended_packets && ["contended", `${count(r.contended_packets)} packets`], r.spilled_packets && ["spilled", `${count(r.spilled_packets)} packets`], r.exempt_packets && ["exempt", `${count(r.exempt_packets)} packets`],
      r.quota_used_bytes !== null && ["quota", quota(r)],
      r.active_sharers !== null && r.active_sharers !== undefined && ["active sharers", grouped(r.active_sharers)], r.hook && ["hook", r.hook]].filter(Boolean);
    const text = facts.map((f) => f[0]).join();
    if (this.#facts !== text || p.facts.children.length === 0) {
      this.#facts = text;
      p.facts.replaceChildren(...facts.map(([label]) => h("div", null, h("dt", null, label), h("dd"))));
    }
    facts.forEach(([, value], i) => setText(p.facts.children[i].lastChild, visible(value)));
  }

  #plots(row) {
    const p = this.#parts;
    const r = row.r;
    const now = this.#store.at;
    const recorded = Boolean(this.#range.since);
    if (recorded) this.#recorded(row);
    else setText(p.past, "");
    const all = row.series;
    // A page that was just opened begins with a short time, which grows.
    const x0 = Math.max(now - (recorded ? ranges["1 min"] : this.#range).seconds * 1000, Math.min(all.t[0] ?? now, now - SHORTEST));
    let from = all.t.findIndex((t) => t >= x0 - 3000);
    if (from < 0) from = all.t.length;
    const t = [];
    const at = { passed: [], dropped: [], level: [] };
    for (let i = from; i < all.t.length; i++) {
      // Nothing is known of a time in which the page was not shown.
      if (t.length && all.t[i] - t.at(-1) > 6000) {
        t.push(t.at(-1) + 1);
        for (const f of Object.values(at)) f.push(NaN);
      }
      t.push(all.t[i]);
      for (const f of Object.keys(at)) at[f].push(all[f][i]);
    }
    const offered = at.passed.map((v, i) => v + at.dropped[i]);
    const time = { x0, x1: now, xText: (v) => clock(v) };
    if (!recorded) p.ratePlot.draw({
      ...time, ...rateLayers(r, t, at.passed, offered),
      says: `Now ${bits(row.passed)} pass and ${bits(row.dropped)} are dropped, of ${rateText(r)}. Highest offered in the time shown: ${bits(Math.max(0, ...offered.filter((v) => v > 0)))}.`,
    });
    const capacity = r.capacity_bytes;
    p.levels.hidden = !capacity;
    if (capacity) p.levelPlot.draw({
      ...time, yText: bytes, marks: [{ name: "capacity", color: "ceiling", y: capacity, dash: [6, 4] }],
      layers: [{ name: "level", color: "level", kind: "area", x: t, y: at.level }],
      yMax: 1.1 * Math.max(capacity + (r.queue_bytes || 0), ...at.level.filter((v) => v > 0)), // a penalty raises the level above the capacity
      says: `Now ${bytes(at.level.at(-1))} of ${bytes(capacity)}.`,
    });
  }

  // #recorded draws what the server recorded, which it is asked for now and then.
  async #recorded(row) {
    const p = this.#parts;
    const range = this.#range;
    const past = (this.#past ??= { next: 0 });
    if (performance.now() < past.next) return;
    past.next = performance.now() + 10_000;
    if (p.past.textContent === "") setText(p.past, "Reading the history …");
    try {
      const found = await calls.history(row.r, range.since);
      if (this.#closed || past !== this.#past) return;
      if (!found) {
        setText(p.past, "Nothing is recorded yet.");
        return;
      }
      const t = [];
      const passed = [];
      const offered = [];
      for (const one of found.periods ?? []) {
        t.push(Date.parse(one.begin));
        passed.push(one.measured_ns ? one.passed_bits_per_second : NaN);
        offered.push(one.measured_ns ? one.offered_bits_per_second : NaN);
      }
      const x1 = Date.parse(found.until) || Date.now();
      p.ratePlot.draw({ x0: x1 - range.seconds * 1000, x1, xText: (v) => clock(v, false), ...rateLayers(row.r, t, passed, offered), says: `Recorded over ${range.since}.` });
      const checked = found.checked_intervals;
      setText(p.past, ["Averages over 5 minutes.", `Passed ${bytes(found.passed_bytes)}, dropped ${bytes(found.dropped_bytes)}.`,
        found.passed?.p95_5min_bits_per_second ? `95th percentile: ${bits(found.passed.p95_5min_bits_per_second)}.` : "",
        checked ? `The committed rate was delivered in ${grouped(found.delivered_intervals)} of ${plural(checked, "interval")}.` : ""].filter(Boolean).join(" "));
    } catch (err) {
      if (past === this.#past) setText(p.past, `No history: ${visible(err.message)}`);
    }
  }

  #members(row) {
    const p = this.#parts;
    if (!p.members) return;
    const some = [...this.#store.rows.values()].filter((m) => m.r.within === row.r.name).slice(0, MEMBERS);
    p.members.show(some, (m) => m.key);
    setText(p.more, row.below > some.length ? `and ${grouped(row.below - some.length)} more with less use` : row.below === 0 ? "This pool has no members." : "");
  }

  // #look reads the buckets of the rule now and then: a reading has only the fullest of all rules.
  async #look(row) {
    const p = this.#parts;
    if (!p.bucketRows || this.#looking || performance.now() - this.#looked < LOOK) return;
    this.#looking = true;
    try {
      const all = await calls.buckets(row.r, BUCKETS);
      p.bucketRows.show(all, (b) => b.key);
      setText(p.more, all.length === 0 ? "All buckets are empty." : all.length === BUCKETS ? `the ${BUCKETS} fullest` : plural(all.length, "bucket"));
    } catch (err) {
      setText(p.more, visible(err.message));
    }
    this.#looked = performance.now();
    this.#looking = false;
  }
}

function describe(r) {
  const shared = r.leased === null || r.adapt && !r.leased ? "" : r.adapt ? `, of ${rate(r.rate_bits_per_second)} as its line allows` : `, its ${r.leased ? "lease on" : "safe share of"} ${rate(r.rate_bits_per_second)}`;
  if (r.kind === "pool") return `Pool of ${rateText(r)}${shared}${r.within ? ` within ${r.within}` : ""}`;
  const network = networkOf(r);
  const who = isEach(r) ? `each ${r.each} in ${network}` : network.includes("/") ? `${network} as a whole` : network;
  return `${r.device} ${r.direction}: ${who} ${!r.unlimited ? `gets ${ratesOf(r)}` : r.within ? `is limited only by pool ${r.within}` : "is not limited"}`;
}

// rateLayers is a plot of what passed and, on top of that, was dropped, with the limits of a rule.
export function rateLayers(r, t, passed, offered) {
  const marks = [];
  if (r.rate_bits_per_second !== null && !isEach(r)) marks.push({ name: "rate", color: "ceiling", y: rateNow(r), dash: [6, 4], text: rate(rateNow(r)) });
  const most = r.pir_bits_per_second ?? (r.eir_bits_per_second && r.eir_bits_per_second + r.rate_bits_per_second);
  if (most && !isEach(r)) marks.push({ name: "yellow up to", color: "ceiling", y: most, dash: [2, 3], text: rate(most) });
  if (r.guarantee_bits_per_second) marks.push({ name: "guarantee", color: "guarantee", y: r.guarantee_bits_per_second, dash: [2, 3], text: rate(r.guarantee_bits_per_second) });
  return {
    yText: bits, marks,
    layers: [
      { name: "dropped", color: "refused", kind: "area", x: t, y: offered, text: (v, i) => bits(v - passed[i]) },
      { name: "passed", color: "passed", kind: "area", x: t, y: passed },
      { name: "offered", color: "muted", kind: "line", width: 1.25, x: t, y: offered },
    ],
  };
}

// quota is how much of a quota is used, and what is in force once it is used up.
const quota = (r) => (r.quota_used_up ? `used up: ${r.then_bits_per_second ? rate(r.then_bits_per_second) : "drop"}` : `${bytes(r.quota_used_bytes)} used, ${bytes(r.quota_left_bytes)} left`) +
  (r.quota_ends_in_ns ? `, for another ${duration(r.quota_ends_in_ns)}` : "");

const burst = (r) => bytes(r.capacity_bytes) + (r.rate_bits_per_second ? ` (${duration((r.capacity_bytes * 8e9) / r.rate_bits_per_second)})` : "");

// firstOf is an address in a network, to begin with.
function firstOf(cidr) {
  const [address, length] = cidr.split("/");
  if (length === (address.includes(":") ? "128" : "32")) return address;
  return address.includes(":") ? (address.endsWith("::") ? `${address}1` : address) : address.replace(/\.0$/, ".1");
}

// addressIn is the host of a bucket's key, which may be a flow.
const addressIn = (key) => /^\[?([0-9a-f.:]*?)\]?(?:[/:]\d+)?(?:\s|$)/i.exec(key)?.[1] || key;

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// rtt is the median of a part of what was measured.
const rtt = (part) => part?.receiver_rtt?.p50_ns ?? null;

function again({ limited, not_limited: free }) {
  const all = limited.payload_packets + free.payload_packets;
  return all ? percent((100 * (limited.retransmitted_packets + free.retransmitted_packets)) / all) : "–";
}

const visibleLines = (text) => text.split("\n").map(visible).join("\n").trimEnd();
