/* The pages of `agentrl view`. Text of a run reaches the page only as text nodes, never as HTML. */
"use strict";

(() => {
  const PAGE_ROWS = 50;
  const PAGE_TOKENS = 500;
  const MAX_TEXT = 20000;
  const MAX_TOKEN = 80;
  const MAX_THUMBNAIL = 256;
  const POLL_MS = 3000;
  const FIRST_METRICS = ["rollout/combined_reward/mean", "rollout/reward/mean", /^val\/.*\/success$/,
    "response_length/mean", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "timing_s/step"];
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
    ? `${text.slice(0, length)}… (${text.length.toLocaleString("en")} characters)` : text);

  /** Write a number with four significant digits; other values as they are. */
  function num(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
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
      `Show all ${whole.length.toLocaleString("en")} characters`);
    return h("div", {}, block, more);
  }

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
      showError(isGone ? "The server does not answer. Is `agentrl view` still running?" : error.message);
      throw error;
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
    const rows = all.filter((row) => (!q.file || row.id.startsWith(`${q.file}:`))
      && (!q.end || row.end === q.end) && (!q.source || row.source === q.source)
      && (!q.uid || row.uid === q.uid)
      && (!q.tool && !q.outcome || row.all_calls.some(([tool, outcome]) => (!q.tool || tool === q.tool)
        && (!q.outcome || outcome === q.outcome)))
      && (!q.min_reward && !q.max_reward || row.reward !== null && row.reward >= low && (!q.max_reward || row.reward < high))
      && (!words || row.text.includes(words)));
    const column = (q.sort || "").replace("-", ""), sign = (q.sort || "").startsWith("-") ? -1 : 1;
    if (column && column !== "id") {
      rows.sort((a, b) => ((a[column] === null) - (b[column] === null))
        || sign * (a[column] > b[column] ? 1 : a[column] < b[column] ? -1 : 0));
    }
    const offset = q.offset || 0;
    const files = known.runs[q.run].files.filter((one) => !q.file || one.label === q.file);
    const damaged = files.reduce((sum, { label }) => sum + EXPORT.answers[`step?${queryOf({ run: q.run, file: label })}`].damaged.length, 0);
    return { total: rows.length, offset, rows: rows.slice(offset, offset + PAGE_ROWS), files: 1, indexed: 1, damaged };
  }

  function showError(text) {
    $("error").textContent = visible(text);
    $("error").hidden = !text;
  }

  // Where the page is: `#/page?key=value`

  let known = { runs: [], differences: [] };
  let shown = 0;
  let page = { keys: {} };

  function place() {
    const [path, query] = location.hash.slice(2).split("?");
    return { page: path || "runs", ...Object.fromEntries(new URLSearchParams(query || "")) };
  }
  const link = (name, parameters) => `#/${name}?${queryOf(parameters)}`;
  const go = (name, parameters) => { location.hash = link(name, parameters); };
  const change = (parameters) => {
    const { page: name, ...now } = place();
    history.replaceState(null, "", link(name, { ...now, ...parameters }));
  };
  const runNumber = () => Number(place().run || 0);
  const run = () => known.runs[runNumber()] || known.runs[0];

  async function show() {
    const at = place();
    const pages = { runs: runsPage, step: stepPage, list: listPage, trajectory: trajectoryPage };
    const mine = shown += 1;
    for (const item of $("pages").children) {
      const isHere = item.dataset.page === at.page || (at.page === "trajectory" && item.dataset.page === "list");
      if (isHere) item.setAttribute("aria-current", "page"); else item.removeAttribute("aria-current");
      item.href = link(item.dataset.page, item.dataset.page === "runs" ? {} : { run: runNumber() || "" });
    }
    try {
      const next = await (pages[at.page] || runsPage)(at);
      if (mine !== shown) return;
      page = { keys: {}, ...next };
      $("main").replaceChildren(...page.content);
      performance.mark("content");
      document.title = visible(`${page.title} – agentrl`);
      showHeader();
      if (page.draw) page.draw();
      document.body.dataset.ready = at.page;
    } catch (error) {
      if (mine === shown) $("main").replaceChildren(h("p", { class: "dim" }, error.message));
    }
  }

  function showHeader() {
    const select = $("run");
    const names = known.runs.map((one) => one.name).join("\n");
    if (select.dataset.names !== names) {
      select.replaceChildren(...known.runs.map((one) => h("option", { value: one.run }, one.name)));
      select.dataset.names = names;
    }
    select.value = runNumber();
    $("run-label").hidden = place().page === "runs";
    const one = run();
    $("state").textContent = one && place().page !== "runs"
      ? `${one.state}${one.step === null ? "" : `, step ${num(one.step)}`}` : "";
  }

  async function poll() {
    if (EXPORT || document.hidden) return;
    const before = JSON.stringify(known);
    try { known = await get("runs"); } catch { return; }
    if (JSON.stringify(known) === before) return;
    showHeader();
    if (page.update) page.update();
  }

  // Runs

  const view = { smooth: 0, log: false, x: "step", search: "", chosen: new Set(), isChosen: false };
  const AXES = { step: "step", time: "time", tokens: "tokens", trained: "trained tokens" };

  async function runsPage() {
    const names = () => [...new Set(known.runs.flatMap((one) => one.names))].sort();
    const chooseFirst = () => {  // a run that has just started has no metrics yet
      if (view.isChosen || !names().length) return;
      const found = (want) => names().filter((name) => (want.test ? want.test(name) : want === name));
      view.chosen = new Set(FIRST_METRICS.flatMap(found).slice(0, 8));
      view.isChosen = true;
    };
    chooseFirst();
    const list = h("ul", { "aria-label": "Metrics" });
    const charts = h("div", { class: "charts" });
    const table = h("div", { class: "scroll" });
    const fillNames = () => {
      const words = view.search.toLowerCase().split(" ");
      const found = names().filter((name) => words.every((word) => name.toLowerCase().includes(word)));
      list.replaceChildren(...found.map((name) => h("li", {}, h("label", {},
        h("input", { type: "checkbox", checked: view.chosen.has(name), onchange: (event) => {
          if (event.target.checked) view.chosen = new Set([name, ...view.chosen]); else view.chosen.delete(name);
          draw();
        } }), name))));
    };
    let axes = [], curves = new Map(), lines = "";
    const draw = async () => {
      const now = known.runs.map((one) => one.num_lines).join() + known.runs.map((one) => one.files.filter((f) => f.is_indexed).length).join();
      if (now !== lines) { curves = new Map(); axes = []; lines = now; }
      const missing = [...view.chosen].filter((name) => !curves.has(name));
      if (!axes.length) axes = await Promise.all(known.runs.map((one) => get("axes", { run: one.run })));
      await Promise.all(missing.map(async (name) => {
        curves.set(name, await Promise.all(known.runs.map((one) => (one.names.includes(name)
          ? get("curve", { run: one.run, name }) : { at: [], y: [] }))));
      }));
      charts.replaceChildren(...[...view.chosen].filter((name) => curves.has(name)).map((name) => chart(name,
        chartWidth(charts), curves.get(name).map((curve, i) => curve.at.map((at, j) => [axes[i][view.x][at], curve.y[j], axes[i].step[at]])
          .filter(([x, y]) => typeof x === "number" && typeof y === "number")))));
      if (!view.chosen.size) charts.replaceChildren(h("p", { class: "dim" }, names().length ? "Choose metrics in the list." : "There are no metrics yet."));
    };
    const fillTable = () => table.replaceChildren(h("table", { id: "runs-table" },
      h("thead", {}, h("tr", {}, ["Run", "State"].map((name) => h("th", {}, name)), h("th", { class: "num" }, "Step"),
        h("th", { class: "num" }, "Rollout files"), h("th", {}, "Folder"))),
      h("tbody", {}, known.runs.map((one) => h("tr", {},
        h("td", { class: "nowrap" }, h("span", { class: `swatch run-${one.run % 6}` }), h("a", { href: link("step", { run: one.run || "" }) }, one.name)),
        h("td", {}, one.state), h("td", { class: "num" }, num(one.step)), h("td", { class: "num" }, num(one.files.length)),
        h("td", { class: "dim" }, one.folder))))));
    const control = (label, input) => h("label", {}, `${label} `, input);
    const controls = h("div", { class: "bar" },
      control("X axis", h("select", { id: "x", onchange: (e) => { view.x = e.target.value; draw(); } },
        Object.entries(AXES).map(([key, name]) => h("option", { value: key, selected: view.x === key }, name)))),
      control("Smoothing", h("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth,
        oninput: (e) => { view.smooth = Number(e.target.value); draw(); } })),
      h("label", {}, h("input", { id: "log", type: "checkbox", checked: view.log, onchange: (e) => { view.log = e.target.checked; draw(); } }), " Log scale"),
      h("span", { class: "dim" }, "A click on a curve opens its step."));
    fillNames();
    fillTable();
    const search = h("input", { type: "search", id: "search", placeholder: "Find a metric (/)", value: view.search, "aria-label": "Find a metric",
      oninput: (e) => { view.search = e.target.value; fillNames(); } });
    return {
      title: "Runs", draw,
      update: () => { chooseFirst(); fillTable(); fillNames(); draw(); },
      content: [table, ...differences(), h("h2", {}, "Curves"), controls,
        h("div", { class: "columns" }, h("div", { class: "names" }, search, list), charts)],
    };
  }

  function differences() {
    if (known.runs.length < 2) return [];
    const rows = known.differences;
    const head = h("tr", {}, h("th", {}, "Key"), known.runs.map((one) => h("th", {}, h("span", { class: `swatch run-${one.run % 6}` }), one.name)));
    return [h("details", { class: "differences", open: rows.length <= 12 }, h("summary", {}, `Keys in which the configurations differ (${num(rows.length)})`),
      h("div", { class: "scroll" }, h("table", { id: "differences" }, h("thead", {}, head),
        h("tbody", {}, rows.map(([key, values]) => h("tr", {}, h("td", {}, key), values.map((value) => h("td", {}, shorten(value, 200)))))))))];
  }

  /** Smooth by an exponential mean that starts without bias. */
  function smoothed(points, factor) {
    let mean = 0, weight = 0;
    return points.map(([x, y, step]) => {
      mean = factor * mean + (1 - factor) * y;
      weight = factor * weight + (1 - factor);
      return [x, mean / weight, step];
    });
  }

  /** Keep the lowest and the highest of each of at most 400 intervals. */
  function thinned(points) {
    const size = Math.ceil(points.length / 400);
    if (size < 3) return points;
    const kept = [];
    for (let i = 0; i < points.length; i += size) {
      const part = points.slice(i, i + size).sort((a, b) => a[1] - b[1]);
      const ends = part.length > 1 ? [part[0], part[part.length - 1]] : part;
      kept.push(...ends.sort((a, b) => a[0] - b[0]));
    }
    return kept;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || rough;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
    return found;
  }

  const axisNumber = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return `${num(value / 1e9, 3)}G`;
    if (size >= 1e6) return `${num(value / 1e6, 3)}M`;
    if (size >= 1e4) return `${num(value / 1e3, 3)}k`;
    return size && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(6)));
  };

  /** Return the width of a column of charts, so that texts in a chart have their size. */
  function chartWidth(charts) {
    const all = charts.clientWidth || 900, number = Math.max(1, Math.floor((all + 16) / 396));
    return Math.round((all - 16 * (number - 1)) / number);
  }

  /** Open the step of a point of a curve, if its rollouts were saved. */
  function openStep(number, step) {
    const ending = `/step_${String(step).padStart(6, "0")}`;
    const file = known.runs[number].files.find((one) => one.label.endsWith(ending));
    if (file) go("step", { run: number || "", file: file.label });
  }

  /** Draw the curves of a metric, one for each run: `[[x, y, step], ...]`. */
  function chart(name, width, series) {
    const height = 210, left = 52, right = 8, top = 6, bottom = 22;
    const note = h("span", { class: "dim" });
    const head = h("figcaption", {}, name, note);
    const isLog = view.log;
    const raw = series.map((points) => (isLog ? points.filter(([, y]) => y > 0) : points));
    const lines = raw.map((points) => (view.smooth ? smoothed(points, view.smooth) : points));
    const all = raw.flat();
    if (!all.length) {
      note.textContent = isLog && series.flat().length ? "no positive values" : `no values over ${AXES[view.x]}`;
      return h("figure", {}, head, h("svg", { viewBox: `0 0 ${width} ${height}` }));
    }
    const scale = isLog ? Math.log10 : (y) => y;
    const bounds = (values) => {
      const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      const margin = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
      return [low, high, margin];
    };
    let [x0, x1] = bounds(all.map(([x]) => x));
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const [low, high, margin] = bounds(all.map(([, y]) => scale(y)));
    const y0 = low - margin, y1 = high + margin;
    const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
    const py = (y) => top + ((y1 - scale(y)) / (y1 - y0)) * (height - top - bottom);
    const path = (points) => thinned(points).map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    const dot = (points) => (points.length === 1 ? `m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0` : "");
    const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
    for (const y of ticks(y0, y1, 5)) {
      const value = isLog ? 10 ** y : y;
      svg.append(h("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }),
        h("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, axisNumber(isLog ? Number(value.toPrecision(2)) : value)));
    }
    for (const x of ticks(x0, x1, 6).filter((value) => view.x !== "step" || Number.isInteger(value))) {
      svg.append(h("text", { x: px(x), y: height - 6, "text-anchor": "middle" }, axisNumber(x) + (view.x === "time" ? " s" : "")));
    }
    lines.forEach((points, i) => {
      if (view.smooth) svg.append(h("path", { class: `raw run-${i % 6}`, d: path(raw[i]) }));
      if (points.length) svg.append(h("path", { class: `curve run-${i % 6}`, d: path(points) + dot(points) }));
    });
    const cursor = h("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    svg.append(cursor);
    const values = (points) => points.map((point, i) => h("span", { class: `value run-${i % 6}` }, point ? num(point[1]) : "–"));
    const last = () => note.replaceChildren(...values(lines.map((points) => points[points.length - 1])));
    last();
    /** Return the point of each curve that is nearest to the pointer along the x axis. */
    const pointsAt = (event) => {
      const box = svg.getBoundingClientRect();
      const x = x0 + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
      return lines.map((points) => points.reduce((best, point) => (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), null));
    };
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect(), y = ((event.clientY - box.top) / box.height) * height;
      const far = pointsAt(event).map((point) => (point ? Math.abs(py(point[1]) - y) : Infinity));
      const number = far.indexOf(Math.min(...far));
      openStep(number, pointsAt(event)[number][2]);
    });
    svg.addEventListener("pointermove", (event) => {
      const near = pointsAt(event);
      const first = near.find(Boolean);
      cursor.setAttribute("x1", px(first[0]));
      cursor.setAttribute("x2", px(first[0]));
      cursor.setAttribute("visibility", "visible");
      note.replaceChildren(`${AXES[view.x]} ${num(first[0])}: `, ...values(near));
    });
    svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); last(); });
    return h("figure", {}, head, svg);
  }

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

  const noRollouts = () => h("p", { class: "dim" },
    "This run has no saved rollouts. Set trainer.rollout_data_dir to save them.");

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
    const width = 300, height = 120, bottom = 18, most = Math.max(1, ...bins.counts);
    const summary = bins.counts.length
      ? `mean ${num(bins.mean, 3)}, median ${num(bins.median, 3)}, p95 ${num(bins.p95, 3)}` : "no values";
    const svg = h("svg", { viewBox: `0 0 ${width} ${height}` });
    const size = Math.min(40, width / Math.max(1, bins.counts.length));
    bins.counts.forEach((count, i) => {
      const tall = (count / most) * (height - bottom - 4);
      const range = bins.is_whole ? num(bins.edges[i] + 0.5) : `${num(bins.edges[i])} to ${num(bins.edges[i + 1])}`;
      const column = h("rect", { class: "column", x: i * size + 0.5, width: Math.max(1, size - 1), y: height - bottom - tall, height: tall },
        h("title", {}, `${range} ${bins.unit}: ${num(count)}`));
      const isReward = bins.name === "reward" && count;
      const target = h("g", isReward ? { role: "link", class: "pick", onclick: () => go("list", { run: runNumber() || "", file,
        min_reward: bins.edges[i], max_reward: i + 1 < bins.counts.length ? bins.edges[i + 1] : "" }) } : {}, column);
      svg.append(target);
    });
    svg.append(h("line", { class: "grid", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }));
    if (bins.counts.length) {
      svg.append(h("text", { x: 0, y: height - 4 }, num(bins.min)),
        bins.max > bins.min ? h("text", { x: size * bins.counts.length, y: height - 4, "text-anchor": "end" }, num(bins.max)) : "");
    }
    const names = { reward: "Reward", response: "Response, tokens", turns: "Turns", duration: "Duration, s" };
    return h("figure", {}, h("figcaption", {}, names[bins.name]), h("div", { class: "dim" }, summary, bins.missing ? `, ${num(bins.missing)} without` : ""), svg);
  }

  /** Make a table; a column is `[title, cell, isNumber]`. */
  function tableOf(columns, rows, none, attributes = {}) {
    if (!rows.length) return h("p", { class: "dim" }, none);
    const kind = (column) => (column[2] ? { class: "num" } : {});
    return h("div", { class: "scroll" }, h("table", attributes,
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", kind(column), column[0])))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column) => h("td", kind(column), column[1](row))))))));
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
    return h("div", {}, h("p", { class: "dim" }, `Each sample: reward, and mean advantage of its trained tokens if it was saved. ${more}`),
      tableOf([
        ["Group", (row) => h("span", { class: "nowrap" }, row.uid)],
        ["Mean reward", (row) => fixed(row.mean, 3), true],
        ["Spread", (row) => fixed(row.spread, 3), true],
        ["Samples", (row) => h("div", { class: "chips" }, row.samples.map((one) => chip(one, runId)))],
      ], step.groups, "None.", { id: "groups" }));
  }

  function chip(one, runId, isHere) {
    const advantage = typeof one.advantage === "number" ? ` (${one.advantage >= 0 ? "+" : "-"}${Math.abs(one.advantage).toFixed(2)})` : "";
    const isFailed = one.is_failed || one.state === "failed";
    return h("a", { class: `chip${isFailed ? " bad" : ""}`, "aria-current": isHere ? "true" : null, title: one.end,
      href: link("trajectory", { run: runId, id: one.id }) }, fixed(one.reward, 2) + advantage);
  }

  // Trajectories

  const COLUMNS = [
    ["step", "Step", (row) => num(row.step), true], ["", "Request", (row) => row.request_id],
    ["reward", "Reward", (row) => fixed(row.reward, 3), true],
    ["", "Advantage", (row) => fixed(row.advantage, 3), true],
    ["end", "End", (row) => h("span", { class: row.state === "failed" ? "bad" : "" }, row.end)],
    ["turns", "Turns", (row) => num(row.turns), true], ["tokens", "Tokens", (row) => num(row.tokens), true],
    ["trained", "Trained", (row) => num(row.trained), true],
    ["calls", "Calls", (row) => (row.bad_calls ? h("span", { class: "bad" }, `${row.calls} (${row.bad_calls} not ok)`) : num(row.calls)), true],
    ["seconds", "Duration", (row) => seconds(row.seconds), true], ["source", "Source", (row) => row.source],
    ["", "Last answer", (row) => row.excerpt],
  ];
  let lastList = "";
  const FILTERS = ["file", "end", "tool", "outcome", "source", "uid", "text", "min_reward", "max_reward", "sort"];

  async function listPage(at) {
    if (!run().files.length) return { title: "Trajectories", content: [noRollouts()], update: () => run().files.length && show() };
    const filters = Object.fromEntries(FILTERS.map((key) => [key, at[key] || ""]));
    if (!("file" in at)) filters.file = run().files[0].label;
    if (at.file === "all") filters.file = "";
    let offset = Number(at.offset || 0), rows = [], selected = 0, asked = 0, timer = 0;
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
      body.replaceChildren(...rows.map((row, i) => h("tr", { onclick: () => open(i) },
        COLUMNS.map(([, title, cell, isNumber]) => h("td", { class: isNumber ? "num" : title === "Last answer" ? "cut" : "nowrap", dir: title === "Last answer" ? "auto" : null }, cell(row))))));
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
    const fillHeads = () => heads.replaceChildren(...COLUMNS.map(([key, title, , isNumber]) => {
      if (!key) return h("th", { class: isNumber ? "num" : "" }, title);
      const order = filters.sort === key ? "ascending" : filters.sort === `-${key}` ? "descending" : null;
      const mark = { ascending: " ↑", descending: " ↓" }[order] || "";
      return h("th", { class: isNumber ? "num" : "", "aria-sort": order }, h("button", {
        onclick: () => set("sort", order === "ascending" ? `-${key}` : order === "descending" ? "" : key) }, title + mark));
    }));
    const pick = (key, label, values) => h("label", {}, `${label} `, h("select", { id: key, onchange: (e) => set(key, e.target.value) },
      h("option", { value: "" }, "any"), values.map((value) => h("option", { value, selected: filters[key] === value }, value))));
    const reward = (key, label) => h("input", { id: key, type: "number", step: "any", placeholder: label, value: filters[key], "aria-label": `Reward ${label}`,
      oninput: (e) => set(key, e.target.value, 100) });
    const choice = fileChoice(filters.file, (value) => go("list", { run: at.run, ...filters, file: value || "all" }), true);
    const choices = await get("choices", { run: runNumber(), file: filters.file });
    const search = h("input", { type: "search", id: "search", placeholder: "Find text (/)", "aria-label": "Find text", value: filters.text, oninput: (e) => set("text", e.target.value, 100) });
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

  // Trajectory

  const tokenView = { isOpen: false, color: "mask" };

  async function trajectoryPage(at) {
    const parameters = { run: runNumber(), id: at.id };
    const [one, other] = await Promise.all([get("trajectory", parameters),
      at.with ? get("trajectory", { run: runNumber(), id: at.with }) : null]);
    const around = one.around;
    const to = (id) => { if (id) go("trajectory", { run: at.run, id }); };
    const button = (name, key, id) => h("button", { disabled: !id, onclick: () => to(id), title: `Key ${key}` }, name);
    const tokens = h("section", { id: "tokens" });
    const toggle = h("button", { "aria-pressed": tokenView.isOpen, onclick: () => flip() }, "Tokens");
    const flip = () => {
      tokenView.isOpen = !tokenView.isOpen;
      toggle.setAttribute("aria-pressed", tokenView.isOpen);
      if (tokenView.isOpen) fillTokens(tokens, parameters, one); else tokens.replaceChildren();
    };
    const compare = h("select", { id: "compare", onchange: (e) => go("trajectory", { run: at.run, id: at.id, with: e.target.value }) },
      h("option", { value: "" }, "none"),
      one.group.filter((sample) => sample.id !== one.id).map((sample) => h("option", { value: sample.id, selected: sample.id === at.with },
        `sample ${sample.sample}, reward ${fixed(sample.reward, 2)}`)));
    return {
      title: one.request_id,
      keys: { j: () => to(around.next), k: () => to(around.previous), "[": () => to(around.worse), "]": () => to(around.better),
        t: flip, Escape: () => { location.hash = lastList || link("list", { run: at.run, file: one.file }); } },
      draw: () => { scrollTo(0, 0); if (tokenView.isOpen) fillTokens(tokens, parameters, one); },
      content: [
        h("div", { class: "bar" }, h("a", { href: link("list", { run: at.run, file: one.file }) }, one.file),
          button("← Before", "k", around.previous), button("Next →", "j", around.next),
          button("Next worse", "[", around.worse), button("Next better", "]", around.better), toggle,
          h("label", {}, "Next to ", compare)),
        facts(one), groupLine(one, at), ...rowLine(one, at), tokens,
        at.with && other ? h("div", { class: "pair" }, conversation(one), conversation(other)) : conversation(one),
        ...rewardParts(one)],
    };
  }

  function facts(one) {
    const rows = [["Request", one.request_id], ["Step", num(one.step)], ["Source", one.source],
      ["Reward", fixed(one.reward, 4)], ["Advantage", fixed(one.advantage, 4)], ["End", one.end],
      ["Turns", num(one.turns)], ["Response", `${num(one.tokens)} tokens, ${num(one.trained)} trained`],
      ["Duration", seconds(one.seconds)], ["Ground truth", one.ground_truth === null ? "–" : shorten(asText(one.ground_truth), 200)]];
    const lines = [h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))];
    if (one.error) lines.push(h("p", { class: "bad" }, `${one.error.fault}: ${one.error.kind}: ${shorten(one.error.message, 2000)}`));
    if (one.dropped) lines.push(h("p", { class: "warn" }, `Not trained: ${one.dropped}`));
    return h("div", {}, lines);
  }

  const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

  const groupLine = (one, at) => h("div", { class: "bar" }, h("span", { class: "dim" }, `Group ${one.uid}`),
    h("div", { class: "chips" }, one.group.map((sample) => chip(sample, at.run, sample.id === one.id))));

  function rowLine(one, at) {
    if (!one.same_row.length) return [];
    const chips = one.same_row.map((other) => h("a", { class: "chip", href: link("trajectory", { run: at.run, id: other.id }), title: other.end },
      `step ${other.step}: ${fixed(other.reward, 2)}`));
    return [h("details", { id: "same-row" }, h("summary", {}, `The same prompt in other steps (${one.same_row.length === 100 ? "first 100" : one.same_row.length})`),
      h("div", { class: "chips" }, chips))];
  }

  function rewardParts(one) {
    const rows = [];
    for (const [name, value] of Object.entries(one.rewards)) {
      if (value === null || value === undefined) continue;
      if (typeof value === "object") for (const [key, part] of Object.entries(value)) rows.push([`${name}.${key}`, part]);
      else rows.push([name, value]);
    }
    one.sequences.forEach((sequence) => sequence.turns.forEach((turn) => {
      if (turn.reward !== null) rows.push([`turn ${turn.index} (${turn.role})`, turn.reward]);
    }));
    return [h("h2", {}, "Reward and its parts"), tableOf([["Part", ([name]) => name],
      ["Value", ([, value]) => (typeof value === "number" ? num(value) : shorten(asText(value), 300)), true]], rows, "It was not scored.", { id: "rewards" })];
  }

  function conversation(one) {
    const parts = one.sequences.flatMap((sequence, i) => [
      one.sequences.length > 1 ? h("h2", {}, `Sequence ${i + 1} of ${one.sequences.length}${sequence.cause ? `: ${sequence.cause}` : ""}`) : h("h2", {}, "Conversation"),
      timeline(sequence, one), ...messagesOf(sequence, one.file), ...sequence.pictures.map((picture) => pictureOf(picture, one.file))]);
    return h("section", { class: "conversation" }, parts);
  }

  function timeline(sequence, one) {
    const total = sequence.turns.reduce((sum, turn) => sum + turn.seconds, 0) || 1e-9;
    const names = { assistant: "sampling", tool: "tools", user: "interaction" };
    const rest = one.sequences.length === 1 ? Math.max(0, one.seconds - total) : 0;
    const span = (kind, name, size, note) => {
      const part = h("span", { class: kind, title: `${note}: ${seconds(size)}` }, size > 0.12 * (total + rest) ? seconds(size) : "");
      part.style.flex = `${1000 * Math.max(size / (total + rest), 1e-6)} 1 0`;
      return part;
    };
    const used = [...new Set(sequence.turns.map((turn) => turn.role))];
    return h("div", {}, h("div", { class: "timeline" },
      sequence.turns.map((turn) => span(turn.role, names[turn.role], turn.seconds, `turn ${turn.index}, ${names[turn.role]}`)),
      rest > 0 ? span("other", "other", rest, "waiting, and before and after the turns") : null),
    h("div", { class: "legend" }, used.map((role) => {
      const sum = sequence.turns.filter((turn) => turn.role === role).reduce((s, turn) => s + turn.seconds, 0);
      return h("span", {}, h("i", { class: `swatch ${role}` }), `${names[role]} ${seconds(sum)}`);
    }), rest > 0 ? h("span", {}, h("i", { class: "swatch other" }), `other ${seconds(rest)}`) : null));
  }

  /** Show messages; the last ones of the assistant are the sampled turns. */
  function messagesOf(sequence, file) {
    const sampled = sequence.turns.filter((turn) => turn.role === "assistant");
    const spoken = sequence.messages.filter((message) => message.role === "assistant").length;
    let at = sampled.length - spoken;
    return sequence.messages.map((message) => {
      const turn = message.role === "assistant" ? sampled[at++] : null;
      const head = [h("b", {}, message.role + (message.name ? ` ${message.name}` : ""))];
      if (turn) {
        const versions = [...new Set(turn.weight_versions.map(([version]) => version))];
        head.push(h("span", {}, `${num(turn.end - turn.start)} tokens`), h("span", {}, seconds(turn.seconds)),
          h("span", {}, `weights ${versions.join(", ") || "unknown"}`), h("span", {}, `finish ${turn.finish_reason}`));
        if (turn.excluded) head.push(h("span", { class: "warn" }, `not trained: ${turn.excluded}`));
        if (turn.cut) head.push(h("span", { class: "warn" }, `cut by the budget of: ${turn.cut}`));
        if (turn.reward !== null) head.push(h("span", {}, `reward ${num(turn.reward)}`));
      }
      const calls = turn ? turn.calls.map(callBlock) : (message.tool_calls || []).map((call) => h("pre", { class: "call" }, asText(call)));
      return h("div", { class: `message ${["assistant", "tool", "user"].includes(message.role) ? message.role : ""}` },
        h("div", { class: "head" }, head), contentOf(message.content, file), calls);
    });
  }

  function contentOf(content, file) {
    if (content === null || content === "") return null;
    if (typeof content === "string") return textBlock(content);
    return h("div", {}, content.map((part) => (part.picture ? pictureOf(part.picture, file)
      : textBlock(part.type === "text" ? part.text : `[${part.type}] ${shorten(asText(part), 300)}`))));
  }

  /** Show the thumbnail of an image or video, its tokens, size and file. */
  function pictureOf(picture, file) {
    const { width, height, frames, path, source } = picture, kind = shorten(picture.kind, 40);
    const title = picture.num_tokens ? `[${kind}: ${num(picture.num_tokens)} tokens]` : `[${kind}]`;
    const about = [typeof width === "number" ? `${num(width)} x ${num(height)}` : null, frames ? `${num(frames)} frames` : null,
      path, source ? `read from ${source}` : null, picture.has_files ? null : picture.text || "the file is missing"];
    const note = h("figcaption", {}, title, h("span", { class: "dim" }, shorten(about.filter(Boolean).join(", "), 400)));
    if (!picture.has_files) return h("figure", { class: "picture" }, note);
    const scale = Math.min(1, MAX_THUMBNAIL / Math.max(width, height));
    const small = h("img", { src: pictureAddress(file, picture.thumbnail), alt: `${kind} ${path}`, loading: "lazy",
      width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
    return h("figure", { class: "picture" }, note, EXPORT ? small
      : h("a", { href: pictureAddress(file, path), target: "_blank", rel: "noopener", title: "The whole picture" }, small));
  }

  const pictureAddress = (file, name) => (EXPORT ? `pictures/${runNumber()}/${name.split("/").pop()}`
    : `picture?${queryOf({ run: runNumber(), file, name })}`);

  function callBlock(call) {
    return h("div", { class: "call" }, h("div", {}, h("b", {}, call.name), " ",
      h("span", { class: outcomeClass(call.outcome) }, call.outcome), h("span", { class: "dim" },
        `  ${seconds(call.queue_seconds)} in the queue, ${seconds(call.seconds)} at work${call.num_attempts === 1 ? "" : `, ${call.num_attempts} attempts`}${call.is_cached ? ", from the cache" : ""}, result ${num(call.num_tokens)} token${call.num_tokens === 1 ? "" : "s"}${call.num_cut_tokens ? ` (${num(call.num_cut_tokens)} cut)` : ""}`)),
    textBlock(asText(call.arguments)), call.message ? h("div", { class: "bad" }, textBlock(call.message)) : null);
  }

  // Tokens

  const MEASURES = {
    mask: ["Mask", null], rollout_log_probs: ["Log-prob. at sampling", "low"], old_log_probs: ["Log-prob. at training", "low"],
    ratio: ["Ratio", "one"], entropies: ["Entropy", "high"], advantages: ["Advantage", "sign"],
    token_level_rewards: ["Reward", "sign"], token_level_scores: ["Score", "sign"], ref_log_prob: ["Log-prob. of the reference", "low"],
    values: ["Value", "sign"], returns: ["Return", "sign"], response_mask: ["Trained", null], rollout_is_weights: ["Weight of the correction", "one"],
    version: ["Weights", "range"], id: ["Id", null],
  };

  async function fillTokens(section, parameters, one, sequence = one.sequences.length - 1, start = 0) {
    const tokens = await get("tokens", { ...parameters, sequence, start });
    const { columns } = tokens;
    const known = Object.keys(MEASURES).filter((name) => columns[name]);
    if (!columns[tokenView.color]) tokenView.color = "mask";
    const detail = h("div", { class: "detail", id: "token-detail" }, h("span", { class: "dim" }, "Point at a token, or choose one with a click and move with ← and →."));
    const flow = h("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
    const spans = columns.id.map((id, i) => {
      const media = tokens.media.find((span) => span.start <= start + i && start + i < span.end);
      const text = columns.text ? shorten(columns.text[i], MAX_TOKEN) : `${id} `;
      const isFirst = media && (i === 0 || media.start === start + i);
      return h("span", { class: `token${columns.mask[i] ? "" : " observed"}`, "data-at": i, hidden: media && !isFirst },
        isFirst ? `[${media.kind}: ${num(media.end - media.start)} tokens]` : text);
    });
    const paint = () => spans.forEach((span, i) => { span.style.background = colorOf(columns, tokenView.color, i); });
    const turnAt = new Map(tokens.turns.map((turn, i) => [turn.start - start, [turn, i]]));
    spans.forEach((span, i) => {
      if (turnAt.has(i)) flow.append(h("span", { class: "turn-mark" }, `${i ? "\n" : ""}${turnAt.get(i)[0].role}`));
      flow.append(span);
    });
    let chosen = -1;
    const explain = (i) => detail.replaceChildren(h("span", {}, h("b", {}, "Index"), num(start + i)),
      ...(columns.text ? [h("span", {}, h("b", {}, "Text"), shorten(JSON.stringify(columns.text[i]), 60))] : []),
      ...known.map((name) => h("span", {}, h("b", {}, MEASURES[name][0]), num(columns[name][i]))));
    const choose = (i) => {
      if (i < 0 || i >= spans.length) return;
      if (spans[chosen]) spans[chosen].classList.remove("chosen");
      chosen = i;
      spans[i].classList.add("chosen");
      explain(i);
    };
    flow.addEventListener("pointerover", (e) => { if (e.target.dataset.at) explain(Number(e.target.dataset.at)); });
    flow.addEventListener("click", (e) => { if (e.target.dataset.at) choose(Number(e.target.dataset.at)); });
    flow.addEventListener("keydown", (e) => {
      if (e.key === "ArrowRight" || e.key === "ArrowLeft") { choose(chosen + (e.key === "ArrowRight" ? 1 : -1)); e.preventDefault(); e.stopPropagation(); }
    });
    const again = (seq, at) => fillTokens(section, parameters, one, seq, at);
    const color = h("select", { id: "color", onchange: (e) => { tokenView.color = e.target.value; paint(); } },
      known.filter((name) => name !== "id").map((name) => h("option", { value: name, selected: name === tokenView.color }, MEASURES[name][0])));
    paint();
    const notes = [columns.text ? null : "The tokenizer of the run's model is not on this machine: tokens are shown as ids.",
      tokens.note ? `Values of training are missing: ${tokens.note}.` : null];
    const end = Math.min(start + PAGE_TOKENS, tokens.num);
    section.replaceChildren(h("h2", {}, "Response tokens"), h("div", { class: "bar" }, h("label", {}, "Color ", color),
      one.sequences.length > 1 ? h("label", {}, "Sequence ", h("select", { onchange: (e) => again(Number(e.target.value), 0) },
        one.sequences.map((_, i) => h("option", { value: i, selected: i === sequence }, i + 1)))) : null,
      h("button", { disabled: start === 0, onclick: () => again(sequence, start - PAGE_TOKENS) }, "←"),
      h("span", { class: "dim" }, tokens.num ? `${num(start)} to ${num(end - 1)} of ${num(tokens.num)}` : "no tokens"),
      h("button", { disabled: end >= tokens.num, onclick: () => again(sequence, start + PAGE_TOKENS) }, "→"),
      h("span", { class: "dim" }, "Gray text was observed, not sampled.")),
    ...notes.filter(Boolean).map((note) => h("p", { class: "dim" }, note)), detail, flow);
  }

  function colorOf(columns, name, i) {
    const value = columns[name][i];
    const tint = (sign, share) => `color-mix(in srgb, var(--${sign}) ${Math.round(65 * Math.min(1, share))}%, transparent)`;
    if (name === "mask" || name === "response_mask") return value ? tint("pos", 0.4) : "transparent";
    if (typeof value !== "number" || !columns.mask[i]) return "transparent";
    switch (MEASURES[name][1]) {
      case "low": return tint("neg", -value / 4);
      case "high": return tint("neg", value / 3);
      case "range": {
        const all = columns[name].filter((one) => typeof one === "number"), low = Math.min(...all);
        return tint("pos", (value - low + 1) / (Math.max(...all) - low + 1));
      }
      case "one": return value >= 1 ? tint("pos", Math.log(Math.max(value, 1)) * 2) : tint("neg", -Math.log(Math.max(value, 1e-9)) * 2);
      default: return tint(value >= 0 ? "pos" : "neg", Math.abs(value));
    }
  }

  // Keys and theme

  const HELP = [["1 2 3", "Runs, step, trajectories"], ["/", "search"], ["j k", "next and previous row or trajectory"], ["Enter", "open the row"],
    ["n p", "next and previous page of a list"], ["← →", "step before and after"], ["[ ]", "next worse and next better by reward"],
    ["t", "tokens"], ["Esc", "leave a field, or go back to the list"], ["d", "light or dark"], ["?", "this help"]];

  function showHelp() {
    $("help").replaceChildren(tableOf([["Key", ([keys]) => keys.split(" ").flatMap((key) => [h("kbd", {}, key), " "])], ["Action", ([, text]) => text]], HELP, ""),
      h("form", { method: "dialog" }, h("button", {}, "Close")));
    if (!$("help").open) $("help").showModal();
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("agentrl-theme", theme); } catch { /* not allowed here: the choice is not kept */ }
  }

  function firstTheme() {
    let saved = null;
    try { saved = localStorage.getItem("agentrl-theme"); } catch { /* not allowed here */ }
    document.documentElement.dataset.theme = saved || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }
  const flipTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const isField = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if (isField) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "Enter" && ["A", "BUTTON"].includes(event.target.tagName)) return;
    const common = { 1: () => go("runs", {}), 2: () => go("step", { run: runNumber() || "" }), 3: () => go("list", { run: runNumber() || "" }),
      "/": () => $("search") && $("search").focus(), d: flipTheme, "?": showHelp };
    const action = page.keys[event.key] || common[event.key];
    if (action) { event.preventDefault(); action(); }
  }

  async function start() {
    firstTheme();
    document.addEventListener("keydown", onKey);
    addEventListener("hashchange", show);
    $("theme").addEventListener("click", flipTheme);
    $("keys").addEventListener("click", showHelp);
    $("run").addEventListener("change", (event) => {
      const name = place().page === "trajectory" ? "list" : place().page;
      go(name, { run: event.target.value });
    });
    try { known = await get("runs"); } catch { return; }
    await show();
    setInterval(poll, POLL_MS);
  }

  start();
})();
