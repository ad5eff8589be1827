"""The prose of the package is plain: words that CONTRIBUTING.md asks to avoid stay rare.

`python -m pytest tests/test_prose.py` prints where they are.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AVOIDED = re.compile(
    r"\b(?:behind|beside|told|tells?|stands?|anew|nobody|somebody|whoever|whose|what came of"
    r"|comes? of|in words|of ours|where (?:it|they|there|that|one|a|an|the|no|nothing|none)"
    r"|lies|mend(?:s|ed)?|be it|holds? \w+ against)\b",
    re.IGNORECASE,
)
"""Words that readers who are not native speakers read twice; most uses can be said more plainly."""
MAX_PER_1000_WORDS = 1.0


def prose(source: str) -> list[tuple[int, str]]:
    """Line and text of each docstring, of each string with a space in it, and of each comment."""
    found = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return found + [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]


def check(files: list[Path]) -> tuple[float, list[str]]:
    """Avoided words per 1,000 words, and where each of them is."""
    num_words, places = 0, list[str]()
    for file in files:
        source = file.read_text(encoding="utf-8")
        texts = prose(source) if file.suffix == ".py" else list(enumerate(source.splitlines(), 1))
        for line, text in texts:
            num_words += len(re.findall(r"\w+", text))
            places += [
                f"{file.relative_to(ROOT)}:{line + text[: hit.start()].count(chr(10))}: {hit[0]}"
                for hit in AVOIDED.finditer(text)
            ]
    return 1000 * len(places) / num_words, places


def test_prose_of_the_package_avoids_words_that_are_read_twice() -> None:
    frequency, places = check(sorted((ROOT / "agentrl").rglob("*.py")))
    assert frequency <= MAX_PER_1000_WORDS, f"{frequency:.2f} per 1,000 words:\n" + "\n".join(
        places
    )


def test_prose_of_the_pages_avoids_words_that_are_read_twice() -> None:
    generated = {"tree.md", "keys.md"}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in generated]
    frequency, places = check([ROOT / "README.md", *sorted(pages)])
    assert frequency <= MAX_PER_1000_WORDS, f"{frequency:.2f} per 1,000 words:\n" + "\n".join(
        places
    )
