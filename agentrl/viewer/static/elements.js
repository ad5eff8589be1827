/* The pages of `agentrl view`: elements, data, addresses. The other scripts use what this one defines.

Text of a run reaches the page only as text nodes, never as HTML. */
"use strict";

const PAGE_ROWS = 50;
const MAX_TEXT = 20000;
const EXPORT = window.AGENTRL_EXPORT || null;

// Elements and numbers

const SHOWN = new Set(["title", "alt", "aria-label", "placeholder"]);

/** Make an element; children are elements or texts. Control characters of texts are escaped. */
function h(tag, attributes, ...children) {
  const space = tag === "svg" || h.svg.has(tag) ? "http://www.w3.org/2000/svg" : null;
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "disabled") element[key] = value;
    else element.setAttribute(key, value === true ? "" : SHOWN.has(key) ? visible(value) : value);
  }
  const given = children.flat().filter((child) => child !== null && child !== undefined);
  element.append(...given.map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}
h.svg = new Set(["path", "line", "rect", "g", "text", "title"]);

const $ = (id) => document.getElementById(id);
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** Replace control characters, also those that change the direction of text, by their codes. */
const visible = (text) => String(text).replace(CONTROL,
  (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

const shorten = (text, length) => (text.length > length
  ? `${text.slice(0, length)}… (${WHOLE.format(text.length)} characters)` : text);

const WHOLE = new Intl.NumberFormat("en");  // much faster than toLocaleString

/** Write a number with four significant digits; other values as they are. */
function num(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return WHOLE.format(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}
const fixed = (value, digits) => (typeof value === "number" ? value.toFixed(digits) : num(value));
function seconds(value) {
  if (typeof value !== "number") return "–";
  return value > 0 && value < 0.0995 ? `${num(1000 * value, 2)} ms` : `${fixed(value, value < 10 ? 2 : 1)} s`;
}
const damagedLines = (number) => `${num(number)} damaged line${number === 1 ? "" : "s"} left out`;
const outcomeClass = (outcome) => (outcome === "ok" ? "good" : "bad");

/** Show a long text; what exceeds the limit is added by a button. */
function textBlock(text) {
  const whole = visible(text);
  const block = h("pre", { dir: "auto" }, whole.slice(0, MAX_TEXT));
  if (whole.length <= MAX_TEXT) return block;
  const more = h("button", { onclick: () => { block.textContent = whole; more.remove(); } },
    `Show all ${WHOLE.format(whole.length)} characters`);
  return h("div", {}, block, more);
}

/** Make a table; a column is `[title, cell, isNumber]`. */
function tableOf(columns, rows, none, attributes = {}) {
  if (!rows.length) return h("p", { class: "dim" }, none);
  const kind = (column) => (column[2] ? { class: "num" } : {});
  return h("div", { class: "scroll" }, h("table", attributes,
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", kind(column), column[0])))),
    h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column) => h("td", kind(column), column[1](row))))))));
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

// Data

let numLoads = 0;

function queryOf(parameters) {
  const query = new URLSearchParams();
  for (const key of Object.keys(parameters).sort()) {
    const value = parameters[key];
    if (value !== "" && value !== null && value !== undefined) query.set(key, value);
  }
  return query.toString();
}

/** Answer a query: from the server, or from the files of an export. */
async function get(name, parameters = {}) {
  numLoads += 1;
  document.body.dataset.loading = numLoads;
  try {
    if (EXPORT) return await fromExport(name, parameters);
    const answer = await fetch(`api/${name}?${queryOf(parameters)}`);
    const value = await answer.json();
    if (!answer.ok) throw new Error(value.error);
    showError("");
    return value;
  } catch (error) {
    const isGone = error instanceof TypeError;
    const reason = isGone ? new Error("The server does not answer. Is `agentrl view` still running?") : error;
    showError(reason.message);
    throw reason;
  } finally {
    numLoads -= 1;
    document.body.dataset.loading = numLoads;
  }
}

async function fromExport(name, parameters) {
  if (name === "list") return listFromExport(parameters);
  const key = `${name}?${queryOf(parameters)}`;
  if (!(key in EXPORT.answers) && parameters.id) await loadScript(EXPORT.files[`${parameters.run}/${parameters.id}`]);
  if (!(key in EXPORT.answers)) throw new Error(`not in this export: ${key}`);
  return EXPORT.answers[key];
}

function loadScript(source) {
  return new Promise((resolve, reject) => {
    if (!source) return reject(new Error("this trajectory is not in the export"));
    return document.head.append(h("script", { src: source, onload: resolve, onerror: reject }));
  });
}

/** Filter and sort the exported trajectories as the server does. */
function listFromExport(q) {
  const all = EXPORT.lists[q.run];
  const low = q.min_reward ? Number(q.min_reward) : -Infinity, high = Number(q.max_reward);
  const words = (q.text || "").toLowerCase();
  const found = all.filter((row) => (!q.file || row.id.startsWith(`${q.file}:`))
    && (!q.end || row.end === q.end) && (!q.source || row.source === q.source)
    && (!q.uid || row.uid === q.uid)
    && (!q.tool && !q.outcome || row.all_calls.some(([tool, outcome]) => (!q.tool || tool === q.tool)
      && (!q.outcome || outcome === q.outcome)))
    && (!q.min_reward && !q.max_reward || row.reward !== null && row.reward >= low && (!q.max_reward || row.reward < high))
    && (!words || row.text.includes(words)));
  const toolSeconds = (row) => row.all_calls.reduce((sum, [tool, , worked]) => sum + (!q.tool || tool === q.tool ? worked : 0), 0);
  const rows = found.map((row) => ({ ...row, tool_seconds: toolSeconds(row) }));
  const column = (q.sort || "").replace("-", ""), sign = (q.sort || "").startsWith("-") ? -1 : 1;
  const order = (a, b, key) => ((a[key] === null) - (b[key] === null))
    || sign * (a[key] > b[key] ? 1 : a[key] < b[key] ? -1 : 0);
  if (column && column !== "id") {
    rows.sort((a, b) => order(a, b, column) || (column === "reward" ? order(a, b, "advantage") : 0));
  }
  const offset = q.offset || 0;
  const files = known.runs[q.run].files.filter((one) => !q.file || one.label === q.file);
  const damaged = files.reduce((sum, { label }) => sum + EXPORT.answers[`step?${queryOf({ run: q.run, file: label })}`].damaged.length, 0);
  return { total: rows.length, offset, rows: rows.slice(offset, offset + PAGE_ROWS), files: 1, indexed: 1, damaged,
    hidden: ["step", "source"].filter((key) => new Set(rows.map((row) => row[key])).size < 2) };
}

function showError(text) {
  $("error").textContent = visible(text);
  $("error").hidden = !text;
}

// Where the page is: `#/page?key=value`

let known = { runs: [], differences: [] };

function address() {
  const [path, query] = location.hash.slice(2).split("?");
  return { page: path || "runs", ...Object.fromEntries(new URLSearchParams(query || "")) };
}
const link = (name, parameters) => `#/${name}?${queryOf(parameters)}`;
const go = (name, parameters) => { location.hash = link(name, parameters); };
const change = (parameters) => {
  const { page: name, ...now } = address();
  history.replaceState(null, "", link(name, { ...now, ...parameters }));
};
const runNumber = () => Number(address().run || 0);
const run = () => known.runs[runNumber()] || known.runs[0];
