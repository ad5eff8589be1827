/* The pages of a step and of the list of trajectories. */
"use strict";

// Step

/** Make the choice of a rollout file, with buttons for the one before and after; `refresh` adds new files. */
function fileChoice(file, onchange, withAll) {
  const labels = () => run().files.map((one) => one.label);
  const move = (by) => { const all = labels(), at = all.indexOf(file); if (at >= 0 && all[at + by]) onchange(all[at + by]); };
  const select = h("select", { id: "file", onchange: (e) => onchange(e.target.value) });
  const before = h("button", { onclick: () => move(1), title: "Step before (←)" }, "←");
  const after = h("button", { onclick: () => move(-1), title: "Step after (→)" }, "→");
  const refresh = () => {
    const all = labels(), at = all.indexOf(file);
    if (select.options.length !== all.length + (withAll ? 1 : 0)) {
      select.replaceChildren(...(withAll ? [h("option", { value: "" }, "all")] : []), ...all.map((label) => h("option", { value: label }, label)));
      select.value = file;
    }
    before.disabled = at < 0 || at + 1 >= all.length;
    after.disabled = at <= 0;
  };
  refresh();
  return { move, refresh, content: [h("label", {}, "File ", select), before, after] };
}

const noRollouts = () => h("p", { class: "dim" }, run().rollout_folder
  ? `This run has no saved rollouts: its folder ${run().rollout_folder} is missing or empty.`
  : "This run has no saved rollouts. Set trainer.rollout_data_dir to save them.");

async function stepPage(at) {
  if (!run().files.length) return { title: "Step", content: [noRollouts()], update: () => run().files.length && show() };
  const file = at.file || run().files[0].label;
  const [otherRun, otherFile] = (at.with || "").split(/:(.*)/);
  const [step, other] = await Promise.all([get("step", { run: runNumber(), file }),
    at.with ? get("step", { run: Number(otherRun), file: otherFile }) : null]);
  const choice = fileChoice(file, (value) => go("step", { run: at.run, file: value }));
  const list = (more) => link("list", { run: at.run, file, ...more });
  const news = h("a", {});
  const showNews = () => {
    const newer = run().files.findIndex((one) => one.label === file);
    news.textContent = newer > 0 ? `${num(newer)} newer` : "";
    news.href = link("step", { run: at.run, file: run().files[0].label });
  };
  showNews();
  const more = step.num_groups > step.groups.length ? `The ${step.groups.length} of ${num(step.num_groups)} groups with the largest spread.` : "";
  return {
    title: `Step ${file}`,
    keys: { ArrowLeft: () => choice.move(1), ArrowRight: () => choice.move(-1) },
    update: () => { choice.refresh(); showNews(); },
    content: [
      h("div", { class: "bar" }, choice.content, compareChoice(at, file), h("a", { href: list() }, `${num(step.num)} trajectories`),
        h("a", { href: list({ sort: "reward" }) }, "the worst first"), news,
        step.damaged.length ? h("span", { class: "bad" }, damagedLines(step.damaged.length)) : null),
      ...(other ? changes(step, other, at) : []),
      h("div", { class: "four" }, step.histograms.map((one) => bars(one, file))),
      h("div", { class: "two" },
        h("section", {}, h("h2", {}, "Ends"), countTable("End", step.ends, step.num, (end) => list({ end }))),
        h("section", {}, h("h2", {}, "Tool calls ", h("span", { class: "dim" }, "mean time in the queue and at work; sum of all")), toolTable(step.tools, list)),
        h("section", {}, h("h2", {}, "Slowest requests"), slowTable(step.slowest, at.run)),
        h("section", {}, h("h2", {}, "Failures"), failureTable(step.failures, at.run))),
      h("h2", {}, "Groups"), groupTable(step, at.run, more)],
  };
}

/** Make the choice of a step to compare with: of this run, or the same step of another one. */
function compareChoice(at, file) {
  const options = known.runs.flatMap((one) => one.files
    .filter(({ label }) => (one.run === runNumber() ? label !== file : label.split("/").pop() === file.split("/").pop()))
    .map(({ label }) => h("option", { value: `${one.run}:${label}`, selected: at.with === `${one.run}:${label}` },
      one.run === runNumber() ? label : `${one.name}: ${label}`)));
  return h("label", {}, "Compare with ", h("select", { id: "with", onchange: (e) => go("step", { run: at.run, file, with: e.target.value }) },
    h("option", { value: "" }, "nothing"), options));
}

