"""The documentation site: each page is in its navigation, and it builds without a warning."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python objects that it names."""


_Loader.add_multi_constructor("!!python/", lambda *_: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(inner)


SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
NAV = list(leaves(SETTINGS["nav"]))


def test_each_page_is_in_the_navigation_once():
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(NAV) == sorted(set(NAV))
    outside = {f"files/{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
    assert set(NAV) - {"index.md"} - outside == pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_another_host(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\"\s>]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?([^\"\s>]+)", text)
        assert not [target for target in loaded if re.match(r"(https?:)?//", target)], page


@pytest.mark.slow
def test_links_out_of_the_documentation_lead_to_pages_of_the_site(site: Path):
    assert (site / "files/agentrl/rollout/states.py.html").is_file()
    assert 'href="tools.html"' in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_browser_opens_the_site_from_disk_and_searches_it(site: Path):
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or pytest.skip("no chromium")
    others, broken = list[str](), list[str]()
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda r: others.append(r.url) if "file:" not in r.url else None)
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on("console", lambda m: broken.append(m.text) if m.type == "error" else None)
        for name in ("index", "keys", "algorithms/index", "reference/api/tools"):
            page.goto(f"{site.as_uri()}/{name}.html")
        page.locator(".md-search__input").first.click()
        page.keyboard.type("circuit_breaker")
        page.locator(".md-search-result__item a[href*=tools]").first.wait_for(timeout=30_000)
        browser.close()
    assert [url for url in others if not url.startswith("data:")] == []
    assert broken == []
