"""Traces of whole runs: to files, to a collector, and to one that fails."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import MissingExtraError
from agentrl.trainer.rollouts.files import read_rollouts
from agentrl.trainer.tracing.spans import Span, Trace
from agentrl.trainer.tracing.tracer import MAX_QUEUED, TraceExport, check_tracing
from tests.fakes.fault_runs import make_run
from tests.fakes.runs import tiny_run

pytestmark = pytest.mark.usefixtures("alone")

NAMES_OF_REQUESTS = {"request", "turn", "engine_call", "tool_call", "score"}


class Collector:
    """A server that decodes what an exporter of OTLP sends.

    Args:
        status: Of every answer.
    """

    def __init__(self, status: int = 200) -> None:
        self.requests: list[Any] = []
        self.paths: list[str] = []
        found = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                    ExportTraceServiceRequest,
                )

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                found.paths.append(self.path)
                found.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Collector()
    yield server
    server.close()


def slices_of(file: Path) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} == named
    return slices


def assert_slices_nest(slices: list[dict[str, Any]]) -> None:
    """Check that two slices of a track are one in the other, or one after the other."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in slices:
        tracks.setdefault((one["pid"], one["tid"]), []).append(one)
    for track in tracks.values():
        open_ends: list[int] = []
        for one in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            end = one["ts"] + one["dur"]
            while open_ends and open_ends[-1] <= one["ts"]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def is_inside(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    end = whole["ts"] + whole["dur"]
    return whole["ts"] <= part["ts"] and part["ts"] + part["dur"] <= end


def test_a_file_has_every_request_of_a_step_with_its_turns_calls_and_score(
    tiny_home: Path, plugin_folder: Path, tmp_path: Path
):
    started = time.time()
    content = make_run(
        tiny_home,
        plugin_folder,
        tmp_path / "run",
        rollout__deterministic=False,
        trainer__tracing={"exporters": ["file"]},
        trainer__rollout_data_dir=str(tmp_path / "run/rollouts"),
    )
    Trainer(parse_config(content)).fit()
    names = sorted(path.name for path in (tmp_path / "run/traces").iterdir())
    assert names == [f"step_{step:06d}.json" for step in range(4)]
    slices = slices_of(tmp_path / "run/traces/step_000002.json")
    assert_slices_nest(slices)
    assert all(started * 1e6 < one["ts"] < time.time() * 1e6 for one in slices)
    requests = list(read_rollouts(tmp_path / "run/rollouts/step_000002.jsonl.zst"))
    assert len(requests) == 4
    for request in requests:
        own = [one for one in slices if one["args"]["trace_id"] == request.trace_id]
        assert {one["cat"] for one in own} == NAMES_OF_REQUESTS
        (root,) = (one for one in own if one["cat"] == "request")
        turns = [one for one in own if one["cat"] == "turn"]
        assert root["args"]["agentrl.request_id"] == request.request_id
        assert len(turns) == request.num_assistant_turns == 2
        assert all(is_inside(one, root) for one in own)
        for one in own:
            if one["cat"] in ("engine_call", "tool_call"):
                assert sum(is_inside(one, turn) for turn in turns) == 1
        (call,) = (one for one in own if one["cat"] == "tool_call")
        record = request.turns[0].calls[0]
        assert call["name"] == record.name
        assert call["dur"] / 1e6 == pytest.approx(record.seconds + record.queue_seconds, abs=2e-6)
    (train_step,) = (one for one in slices if one["cat"] == "train_step")
    for name in ("gen", "update_actor", "sync_weights"):
        found = [one for one in slices if one["cat"] == name and is_inside(one, train_step)]
        assert len(found) == 1
    (gen, *_) = (one for one in slices if one["cat"] == "gen")
    engine_calls = [one for one in slices if one["cat"] == "engine_call"]
    assert sum(is_inside(one, gen) for one in engine_calls) == 8
    (validate,) = (one for one in slices if one["cat"] == "validate")
    assert sum(is_inside(one, validate) for one in engine_calls) == 4


def test_the_embedded_engine_is_traced_in_every_second_step(tiny_home: Path, tmp_path: Path):
    tracing = {"exporters": ["file"], "freq": 2}
    content = tiny_run(tiny_home, tmp_path / "run", trainer__tracing=tracing)
    Trainer(parse_config(content)).fit()
    names = sorted(path.name for path in (tmp_path / "run/traces").iterdir())
    assert names == ["step_000000.json", "step_000002.json"]
    slices = slices_of(tmp_path / "run/traces/step_000002.json")
    assert_slices_nest(slices)
    calls = [one for one in slices if one["cat"] == "engine_call"]
    assert len(calls) >= 8
    assert {one["args"]["gen_ai.usage.output_tokens"] for one in calls} == {12}
    assert {one["args"]["agentrl.policy_version"] for one in calls} == {1, 2}


def test_a_run_without_tracing_writes_no_trace_and_no_ids(tiny_home: Path, tmp_path: Path):
    rollouts = str(tmp_path / "rollouts")
    content = tiny_run(tiny_home, tmp_path / "run", trainer__rollout_data_dir=rollouts)
    trainer = Trainer(parse_config(content))
    trainer.fit()
    assert not (tmp_path / "run/traces").exists()
    requests = read_rollouts(tmp_path / "rollouts/step_000001.jsonl.zst")
    assert {request.trace_id for request in requests} == {""}


needs_otel = pytest.mark.skipif(
    find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None,
    reason="needs the extra otel",
)


@needs_otel
def test_a_collector_gets_one_trace_of_each_request_and_one_of_the_step(
    tiny_home: Path,
    plugin_folder: Path,
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
    content = make_run(
        tiny_home,
        plugin_folder,
        tmp_path / "run",
        trainer__tracing={"exporters": ["otlp"], "endpoint": collector.url},
        trainer__total_training_steps=1,
        trainer__val_before_train=False,
        trainer__test_freq=-1,
        trainer__rollout_data_dir=str(tmp_path / "run/rollouts"),
    )
    Trainer(parse_config(content)).fit()
    assert set(collector.paths) == {"/v1/traces"}
    resource = {
        one.key: one.value.string_value
        for one in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "agentrl"
    assert resource["team"] == "blue"
    by_id = {span.span_id: span for span in collector.spans}
    assert len(by_id) == len(collector.spans)
    requests = list(read_rollouts(tmp_path / "run/rollouts/step_000001.jsonl.zst"))
    for request in requests:
        own = [one for one in collector.spans if one.trace_id.hex() == request.trace_id]
        assert {one.name for one in own} == NAMES_OF_REQUESTS
        roots = [one for one in own if not one.parent_span_id]
        assert [one.name for one in roots] == ["request"]
        for one in own:
            if one.parent_span_id:
                parent = by_id[one.parent_span_id]
                assert parent.trace_id == one.trace_id
                assert parent.start_time_unix_nano <= one.start_time_unix_nano
                assert one.end_time_unix_nano <= parent.end_time_unix_nano
            if one.name == "tool_call":
                assert by_id[one.parent_span_id].name == "turn"
    (step,) = (one for one in collector.spans if one.name == "step")
    in_step = [one.name for one in collector.spans if one.trace_id == step.trace_id]
    assert {"train_step", "gen", "update_actor", "sync_weights"} <= set(in_step)


def one_step() -> list[Trace]:
    return [Trace("ab" * 16, 0, Span("request", 1.0, 2.0, {"agentrl.step": 1}))]


def export(tmp_path: Path, lines: list[str], **tracing: Any) -> TraceExport:
    config = TrainerConfig(default_local_dir=tmp_path, tracing=tracing)  # pyright: ignore
    return TraceExport(config, lines.append)


@needs_otel
def test_a_collector_that_refuses_costs_the_step_nothing_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    refusing, lines = Collector(status=400), list[str]()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing.url)
    exporter = export(tmp_path, lines, exporters=["otlp", "file"])
    for step in (1, 2):
        exporter.put(step, one_step())
    exporter.close()
    refusing.close()
    assert len(refusing.requests) == 2
    assert lines == [
        "note: traces: step 1 was not exported by 'otlp': the collector did not take the spans"
    ]
    assert len(list((tmp_path / "traces").iterdir())) == 2, "the other exporter continues"


@needs_otel
def test_an_unreachable_collector_holds_up_neither_steps_nor_the_end_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.trainer.tracing.tracer.CLOSE_S", 0.2)
    lines: list[str] = []
    exporter = export(tmp_path, lines, exporters=["otlp"], endpoint="http://127.0.0.1:9")
    started = time.monotonic()
    for step in range(MAX_QUEUED + 3):
        exporter.put(step, one_step())
    assert time.monotonic() - started < 10
    exporter.close()
    assert time.monotonic() - started < 15
    exporter._thread.join(20)  # pyright: ignore[reportPrivateUsage]
    assert not exporter._thread.is_alive()  # pyright: ignore[reportPrivateUsage]
    assert any("traces are dropped" in line for line in lines)


def test_a_folder_that_cannot_be_written_is_reported_and_stops_nothing(tmp_path: Path):
    (tmp_path / "traces").write_text("a file where the folder should be")
    lines: list[str] = []
    exporter = export(tmp_path, lines, exporters=["file"])
    exporter.put(1, one_step())
    exporter.put(2, one_step())
    exporter.close()
    assert len(lines) == 1
    assert lines[0].startswith("note: traces: step 1 was not exported by 'file'")


def test_an_exporter_without_its_package_is_refused_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
):
    def find_none(name: str) -> object | None:
        return None if name == "opentelemetry.exporter" else find_spec("json")

    monkeypatch.setattr("agentrl.plugins.environment.find_spec", find_none)
    check_tracing(TrainerConfig())
    config = TrainerConfig(tracing={"exporters": ["otlp"]})  # pyright: ignore
    with pytest.raises(MissingExtraError, match=r"trainer\.tracing\.exporters: otlp"):
        check_tracing(config)
