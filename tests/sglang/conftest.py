"""The real SGLang: one start for each process of tests."""

from collections.abc import Iterator

import pytest

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.engine import SGLangEngine
from tests.fakes_engines import tiny_model
from tests.fakes_sglang import letter_tokenizer, save_policy

MAX_MODEL_LEN = 1024


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """The one engine of this process."""
    folder = save_policy(tiny_model(), tmp_path_factory.mktemp("policy"))
    needs = SGLangNeeds(
        model_path=str(folder), max_model_len=MAX_MODEL_LEN, max_requests=64, dtype="float32"
    )
    engine = SGLangEngine.start(needs, letter_tokenizer(), bucket_bytes=20_000)
    yield engine
    engine._host.close()
