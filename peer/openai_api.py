"""The part of OpenAI's HTTP interface that a model in training can answer. Pure.

What is asked is read strictly, as it comes from anybody's program: types, ranges, and whatever
would change the answer and cannot be done is refused by name, not left out in silence. Parameters
without influence on the text (``user``, ``store``, ...) are ignored, as clients send many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from echo2p2p.errors import EchoError
from echo2p2p.net.ports import Response
from echo2p2p.tasks.base import Message, Prompt
from peer.speech import Said

MODEL: Final = "echo2"
"""What the model is called; any other name is taken for it."""
BODY_BYTES_MAX: Final = 1 << 20
CHOICES_MAX: Final = 16
"""Of one prompt."""
PROMPTS_MAX: Final = 16
"""Of one request."""
STOPS_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 256
TOKENS_DEFAULT: Final = 256
SEEDS: Final = 1 << 63
REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "echo": (None, False),
    "best_of": (None, 1),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
}
"""Parameters that would change the answer, and the values at which they do not."""


class ApiError(EchoError):
    """A request that is not answered as it is; becomes the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def response(self) -> Response:
        """Return it in OpenAI's form."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        body = {
            "message": self.message,
            "type": kinds.get(self.status, server),
            "param": self.param,
            "code": self.code,
        }
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return json_response({"error": body}, status=self.status, headers=headers)


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None


class _Common(msgspec.Struct, frozen=True):
    model: str = MODEL
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None


class _CompletionBody(_Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] = ""
    logprobs: int | None = None


class _ChatBody(_Common, frozen=True, kw_only=True):
    messages: list[_ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None


@dataclass(frozen=True)
class Asked:
    """A request that can be answered."""

    kind: Literal["chat", "text"]
    prompts: tuple[Prompt | tuple[int, ...], ...]
    """To be tokenised, or tokens."""
    model: str
    samples: int
    tokens_max: int
    temperature: float
    """0: the likeliest token, always."""
    top_p: float
    top_k: int
    """0: all."""
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    usage_in_stream: bool
    logprobs: bool


Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Heading:
    """What stands at the head of an answer, and of each part of a stream."""

    identity: str
    """32 hexadecimal digits, not used before."""
    created_s: int
    """Wall clock."""
    versions: str
    """Of the weights that have answered: ``3``, or ``3-4``."""


@dataclass(frozen=True)
class Choice:
    """One answer."""

    said: Said
    finish: Finish


@dataclass(frozen=True)
class Usage:
    """Tokens of one request."""

    prompt: int
    completion: int


def read_request(kind: Literal["chat", "text"], body: bytes) -> Asked:
    """Return what a body asks for.

    Raises:
        ApiError: It is malformed, out of range, or asks for what cannot be done.
    """
    if len(body) > BODY_BYTES_MAX:
        raise ApiError(413, f"the body has {len(body)} bytes; {BODY_BYTES_MAX} are taken")
    try:
        plain = json.loads(body)
        shape: type[_ChatBody | _CompletionBody] = _ChatBody if kind == "chat" else _CompletionBody
        found = msgspec.convert(plain, shape)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is malformed: {error}") from error
    for name, harmless in REFUSED.items():
        if name in plain and plain[name] not in harmless:
            raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported")
    if isinstance(found, _ChatBody):
        prompts: tuple[Prompt | tuple[int, ...], ...] = (_conversation(found.messages),)
        wanted, logprobs = found.max_completion_tokens or found.max_tokens, bool(found.logprobs)
    else:
        prompts = _prompts(found.prompt)
        wanted, logprobs = found.max_tokens, found.logprobs is not None
        if found.logprobs is not None and found.logprobs not in (0, 1):
            raise ApiError(400, "only the sampled token's log-prob is known", param="logprobs")
    return Asked(
        kind=kind,
        prompts=prompts,
        model=found.model,
        samples=_within("n", found.n, 1, 1, CHOICES_MAX),
        tokens_max=_within("max_tokens", wanted, TOKENS_DEFAULT, 1, 1 << 20),
        temperature=_real("temperature", found.temperature, 0.0, 2.0),
        top_p=_real("top_p", found.top_p, 1e-6, 1.0),
        top_k=_within("top_k", found.top_k, 0, 0, 1 << 20),
        seed=None if found.seed is None else found.seed % SEEDS,
        stops=_stops(found.stop),
        stream=bool(found.stream),
        usage_in_stream=found.stream_options is not None and found.stream_options.include_usage,
        logprobs=logprobs,
    )


def _within(name: str, value: int | None, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise ApiError(400, f"{name} is {value}; it can be {low} to {high}", param=name)
    return value


def _real(name: str, value: float | None, low: float, high: float) -> float:
    if value is None:
        return 1.0
    if not low <= value <= high:
        raise ApiError(400, f"{name} is {value}; it can be {low:g} to {high:g}", param=name)
    return value


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > STOPS_MAX or not all(stops):
        raise ApiError(400, f"stop takes up to {STOPS_MAX} texts, none empty", param="stop")
    if any(len(stop) > STOP_CHARACTERS_MAX for stop in stops):
        raise ApiError(400, f"a stop has up to {STOP_CHARACTERS_MAX} characters", param="stop")
    return stops


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt | tuple[int, ...], ...]:
    """Return the prompts: one text, one list of tokens, or a list of either."""
    if isinstance(given, str):
        given = [given]
    tokens = [each for each in given if isinstance(each, int)]
    found: list[Prompt | tuple[int, ...]] = [tuple(tokens)] if tokens else []
    for each in given:
        if isinstance(each, str):
            found.append(Prompt(text=each))
        elif isinstance(each, list):
            found.append(tuple(each))
    if tokens and len(tokens) != len(given):
        raise ApiError(400, "prompt mixes tokens with prompts", param="prompt")
    if not 1 <= len(found) <= PROMPTS_MAX:
        raise ApiError(400, f"{len(found)} prompts; 1 to {PROMPTS_MAX} are taken", param="prompt")
    if any(not 0 <= token < 1 << 32 for each in found if isinstance(each, tuple) for token in each):
        raise ApiError(400, "a prompt's tokens are whole numbers from 0", param="prompt")
    return tuple(found)


def _conversation(messages: Sequence[_ChatMessage]) -> Prompt:
    said = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            if any(part.type != "text" for part in content):
                raise ApiError(400, "only text is understood", param="messages")
            content = "".join(part.text for part in content)
        role = "system" if message.role == "developer" else message.role
        if role not in ("system", "user", "assistant"):
            raise ApiError(400, f"the role {role!r} is not supported here", param="messages")
        said.append(msgspec.convert({"role": role, "content": content or ""}, Message))
    if not said:
        raise ApiError(400, "messages is empty", param="messages")
    return Prompt(messages=tuple(said))


# --- answers --------------------------------------------------------------------------------------


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return ``value`` as a JSON answer."""
    body = json.dumps(value, ensure_ascii=False).encode()
    return Response(status, body, headers or {}, content_type="application/json")


