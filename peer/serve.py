"""Lets anybody talk to the model in training: OpenAI's interface on the peer's own engine.

A request becomes leases like those of the run, and takes its turn at the engine with them; what is
waiting is answered as one batch. A stream is written while the batch runs. Each answer says by
which version it was sampled. The queue is bounded: beyond it, 429. On loopback unless the volunteer
says otherwise, and then with a key.

Tokens and text are turned into each other here, which needs the model's tokenizer: the volunteer
has it in a folder, or the run gives it once the peer is a member.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Literal, Protocol

import numpy as np
import trio

from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import (
    Endpoint,
    Entropy,
    HttpServer,
    Journal,
    Offload,
    Request,
    Response,
    Route,
    WallClock,
)
from echo2p2p.tasks.base import Prompt
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Lease, Sampling
from peer.engine.base import Generated, Heard
from peer.openai_api import (
    BODY_BYTES_MAX,
    MODEL,
    STREAM_TYPE,
    ApiError,
    Asked,
    Choice,
    Heading,
    Usage,
    json_response,
    read_request,
    write_answer,
)
from peer.telling import RETRY_S, Decoder, Telling, Waiting, choice_of, give_up, hear, span_of

WAITING_MAX: Final = 32
"""Prompts that wait for the engine; of one request at most 16."""
BATCH_MAX: Final = 8
"""Prompts that are answered at once."""
READ_BYTES_MAX: Final = 8 * BODY_BYTES_MAX
"""A body that is too long is refused in OpenAI's form, up to this length; beyond it, in ours."""
SERVE_FAILED: Final = "serve.failed"


class Speaker(Protocol):
    """The part of `peer.keeper.EngineKeeper` that is used."""

    version: Version | None
    digest: Digest | None

    async def generate(self, leases: list[Lease], heard: Heard | None = None) -> list[Generated]:
        """Answer leases as one batch, and tell how they grow."""
        ...


