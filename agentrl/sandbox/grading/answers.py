"""Find the code in what a model wrote."""

import re
from itertools import zip_longest

_LANGUAGE = re.compile(r"[ \t]*```[ \t]*([\w+#-]*)")
_PYTHON = {"", "py", "python", "python3", "Python"}


def last_code_block(text: str) -> str | None:
    r"""Give the last fenced block of Python, or of no language; None where there is none.

    A block that was cut before its closing fence counts.

    Example:
        >>> last_code_block("First\n```python\nx = 1\n```\nthen")
        'x = 1'
    """
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.lstrip(" \t").startswith("```")]
    # Every second fence closes; the last one may be missing.
    blocks = list(zip_longest(fences[::2], fences[1::2], fillvalue=len(lines)))
    for first, last in reversed(blocks):
        opening = _LANGUAGE.match(lines[first])
        if opening is not None and opening[1] in _PYTHON and first + 1 < len(lines):
            return "\n".join(lines[first + 1 : last])
    return None


def without_fence(code: str) -> str:
    r"""Take the fence off code that a model wrote into one, whatever its language.

    Example:
        >>> without_fence("```bash\nls\n```")
        'ls'
    """
    stripped = code.strip()
    head, end, body = stripped.partition("\n")
    is_fenced = end and head.startswith("```") and "`" not in head[3:] and body.endswith("```")
    return body[:-3].rstrip(" \t").removesuffix("\n") if is_fenced else code
