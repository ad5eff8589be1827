"""Optional packages: what is missing is named, with a command that installs just that."""

import pytest

from agentrl.errors import MissingExtraError
from agentrl.plugins import environment as extras
from agentrl.plugins.environment import install_command, require_package


def test_command_names_the_packages_and_never_a_distribution_that_is_another_projects():
    command = install_command("mcp")
    assert command.startswith("pip install 'mcp")
    assert "agentrl" not in command


def test_command_of_an_extra_keeps_the_extras_of_its_packages():
    assert "math-verify[" in install_command("math")


def test_without_metadata_the_command_is_that_of_a_checkout(monkeypatch):
    monkeypatch.setattr(extras, "DISTRIBUTION", "a-name-that-is-nowhere-installed")
    assert install_command("mcp") == "pip install '.[mcp]' (in a checkout of agentrl)"


def test_a_package_that_is_not_there_is_an_error_with_the_command():
    with pytest.raises(MissingExtraError) as caught:
        require_package("no_such_package", extra="mcp", what="the tool")
    assert caught.value.details["install"] == install_command("mcp")
