"""Traces for a collector of OpenTelemetry, by OTLP over HTTP. The only importer of OpenTelemetry.

The spans are made complete, with their times, and given to the exporter. No tracer provider is set
up, so a provider of the user's own code is not touched.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from agentrl import __version__
from agentrl.trainer.tracing.spans import Attribute, Span, Trace

MAX_SPANS = 2048
"""Spans of one message to the collector."""
_PATH = "/v1/traces"


class OtlpExporter:
    """Sends traces to a collector.

    Args:
        endpoint: Base URL of the collector; None: that of the environment (`OTEL_EXPORTER_OTLP_*`),
            or port 4318 of this machine.
        attributes: Attributes of the run, for every span.
    """

    def __init__(self, endpoint: str | None, attributes: Mapping[str, Attribute]) -> None:
        # It reports each failed attempt; `TraceExport` reports the first one.
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
        url = endpoint and endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        self._exporter = OTLPSpanExporter(endpoint=url)
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME replace these names.
        named = Resource.create({"service.name": "agentrl", **attributes})
        self._resource = named.merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("agentrl", __version__)

    def export(self, traces: Sequence[Trace]) -> None:
        """Send traces, in messages of at most `MAX_SPANS`.

        Raises:
            OSError: If the collector did not take them.
        """
        spans = [span for trace in traces for span in self._convert(trace)]
        for start in range(0, len(spans), MAX_SPANS):
            result = self._exporter.export(spans[start : start + MAX_SPANS])
            if result is not SpanExportResult.SUCCESS:
                raise OSError("the collector did not take the spans")

    def close(self) -> None:
        """End the attempts to send."""
        self._exporter.shutdown()

    def _convert(self, trace: Trace) -> Iterator[ReadableSpan]:
        stack: list[tuple[Span, SpanContext | None]] = [(trace.root, None)]
        number = 0
        while stack:
            span, parent = stack.pop()
            context = _context(trace, number)
            number += 1
            stack += [(child, context) for child in reversed(span.children)]
            yield ReadableSpan(
                name=span.name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes={"agentrl.rank": trace.rank, **span.attributes},
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=round(span.started * 1e6) * 1000,
                end_time=round(span.ended * 1e6) * 1000,
                instrumentation_scope=self._scope,
            )


def _context(trace: Trace, number: int) -> SpanContext:
    """Name a span by its trace, its rank and its number; ranks have steps in common."""
    name = f"{trace.trace_id}:{trace.rank}:{number}".encode()
    span_id = int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
    return SpanContext(int(trace.trace_id, 16), span_id, is_remote=False, trace_flags=TraceFlags(1))
