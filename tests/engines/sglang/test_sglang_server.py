"""The suite of every engine, on two real servers that `agentrl serve` starts on loopback."""

import socket
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from tests.engines.conformance import ModelCase, ModelConformance
from tests.fakes.engines import tiny_model
from tests.fakes.serving import Serving, are_gone, connect, kill
from tests.fakes.sglang import letter_tokenizer, save_policy

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The two servers of this process of tests."""
    serving = Serving(save_policy(tiny_model(), tmp_path_factory.mktemp("served") / "policy"))
    yield serving
    serving.end()


class TestSGLangServerEngine(ModelConformance):
    @pytest.fixture
    async def engine_case(self, serving: Serving) -> AsyncIterator[ModelCase]:
        tokenizer, model = letter_tokenizer(), tiny_model().eval()

        def decode(token_ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

        engine = connect(serving.start(), decode)
        await engine.update_weights(model.named_parameters(), version=0)
        yield ModelCase(engine, decode, model)
        await engine.close()


def test_killed_supervisor_leaves_no_process_and_no_port(serving: Serving):
    addresses = serving.start()
    supervisor, *servers = serving.processes()
    assert len(servers) >= 6, "each server has a scheduler and a detokenizer"
    kill(supervisor)
    assert serving.supervisor is not None
    serving.supervisor.communicate(timeout=20)
    assert are_gone(servers)
    for address in addresses:
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", int(address.rsplit(":", 1)[1])))
