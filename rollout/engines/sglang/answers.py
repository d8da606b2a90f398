"""Requests to an SGLang server, and its answers as `Generation`. The answers are checked, since
another program wrote them.
"""

from typing import Any

import numpy as np

from rollout.engines.engine import EngineFailedError, Generation, SamplingParams, VersionSpan
from storage.errors import ConfigError
from storage.plain_names import quoted
from storage.records.types import Json

MASK_TOKENS_MAX = 4096
"""The largest top_k for which a server returns the tokens it kept (0.5.21)."""
LABEL_SEPARATOR = "-"
MESSAGE_CHARACTERS_MAX = 500
VERSION_DIGITS_MAX = 9
"""Digits of a version: a token holds it in 32 bits."""


def version_label(engine_id: str, version: int) -> str:
    """Return the server's name for a version: `3f9c21aa-7`; another client has another id."""
    return f"{engine_id}{LABEL_SEPARATOR}{version}"


def request_body(
    request_id: str,
    prompt: tuple[int, ...],
    limit: int,
    sampling: SamplingParams,
    *,
    vocab: int,
    prefix_key: str,
    adapter: str = "",
) -> Json:
    """Return the body of a request for at most `limit` tokens.

    Args:
        prefix_key: requests share the keys and values of equal prompts only under an equal key.
        adapter: the server's name of the adapter that samples; empty: none.

    Raises:
        ConfigError: SGLang cannot give the log-probabilities of this sampling.
    """
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": limit,
        "stop_token_ids": list(sampling.stop_ids),
        "sampling_seed": sampling.seed & (2**63 - 1),
        "skip_special_tokens": False,
    }
    body: Json = {
        "rid": request_id,
        "input_ids": list(prompt),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": prefix_key,
    }
    if adapter:
        body["lora_path"] = adapter
    if _is_restricted(sampling):
        if sampling.top_p < 1 and sampling.top_k:
            raise ConfigError(
                "top_p and top_k together: SGLang applies top_p to the distribution before top_k; "
                "set one of them"
            )
        if sampling.top_k > MASK_TOKENS_MAX:
            raise ConfigError(
                f"top_k is {sampling.top_k}; SGLang returns log-probabilities up to "
                f"{MASK_TOKENS_MAX}"
            )
        params["top_p"] = sampling.top_p
        params["top_k"] = sampling.top_k or min(vocab, MASK_TOKENS_MAX)
        body["return_sampling_mask"] = True
    return body


def _is_restricted(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def read_answer(
    answer: Json,
    sampling: SamplingParams,
    limit: int,
    engine_id: str,
    adapter_version: int | None = None,
    *,
    vocab: int,
) -> Generation:
    """Return the answer as `Generation`.

    Args:
        adapter_version: that of the adapter which the request named; it sampled every token.
        vocab: number of tokens that the model has.

    Raises:
        EngineFailedError: the answer is not one to this request, or other weights sampled it.
    """
    try:
        info = answer["meta_info"]
        tokens = _tokens(answer["output_ids"], vocab)
        reason = str(info["finish_reason"]["type"])
        if reason == "abort" and not len(tokens):
            return aborted()
        logprobs = _logprobs(info, sampling, tokens)
        spans = _spans(info, len(tokens), engine_id)
        if adapter_version is not None:
            spans = (VersionSpan(adapter_version, 0, len(tokens)),) if len(tokens) else ()
    except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
        raise EngineFailedError(
            f"SGLang gave an answer that is not one: {type(error).__name__}: {error}"[
                :MESSAGE_CHARACTERS_MAX
            ]
        ) from error
    if reason not in ("stop", "length", "abort") or not (len(tokens) or reason == "abort"):
        raise EngineFailedError(
            f"SGLang ended a request of {len(tokens)} tokens by {quoted(reason)}"
        )
    if len(tokens) > limit:
        raise EngineFailedError(f"SGLang gave {len(tokens)} tokens, and {limit} were asked for")
    if reason == "stop" and int(tokens[-1]) not in sampling.stop_ids:
        raise EngineFailedError(
            f"SGLang stopped after token {tokens[-1]}, which is not among the stop ids "
            f"{sampling.stop_ids}; start the server from a model folder without other end tokens"
        )
    return Generation(tokens, logprobs, spans, reason)  # type: ignore[arg-type]  # checked above


def _tokens(ids: Any, vocab: int) -> "np.ndarray[Any, Any]":
    """Return the ids as int32 [L]; ValueError when they are not tokens of the model."""
    if not isinstance(ids, list) or not all(
        type(each) is int and 0 <= each < vocab for each in ids
    ):
        raise ValueError(
            f"its tokens are not a list of whole numbers from 0 to {vocab - 1}, the last token of "
            "config.json's vocab_size"
        )
    return np.array(ids, dtype=np.int32)


def _logprobs(info: Json, sampling: SamplingParams, tokens: "np.ndarray[Any, Any]") -> Any:
    """Return the log-probability of each token under the distribution it was drawn from."""
    if sampling.temperature == 0:
        return np.zeros(len(tokens), np.float32)
    entries = info["output_token_logprobs"]
    if [entry[1] for entry in entries] != tokens.tolist():
        raise ValueError("the log-probabilities are those of other tokens")
    if _is_restricted(sampling):
        values = info["output_token_sampling_logprobs"]
    else:
        values = [entry[0] for entry in entries]
    with np.errstate(over="ignore"):  # what float32 cannot hold is not finite
        logprobs = np.array(values, dtype=np.float32)
    if logprobs.shape != tokens.shape or not np.isfinite(logprobs).all():
        raise ValueError(f"{len(tokens)} tokens have log-probabilities {values[:8]}")
    if len(logprobs) and float(logprobs.max()) > 1e-3:
        raise ValueError(f"the log-probability {float(logprobs.max())} is above 0")
    return np.minimum(logprobs, np.float32(0.0))


def _spans(info: Json, length: int, engine_id: str) -> tuple[VersionSpan, ...]:
    entries = info.get("weight_versions")
    if entries is None:  # an older server, whose weights change between two answers only
        entries = [{"version": info["weight_version"], "start": 0, "end": length}]
    spans = tuple(
        VersionSpan(_version(entry["version"], engine_id), int(entry["start"]), int(entry["end"]))
        for entry in entries
        if int(entry["end"]) > int(entry["start"])
    )
    bounds = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != length:
        raise ValueError(f"the spans {entries} do not cover {length} tokens")
    return spans


def _version(label: str, engine_id: str) -> int:
    owner, _, number = str(label).rpartition(LABEL_SEPARATOR)
    if owner != engine_id or not number.isdecimal() or len(number) > VERSION_DIGITS_MAX:
        raise ValueError(
            f"version {quoted(str(label))} sampled the tokens, and this worker never loaded it: "
            "does another worker use the same server?"
        )
    return int(number)


def aborted() -> Generation:
    """Return the answer to a request that was aborted before its first token."""
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")


def has_spans(answer: Json) -> bool:
    """Return whether a server names the version of each token; those before 0.5.21 do not."""
    info = answer.get("meta_info")
    return isinstance(info, dict) and isinstance(info.get("weight_versions"), list)
