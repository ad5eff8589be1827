"""Helpers of verl's bundled tools, which copies of those tools import, ask the same services."""

import asyncio
import json

from agentrl.compat.scoring import process_single_case
from agentrl.compat.tools import perform_single_search_batch
from tests.fakes.http_services import retriever, serving
from tests.fakes.sandbox_fusion import fusion_service


async def test_a_search_is_worded_as_in_verl():
    found = [{"document": {"contents": '"Bern"\nA city.'}, "score": 1.0}]
    async with serving(retriever(lambda query: found)) as url:
        text, metadata = await asyncio.to_thread(perform_single_search_batch, url, ["a", "b"])
    assert json.loads(text)["result"] == 'Doc 1 (Title: "Bern")\nA city.' + (
        '\n---\nDoc 1 (Title: "Bern")\nA city.'
    )
    assert (metadata["status"], metadata["total_results"]) == ("success", 2)
    nowhere = ("http://127.0.0.1:9", ["a"], 3, None, 1)
    failed, metadata = await asyncio.to_thread(perform_single_search_batch, *nowhere)
    assert json.loads(failed)["result"].startswith("Search error: ")
    assert metadata["status"] == "api_error"


async def test_a_program_is_run_and_its_end_reported():
    async with fusion_service() as service:
        one = (service.url, "print(1)", 5, 1024, "python")
        right, metadata = await asyncio.to_thread(process_single_case, 0, None, None, *one)
        wrong, _ = await asyncio.to_thread(process_single_case, 0, None, "2", *one)
    assert (right, metadata["run_status"], metadata["stdout"]) == (True, "Finished", "1\n")
    assert wrong is False
    lost, metadata = await asyncio.to_thread(
        process_single_case, 0, None, None, "http://127.0.0.1:9", "", 1, -1, "python"
    )
    assert (lost, metadata["run_status"]) == (-1, None)
