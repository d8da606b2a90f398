"""Traces in MLflow: an `EpisodeTrace` as MLflow's records, under an id that is derived from it.

    EpisodeTrace ──▶ start_trace (ids, tags, the run that it belongs to) ──▶ log_spans

Both calls replace what they have written before, so a trace that is logged twice is stored once.
MLflow's decorators and `start_span` are not used: their ids are random, their exporter only logs
errors, and their address is global.
"""

import base64
import hashlib
import json
from typing import Any

from tasks.tracking.episode_traces import EpisodeSpan, EpisodeTrace

PREVIEW_MAX = 1_000
"""Characters of a preview that MLflow's tables have."""
_TRACE_BYTES, _SPAN_BYTES = 16, 8


def log_trace(uri: str, experiment_id: str, mlflow_run_id: str, trace: EpisodeTrace) -> None:
    """Store a trace and link it to an MLflow run; raises what MLflow's client raises."""
    from mlflow.tracing.client import TracingClient

    client = TracingClient(tracking_uri=uri)
    identity = f"{mlflow_run_id}/{trace.identity}"
    client.start_trace(_info(trace, identity, experiment_id, mlflow_run_id))
    client.log_spans(experiment_id, _spans(trace, identity))


def trace_id(identity: str) -> str:
    """Return MLflow's id of the trace with this identity."""
    return f"tr-{_digest(identity, _TRACE_BYTES).hex()}"


def _info(trace: EpisodeTrace, identity: str, experiment_id: str, mlflow_run_id: str) -> Any:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    root = trace.root
    return TraceInfo(
        trace_id=trace_id(identity),
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=round(root.start_s * 1e3),
        execution_duration=round((root.end_s - root.start_s) * 1e3),
        state=TraceState.ERROR if trace.error else TraceState.OK,
        request_preview=json.dumps(root.inputs, ensure_ascii=False)[:PREVIEW_MAX],
        response_preview=root.outputs[:PREVIEW_MAX],
        trace_metadata={
            TraceMetadataKey.SOURCE_RUN: mlflow_run_id,
            TraceMetadataKey.TOKEN_USAGE: json.dumps(_usage(root)),
        },
        tags={**trace.tags, TraceTagKey.TRACE_NAME: root.name},
    )


def _spans(trace: EpisodeTrace, identity: str) -> list[Any]:
    from mlflow.entities import Span

    spans = [trace.root, *trace.spans]
    return [Span.from_dict(_span(trace, identity, *each)) for each in enumerate(spans)]


def _span(trace: EpisodeTrace, identity: str, number: int, span: EpisodeSpan) -> dict[str, Any]:
    """Return a span in MLflow's stored form. Number 0 is the episode, the parent of the others."""
    from mlflow.tracing.constant import SpanAttributeKey

    attributes = {
        SpanAttributeKey.REQUEST_ID: trace_id(identity),
        SpanAttributeKey.SPAN_TYPE: span.kind,
        SpanAttributeKey.INPUTS: span.inputs,
        SpanAttributeKey.OUTPUTS: span.outputs,
        **{f"astraflow.{name}": value for name, value in span.attributes.items()},
    }
    if span.kind == "LLM":  # MLflow adds up those of the spans
        attributes[SpanAttributeKey.CHAT_USAGE] = _usage(span)
    is_failed = bool(trace.error) and number == 0
    return {
        "trace_id": _base64(_digest(identity, _TRACE_BYTES)),
        "span_id": _span_id(identity, number),
        "parent_span_id": _span_id(identity, 0) if number else None,
        "name": span.name,
        "start_time_unix_nano": round(span.start_s * 1e9),
        "end_time_unix_nano": round(span.end_s * 1e9),
        "status": {
            "code": "STATUS_CODE_ERROR" if is_failed else "STATUS_CODE_OK",
            "message": trace.error if is_failed else "",
        },
        "attributes": {
            name: json.dumps(value) for name, value in attributes.items() if value is not None
        },
    }


def _usage(span: EpisodeSpan) -> dict[str, int]:
    context, sampled = span.usage
    return {
        "input_tokens": context,
        "output_tokens": sampled,
        "total_tokens": context + sampled,
    }


def _span_id(identity: str, number: int) -> str:
    return _base64(_digest(f"{identity}/{number}", _SPAN_BYTES))


def _digest(text: str, size: int) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:size]


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
