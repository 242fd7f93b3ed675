"use strict";
// ---- elements and numbers; everything a model wrote reaches the page as text nodes, never as markup

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return made;
}

function shape(tag, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const show = {
  percent: value => value === null ? "–" : (100 * value).toFixed(1) + " %",
  tokens: value => value === null ? "–" : Math.round(value).toLocaleString("en") + " tokens",
  plain: value => value === null ? "–" : value.toFixed(2),
  count: value => Number(value).toLocaleString("en"),
  seconds: value => value < 0.995 ? value.toFixed(2) + " s" : value < 90 ? value.toFixed(1) + " s" : value < 5400 ? (value / 60).toFixed(1) + " min" : (value / 3600).toFixed(1) + " h",
};
const plural = (count, one, many) => `${show.count(count)} ${count === 1 ? one : many || one + "s"}`;
const words = text => text.replaceAll("_", " ");

function table(head, rows, kind) {
  const body = node("tbody", {}, rows.map(row => node("tr", {}, row.map(cell => node("td", {}, cell)))));
  const top = head ? node("thead", {}, node("tr", {}, head.map(cell => node("th", { scope: "col" }, cell)))) : null;
  return node("div", { class: `card scroll ${kind || ""}` }, node("table", {}, top, body));
}

function section(id, title, ...children) {
  return node("section", { id }, node("h2", {}, title), ...children);
}