def write_answer(
    asked: Asked,
    heading: Heading,
    choices: Sequence[Choice],
    usage: Usage,
    headers: Mapping[str, str],
) -> Response:
    """Return an answer that is given whole."""
    written = []
    for index, choice in enumerate(choices):
        one: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
        one["logprobs"] = _logprobs(asked, choice.said)
        if asked.kind == "chat":
            one["message"] = {"role": "assistant", "content": choice.said.text, "refusal": None}
        else:
            one["text"] = choice.said.text
        written.append(one)
    frame = _frame(asked, heading, chunk=False)
    return json_response({**frame, "choices": written, "usage": _usage(usage)}, headers=headers)


def _frame(asked: Asked, heading: Heading, *, chunk: bool) -> dict[str, Any]:
    name, prefix = ("chat.completion", "chatcmpl") if asked.kind == "chat" else ("", "cmpl")
    kind = f"{name}.chunk" if name and chunk else name or "text_completion"
    return {
        "id": f"{prefix}-{heading.identity}",
        "object": kind,
        "created": heading.created_s,
        "model": MODEL,
        "system_fingerprint": f"version-{heading.versions}",
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }


STREAM_TYPE: Final = "text/event-stream"
STREAM_END: Final = b"data: [DONE]\n\n"


def write_part(asked: Asked, heading: Heading, index: int, said: Said, *, first: bool) -> bytes:
    """Return the event of a stream in which a choice goes on; ``first``: begins."""
    part: dict[str, Any]
    if asked.kind == "chat":
        role = {"role": "assistant"} if first else {}
        part = {"delta": {**role, "content": said.text}}
    else:
        part = {"text": said.text}
    part |= {"index": index, "logprobs": _logprobs(asked, said), "finish_reason": None}
    return _event(asked, {**_frame(asked, heading, chunk=True), "choices": [part]})


def write_end(asked: Asked, heading: Heading, index: int, finish: Finish) -> bytes:
    """Return the event in which a choice ends."""
    part: dict[str, Any] = {"delta": {}} if asked.kind == "chat" else {"text": ""}
    part |= {"index": index, "logprobs": None, "finish_reason": finish}
    return _event(asked, {**_frame(asked, heading, chunk=True), "choices": [part]})


def write_stream_end(asked: Asked, heading: Heading, usage: Usage) -> bytes:
    """Return what ends a stream."""
    if not asked.usage_in_stream:
        return STREAM_END
    frame = _frame(asked, heading, chunk=True)
    return _event(asked, {**frame, "choices": [], "usage": _usage(usage)}) + STREAM_END


def write_error(error: ApiError) -> bytes:
    """Return the event in which a stream breaks off."""
    return b"data: %s\n\n" % error.response().body


def _event(asked: Asked, event: dict[str, Any]) -> bytes:
    if asked.usage_in_stream:
        event = {"usage": None, **event}
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _logprobs(asked: Asked, said: Said) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    pairs = list(zip(said.tokens, said.logprobs, strict=True))
    if asked.kind == "chat":
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in pairs
        ]
        return {"content": content, "refusal": None}
    offsets = [said.offset + sum(map(len, said.tokens[:place])) for place in range(len(pairs))]
    return {
        "tokens": list(said.tokens),
        "token_logprobs": list(said.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
