/* The page of runs: their states, the differences of their configurations, curves of metrics. */
"use strict";

const FIRST_METRICS = ["rollout/combined_reward/mean", "rollout/reward/mean", /^val\/.*\/success$/,
  "response_length/mean", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "timing_s/step"];

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
      } }), h("span", {}, breakable(name))))));
  };
  let axes = [], curves = new Map(), lines = "", asked = 0;
  const draw = async () => {
    const mine = asked += 1;  // what a later call draws is newer
    const now = known.runs.map((one) => one.num_lines).join() + known.runs.map((one) => one.files.filter((f) => f.is_indexed).length).join();
    if (now !== lines) { curves = new Map(); axes = []; lines = now; }
    const own = curves, missing = [...view.chosen].filter((name) => !own.has(name));
    const found = axes.length ? axes : await Promise.all(known.runs.map((one) => get("axes", { run: one.run })));
    if (mine !== asked) return;
    axes = found;
    await Promise.all(missing.map(async (name) => {
      own.set(name, await Promise.all(known.runs.map((one) => (one.names.includes(name)
        ? get("curve", { run: one.run, name }) : { at: [], y: [] }))));
    }));
    if (mine !== asked) return;
    const drawn = [...view.chosen].filter((name) => curves.has(name)).map((name) => [name, curves.get(name).map((curve, i) => curve.at
      .map((at, j) => [axes[i][view.x][at], curve.y[j], axes[i].step[at]]).filter(([x, y]) => typeof x === "number" && typeof y === "number"))]);
    const range = rangeOf(drawn.flatMap(([, series]) => series.flat()).map(([x]) => x));
    charts.replaceChildren(...drawn.map(([name, series]) => chart(name, chartWidth(charts), series, range)));
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

const rangeOf = (values) => [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];

/** Let a name break after `/` and `_` only. */
const breakable = (name) => name.split(/(?<=[/_])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

/** Draw the curves of a metric, one for each run: `[[x, y, step], ...]`; `range` is that of the x axes of all charts. */
function chart(name, width, series, range) {
  const height = 210, left = 52, right = 8, top = 6, bottom = 22, inset = 8;
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
  let [x0, x1] = range;
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  let [low, high] = rangeOf(all.map(([, y]) => scale(y)));
  if (low === high) { if (low) low -= Math.abs(low) * 0.1; else high = 1; }
  const margin = (high - low) * 0.04, y0 = low - margin, y1 = high + margin;
  const inner = width - left - right - 2 * inset;  // no point is on the y axis
  const px = (x) => left + inset + ((x - x0) / (x1 - x0)) * inner;
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
    const x = x0 + ((((event.clientX - box.left) / box.width) * width - left - inset) / inner) * (x1 - x0);
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
