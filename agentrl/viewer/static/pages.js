/* Show the page of the address, follow a live run, handle keys and the theme. The last script. */
"use strict";

const POLL_MS = 3000;

let shown = 0;
let page = { keys: {} };

async function show() {
  const at = address();
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
    if (mine !== shown) return;
    showError("");
    $("main").replaceChildren(h("p", { class: "bad", role: "alert" }, error.message));
    document.body.dataset.ready = at.page;
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
  $("run-label").hidden = address().page === "runs";
  const one = run();
  $("state").textContent = one && address().page !== "runs"
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
    const name = address().page === "trajectory" ? "list" : address().page;
    go(name, { run: event.target.value });
  });
  try { known = await get("runs"); } catch { return; }
  await show();
  setInterval(poll, POLL_MS);
}

start();
