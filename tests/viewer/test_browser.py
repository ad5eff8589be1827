"""The pages in a real browser: Chromium, without a window."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.rollout.states import StopReason
from agentrl.viewer.export import export_runs
from agentrl.viewer.queries import Filters, list_trajectories
from agentrl.viewer.runs import RunReader
from agentrl.viewer.server import ViewServer
from tests.fakes.runs import read_lines
from tests.fakes.viewer_runs import (
    append_metrics,
    conversation,
    make_line,
    write_picture_step,
    write_step,
    write_video_step,
    write_view_run,
)

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = Path("/usr/bin/chromium")
DOCS = Path(__file__).parents[2] / "docs"
CONTENT_S, FILTER_S = 1.0, 0.3
SLACK = 1 if os.environ.get("AGENTRL_IDLE_MACHINE") else 10
"""Machines that run tests are loaded: only a tenfold excess is a failure, except on an idle one."""
FILE = "rollouts/step_000010"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.access(CHROMIUM, os.X_OK), reason=f"needs {CHROMIUM}"),
]


@contextmanager
def serving(*folders: Path) -> Iterator[str]:
    """Serve runs from a thread with its own event loop; yields the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ViewServer([RunReader(folder) for folder in folders])

    def do(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=60)

    do(server.start())
    try:
        yield server.address
    finally:
        do(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Tab:
    """A page, and what it must not do."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._note_dialog)
        page.on("request", lambda request: self.requests.append(request.url))

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _note_dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, address: str, fragment: str) -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{address}#/{fragment}")
        self.settle()

    def settle(self) -> None:
        ready = "document.body.dataset.ready && document.body.dataset.loading === '0'"
        self.wait_until(ready)

    def wait_until(self, expression: str) -> None:
        """Wait until an expression of the page is true.

        Playwright's own function evaluates a text in the page, which the page's policy refuses.
        """
        end = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"still not true: {expression}"
            time.sleep(0.02)

    def check(self, address: str) -> None:
        """Check that there were no errors, and no requests to another host."""
        assert self.problems == []
        outside = [url for url in self.requests if not url.startswith((address, "about:"))]
        assert outside == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), headless=True, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def make_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    contexts: list[Any] = []

    def make(width: int = 1280, *, scheme: str = "light") -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        context.set_default_timeout(30_000)
        contexts.append(context)
        return Tab(context.new_page())

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run of 10 steps with 1,000 trajectories each."""
    folder = tmp_path_factory.mktemp("large") / "run_a"
    return write_view_run(folder, num_steps=10, per_step=1000)


@pytest.fixture(scope="module")
def address(large: Path) -> Iterator[str]:
    with serving(large) as address:
        yield address


def count(tab: Tab) -> int:
    return int(tab.page.locator("#count").get_attribute("data-total"))


def wait_for_files(tab: Tab) -> None:
    """Wait until all files have been indexed."""
    tab.wait_until(
        "fetch('api/runs').then((a) => a.json()).then((v) => v.runs.every((r) =>"
        " r.files.every((f) => f.is_indexed)))"
    )


def content_time(tab: Tab) -> float:
    """Return the seconds until `main` had its first content."""
    mark = "performance.getEntriesByName('content')[0].startTime"
    return float(tab.page.evaluate(mark)) / 1000


def time_filter(tab: Tab, selector: str, value: str, before: int) -> float:
    """Set a filter; return the seconds until the list has another number of trajectories."""
    script = """([selector, value, before]) => new Promise((resolve) => {
      const start = performance.now(), field = document.querySelector(selector);
      const count = document.getElementById("count");
      new MutationObserver(() => {
        if (count.dataset.total !== before) resolve(performance.now() - start);
      }).observe(count, { attributes: true });
      field.value = value;
      field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input"));
    })"""
    return float(tab.page.evaluate(script, [selector, value, str(before)])) / 1000


PAGES = ("runs", "step", "list?file=all", f"trajectory?id={FILE}:17")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_opens_without_errors_and_soon(address: str, make_tab: Any, scheme: str):
    for fragment in PAGES:
        tab = make_tab(scheme=scheme)
        tab.open(address, fragment)
        content_s = content_time(tab)
        start = time.perf_counter()
        tab.open(address, fragment)
        ready_s = time.perf_counter() - start
        print(f"{fragment}: content {content_s:.3f} s, second visit complete {ready_s:.3f} s")
        assert content_s < SLACK * CONTENT_S
        assert tab.page.locator("main").inner_text().strip()
        assert tab.page.evaluate("document.documentElement.dataset.theme") == scheme
        tab.check(address)


def test_no_page_is_wider_than_the_window(address: str, make_tab: Any):
    for width in (700, 1280):
        tab = make_tab(width)
        for fragment in PAGES:
            tab.open(address, fragment)
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, fragment


def test_filters_of_10_000_trajectories(address: str, make_tab: Any):
    tab = make_tab()
    tab.open(address, "list?file=all")
    wait_for_files(tab)
    tab.open(address, "list?file=all")
    assert count(tab) == 10_000
    top = tab.page.locator("table.list").bounding_box()["y"]
    for selector, value in (
        ("#end", "failed"), ("#source", "gsm8k"), ("#min_reward", "0.5"), ("#search", "it is 5"),
    ):  # fmt: skip
        before = count(tab)
        filter_s = time_filter(tab, selector, value, before)
        print(f"filter {selector}: {filter_s:.3f} s, {before:,} -> {count(tab):,}")
        assert filter_s < SLACK * FILTER_S
        assert 0 < count(tab) < before
    assert tab.page.locator("table.list").bounding_box()["y"] == top
    ends = tab.page.locator("table.list td[data-column='End']").all_inner_texts()
    assert set(ends) == {"failed"}
    tab.check(address)


def test_the_keyboard_reaches_everything(address: str, make_tab: Any):
    tab = make_tab()
    press, page = tab.page.keyboard.press, tab.page
    tab.open(address, "runs")
    press("3")
    page.wait_for_selector("tr[aria-selected='true']")
    tab.settle()
    press("j")
    press("j")
    first = page.locator("tr[aria-selected='true'] td[data-column='Request']").inner_text()
    press("Enter")
    page.wait_for_selector(".conversation")
    assert first in page.inner_text("dl.facts")
    reward = float(page.locator("dl.facts div:nth-child(4) dd").inner_text())
    press("]")
    tab.wait_until(f"document.querySelector('dl.facts dd').innerText !== {first!r}")
    assert float(page.locator("dl.facts div:nth-child(4) dd").inner_text()) >= reward
    press("t")
    page.wait_for_selector(".token")
    press("Escape")
    page.wait_for_selector("table.list")
    press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    press("Escape")
    press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    press("?")
    assert page.locator("dialog").is_visible()
    tab.check(address)


def test_tokens_show_what_training_computed(address: str, make_tab: Any):
    tab = make_tab()
    tab.open(address, f"trajectory?id={FILE}:17")
    tab.page.click("text=Tokens")
    tab.page.locator(".token").nth(3).click()
    detail = tab.page.inner_text("#token-detail")
    for name in ("Ratio", "Entropy", "Advantage", "Log-prob. at training", "Weights"):
        assert name in detail
    for color in ("ratio", "entropies", "advantages", "version", "rollout_log_probs"):
        tab.page.select_option("#color", color)
    tab.page.click("#prompt-tokens summary")
    tab.page.wait_for_selector("#prompt-tokens .token")
    prompt = tab.page.inner_text("#prompt-tokens .tokens")
    assert prompt == tab.page.inner_text(".message.user pre")
    assert (
        tab.page.locator("#response-tokens .token").nth(3).evaluate("(e) => e.style.background")
        != ""
    )
    tab.check(address)


def test_the_time_line_has_states_and_calls(address: str, make_tab: Any):
    tab = make_tab()
    tab.open(address, f"trajectory?id={FILE}:17")
    states = tab.page.locator(".lane.states span").evaluate_all("(all) => all.map((e) => e.title)")
    kinds = [title.partition(",")[0].partition(":")[0] for title in states]
    assert kinds == [
        *("pending", "running", "tool calling", "other", "running", "other", "scoring"),
    ]  # fmt: skip
    boxes = [box.bounding_box() for box in tab.page.locator(".lane.states span").all()]
    assert all(one["x"] + one["width"] <= two["x"] + 3 for one, two in pairwise(boxes))
    assert tab.page.locator(".lane.calls .kind-queue, .lane.calls .kind-work").count() == 2
    assert "completed after" in tab.page.inner_text(".timeline .legend")
    tab.check(address)


def test_two_samples_of_a_group_are_next_to_each_other(address: str, make_tab: Any):
    tab = make_tab()
    tab.open(address, f"trajectory?id={FILE}:17")
    tab.page.select_option("#compare", index=1)
    tab.page.wait_for_selector(".pair")
    columns = tab.page.locator(".pair .conversation")
    heads = columns.locator("h2:first-child").all_inner_texts()
    assert [head.partition(":")[0] for head in heads] == ["Sample 1", "Sample 0"]
    rewards = columns.locator(".rewards tr:has-text('combined_reward')").all_inner_texts()
    for head, reward in zip(heads, rewards, strict=True):
        assert head.split()[3] == f"{float(reward.split()[1]):.3f},"
    assert tab.page.locator("#same-row .chip").count() > 0
    tab.check(address)


def test_a_live_run_grows_on_the_page(tmp_path: Path, make_tab: Any):
    """The pages are opened before the first step has ended."""
    folder = write_view_run(tmp_path / "live", num_steps=0, is_live=True)
    other = write_view_run(tmp_path / "other", num_steps=0, seed=3, is_live=True)
    with serving(folder, other) as address:
        tab, step = make_tab(), make_tab()
        tab.open(address, "runs")
        step.open(address, "step")
        assert "There are no metrics yet" in tab.page.inner_text("main")
        assert f"its folder {folder}/rollouts is missing or empty" in step.page.inner_text("main")
        assert "actor.lr" in tab.page.inner_text("#differences")
        draw, before = random.Random(5), None
        for number in (1, 2, 3):
            for run in (folder, other):
                append_metrics(run, number, draw)
                write_step(run, number, 16, draw)
            shown = "document.querySelector('#runs-table tbody td.num').innerText"
            tab.wait_until(f"{shown} === '{number}'")
            tab.wait_until("document.querySelector('svg path.curve.run-0') !== null")
            tab.settle()
            curve = tab.page.locator("svg path.curve.run-0").first.get_attribute("d")
            assert curve != before
            before = curve
        step.wait_until("document.getElementById('file') !== null")
        tab.page.check("#log")
        tab.page.fill("#smooth", "0.9")
        for x in ("time", "tokens", "trained"):
            tab.page.select_option("#x", x)
            tab.settle()
            assert tab.page.locator("svg path.curve").count() > 0
        tab.check(address)


GROW = (
    "import sys; from pathlib import Path; from tests.fakes.viewer_runs import grow; "
    "grow(Path(sys.argv[1]), range(6, 11), 1000)"
)


def test_10_000_trajectories_of_a_live_run_appear_without_a_reload(tmp_path: Path, make_tab: Any):
    """Another process appends 5 steps of 1,000 trajectories while the page is open."""
    folder = write_view_run(tmp_path / "live", num_steps=5, per_step=1000, is_live=True)
    with serving(folder) as address:
        curves, step, rows = (make_tab() for _ in range(3))
        for tab, fragment in ((curves, "runs"), (step, "step"), (rows, "list?file=all")):
            tab.open(address, fragment)
            tab.page.evaluate("window.isSamePage = true")
        path = curves.page.locator("svg path.curve.run-0").first
        before = path.get_attribute("d")
        started = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", GROW, str(folder)]) as writer:
            during = make_tab()
            during.open(address, "list?file=all")
            content_s = content_time(during)
            during_s = time_filter(during, "#search", "it is 7", count(during))
            assert writer.wait(timeout=300) == 0
        written_s = time.perf_counter() - started
        rows.wait_until("document.getElementById('count').dataset.total === '10000'")
        seen_s = time.perf_counter() - started - written_s
        filter_s = time_filter(rows, "#search", "it is 5", 10_000)
        print(
            f"live: content {content_s:.3f} s, filter while it grows {during_s:.3f} s; 5,000 "
            f"trajectories written in {written_s:.1f} s, all listed {seen_s:.1f} s later; filter "
            f"of 10,000 {filter_s:.3f} s"
        )
        assert content_s < SLACK * CONTENT_S
        assert max(during_s, filter_s) < SLACK * FILTER_S
        curves.wait_until("document.querySelector('#runs-table tbody td.num').innerText === '10'")
        curves.settle()
        assert path.get_attribute("d") != before
        step.wait_until("document.querySelector('main').innerText.includes('5 newer')")
        step.page.click("text=5 newer")
        step.wait_until(f"document.getElementById('file').value === '{FILE}'")
        for tab in (curves, step, rows):
            assert tab.page.evaluate("window.isSamePage")
        for tab in (curves, step, rows, during):
            tab.check(address)


SCRIPT = "<script>window.ran=1</script><img src=x onerror='window.ran=1'><svg onload=window.ran=1>"
HOSTILE = (
    SCRIPT,
    "a\x1b[2J\x00\x07\u202eevil\u2066\ufeff\u2028end",
    "שלום مرحبا " * 50,
    "x" * 1_000_000,
    "</script><style>body{display:none}</style>",
    "javascript:window.ran=1",
    "\ud800 lone",
)


def write_hostile(folder: Path) -> None:
    lines = []
    for number, text in enumerate(HOSTILE):
        line = json.loads(
            make_line(conversation(text, text, text), "ok", reason=StopReason.FAILED, uid=text[:99])
        )
        request = line["request"]
        request["data_source"] = request["request_id"] = f"{number} {text[:200]}"
        request["stop_reason"] = request["turns"][0]["finish_reason"] = text[:200]
        request["messages"][0]["role"] = text[:200]
        request["turns"][0]["calls"][0].update(name=text[:200], message=text, outcome=text[:200])
        request["turns"][0]["calls"][0]["arguments"] = {text[:200]: text}
        request["error"]["message"] = text
        entry = {"path": text, "thumbnail": text, "width": text, "frames": text}
        request["multi_modal_data"] = {text[:200]: [entry, text]}
        lines.append(json.dumps(line) + "\n")
    (folder / "rollouts" / "step_000009.jsonl").write_text("".join(lines))


def check_text(tab: Tab) -> None:
    """Check that no script ran, and that no control character is on the page."""
    assert tab.page.evaluate("window.ran") is None
    assert tab.page.locator("main script, main img, main style").count() == 0
    shown = tab.page.evaluate(
        "document.body.textContent + document.title + [...document.querySelectorAll('*')].map("
        "(one) => [one.title, one.alt, one.ariaLabel].join('')).join('')"
    )
    assert not set(shown) & set("\x00\x07\x1b\u202e\u2066\ufeff\u2028")


def test_hostile_trajectories_are_inert(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "<b onclick=alert(1)>run", num_steps=1)
    write_hostile(folder)
    vocabulary = json.loads((folder / "model" / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] = {
        (SCRIPT if code == 111 else "y" * 1_000_000 if code == 107 else token): code
        for token, code in vocabulary["model"]["vocab"].items()
    }
    (folder / "model" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with serving(folder) as address:
        tab = make_tab()
        label = "rollouts/step_000009"
        for fragment in (f"step?file={label}", f"list?file={label}"):
            tab.open(address, fragment)
            check_text(tab)
        assert count(tab) == len(HOSTILE)
        for number in range(len(HOSTILE)):
            tab.open(address, f"trajectory?id={label}:{number}")
            if number == 0:
                assert SCRIPT in tab.page.inner_text(".conversation")
                tab.page.keyboard.press("t")
                tab.page.wait_for_selector(".token")
                assert "window.ran" in tab.page.inner_text("#response-tokens .tokens")
                assert len(tab.page.inner_text("#response-tokens .tokens")) < 20_000
            check_text(tab)
        tab.open(address, f"trajectory?id={label}:1")
        assert "\\u202eevil" in tab.page.inner_text(".conversation")
        tab.check(address)


def test_pictures_of_a_trajectory_are_shown(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "run", num_steps=1)
    write_picture_step(folder, 7)
    export_runs([RunReader(folder)], tmp_path / "out", steps=[7])
    exported = (tmp_path / "out" / "index.html").as_uri()
    with serving(folder) as address:
        for where, root in ((address, address), (exported, (tmp_path / "out").as_uri())):
            tab = make_tab()
            tab.open(where, "trajectory?id=rollouts/step_000007:0")
            tab.wait_until("[...document.images].every((image) => image.naturalWidth > 0)")
            sizes = "[...document.images].map((image) => [image.width, image.height])"
            assert tab.page.evaluate(sizes) == [[256, 192], [24, 24]]
            tab.page.keyboard.press("t")
            tab.page.wait_for_selector(".token")
            text = tab.page.inner_text(".conversation")
            assert "[image: 6 tokens]" in text
            assert "read from a/plan.png" in text
            assert "[image: 4 tokens]" in tab.page.inner_text("#response-tokens .tokens")
            tab.page.click("#prompt-tokens summary")
            tab.page.locator("#prompt-tokens .token").first.click()
            assert "observed" in tab.page.inner_text("#token-detail")
            assert tab.page.inner_text("#prompt-tokens .tokens").startswith("[image: 6 tokens]")
            tab.page.keyboard.press("ArrowRight")
            assert "Index in the prompt6" in tab.page.inner_text("#token-detail").replace("\n", "")
            tab.check(root)


def test_a_video_is_shown_by_its_first_frame(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "run", num_steps=1)
    write_video_step(folder, 7)
    export_runs([RunReader(folder)], tmp_path / "out", steps=[7])
    pixel = """async () => {
      const image = document.images[0], canvas = document.createElement("canvas");
      await image.decode();
      const context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      return [image.naturalWidth, image.naturalHeight, ...context.getImageData(9, 9, 1, 1).data];
    }"""
    with serving(folder) as address:
        tab = make_tab()
        tab.open(address, "trajectory?id=rollouts/step_000007:0")
        assert tab.page.evaluate(pixel) == [64, 48, 200, 20, 20, 255]
        text = tab.page.inner_text(".conversation")
        assert "[video: 5 tokens]" in text
        assert "64 x 48, 3 frames" in text
        tab.page.keyboard.press("t")
        tab.page.click("#prompt-tokens summary")
        tab.page.wait_for_selector("#prompt-tokens .token")
        shown = tab.page.inner_text("#prompt-tokens .tokens")
        assert shown == "[video: 5 tokens]?"
        tab.check(address)
    tab = make_tab()
    tab.open((tmp_path / "out" / "index.html").as_uri(), "trajectory?id=rollouts/step_000007:0")
    tab.wait_until("document.images[0]?.naturalWidth === 64")
    tab.check((tmp_path / "out").as_uri())


def test_a_step_is_compared_with_another_one(large: Path, address: str, make_tab: Any):
    tab = make_tab()
    tab.open(address, f"step?file={FILE}")
    tab.page.select_option("#with", "0:rollouts/step_000009")
    tab.page.wait_for_selector("#changes")
    rewards = [
        [json.loads(line)["combined_reward"] for line in path.read_text().splitlines()]
        for path in (large / f"{FILE}.jsonl", large / "rollouts/step_000009.jsonl")
    ]
    here, there = (sum(values) / len(values) for values in rewards)
    cells = tab.page.locator("#changes tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == ["reward", f"{here:.3g}", f"{there:.3g}"]
    tab.check(address)


def test_a_click_on_a_curve_opens_its_step(address: str, make_tab: Any):
    tab = make_tab()
    tab.open(address, "runs")
    box = tab.page.locator(".charts svg").first.bounding_box()
    tab.page.mouse.click(box["x"] + 54, box["y"] + box["height"] / 2)
    tab.wait_until("location.hash.includes('step_000001')")
    tab.settle()
    tab.check(address)


def test_an_export_opens_from_disk(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "run")
    write_hostile(folder)
    out = tmp_path / "export"
    done = export_runs([RunReader(folder)], out, steps=[2, 9], limit=10)
    assert (done.num_trajectories, done.num_left_out) == (17, 6)
    address = (out / "index.html").as_uri()
    tab = make_tab()
    tab.open(address, "runs")
    assert tab.page.locator("svg path.curve").count() > 0
    tab.open(address, "list?file=all")
    assert count(tab) == 17
    tab.page.fill("#search", "window.ran")
    tab.wait_until("document.getElementById('count').dataset.total === '2'")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".conversation")
    tab.page.keyboard.press("t")
    tab.page.wait_for_selector(".token")
    tab.open(address, "step?file=rollouts/step_000002")
    assert tab.page.evaluate("window.ran") is None
    tab.check(out.as_uri())


def test_an_export_has_the_order_of_the_server(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "run", num_steps=1, per_step=40)
    path = folder / "rollouts" / "step_000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["combined_reward"] = round(line["combined_reward"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, tab = RunReader(folder), make_tab()
    export_runs([run], tmp_path / "out", steps=[1])
    tab.open((tmp_path / "out" / "index.html").as_uri(), "list")
    for sort, tool in (("reward", ""), ("-reward", ""), ("-tool_seconds", "search")):
        query = {"run": 0, "sort": sort, "tool": tool}
        shown = tab.page.evaluate(f"listFromExport({json.dumps(query)})")
        found = list_trajectories(run, Filters(sort=sort, tool=tool))
        for key in ("id", "tool_seconds"):
            assert [row[key] for row in shown["rows"]] == [row[key] for row in found["rows"]]
        assert shown["hidden"] == found["hidden"]


def test_a_step_with_two_rewards_and_a_group_without_spread(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "run", num_steps=1)
    path = folder / "rollouts" / "step_000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["combined_reward"] = float(number > 10)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(folder) as address:
        tab = make_tab()
        tab.open(address, "step")
        reward = tab.page.locator(".four figure").first
        chart = reward.locator("svg").bounding_box()
        boxes = [bar.bounding_box() for bar in reward.locator("rect").all()]
        assert sum(box["width"] for box in boxes) > 0.85 * chart["width"]
        assert reward.locator("svg text").all_text_contents() == ["11", "0", "0", "1"]
        assert tab.page.locator("#groups tbody tr").count() == 1
        assert not tab.page.locator("#flat-groups").is_visible()
        tab.page.click("text=1 group without spread")
        assert tab.page.locator("#flat-groups tbody tr").count() == 1
        tab.page.set_viewport_size({"width": 800, "height": 800})
        tops = [box.bounding_box()["y"] for box in tab.page.locator(".four figure").all()]
        assert tops[0] == tops[1] < tops[2] == tops[3]


def test_charts_have_one_x_axis_and_no_point_on_the_y_axis(tmp_path: Path, make_tab: Any):
    folder = write_view_run(tmp_path / "run", num_steps=0)
    lines = [{"step": step, "rollout/reward/mean": step / 9} for step in range(1, 9)]
    lines.insert(0, {"step": 0, "val/a/success": 1.0, "algorithm/zero_signal_groups_frac": 0.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(folder) as address:
        tab = make_tab()
        tab.open(address, "runs")
        tab.wait_until("document.querySelectorAll('.charts svg').length === 2")
        labels = [
            chart.locator("text[text-anchor='middle']").all_text_contents()
            for chart in tab.page.locator(".charts svg").all()
        ]
        assert labels[0] == labels[1] == ["0", "2", "4", "6", "8"]
        success = tab.page.locator("svg[aria-label='val/a/success']")
        numbers = success.locator("text[text-anchor='end']").all_text_contents()
        assert max(map(float, numbers)) == 1
        start = success.locator("path.curve").get_attribute("d").split("m")[0]
        assert float(start[1:].split()[0]) > float(
            success.locator("line.grid").first.get_attribute("x1")
        )
        name = tab.page.locator(".names li:has-text('zero_signal') span")
        parts = name.evaluate("(e) => [...e.childNodes].filter((n) => n.data).map((n) => n.data)")
        assert parts == ["algorithm/", "zero_", "signal_", "groups_", "frac"]


def test_a_call_that_was_not_made_has_no_times_and_no_empty_arguments(
    tmp_path: Path, make_tab: Any
):
    folder = write_view_run(tmp_path / "run", num_steps=1)
    path = folder / "rollouts" / "step_000001.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    made = line["request"]["turns"][0]["calls"][0]
    missing = {"arguments": {}, "num_attempts": 0, "seconds": 0.0, "queue_seconds": 0.0}
    malformed = {**made, **missing, "name": "", "outcome": "malformed", "message": "not closed"}
    line["request"]["turns"][0]["calls"] = [malformed, made]
    path.write_text(json.dumps(line) + "\n")
    with serving(folder) as address:
        tab = make_tab()
        tab.open(address, "trajectory?id=rollouts/step_000001:0")
        texts = tab.page.locator(".message .call").all_inner_texts()
        assert texts[0].split() == ["malformed", "result", "4", "tokens", "not", "closed"]
        assert "at work" in texts[1]
        assert "12 * 48" in texts[1]


def test_an_unknown_trajectory_is_reported_once(tmp_path: Path, make_tab: Any):
    with serving(write_view_run(tmp_path / "run", num_steps=1)) as address:
        tab = make_tab()
        tab.open(address, "trajectory?id=nothing")
        assert tab.page.inner_text("main") == "not found: the trajectory 'nothing'"
        assert not tab.page.locator("#error").is_visible()


def test_a_bar_of_the_rewards_lists_as_many_trajectories_as_it_counts(
    tmp_path: Path, make_tab: Any
):
    folder = write_view_run(tmp_path / "run", num_steps=1, per_step=100)
    with (folder / "rollouts" / "step_000001.jsonl").open("a") as file:
        file.write('{"step": 1}\n')
    export_runs([RunReader(folder)], tmp_path / "out")
    exported = (tmp_path / "out" / "index.html").as_uri()
    with serving(folder) as address:
        for where in (address, exported):
            tab = make_tab()
            tab.open(where, "step?file=rollouts/step_000001")
            assert "1 damaged line left out" in tab.page.inner_text("main")
            bars = tab.page.locator("g.pick")
            counts = [int(text.rpartition(": ")[2]) for text in bars.all_text_contents()]
            assert sum(counts) == 100
            for number in (0, len(counts) // 2, len(counts) - 1):
                tab.open(where, "step?file=rollouts/step_000001")
                bars.nth(number).locator("rect").dispatch_event("click")
                tab.wait_until("document.getElementById('count')?.dataset.total !== undefined")
                assert count(tab) == counts[number]
                assert tab.page.inner_text("#count").endswith(", 1 damaged line left out")


def test_runs_with_other_folders_of_rollouts_are_compared(tmp_path: Path, make_tab: Any):
    runs = [write_view_run(tmp_path / name, num_steps=2) for name in "ab"]
    (runs[1] / "rollouts").rename(runs[1] / "validation")
    with serving(*runs) as address:
        tab = make_tab()
        tab.open(address, "step?file=rollouts/step_000002")
        tab.page.select_option("#with", label="b: validation/step_000002")
        tab.page.wait_for_selector("#changes")
        tab.check(address)


def test_the_four_tasks_of_the_documentation(tmp_path: Path, make_tab: Any):
    """Do what `docs/viewer.md` describes, with the labels that it names."""
    runs = [write_view_run(tmp_path / n, num_steps=12, seed=i) for i, n in enumerate("ab")]
    page_of_tasks = (DOCS / "viewer.md").read_text(encoding="utf-8")
    with serving(*runs) as address:
        tab = make_tab()
        page = tab.page

        def click(selector: str, label: str) -> None:
            assert label in page_of_tasks
            page.click(f"{selector} >> text={label}")
            tab.settle()

        def choose(selector: str, label: str) -> None:
            assert label in page_of_tasks
            page.select_option(selector, label=label)
            tab.wait_until(f"document.querySelector('{selector}').selectedOptions[0].text ==="
                           f" '{label}' && document.body.dataset.loading === '0'")  # fmt: skip

        tab.open(address, "runs")
        click("nav", "Step")
        choose("#file", "rollouts/step_000010")
        click("main", "the worst first")
        page.wait_for_selector("table.list tbody tr")
        worst = page.locator("table.list td[data-column='Request']").all_inner_texts()[:3]
        lines = read_lines(runs[0] / "rollouts/step_000010.jsonl")
        ranked = sorted(lines, key=lambda line: line["combined_reward"])
        assert worst == [line["request"]["request_id"] for line in ranked[:3]]
        page.keyboard.press("Enter")
        for name in worst:
            tab.wait_until(f"document.querySelector('dl.facts dd')?.innerText === '{name}'")
            page.keyboard.press("]")

        click("nav", "Runs")
        page.wait_for_selector(".charts svg")
        box = page.locator(".charts svg").first.bounding_box()
        x = box["x"] + 52 + (box["width"] - 60) / 11
        page.mouse.click(x, box["y"] + 100)
        page.wait_for_selector("#with")
        assert page.input_value("#file") == "rollouts/step_000002"
        choose("#with", "rollouts/step_000001")
        page.wait_for_selector("#changes")

        click("nav", "Runs")
        page.wait_for_selector("#differences")
        choose("#x", "trained tokens")
        click("#runs-table", "b")
        choose("#with", "a: rollouts/step_000012")
        assert "Compared" in page.inner_text("main")

        click("nav", "Step")
        slowest = page.locator("section:has-text('Tool calls') tbody td").first
        assert slowest.inner_text() == "search"
        slowest.locator("a").click()
        for order in ("ascending", "descending"):
            click("th", "Tools s")
            page.wait_for_selector(f"th[aria-sort='{order}']")
            tab.settle()
        page.keyboard.press("Escape")
        page.keyboard.press("Enter")
        page.wait_for_selector(".timeline")
        tab.check(address)


def take_screenshots(make_tab: Any, address: str, folder: Path) -> None:
    """Make the pictures of `docs/viewer.md`."""
    shots = {
        "viewer_runs": ("runs", 640),
        "viewer_step": ("step?with=0:rollouts/step_000001", 1000),
        "viewer_trajectory": ("trajectory?id=rollouts/step_000040:17", 760),
    }
    for name, (fragment, height) in shots.items():
        tab = make_tab(1200)
        tab.page.set_viewport_size({"width": 1200, "height": height})
        tab.open(address, fragment)
        if name == "viewer_runs":
            tab.page.fill("#smooth", "0.6")
            tab.page.locator("#smooth").blur()
        if name == "viewer_trajectory":
            tab.page.keyboard.press("t")
            tab.page.wait_for_selector(".token")
            tab.page.select_option("#color", "rollout_log_probs")
            tab.page.locator(".token").nth(5).click()
            tab.page.evaluate("scrollTo(0, 0)")
        tab.settle()
        tab.page.screenshot(path=str(folder / f"{name}.png"))


def test_the_screenshots_of_the_documentation(
    make_tab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With AGENTRL_SCREENSHOTS=1 they are written to `docs/`."""
    monkeypatch.chdir(tmp_path)
    runs = [Path("runs/lr_1e-6"), Path("runs/lr_3e-6")]
    for seed, run in enumerate(runs):
        write_view_run(run, num_steps=40, per_step=64, seed=2 * seed)
    folder = DOCS if os.environ.get("AGENTRL_SCREENSHOTS") else tmp_path
    with serving(*runs) as address:
        take_screenshots(make_tab, address, folder)
    for name in ("viewer_runs", "viewer_step", "viewer_trajectory"):
        assert (folder / f"{name}.png").stat().st_size > 10_000
