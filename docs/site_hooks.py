"""Build the site's pages from files outside docs/: the home page is README.md, and each other file
or folder that a page links to becomes a page in `files/`. mkdocs.yml names this module.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=(?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash"}


def site_path(path: str) -> str:
    """Return the page in the site of a path in the repository, or the file if it is in docs/."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def rewrite_links(text: str, path: str) -> str:
    """Return the text of the page at a path in the repository with links to pages of the site."""
    folder = PurePosixPath(path).parent
    start = PurePosixPath(site_path(path)).parent

    def new_target(found: re.Match[str]) -> str:
        target = os.path.normpath(folder / found[0])
        return os.path.relpath(site_path(target), start) if (ROOT / target).exists() else found[0]

    return LINK.sub(new_target, text)


def outside_links(text: str, path: str) -> set[str]:
    """Return the paths outside docs/ to which the page at a path links."""
    folder = PurePosixPath(path).parent
    targets = {os.path.normpath(folder / link) for link in LINK.findall(text)}
    return {t for t in targets if not t.startswith(("docs/", "..")) and (ROOT / t).exists()}


def text_of(path: str) -> str:
    """Return a file or folder outside docs/ as Markdown."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    files = sorted(f for f in file.rglob("*") if f.suffix in LANGUAGES) if file.is_dir() else [file]
    parts = [f"# {path}"]
    for one in files:
        heading = f"## {one.relative_to(file)}\n\n" if file.is_dir() else ""
        code = one.read_text(encoding="utf-8").rstrip()
        parts.append(f"{heading}````{LANGUAGES.get(one.suffix, 'text')}\n{code}\n````")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/ that the pages of the site reach by links."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    missing = {"README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    for path in pages:
        missing |= outside_links(text_of(path), path)
    done = set[str]()
    while missing := missing - done:
        path = missing.pop()
        text = text_of(path)
        done.add(path)
        if path.endswith(".md"):
            missing |= outside_links(text, path)
        content = rewrite_links(text, path) if path.endswith(".md") else text
        files.append(File.generated(config, site_path(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page of docs/ that lead out of it."""
    if page.file.generated_by:
        return markdown
    return rewrite_links(markdown, f"docs/{page.file.src_uri}")
