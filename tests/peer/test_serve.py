"""A peer's OpenAI interface: forms, versions, the bounded queue, refusals; and a real client."""

import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.lowlevel

from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.errors import ConfigError, EngineError
from echo2p2p.net.aio import AioHttpServer, open_aio
from echo2p2p.net.ports import Endpoint, Request
from echo2p2p.net.system import SystemClock, SystemEntropy, ThreadOffload
from echo2p2p.net.tokenizer import FolderTokenizer
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.http import SimHttp
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload, SimEntropy
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_tokens
from echo2p2p.wire.messages import Sample, Span
from peer.engine.base import Generated, Grown
from peer.serve import BATCH_MAX, WAITING_MAX, ModelServer, parse_address, serve_model

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    prepare_model(TINY_QWEN3, folder)
    return FolderTokenizer(folder)


class Speaker:
    """An engine that says its prompt's text again, a token a second, then stops if it may."""

    def __init__(self, tokenizer, seconds=0.0):
        self.tokenizer, self.seconds = tokenizer, seconds
        self.version, self.digest = 3, bytes(range(32))
        self.batches, self.leases = [], []
        self.broken = self.refusal = ""
        self.dies_at = self.lies_at = None
        self.pace = partial(trio.sleep, 1)

    async def generate(self, leases, heard=None):
        self.batches.append(len(leases))
        self.leases += leases
        await trio.sleep(self.seconds)
        if self.broken:
            raise EngineError(self.broken)
        answers = [self.answer(lease) for lease in leases]
        if heard is not None:
            await self.tell(answers, heard)
        return answers

    async def tell(self, answers, heard):
        samples = [(place, number, to_tokens(sample.tokens).tolist())
                   for place, answer in enumerate(answers)
                   for number, sample in enumerate(answer.samples)]  # fmt: skip
        for at in range(max((len(tokens) for *_, tokens in samples), default=0)):
            await self.pace()
            if at == self.dies_at:
                raise EngineError("it died of SIGKILL")
            heard([
                Grown(place, number, 3, [tokens[at] + (at == self.lies_at)], [-0.5 - at])
                for place, number, tokens in samples
                if at < len(tokens)
            ])  # fmt: skip
            await trio.lowlevel.checkpoint()  # who listens has its turn first

    def answer(self, lease):
        if self.refusal:
            return Generated(lease.lease_id, (), 0.0, self.refusal)
        told = [token for token in to_tokens(lease.prompt).tolist() if token > 3]
        tokens = [*told, 2][: lease.tokens_max]
        sample = Sample(
            tokens=from_tokens(tokens),
            logprobs=from_logprobs([-0.5 - place for place in range(len(tokens))]),
            spans=[Span(version=3, start=0, end=len(tokens))],
            finish="stop" if tokens[-1] == 2 else "length",
        )
        return Generated(lease.lease_id, (sample,) * lease.samples, 0.1)


def make_model(tokenizer, speaker, journal, *, key=None, tokens_max=64):
    return ModelServer(
        speaker=lambda: speaker,
        tokenizer=lambda: tokenizer,
        key=key,
        tokens_max=tokens_max,
        clock=SimClock(),
        entropy=SimEntropy("serve"),
        offload=InlineOffload(),
        journal=journal,
    )


@asynccontextmanager
async def model_of(tokenizer, speaker):
    """Without HTTP: what the server's tasks get to see."""
    model = make_model(tokenizer, speaker, TraceJournal())
    handlers = {route.path: route.handler for route in model.routes() if route.method == "POST"}

    async def ask(path, **body):
        return await handlers[path](Request("POST", path, {}, JSON, json.dumps(body).encode()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.run)
        yield ask
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def served(tokenizer, speaker, **settings):
    http, journal = SimHttp(), TraceJournal()
    model = make_model(tokenizer, speaker, journal, **settings)
    async with (
        serve_model(http.server("peer", journal), Endpoint("peer", 8000), model),
        http.clients("me").connect("http://peer:8000", None) as client,
    ):

        async def post(path, headers=JSON, **body):
            return await client.request(
                "POST", path, body=json.dumps(body).encode(), headers=headers, timeout_s=900
            )

        post.client = client
        yield post


def error_of(response):
    found = json.loads(response.body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


async def test_a_chat_goes_through_the_template_and_the_answer_names_its_version(
    tokenizer, autojump_clock
):
    speaker = Speaker(tokenizer)
    async with served(tokenizer, speaker) as post:
        got = await post(
            "/v1/chat/completions",
            model="whatever",
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
            ],
            n=2,
            logprobs=True,
            user="me",
        )
    assert (got.status, got.content_type) == (200, "application/json")
    assert got.headers["x-echo2-version"] == "3"
    assert got.headers["x-echo2-digest"] == bytes(range(32)).hex()
    found = json.loads(got.body)
    assert (found["object"], found["model"]) == ("chat.completion", "echo2")
    assert found["id"].startswith("chatcmpl-")
    assert len(found["choices"]) == 2
    for index, choice in enumerate(found["choices"]):
        assert choice["index"] == index
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {
            "role": "assistant",
            "content": "be brief\n1+1\n",
            "refusal": None,
        }
        content = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in content) == "be brief\n1+1\n"
        assert [one["logprob"] for one in content][:2] == [-0.5, -1.5]
    prompt = speaker.leases[0].prompt.length
    assert found["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2 * 14,
        "total_tokens": prompt + 28,
    }


