// Makes and changes elements. Text is only ever set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(el, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "class") el.setAttribute("class", value);
    else if (name === "value" || name === "checked" || name === "disabled") el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

// h makes an element of HTML: h("a", { href: "#", class: "chip" }, "text", element, ...).
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

// s makes an element of SVG.
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

export const byID = (id) => document.getElementById(id);

// setText changes the text of an element only if it differs, so that screen readers and selections are not disturbed.
export function setText(el, text) {
  if (el.textContent !== text) el.textContent = text;
}

// setAttr sets an attribute, or removes it for null.
export function setAttr(el, name, value) {
  if (value === null || value === undefined) {
    if (el.hasAttribute(name)) el.removeAttribute(name);
  } else if (el.getAttribute(name) !== String(value)) {
    el.setAttribute(name, value);
  }
}

// Rows keeps the children of an element the same as a list of items: one element for each key, in order. An element is
// made once and then updated, so that focus and hover stay where they are.
export class Rows {
  #parent;
  #make;
  #update;
  #have = new Map();

  // make(item) makes an element, update(element, item) shows an item in it.
  constructor(parent, make, update) {
    this.#parent = parent;
    this.#make = make;
    this.#update = update;
  }

  show(items, keyOf) {
    const left = this.#have;
    this.#have = new Map();
    let at = this.#parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      if (this.#have.has(key)) continue;
      const el = left.get(key) ?? this.#make(item);
      left.delete(key);
      this.#have.set(key, el);
      this.#update(el, item);
      if (el === at) {
        at = at.nextSibling;
        continue;
      }
      // Moving an element takes its focus away.
      const focus = el.contains(document.activeElement) ? document.activeElement : null;
      this.#parent.insertBefore(el, at);
      focus?.focus({ preventScroll: true });
    }
    for (const el of left.values()) el.remove();
  }
}

// visible is text from outside as one line: characters that would not show, but act, are escaped as on the command line.
export function visible(text) {
  return String(text ?? "").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu, (c) => {
    if (c === "\u200c" || c === "\u200d") return c; // some languages need these joiners
    let out = "";
    for (let i = 0; i < c.length; i++) out += "\\u" + c.charCodeAt(i).toString(16).padStart(4, "0");
    return out;
  });
}

// name is text from outside that keeps its direction of writing to itself.
export function name(text, props) {
  return h("bdi", props, visible(text));
}

// commandLine is a command as text that may break before an option, not within one.
export const commandLine = (text) => text.split(" --").flatMap((part, i) => (i ? [" ", h("span", { class: "nowrap" }, `--${part}`)] : [part]));

// searchField puts a magnifying glass before a field.
export function searchField(input) {
  return h("div", { class: "search" },
    s("svg", { viewBox: "0 0 16 16", fill: "none", stroke: "currentColor", "stroke-width": 1.75, "stroke-linecap": "round", "aria-hidden": "true" }, s("circle", { cx: 7, cy: 7, r: 4.5 }), s("path", { d: "m10.5 10.5 3.5 3.5" })), input);
}
