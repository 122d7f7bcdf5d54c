// Talks to the API of serve. The token for changes is kept by this tab only.

const KEY = "shapectl-token";
const PATIENCE = 15_000;

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// A Refusal is an answer that is an error. status is 0 if there was no answer.
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
  get wantsToken() {
    return this.status === 401;
  }
}

function headers(more) {
  const all = { Accept: "application/json", ...more };
  if (token.get()) all.Authorization = `Bearer ${token.get()}`;
  return all;
}

// send returns the text of an answer, and its value if it is JSON.
async function send(path, options) {
  let answer;
  let text;
  try {
    answer = await fetch(`api/v1/${path}`, { ...options, cache: "no-store", redirect: "error", signal: AbortSignal.timeout(PATIENCE) });
    text = await answer.text();
  } catch (err) {
    throw new Refusal(err.name === "TimeoutError" ? `no answer for ${PATIENCE / 1000} s` : "no answer");
  }
  let value = null;
  try {
    value = text === "" ? null : JSON.parse(text);
  } catch {
    value = null; // a text for people, or an error of a proxy
  }
  if (!answer.ok) throw new Refusal(value?.error ?? (text.trim().slice(0, 300) || answer.statusText || `HTTP status ${answer.status}`), answer.status);
  return { text, value };
}

function query(params) {
  const q = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && (one !== "" || Array.isArray(value))) q.append(name, one);
    }
  }
  const text = q.toString();
  return text && `?${text}`;
}

export const get = async (path, params) => (await send(path + query(params), { headers: headers() })).value;

// text is the answer as the command line writes it for people.
export const text = async (path, params) => (await send(path + query(params), { headers: headers({ Accept: "text/plain" }) })).text;

export const post = async (path, body) =>
  (await send(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body ?? {}) })).value;

// stream calls back with each event that the server sends, until signal is aborted or the server ends it. EventSource
// cannot send a token.
export async function stream(path, params, signal, onEvent) {
  const answer = await fetch(`api/v1/${path}${query(params)}`, { headers: { ...headers(), Accept: "text/event-stream" }, cache: "no-store", signal });
  if (!answer.ok) throw new Refusal((await answer.text()).slice(0, 300), answer.status);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop().slice(-65536);
    for (const line of lines) {
      const text = line.startsWith("data:") ? line.slice(5).trim() : line.startsWith("{") ? line.trim() : "";
      if (text === "") continue;
      try {
        onEvent(JSON.parse(text));
      } catch { /* a line that was cut */ }
    }
  }
}
