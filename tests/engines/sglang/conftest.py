"""Start the real SGLang once in each process of tests: inside it, and as two servers."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from tests.fakes.client_agents import CLIENT_MODEL_LEN, random_policy_for_clients
from tests.fakes.engines import tiny_model
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.serve_command import Serving
from tests.fakes.sglang_policy import letter_tokenizer, save_policy

MAX_MODEL_LEN = 1024
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore what SGLang leaves open in this process."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """The engine inside this process."""
    folder = save_policy(tiny_model(), tmp_path_factory.mktemp("policy"))
    needs = SGLangNeeds(
        model_path=str(folder), max_model_len=MAX_MODEL_LEN, max_requests=64, dtype="float32"
    )
    engine = SGLangEngine.start(needs, letter_tokenizer(), bucket_bytes=20_000)
    yield engine
    engine._host.close()


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """An engine with `random_policy_for_clients`, whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("agents") / "policy"
    random_policy_for_clients().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    needs = SGLangNeeds(
        model_path=str(folder), max_model_len=CLIENT_MODEL_LEN, max_requests=8, dtype="float32"
    )
    engine = SGLangEngine.start(needs, tiny_tokenizer(), bucket_bytes=20_000)
    yield engine
    engine._host.close()


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two servers. The tests that kill them run last: `test_sglang_weight_sync_killed.py`."""
    serving = Serving(save_policy(tiny_model(), tmp_path_factory.mktemp("served") / "policy"))
    yield serving
    serving.end()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember the result for `pytest_unconfigure`."""
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without the interpreter's finalization, in which SGLang's libraries may crash."""
    status = config.stash.get(_STATUS, None)
    if config.option.markexpr == "sglang" and status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_STATUS = pytest.StashKey[int]()
