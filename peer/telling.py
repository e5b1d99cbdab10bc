"""An answer on its way from the engine to whoever asked, whole or as a stream of its parts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import trio

from echo2p2p.net.ports import Offload
from echo2p2p.wire.arrays import to_logprobs, to_tokens
from echo2p2p.wire.messages import Lease, Sample
from peer.engine.base import Generated, Grown
from peer.openai_api import (
    ApiError,
    Asked,
    Choice,
    Finish,
    Heading,
    Usage,
    write_end,
    write_error,
    write_part,
    write_stream_end,
)
from peer.speech import Said, Speech

RETRY_S: Final = 2


class Decoder(Protocol):
    """The part of a tokenizer that answers need."""

    stop_ids: tuple[int, ...]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...


@dataclass
class Waiting:
    """One prompt on its way to the engine and back."""

    lease: Lease
    news: trio.lowlevel.ParkingLot
    """Of its request; unparked whenever something of the following changes."""
    streamed: bool
    done: bool = False
    answer: Generated | None = None
    """``None`` when it is done: the engine failed."""
    grown: list[Grown] = field(default_factory=list)
    """In a stream: what the engine has told of, and nobody has written yet."""
    given_up: bool = False

    def versions(self) -> set[int]:
        """Return by which versions it was sampled, as far as that is known."""
        samples = () if self.answer is None else self.answer.samples
        spans = {span.version for sample in samples for span in sample.spans}
        return spans | {each.version for each in self.grown}

    def checked(self) -> Generated:
        """Return the answer, once it is done.

        Raises:
            ApiError: There is none.
        """
        if self.answer is None or any(s.finish == "aborted" for s in self.answer.samples):
            raise ApiError(503, "the engine failed: ask again", retry_after_s=RETRY_S)
        if self.answer.refused:
            raise ApiError(400, self.answer.refused, code="context_length_exceeded")
        return self.answer


def hear(batch: Sequence[Waiting], grown: Sequence[Grown]) -> None:
    """Note what a batch that runs has come to."""
    for each in grown:
        waiting = batch[each.lease]
        if waiting.streamed and not waiting.given_up:
            waiting.grown.append(each)
            waiting.news.unpark_all()


def give_up(waiting: Sequence[Waiting]) -> None:
    """Nobody wants these any more."""
    for each in waiting:
        each.given_up = True
        each.grown.clear()


def span_of(versions: Collection[int]) -> str:
    """Return versions as text, the first and the last of them."""
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first}-{last}"


def new_speech(asked: Asked, decoder: Decoder) -> Speech:
    """Return an answer that has not begun."""
    return Speech(
        decoder.decode, stops=asked.stops, silent=decoder.stop_ids, by_token=asked.logprobs
    )


def choice_of(asked: Asked, decoder: Decoder, sample: Sample) -> Choice:
    """Return a sample in text."""
    speech = new_speech(asked, decoder)
    said = speech.hear(to_tokens(sample.tokens).tolist(), to_logprobs(sample.logprobs).tolist())
    return Choice(said + speech.close(), _finish(speech, sample))


def _finish(speech: Speech, sample: Sample) -> Finish:
    """Return why a sample that is whole has ended."""
    return "length" if sample.finish == "length" and not speech.cut else "stop"


class _Voice:
    """One choice of a stream."""

    def __init__(self, asked: Asked, index: int, speech: Speech) -> None:
        self._asked = asked
        self._index = index
        self._speech = speech
        self._begun = False
        self.heard: list[int] = []
        self.over = False

    def go_on(self, heading: Heading, grown: Grown) -> bytes:
        """Return the events of what the engine tells, which may be none.

        Only a stop text ends a choice here: that an answer is whole, and is any good, is known once
        the engine has given it.
        """
        self.heard += grown.tokens
        said = self._speech.hear(grown.tokens, grown.logprobs)
        finish: Finish | None = "stop" if self._speech.cut else None
        return self._say(replace(heading, versions=str(grown.version)), said, finish)

    def finish(self, heading: Heading, sample: Sample) -> bytes:
        """Return the events of what is left.

        Raises:
            ApiError: The sample is not what was heard of it.
        """
        tokens, known = to_tokens(sample.tokens).tolist(), len(self.heard)
        if tokens[:known] != self.heard:
            raise ApiError(503, "the engine failed: ask again", retry_after_s=RETRY_S)
        self.heard = tokens
        said = self._speech.hear(tokens[known:], to_logprobs(sample.logprobs).tolist()[known:])
        heading = replace(heading, versions=str(sample.spans[-1].version))
        return self._say(heading, said, _finish(self._speech, sample))

    def _say(self, heading: Heading, said: Said, finish: Finish | None) -> bytes:
        """Return the events; with ``finish`` the choice ends, and without a word it is said so."""
        if self.over:
            return b""
        if finish is not None:
            said += self._speech.close()
            finish = "stop" if self._speech.cut else finish
        events = b""
        if said.text or said.tokens or (finish and not self._begun):
            events = write_part(self._asked, heading, self._index, said, first=not self._begun)
            self._begun = True
        if finish is not None:
            self.over = True
            events += write_end(self._asked, heading, self._index, finish)
        return events


class Telling:
    """A stream of events, while the engine samples.

    Args:
        asked: The request.
        heading: Of all events, but for the version: each names its own.
        waiting: The request's prompts, of which something is there.
        decoder: The tokenizer.
        offload: For turning tokens into text.
    """

    def __init__(
        self,
        asked: Asked,
        heading: Heading,
        waiting: Sequence[Waiting],
        decoder: Decoder,
        offload: Offload,
    ) -> None:
        self._asked = asked
        self._heading = heading
        self._offload = offload
        numbers = itertools.count()
        self._shares = [
            (each, [self._voice(next(numbers), decoder) for _ in each.lease.seeds])
            for each in waiting
        ]

    def _voice(self, index: int, decoder: Decoder) -> _Voice:
        return _Voice(self._asked, index, new_speech(self._asked, decoder))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Write events until every choice has ended."""
        waiting = [each for each, _ in self._shares]
        try:
            while not all(voice.over for _, own in self._shares for voice in own):
                news = [
                    (each, own)
                    for each, own in self._shares
                    if each.grown or (each.done and not all(voice.over for voice in own))
                ]
                if not news:
                    await waiting[0].news.park()
                for each, own in news:
                    if written := await self._write(each, own):
                        yield written
            yield write_stream_end(self._asked, self._heading, self._usage())
        except ApiError as error:
            yield write_error(error)
        finally:
            give_up(waiting)

    async def _write(self, waiting: Waiting, voices: Sequence[_Voice]) -> bytes:
        """Return the events of what one prompt has come to.

        Raises:
            ApiError: It has come to nothing.
        """
        answer = waiting.checked() if waiting.done else None
        grown, waiting.grown = waiting.grown, []

        def write() -> bytes:
            events = [voices[each.sample].go_on(self._heading, each) for each in grown]
            if answer is not None:
                pairs = zip(voices, answer.samples, strict=True)
                events += [voice.finish(self._heading, sample) for voice, sample in pairs]
            return b"".join(events)

        return await self._offload.run(write)

    def _usage(self) -> Usage:
        """Return the tokens that were sampled up to now."""
        return Usage(
            prompt=sum(each.lease.prompt.length for each, _ in self._shares),
            completion=sum(len(voice.heard) for _, own in self._shares for voice in own),
        )
