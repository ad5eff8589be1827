"""Text of others is shown without its control characters."""

import pytest
from rich.console import Console

from agentrl.commands.rescore import Change, changes_table
from agentrl.errors import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 中 😀", "plain ä 中 😀"),
        ("red \x1b[31m", "red \\x1b[31m"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str):
    assert printable(text) == shown


def test_a_table_of_sources_moves_no_cursor():
    console = Console(record=True, width=100, force_terminal=True, color_system=None)
    console.print(changes_table({"a\x1b[2J\n": Change()}))
    assert "\x1b[2J" not in console.export_text(styles=False)