async def test_a_completion_takes_text_and_tokens_and_cuts_at_a_stop(tokenizer, autojump_clock):
    speaker = Speaker(tokenizer)
    async with served(tokenizer, speaker) as post:
        got = await post(
            "/v1/completions", prompt=["12+34", "56"], stop=["+3", "zz"], logprobs=0, seed=5
        )
        found = json.loads(got.body)
        tokens = json.loads((await post("/v1/completions", prompt=[1, 8, 5])).body)
        short = json.loads((await post("/v1/completions", prompt="1234", max_tokens=2)).body)
        greedy = await post("/v1/completions", prompt="1", temperature=0)
    assert found["object"] == "text_completion"
    first, second = found["choices"]
    assert (first["text"], first["finish_reason"]) == ("12", "stop")
    assert first["logprobs"] == {
        "tokens": ["1", "2"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }
    assert (second["text"], second["index"]) == ("56", 1)
    assert [lease.seeds for lease in speaker.leases[:2]] == [[5], [6]]
    assert tokens["choices"][0]["text"] == tokenizer.decode([8, 5])
    assert (short["choices"][0]["text"], short["choices"][0]["finish_reason"]) == ("12", "length")
    assert greedy.status == 200
    sampling = speaker.leases[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (1.0, 1)


def chunks_of(body):
    """Return a stream's events; the last one is its end."""
    *events, last, nothing = body.decode().split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_stream_has_the_form_of_one(tokenizer, autojump_clock):
    async with served(tokenizer, Speaker(tokenizer)) as post:
        got = await post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "7"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text = await post("/v1/completions", prompt="73", stream=True, logprobs=1)
    assert got.content_type == "text/event-stream"
    assert got.headers["x-echo2-version"] == "3"
    assert got.headers["x-echo2-digest"] == bytes(range(32)).hex()
    chunks = chunks_of(got.body)
    assert {(c["object"], c["system_fingerprint"]) for c in chunks} == {
        ("chat.completion.chunk", "version-3")
    }
    assert len({chunk["id"] for chunk in chunks}) == 1
    said = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [one["delta"] for one in said] == [
        {"role": "assistant", "content": "7"},
        {"content": "\n"},
        {},
    ]
    assert [one["finish_reason"] for one in said] == [None, None, "stop"]
    assert (chunks[0]["usage"], chunks[-1]["choices"]) == (None, [])
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    first, second, end = (chunk["choices"][0] for chunk in chunks_of(text.body))
    assert (first["text"], second["text"], end["text"]) == ("7", "3", "")
    assert second["logprobs"] == {
        "tokens": ["3"],
        "token_logprobs": [-1.5],
        "top_logprobs": None,
        "text_offset": [1],
    }


async def test_a_stream_is_written_while_the_engine_samples(tokenizer, autojump_clock):
    """Each choice of each prompt, as its tokens come, and none beyond its stop."""
    speaker = Speaker(tokenizer)
    asked = {"prompt": ["12+34", "567"], "n": 2, "stop": "+3", "stream": True}
    async with model_of(tokenizer, speaker) as ask:
        response = await ask("/v1/completions", **asked)
        said, times = {}, {}
        async for events in response.rest:
            for event in filter(None, events.decode().split("\n\n")):
                if event == "data: [DONE]":
                    continue
                [one] = json.loads(event.removeprefix("data: "))["choices"]
                said.setdefault(one["index"], []).append(one["text"])
                times.setdefault(one["index"], []).append(trio.current_time())
    assert said == {0: ["1", "2", ""], 1: ["1", "2", ""], 2: ["5", "6", "7", ""], 3: said[2]}
    assert times[0] == [1.0, 2.0, 4.0], "the + waited for what came after it"
    assert times[2] == [1.0, 2.0, 3.0, 6.0], "and its end for the engine's whole answer"
    assert speaker.batches == [2]


async def test_a_stream_whose_choices_have_all_stopped_does_not_wait_for_the_engine(
    tokenizer, autojump_clock
):
    async with model_of(tokenizer, Speaker(tokenizer)) as ask:
        response = await ask("/v1/completions", prompt="123456789", stop="3", stream=True)
        body = b"".join([events async for events in response.rest])
        assert trio.current_time() == 3.0
    assert [one["choices"][0]["text"] for one in chunks_of(body)] == ["1", "2", ""]


async def test_who_leaves_a_stream_is_not_sampled_for_any_more(tokenizer, autojump_clock):
    speaker = Speaker(tokenizer)
    async with model_of(tokenizer, speaker) as ask:
        response = await ask("/v1/completions", prompt=["1234"] * (BATCH_MAX + 1), stream=True)
        await anext(response.rest)
        await response.rest.aclose()
        await trio.sleep(60)
        assert speaker.batches == [BATCH_MAX], "the last prompt was never asked"
        await ask("/v1/completions", prompt="1")
        assert speaker.batches == [BATCH_MAX, 1]


@pytest.mark.parametrize("how", ["dies_at", "lies_at"])
async def test_a_stream_breaks_off_with_an_error_if_the_engine_fails(
    tokenizer, autojump_clock, how
):
    speaker = Speaker(tokenizer)
    setattr(speaker, how, 2)
    async with served(tokenizer, speaker) as post:
        got = await post("/v1/completions", prompt="1234", stream=True)
        *events, last, nothing = got.body.decode().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (got.status, nothing) == (200, "")
        assert (error["type"], error["message"]) == ("server_error", "the engine failed: ask again")
        assert len(events) == {"dies_at": 2, "lies_at": 4}[how]
        speaker.dies_at = 0
        got = await post("/v1/completions", prompt="1234", stream=True)
        assert (got.status, error_of(got)["type"]) == (503, "server_error")
        speaker.refusal = "a prompt of 9 tokens; this engine takes 8"
        got = await post("/v1/completions", prompt="1234", stream=True)
        assert (got.status, error_of(got)["message"]) == (400, speaker.refusal)


async def test_what_cannot_be_done_is_refused_by_name_in_openai_s_form(tokenizer, autojump_clock):
    speaker = Speaker(tokenizer)
    async with served(tokenizer, speaker) as post:
        for body, param in (
            ({"prompt": "1", "presence_penalty": 0.5}, "presence_penalty"),
            ({"prompt": "1", "echo": True}, "echo"),
            ({"prompt": "1", "logit_bias": {"5": 1}}, "logit_bias"),
            ({"prompt": "1", "n": 99}, "n"),
            ({"prompt": "1", "temperature": 3}, "temperature"),
            ({"prompt": "1", "top_p": 0}, "top_p"),
            ({"prompt": "1", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "1", "stop": [""]}, "stop"),
            ({"prompt": "1", "stop": "x" * 257}, "stop"),
            ({"prompt": "1", "logprobs": 5}, "logprobs"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": {"a": 1}}, None),
            ({"prompt": "1", "temperature": "hot"}, None),
            ({"prompt": [9999]}, None),
            ({"prompt": "half a smile: \ud83d"}, None),
        ):
            got = await post("/v1/completions", **body)
            found = error_of(got)
            assert (got.status, found["type"], found["param"]) == (
                400,
                "invalid_request_error",
                param,
            ), body
        long = await post("/v1/completions", prompt="1" * 200)
        assert error_of(long)["code"] == "context_length_exceeded"
        for messages in ([], [{"role": "tool", "content": "x"}], [{"role": "user", "content": 7}],
                         [{"role": "user", "content": "\ud83d"}]):  # fmt: skip
            assert (await post("/v1/chat/completions", messages=messages)).status == 400
        assert (await post("/v1/completions", prompt="1", headers={})).status == 415
        assert error_of(await post("/v1/embeddings", input="x"))["message"].startswith("POST /v1/")
        large = await post("/v1/completions", prompt="1" * (1 << 20))
        assert (large.status, error_of(large)["type"]) == (413, "invalid_request_error")
        assert speaker.leases == []
        speaker.refusal = "a prompt of 9 tokens; this engine takes 8"
        assert error_of(await post("/v1/completions", prompt="1"))["message"] == speaker.refusal


async def test_models_are_listed_and_a_stranger_needs_the_key(tokenizer, autojump_clock):
    async with served(tokenizer, Speaker(tokenizer), key="sesame") as post:
        for shown in (
            {},
            {"authorization": "Bearer sesam"},
            {"authorization": "Bearer sesame "},
            {"authorization": "Bearer \udcff"},
        ):
            got = await post.client.request("GET", "/v1/models", headers=shown, timeout_s=9)
            assert (got.status, error_of(got)["code"]) == (401, "invalid_api_key")
        key = {"authorization": "Bearer sesame"}
        got = await post.client.request("GET", "/v1/models", headers=key, timeout_s=9)
        (model,) = json.loads(got.body)["data"]
        assert (model["id"], model["version"]) == ("echo2", 3)
        got = await post.client.request("GET", "/v1/models/echo2", headers=key, timeout_s=9)
        assert json.loads(got.body)["id"] == "echo2"
        got = await post.client.request("GET", "/v1/models/gpt", headers=key, timeout_s=9)
        assert got.status == 404


async def test_what_waits_is_one_batch_and_a_full_queue_says_when_to_come_again(
    tokenizer, autojump_clock
):
    speaker, statuses, refused = Speaker(tokenizer, seconds=5.0), [], []
    async with served(tokenizer, speaker) as post:

        async def ask():
            got = await post("/v1/completions", prompt="1")
            statuses.append(got.status)
            if got.status == 429:
                refused.append((got.headers["retry-after"], error_of(got)["type"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1)  # it is at the engine, and waits no more
            for _ in range(WAITING_MAX + 3):
                nursery.start_soon(ask)
    assert refused == [("2", "rate_limit_error")] * 3
    assert sorted(statuses) == [200] * (WAITING_MAX + 1) + [429] * 3
    assert speaker.batches == [1] + [BATCH_MAX] * (WAITING_MAX // BATCH_MAX)


async def test_who_has_gone_is_not_answered_and_a_broken_engine_is_a_503(tokenizer, autojump_clock):
    speaker = Speaker(tokenizer, seconds=5.0)
    async with served(tokenizer, speaker) as post:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: post("/v1/completions", prompt="1"))
            await trio.sleep(1)
            with trio.move_on_after(1):
                await post("/v1/completions", prompt="2")
        await trio.sleep(10)
        assert speaker.batches == [1]
        speaker.broken = "the engine is being started again"
        got = await post("/v1/completions", prompt="3")
        assert (got.status, error_of(got)["type"]) == (503, "server_error")
        speaker.version = None
        got = await post("/v1/completions", prompt="4")
        assert (got.status, got.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("0.0.0.0:8000", None, "can be reached by others"),
        ("192.168.1.5:80", "", "can be reached by others"),
        ("8000", None, "is no HOST:PORT"),
        (":8000", None, "is no HOST:PORT"),
        ("127.0.0.1:x", None, "is no HOST:PORT"),
    ],
)
def test_an_address_that_strangers_reach_needs_a_key(text, key, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_address(text, key=key)


def test_loopback_needs_none():
    assert parse_address("127.0.0.1:8000", key=None) == Endpoint("127.0.0.1", 8000)
    assert parse_address("[::1]:0", key=None) == Endpoint("::1", 0)
    assert parse_address("0.0.0.0:1", key="k") == Endpoint("0.0.0.0", 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
async def test_openai_s_own_client_talks_to_it(tokenizer):
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    journal = TraceJournal()
    model = ModelServer(
        speaker=lambda: speaker,
        tokenizer=lambda: tokenizer,
        key="sesame",
        tokens_max=64,
        clock=SystemClock(),
        entropy=SystemEntropy(),
        offload=ThreadOffload(),
        journal=journal,
    )
    speaker = Speaker(tokenizer)
    got_one = trio.Event()
    token = trio.lowlevel.current_trio_token()

    async def pace():
        """After the first token go on only when it has reached the client."""
        if speaker.batches == [1, 1]:
            with trio.fail_after(20):
                await first_heard()

    heard = []

    async def first_heard():
        if heard:
            await got_one.wait()
        heard.append(1)

    speaker.pace = pace

    def talk(port):
        url = f"http://127.0.0.1:{port}/v1"
        client = openai.OpenAI(base_url=url, api_key="sesame", max_retries=0)
        assert [each.id for each in client.models.list()] == ["echo2"]
        said = [{"role": "user", "content": "1+2"}]
        raw = client.chat.completions.with_raw_response.create(model="echo2", messages=said)
        assert raw.headers["x-echo2-version"] == "3"
        assert raw.parse().choices[0].message.content == "1+2\n"
        stream = client.chat.completions.create(model="echo2", messages=said, stream=True)
        said = []
        for chunk in stream:
            said.append(chunk.choices[0].delta.content or "")
            token.run_sync_soon(got_one.set)
        assert said == ["1", "+", "2", "\n", ""]
        text = client.completions.create(model="echo2", prompt="42", logprobs=1)
        assert (text.choices[0].text, text.choices[0].logprobs.tokens) == ("42", ["4", "2"])
        with pytest.raises(openai.BadRequestError, match="presence_penalty is not supported"):
            client.completions.create(model="echo2", prompt="4", presence_penalty=1)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        speaker.version = None
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="echo2", prompt="4")

    async with open_aio(journal) as aio:
        server = AioHttpServer(aio, None, journal)
        async with serve_model(server, Endpoint("127.0.0.1", 0), model) as real:
            await trio.to_thread.run_sync(talk, real.port)
