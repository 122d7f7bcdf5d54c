// Dialogs: a change of a rate, a token, and what was refused.
import { Refusal, token } from "./api.js";
import * as calls from "./calls.js";
import { commandLine, h, name, setText, visible } from "./dom.js";
import { titleOf } from "./store.js";
import { asRate, percent, rate } from "./units.js";

// dialog shows a form, and resolves to the value of the button that ended it; "" for Escape.
function dialog(title, content, buttons, onSubmit) {
  return new Promise((resolve) => {
    const heading = h("h2", { id: "dialog-title" }, title);
    const wrong = h("p", { class: "wrong", role: "alert" });
    const send = h("button", { type: "submit", class: "primary" }, buttons.submit);
    const form = h("form", { method: "dialog" }, heading, content, wrong,
      h("div", { class: "dialog-buttons" }, h("button", { type: "button", onclick: () => box.close() }, buttons.cancel ?? "Cancel"), send));
    const box = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    let result = null;
    form.addEventListener("submit", async (e) => {
      e.preventDefault();
      send.disabled = true;
      setText(wrong, "");
      try {
        result = await onSubmit();
        box.close();
      } catch (err) {
        setText(wrong, visible(err.message));
        send.disabled = false;
      }
    });
    box.addEventListener("close", () => {
      box.remove();
      resolve(result);
    });
    document.body.append(box);
    box.showModal();
  });
}

// askToken asks for the token that permits changes, and resolves to whether there is one now.
export async function askToken(why) {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", value: token.get(), autofocus: true });
  const done = await dialog("Token for changes", [
    h("p", { class: "muted" }, why ?? "Reading needs no token on this host. Changes over TCP need the one that serve reads from ", why ? null : h("code", { class: "whole" }, "--token-file"), why ? null : "."),
    h("div", { class: "field" }, h("label", { for: "token" }, "Token"), field, h("span", { class: "hint" }, "This tab keeps it until you close it. Leave the field empty to forget it.")),
  ], { submit: "Use" }, () => {
    token.set(field.value.trim());
    return true;
  });
  return done === true && token.get() !== "";
}

// permitted sends a change, or a request to measure. Where it takes a token, it asks for one and tries again.
export async function permitted(send, what = "Changes need") {
  for (;;) {
    try {
      return await send();
    } catch (err) {
      if (!(err instanceof Refusal) || !err.wantsToken) throw err;
      const asked = token.get() === "" ? `${what} the token that shapectl serve reads from --token-file.` : `The token was refused: ${visible(err.message)}.`;
      if (!(await askToken(asked))) throw new Refusal("nothing was done: this needs the token", err.status);
    }
  }
}

// tell shows an error that nothing else on the page has a place for.
export const tell = (title, text) => dialog(title, h("p", null, visible(text)), { submit: "OK", cancel: "Close" }, () => true);

// reverts are the times after which an unconfirmed change reverts.
export const reverts = { "30s": "30 s", "60s": "1 min", "5m": "5 min", "30m": "30 min" };

// confirmRate shows what a change of a rate does, and makes it. It resolves to true if it was made.
export function confirmRate(r, wanted, confirm) {
  const before = r.rate_bits_per_second;
  const now = asRate(wanted);
  const factor = before && now ? now / before : NaN;
  const how = !Number.isNaN(factor) && factor !== 1 ? (factor > 1 ? `${percent((factor - 1) * 100)} more than now` : `${percent((1 - factor) * 100)} less than now`) : "";
  const far = factor >= 50 || factor <= 0.02;
  return dialog("Change this rate?", [
    h("p", null, r.kind === "pool" ? "Pool " : `${visible(`${r.device} ${r.direction}`)} `, h("strong", null, name(titleOf(r)))),
    h("dl", { class: "change" },
      h("div", null, h("dt", null, "now"), h("dd", null, rate(before))), h("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      h("div", null, h("dt", null, "after"), h("dd", null, visible(wanted)))),
    far ? h("p", { class: "banner warn" }, h("strong", null, `${how}. Is the unit right?`)) : how ? h("p", { class: "muted" }, how, ". Buckets and counters are kept.") : null,
    h("p", null, confirm ? `The change reverts after ${reverts[confirm]} unless you confirm it, even if you lose the connection.` : "The change does not revert by itself."),
    h("code", { class: "command" }, commandLine(calls.command(r, visible(wanted), confirm))),
  ], { submit: confirm ? `Try for ${reverts[confirm]}` : "Change" }, () => permitted(() => calls.setRate(r, wanted, confirm)));
}