class Tokenizer(Decoder, Protocol):
    """The part of `echo2p2p.net.tokenizer.FolderTokenizer` that is used."""

    vocab_size: int
    positions_max: int | None

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens."""
        ...


class ModelServer:
    """Answers requests.

    Args:
        speaker: The engine's keeper; ``None``: there is none yet.
        tokenizer: The model's; ``None``: there is none yet.
        key: What requests must show as a bearer; ``None``: nothing.
        tokens_max: Of an answer, whatever is asked for.
        journal: Told of batches that failed.
    """

    def __init__(
        self,
        *,
        speaker: Callable[[], Speaker | None],
        tokenizer: Callable[[], Tokenizer | None],
        key: str | None,
        tokens_max: int,
        clock: WallClock,
        entropy: Entropy,
        offload: Offload,
        journal: Journal,
    ) -> None:
        self._speaker = speaker
        self._find_tokenizer = tokenizer
        self._key = key
        self._tokens_max = tokens_max
        self._clock = clock
        self._rng = entropy.rng("serve")
        self._offload = offload
        self._journal = journal
        self._waiting: list[Waiting] = []
        self._news = trio.lowlevel.ParkingLot()

    def routes(self) -> tuple[Route, ...]:
        """Return what is served."""
        return (
            Route("POST", "/v1/chat/completions", self._safe(self._chat), READ_BYTES_MAX),
            Route("POST", "/v1/completions", self._safe(self._text), READ_BYTES_MAX),
            Route("GET", "/v1/models", self._safe(self._models), 0),
            Route("GET", "/v1/models/{model}", self._safe(self._models), 0),
            Route("POST", "/v1/{other}", self._safe(self._none), READ_BYTES_MAX),
            Route("GET", "/v1/{other}", self._safe(self._none), 0),
        )

    async def run(self) -> None:
        """Have the engine answer what waits, until cancelled."""
        while True:
            while not self._waiting:
                await self._news.park()
            batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
            batch = [each for each in batch if not each.given_up]
            speaker = self._speaker()
            heard = partial(hear, batch) if any(each.streamed for each in batch) else None
            try:
                if speaker is not None and batch:
                    answers = await speaker.generate([each.lease for each in batch], heard)
                    for each, answer in zip(batch, answers, strict=True):
                        each.answer = answer
            except EngineError as error:
                self._journal.event(SERVE_FAILED, prompts=len(batch), detail=str(error))
            for each in batch:
                each.done = True
                each.news.unpark_all()

    def _safe(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                self._check(request)
                return await handler(request)
            except ApiError as error:
                return error.response()

        return handle

    def _check(self, request: Request) -> None:
        """Refuse who has not the key, and what a web page could send without being asked."""
        if self._key is not None:
            shown = request.headers.get("authorization", "").removeprefix("Bearer ")
            # Header bytes that are no text arrive as surrogates.
            given = shown.encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self._key.encode()):
                raise ApiError(401, "give this peer's key as api_key", code="invalid_api_key")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise ApiError(415, "send JSON, with Content-Type: application/json")

    async def _none(self, request: Request) -> Response:
        raise ApiError(404, f"{request.method} {request.path} is not served here")

    async def _models(self, request: Request) -> Response:
        name = request.query.get("model")
        if name not in (None, MODEL):
            raise ApiError(404, f"no model {name!r}; there is {MODEL}", code="model_not_found")
        speaker = self._speaker()
        version = None if speaker is None else speaker.version
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "echo2p2p"}
        one["version"] = version
        if name is not None:
            return json_response(one)
        return json_response({"object": "list", "data": [one]})

    async def _chat(self, request: Request) -> Response:
        return await self._answer("chat", request.body)

    async def _text(self, request: Request) -> Response:
        return await self._answer("text", request.body)

    async def _answer(self, kind: Literal["chat", "text"], body: bytes) -> Response:
        speaker = self._speaker()
        if speaker is None or speaker.version is None:
            raise ApiError(503, "the engine has no version yet", retry_after_s=RETRY_S)
        if self._find_tokenizer() is None:
            raise ApiError(503, "the tokenizer is still on its way", retry_after_s=RETRY_S)
        asked = await self._offload.run(lambda: read_request(kind, body))
        leases = await self._offload.run(lambda: self._leases(asked))
        if len(self._waiting) + len(leases) > WAITING_MAX:
            raise ApiError(429, "too many prompts wait here: ask again", retry_after_s=RETRY_S)
        news = trio.lowlevel.ParkingLot()
        waiting = [Waiting(lease, news, asked.stream) for lease in leases]
        self._waiting += waiting
        self._news.unpark_all()
        enough = any if asked.stream else all
        try:
            while not enough(each.done or each.grown for each in waiting):
                await news.park()
            return await self._begun(asked, waiting, speaker)
        except BaseException:  # whoever has gone needs no answer
            give_up(waiting)
            raise

    async def _begun(self, asked: Asked, waiting: list[Waiting], speaker: Speaker) -> Response:
        """Return the answer, or what there is of a stream.

        Raises:
            ApiError: The engine has failed or refused.
        """
        answers = [each.checked() for each in waiting if each.done]
        versions = set[int]().union(*(each.versions() for each in waiting))
        heading, headers = self._heading(versions), _version_headers(versions, speaker)
        if asked.stream:
            told = Telling(asked, heading, waiting, self._tokenizer, self._offload)
            return Response(200, b"", headers, content_type=STREAM_TYPE, rest=told.events())
        choices = await self._offload.run(lambda: self._spoken(asked, answers))
        usage = Usage(
            prompt=sum(each.lease.prompt.length for each in waiting),
            completion=sum(s.tokens.length for answer in answers for s in answer.samples),
        )
        return write_answer(asked, heading, choices, usage, headers)

    def _heading(self, versions: Collection[int]) -> Heading:
        return Heading(
            identity=f"{self._rng.getrandbits(128):032x}",
            created_s=int(self._clock.time()),
            versions=span_of(versions),
        )

    def _spoken(self, asked: Asked, answers: Sequence[Generated]) -> list[Choice]:
        samples = [sample for answer in answers for sample in answer.samples]
        return [choice_of(asked, self._tokenizer, sample) for sample in samples]

    @property
    def _tokenizer(self) -> Tokenizer:
        found = self._find_tokenizer()
        assert found is not None
        return found

    def _leases(self, asked: Asked) -> list[Lease]:
        """Return a lease a prompt."""
        limit, found = self._tokenizer.positions_max, []
        for place, prompt in enumerate(asked.prompts):
            tokens = list(prompt) if isinstance(prompt, tuple) else self._encoded(prompt)
            if not tokens or any(token >= self._tokenizer.vocab_size for token in tokens):
                raise ApiError(400, "the prompt is empty, or has tokens that the model has not")
            tokens_max = min(asked.tokens_max, self._tokens_max)
            if limit is not None:
                tokens_max = min(tokens_max, limit - len(tokens))
            if tokens_max < 1:
                raise ApiError(
                    400,
                    f"the prompt has {len(tokens)} tokens; the model takes {limit} in all",
                    code="context_length_exceeded",
                )
            found.append(self._lease(asked, place, tokens, tokens_max))
        return found

    def _encoded(self, prompt: Prompt) -> list[int]:
        try:
            for text in (prompt.text or "", *(message.content for message in prompt.messages)):
                text.encode()
            return self._tokenizer.encode(prompt)
        except UnicodeEncodeError as error:  # JSON can hold it; no tokenizer takes it
            raise ApiError(400, "the text holds half of a character (a lone surrogate)") from error
        except ConfigError as error:  # its chat template refuses, or there is none
            raise ApiError(400, error.detail, param="messages") from error

    def _lease(self, asked: Asked, place: int, tokens: list[int], tokens_max: int) -> Lease:
        count = asked.samples
        if asked.seed is None:
            seeds = [self._rng.getrandbits(63) for _ in range(count)]
        else:
            seeds = [(asked.seed + place * count + each) % (1 << 63) for each in range(count)]
        greedy = asked.temperature == 0
        return Lease(
            lease_id=f"{self._rng.getrandbits(128):032x}",
            kind="eval",
            prompt=from_tokens(np.asarray(tokens, np.uint32)),
            samples=count,
            seeds=seeds,
            sampling=Sampling(
                temperature=1.0 if greedy else max(asked.temperature, 0.01),
                top_p=asked.top_p,
                top_k=1 if greedy else asked.top_k,
            ),
            tokens_max=tokens_max,
            stop_ids=list(self._tokenizer.stop_ids),
            forced=None,
            version=0,
            deadline_s=0.0,
            affinity=None,
        )


def _version_headers(versions: Collection[int], speaker: Speaker) -> dict[str, str]:
    """Return by which version the answers were sampled, and its digest if it is still there."""
    headers = {"X-Echo2-Version": span_of(versions)}
    if set(versions) == {speaker.version} and speaker.digest is not None:
        headers["X-Echo2-Digest"] = speaker.digest.hex()
    return headers


def parse_address(text: str, *, key: str | None) -> Endpoint:
    """Return where to listen.

    Raises:
        ConfigError: It is no address, or strangers could reach it and need no key.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("serve.address", f"{text!r} is no HOST:PORT, such as 127.0.0.1:8000")
    if host not in LOOPBACK and not key:
        raise ConfigError(
            "serve.address",
            f"{host} can be reached by others, without encryption: give --serve.key as well, or "
            "listen on 127.0.0.1",
        )
    return Endpoint(host, int(port))


LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@asynccontextmanager
async def serve_model(
    server: HttpServer, endpoint: Endpoint, model: ModelServer
) -> AsyncIterator[Endpoint]:
    """Serve while the context is open; its value is the real address.

    Raises:
        ConfigError: The address cannot be bound.
    """
    async with server.serve(model.routes(), endpoint) as real, trio.open_nursery() as nursery:
        nursery.start_soon(model.run)
        yield real
        nursery.cancel_scope.cancel()
