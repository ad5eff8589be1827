"""The SandboxFusion provider: its answers, its failures, and sessions that run sources again."""

import asyncio

import pytest
from pydantic import ValidationError

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox import ExecutionEnd
from agentrl.sandbox.fusion import FusionClient, FusionSandbox
from tests.fakes.sandbox_fusion import fusion_service


def config(url: str | None, **keys: object) -> SandboxConfig:
    return SandboxConfig.model_validate({"provider": "sandbox_fusion", "url": url, **keys})


async def test_names_and_files_come_back_and_old_output_does_not():
    async with fusion_service() as service:
        sandbox = FusionSandbox(config(service.url))
        session = await sandbox.open_python()
        await session.run("import os\nx = 20\nprint('first')\nos.system('echo loud')")
        await session.run("open('a.txt', 'w').write('22')")
        failed = await session.run("y = 1\n1 / 0\n")
        last = await session.run("x + y + int(open('a.txt').read()) - 1", echo=True)
        await sandbox.close()
    assert (last.stdout, last.stderr, last.end) == ("42\n", "", ExecutionEnd.OK)
    assert failed.end is ExecutionEnd.ERROR
    assert failed.stderr.splitlines()[1:] == [
        '  File "<code>", line 2, in <module>',
        "    1 / 0",
        "    ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


async def test_a_killed_call_ends_the_state_and_reports_it():
    async with fusion_service() as service:
        sandbox = FusionSandbox(config(service.url))
        session = await sandbox.open_python()
        await session.run("x = 1")
        late = await session.run("while True: pass", timeout_s=0.5)
        after = await session.run("print('x' in globals())")
        await sandbox.close()
    assert late.end is ExecutionEnd.TIMEOUT
    assert "its time was up" in late.stderr
    assert after.stdout == "False\n"
    assert "are gone" in after.stderr


async def test_a_shell_keeps_its_files_and_a_program_reads_its_input():
    async with fusion_service() as service:
        sandbox = FusionSandbox(config(service.url))
        shell = await sandbox.open_shell()
        await shell.run("echo hello > a.txt; echo loud; cd /")
        said = await shell.run("cat a.txt; exit 3")
        program = await sandbox.run_program(
            ["python", "main.py"], files={"main.py": "print(input()[::-1])"}, stdin="abc\n"
        )
        await sandbox.close()
    assert (said.stdout, said.exit_code, said.end) == ("hello\n", 3, ExecutionEnd.ERROR)
    assert program.stdout == "cba\n"


async def test_output_is_cut_at_the_limit():
    async with fusion_service() as service:
        sandbox = FusionSandbox(config(service.url, max_output_bytes=10))
        argv = ["python", "-c", "print('x' * 99)"]
        said = await sandbox.run_program(argv)
        one_call = await sandbox.run_program(argv, max_output_bytes=1000)
        await sandbox.close()
    assert (said.stdout, said.num_cut_bytes) == ("x" * 10, 90)
    assert (one_call.stdout, one_call.num_cut_bytes) == ("x" * 99 + "\n", 0)


async def test_output_without_end_is_read_no_further_and_ends_the_state():
    async with fusion_service("flood") as service:
        sandbox = FusionSandbox(config(service.url, max_output_bytes=1024))
        session = await sandbox.open_python()
        said = await session.run("while True: print('x')", timeout_s=5)
        service.mode = "fine"
        after = await session.run("print(1)")
        await sandbox.close()
    assert said.end is ExecutionEnd.KILLED
    assert "more than 262144 bytes" in said.stderr
    assert service.num_sent_bytes < 16 * 1024**2  # what was under way in buffers
    assert (after.stdout, "are gone" in after.stderr) == ("1\n", True)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("500", "it answered 500"),
        ("nonsense", "<html>"),
        ("empty", "Field required"),
        ("sandbox_error", "no room"),
        ("no_result", "without a result"),
    ],
)
async def test_a_service_that_fails_is_a_failure_of_the_sandbox(mode: str, message: str):
    async with fusion_service(mode) as service:
        client = FusionClient(service.url)
        with pytest.raises(SandboxError, match=message) as error:
            await client.run("print(1)", timeout_s=1)
        assert service.url in str(error.value)
        await client.close()
        await client.close()


async def test_a_service_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.sandbox.fusion.MARGIN_S", 0.2)
    async with fusion_service("hang") as service:
        client = FusionClient(service.url + "/run_code")
        started = asyncio.get_running_loop().time()
        with pytest.raises(SandboxError, match="no answer within"):
            await client.run("print(1)", timeout_s=0.05)
        assert asyncio.get_running_loop().time() - started < 2
        await client.close()


async def test_a_service_that_is_not_there_is_named():
    client = FusionClient("http://127.0.0.1:9")
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):
        await client.run("print(1)", timeout_s=1)
    await client.close()


def test_a_provider_without_an_address_is_refused():
    with pytest.raises(ValidationError, match="needs a url"):
        config(None)