function changes(step, other, at) {
  const here = new Map(step.summary), there = new Map(other.summary);
  const names = [...new Set([...here.keys(), ...there.keys()])];
  const value = (figures, name) => figures.get(name) ?? (name.endsWith("share") ? 0 : null);
  const shown = (name, x) => (name.endsWith("share") && x !== null ? `${fixed(100 * x, 1)} %` : num(x, 3));
  const difference = (name) => {
    const [a, b] = [value(here, name), value(there, name)];
    if (a === null || b === null) return "–";
    return `${a > b ? "+" : ""}${shown(name, a - b)}`;
  };
  const title = at.with.split(/:(.*)/)[1];
  return [h("h2", {}, "Compared"), tableOf([
    ["Figure", (name) => name.replace(/, share$/, "")],
    ["This step", (name) => shown(name, value(here, name)), true],
    [Number(at.with.split(":")[0]) === runNumber() ? title : known.runs[Number(at.with.split(":")[0])].name, (name) => shown(name, value(there, name)), true],
    ["Difference", difference, true],
  ], names, "None.", { id: "changes" })];
}

function bars(bins, file) {
  const width = 300, height = 120, left = 30, top = 6, bottom = 18, most = Math.max(1, ...bins.counts);
  const summary = bins.counts.length
    ? `mean ${num(bins.mean, 3)}, median ${num(bins.median, 3)}, p95 ${num(bins.p95, 3)}` : "no values";
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}` });
  const size = (width - left) / Math.max(1, bins.counts.length);
  for (const [y, count] of [[top, most], [height - bottom, 0]]) {
    svg.append(h("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }),
      h("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, bins.counts.length ? axisNumber(count) : ""));
  }
  bins.counts.forEach((count, i) => {
    const tall = (count / most) * (height - bottom - top);
    const range = bins.is_whole ? num(bins.edges[i] + 0.5) : `${num(bins.edges[i])} to ${num(bins.edges[i + 1])}`;
    const column = h("rect", { class: "column", x: left + i * size + 0.5, width: Math.max(1, size - 1), y: height - bottom - tall, height: tall },
      h("title", {}, `${range} ${bins.unit}: ${num(count)}`));
    const isReward = bins.name === "reward" && count;
    const target = h("g", isReward ? { role: "link", class: "pick", onclick: () => go("list", { run: runNumber() || "", file,
      min_reward: bins.edges[i], max_reward: i + 1 < bins.counts.length ? bins.edges[i + 1] : "" }) } : {}, column);
    svg.append(target);
  });
  if (bins.counts.length) {
    const [first, last] = bins.is_whole ? [left + size / 2, width - size / 2] : [left, width];
    const anchors = bins.is_whole ? ["middle", "middle"] : ["start", "end"];
    svg.append(h("text", { x: first, y: height - 4, "text-anchor": anchors[0] }, num(bins.min)),
      bins.max > bins.min ? h("text", { x: last, y: height - 4, "text-anchor": anchors[1] }, num(bins.max)) : "");
  }
  const names = { reward: "Reward", response: "Response, tokens", turns: "Turns", duration: "Duration, s" };
  return h("figure", {}, h("figcaption", {}, names[bins.name]), h("div", { class: "dim" }, summary, bins.missing ? `, ${num(bins.missing)} without` : ""), svg);
}

const countTable = (name, counts, total, href) => tableOf([
  [name, ([key]) => h("a", { href: href(key) }, key || "none")],
  ["Number", ([, count]) => num(count), true],
  ["Share", ([, count]) => `${fixed((100 * count) / total, 1)} %`, true],
], counts, "None.");

const toolTable = (tools, list) => tableOf([
  ["Tool", (row) => (row.tool ? h("a", { href: list({ tool: row.tool }) }, row.tool) : row.tool === null ? "other tools" : "no name")],
  ["Calls", (row) => num(row.calls), true],
  ["Outcomes", (row) => row.outcomes.flatMap(([outcome, count]) => [
    h("a", { class: `nowrap ${outcomeClass(outcome)}`, href: row.tool === null ? null : list({ tool: row.tool, outcome }) }, `${outcome} ${num(count)}`), " "])],
  ["Queue", (row) => seconds(row.queue_s), true],
  ["Work", (row) => seconds(row.work_s), true],
  ["Longest", (row) => seconds(row.max_work_s), true],
  ["Sum", (row) => seconds(row.total_s), true],
], tools, "No tool was called.");

const openLink = (row, runId, text) => h("a", { href: link("trajectory", { run: runId, id: row.id }) }, text);

const slowTable = (rows, runId) => tableOf([
  ["Request", (row) => openLink(row, runId, row.request_id)],
  ["Duration", (row) => seconds(row.seconds), true],
  ["Tokens", (row) => num(row.tokens), true],
  ["Turns", (row) => num(row.turns), true],
  ["End", (row) => row.end],
], rows, "None.");

const failureTable = (rows, runId) => tableOf([
  ["Fault", (row) => row.fault],
  ["Number", (row) => num(row.num), true],
  ["Message", (row) => openLink(row, runId, shorten(row.message, 200))],
], rows, "No request failed.");

function groupTable(step, runId, more) {
  const table = (rows, id) => tableOf([
    ["Group", (row) => h("span", { class: "nowrap" }, row.uid)],
    ["Mean reward", (row) => fixed(row.mean, 3), true],
    ["Spread", (row) => fixed(row.spread, 3), true],
    ["Samples", (row) => h("div", { class: "chips" }, row.samples.map((one) => chip(one, runId)))],
  ], rows, "None has a spread.", { class: "groups", id });
  const spread = step.groups.filter((row) => row.spread), flat = step.groups.filter((row) => !row.spread);
  const number = flat.length + step.num_groups - step.groups.length;  // those with a spread are listed first
  return h("div", {}, h("p", { class: "dim" }, `Each sample: reward, and mean advantage of its trained tokens if it was saved. ${more}`),
    table(spread, "groups"),
    flat.length ? h("details", {}, h("summary", {}, `${num(number)} group${number === 1 ? "" : "s"} without spread`), table(flat, "flat-groups")) : null);
}

function chip(one, runId, isHere) {
  const advantage = typeof one.advantage === "number" ? ` (${one.advantage >= 0 ? "+" : "-"}${Math.abs(one.advantage).toFixed(2)})` : "";
  const isFailed = one.is_failed || one.state === "failed";
  return h("a", { class: `chip${isFailed ? " bad" : ""}`, "aria-current": isHere ? "true" : null, title: one.end,
    href: link("trajectory", { run: runId, id: one.id }) }, fixed(one.reward, 2) + advantage);
}

// Trajectories

const MAX_EXCERPT = 160;  // longer answers come as their end
const COLUMNS = [
  ["step", "Step", (row) => num(row.step), true], ["", "Request", (row) => row.request_id],
  ["reward", "Reward", (row) => fixed(row.reward, 3), true],
  ["", "Advantage", (row) => fixed(row.advantage, 3), true],
  ["end", "End", (row) => h("span", { class: row.state === "failed" ? "bad" : "" }, row.end)],
  ["turns", "Turns", (row) => num(row.turns), true], ["tokens", "Tokens", (row) => num(row.tokens), true],
  ["trained", "Trained", (row) => num(row.trained), true],
  ["calls", "Calls", (row) => (row.bad_calls ? h("span", { class: "bad" }, `${row.calls} (${row.bad_calls} not ok)`) : num(row.calls)), true],
  ["tool_seconds", "Tools s", (row) => fixed(row.tool_seconds, 3), true],
  ["seconds", "Duration", (row) => seconds(row.seconds), true], ["source", "Source", (row) => row.source],
  ["", "Last answer", (row) => (row.excerpt.length < MAX_EXCERPT ? row.excerpt : `…${row.excerpt}`)],
];
const TYPING_MS = 40;  // between a key and the query
let lastList = "";
const FILTERS = ["file", "end", "tool", "outcome", "source", "uid", "text", "min_reward", "max_reward", "sort"];

async function listPage(at) {
  if (!run().files.length) return { title: "Trajectories", content: [noRollouts()], update: () => run().files.length && show() };
  const filters = Object.fromEntries(FILTERS.map((key) => [key, at[key] || ""]));
  if (!("file" in at)) filters.file = run().files[0].label;
  if (at.file === "all") filters.file = "";
  let offset = Number(at.offset || 0), rows = [], columns = COLUMNS, selected = 0, asked = 0, timer = 0;
  const count = h("span", { class: "dim", id: "count" });
  const body = h("tbody", {});
  const heads = h("tr", {});
  const pager = h("div", { class: "bar" });
  const open = (i) => rows[i] && go("trajectory", { run: at.run, id: rows[i].id });
  const select = (i) => {
    selected = Math.max(0, Math.min(rows.length - 1, i));
    [...body.children].forEach((line, j) => line.setAttribute("aria-selected", j === selected));
    if (body.children[selected]) body.children[selected].scrollIntoView({ block: "nearest" });
  };
  const load = async () => {
    const mine = asked += 1;
    change({ ...filters, file: filters.file || "all", offset: offset || "" });
    lastList = location.hash;
    const found = await get("list", { run: runNumber(), ...filters, offset, limit: PAGE_ROWS });
    if (mine !== asked) return;
    rows = found.rows;
    columns = COLUMNS.filter(([key]) => !found.hidden.includes(key));
    body.replaceChildren(...rows.map((row, i) => h("tr", { onclick: () => open(i) },
      columns.map(([, title, cell, isNumber]) => h("td", { class: isNumber ? "num" : title === "Last answer" ? "cut" : "nowrap", "data-column": title, dir: title === "Last answer" ? "auto" : null }, cell(row))))));
    const pending = !filters.file && found.indexed < found.files ? ` (in ${found.indexed} of ${found.files} files; the others are being read)` : "";
    count.textContent = `${num(found.total)} trajectories${pending}${found.damaged ? `, ${damagedLines(found.damaged)}` : ""}`;
    count.dataset.total = found.total;
    fillHeads();
    const last = Math.max(0, Math.ceil(found.total / PAGE_ROWS) - 1), now = Math.floor(offset / PAGE_ROWS);
    pager.replaceChildren(
      h("button", { disabled: now === 0, onclick: () => turn(-1), title: "Page before (p)" }, "← Before"),
      h("span", { class: "dim" }, `page ${num(now + 1)} of ${num(last + 1)}`),
      h("button", { disabled: now >= last, onclick: () => turn(1), title: "Next page (n)" }, "Next →"));
    page.isLast = now >= last;
    select(Math.min(selected, rows.length - 1));
  };
  const turn = (by) => { if ((by < 0 && offset > 0) || (by > 0 && !page.isLast)) { offset += by * PAGE_ROWS; selected = 0; load(); } };
  const set = (key, value, wait = 0) => {
    filters[key] = value; offset = 0; selected = 0;
    clearTimeout(timer);
    timer = setTimeout(load, wait);
  };
  const fillHeads = () => heads.replaceChildren(...columns.map(([key, title, , isNumber]) => {
    if (!key) return h("th", { class: isNumber ? "num" : "" }, title);
    const order = filters.sort === key ? "ascending" : filters.sort === `-${key}` ? "descending" : null;
    const mark = { ascending: " ↑", descending: " ↓" }[order] || "";
    return h("th", { class: isNumber ? "num" : "", "aria-sort": order }, h("button", {
      onclick: () => set("sort", order === "ascending" ? `-${key}` : order === "descending" ? "" : key) }, title + mark));
  }));
  const pick = (key, label, values) => h("label", {}, `${label} `, h("select", { id: key, onchange: (e) => set(key, e.target.value) },
    h("option", { value: "" }, "any"), values.map((value) => h("option", { value, selected: filters[key] === value }, value))));
  const reward = (key, label) => h("input", { id: key, type: "number", step: "any", placeholder: label, value: filters[key], "aria-label": `Reward ${label}`,
    oninput: (e) => set(key, e.target.value, TYPING_MS) });
  const choice = fileChoice(filters.file, (value) => go("list", { run: at.run, ...filters, file: value || "all" }), true);
  const choices = await get("choices", { run: runNumber(), file: filters.file });
  const search = h("input", { type: "search", id: "search", placeholder: "Find text (/)", "aria-label": "Find text", value: filters.text, oninput: (e) => set("text", e.target.value, TYPING_MS) });
  return {
    title: "Trajectories", draw: load,
    update: () => { choice.refresh(); if (!filters.file) load(); },
    keys: { j: () => select(selected + 1), k: () => select(selected - 1), Enter: () => open(selected),
      n: () => turn(1), p: () => turn(-1), ArrowLeft: () => choice.move(1), ArrowRight: () => choice.move(-1) },
    content: [h("div", { class: "bar" }, choice.content, search, pick("end", "End", choices.ends), pick("tool", "Tool", choices.tools),
      pick("outcome", "Outcome", choices.outcomes), pick("source", "Source", choices.sources),
      h("span", {}, h("span", { class: "dim" }, "Reward "), reward("min_reward", "from"), " ", reward("max_reward", "below")),
      filters.uid ? h("span", { class: "chip" }, `group ${filters.uid}`) : null,
      h("button", { onclick: () => go("list", { run: at.run, file: filters.file || "all" }) }, "Clear")),
    h("div", { class: "bar" }, count, h("span", { class: "grow" }), pager),
    h("div", { class: "scroll list-space" }, h("table", { class: "list" }, h("thead", {}, heads), body))],
  };
}
