"""Find the code in what a model wrote."""

import re

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.M | re.S)
_FENCED = re.compile(r"```[^\n`]*\n(.*?)\n?[ \t]*```", re.S)
_PYTHON = {"", "py", "python", "python3", "Python"}


def last_code_block(text: str) -> str | None:
    r"""Give the last fenced block of Python, or of no language; None where there is none.

    A block that was cut before its closing fence counts.

    Example:
        >>> last_code_block("First\n```python\nx = 1\n```\nthen")
        'x = 1'
    """
    blocks = [code for language, code in _BLOCK.findall(text) if language in _PYTHON]
    return blocks[-1] if blocks else None


def without_fence(code: str) -> str:
    r"""Take the fence off code that a model wrote into one, whatever its language.

    Example:
        >>> without_fence("```bash\nls\n```")
        'ls'
    """
    found = _FENCED.fullmatch(code.strip())
    return code if found is None else found[1]
