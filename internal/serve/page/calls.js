// What the page asks of the API beyond the figures: each is a command line of shapectl (docs/serve.md).
import { get, post, text } from "./api.js";

const RTT_SECONDS = 3; // of a measurement of round-trip times
const COUNT_SECONDS = 2; // of counting who uses a rule

const named = (r) => (r.kind === "pool" ? { named: r.name } : { device: r.device, direction: r.direction, network: r.cidr });

export const version = () => get("version");

export const confirmChange = () => post("confirm");

export const rollback = () => post("rollback");

// setRate changes a rate and nothing else, unless the rule or pool is gone. The change reverts after confirm (a duration)
// unless that is "".
export function setRate(r, rate, confirm) {
  const how = confirm ? { rate, confirm } : { rate };
  return post("set", { kind: r.kind, ...named(r), ...how });
}

// command is the same as a command line, for people.
export function command(r, rate, confirm) {
  const how = `--kind ${r.kind} --rate ${rate}${confirm ? ` --confirm ${confirm}` : ""}`;
  const words = Object.values(named(r));
  return `shapectl set ${how} ${words.some((w) => w.startsWith("-")) ? "-- " : ""}${words.map(word).join(" ")}`;
}

const word = (s) => (/^[\w.,:@+/-]+$/.test(s) ? s : `'${s.replaceAll("'", "'\\''")}'`);

// buckets are the fullest buckets of a rule.
export async function buckets(r, top) {
  const rules = await get("show", { ...named(r), buckets: true, top });
  return rules[0]?.buckets ?? [];
}

// explain says what limits packets of an address, or what limits a pool, as the command line does.
export function explain(r, address) {
  if (r.kind === "pool") return text("explain", { named: r.name });
  return text("explain", { device: r.device, direction: r.direction, address });
}

// roundTrips are TCP round-trip times of a rule: those that the server measures anyway (running), or it measures now for a
// few seconds. null is none, and undefined that the server measures nothing by itself.
export async function roundTrips(r, running) {
  const all = await get("top", { rtt: true, ...named(r), ...(running ? { running } : { interval: `${RTT_SECONDS}s` }) });
  if (running && all.interval_ns === 0) return undefined;
  return all.rules.find((one) => one.device === r.device && one.direction === r.direction && one.cidr === r.cidr) ?? null;
}

// talkers are the hosts that use a rule now, or the flows of one of them.
export async function talkers(r, host, top) {
  const of = host ? { by: "flow", address: host, direction: r.direction } : { by: "host", ...named(r) };
  const all = await get("top", { ...of, sort: "use", top, interval: `${COUNT_SECONDS}s` });
  return all.rules.find((one) => one.device === r.device && one.direction === r.direction && one.cidr === r.cidr) ?? null;
}

// history is what the server recorded of a rule or pool, over a time such as 24h; undefined for nothing.
export async function history(r, since) {
  const found = await get("report", { ...named(r), since });
  return found.find((one) => (one.kind === "pool") === (r.kind === "pool"));
}
