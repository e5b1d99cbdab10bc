"""An answer's text, as its tokens come: whole characters, stops, however it is heard."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from peer.speech import Said, Speech

END = 0
NOTHING = Said("", (), ())


def make_bytes_tokenizer():
    """Return a byte-level one, as large models have: a character may be four tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": END, **{letter: 1 + place for place, letter in enumerate(letters)}}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


BYTES = make_bytes_tokenizer()


def decode(tokens):
    return BYTES.decode(list(tokens), skip_special_tokens=False) if tokens else ""


def tokens_of(text):
    return BYTES.encode(text).ids


def make_speech(stops=(), by_token=False):
    return Speech(decode, stops=stops, silent={END}, by_token=by_token)


def heard_in(speech, *parts):
    """Return all that is said of tokens that come in parts, each by itself, and at the end."""
    numbers = iter(range(1 << 30))
    said = [speech.hear(part, [-next(numbers) for _ in part]) for part in parts]
    return said, speech.close()


def test_a_character_is_said_when_it_is_whole():
    said, rest = heard_in(make_speech(), *([token] for token in tokens_of("a\N{EURO SIGN}b")))
    assert [each.text for each in said] == ["a", "", "", "\N{EURO SIGN}", "b"]
    assert rest == NOTHING


def test_half_a_character_at_the_end_shows_as_one_that_is_none():
    said, rest = heard_in(make_speech(), tokens_of("ab\N{EURO SIGN}")[:-1])
    assert (said[0].text, rest.text) == ("", "ab\ufffd")


def test_what_could_begin_a_stop_waits_until_it_does_not():
    said, rest = heard_in(make_speech(["END", "<<"]), *map(tokens_of, ["xE", "NE", "N", "<", "a<"]))
    assert [each.text for each in said] == ["x", "EN", "", "EN", "<a"]
    assert rest.text == "<"


def test_nothing_is_said_after_a_stop():
    speech = make_speech(["END"])
    said, rest = heard_in(speech, *map(tokens_of, ["xE", "ND and", " more"]))
    assert [each.text for each in said] == ["x", "", ""]
    assert (rest, speech.cut) == (NOTHING, True)


def test_the_first_of_two_stops_counts_and_the_end_token_is_silent():
    speech = make_speech(["cd", "bc"])
    said, _ = heard_in(speech, tokens_of("abcd"))
    assert (said[0].text, speech.cut) == ("a", True)
    speech = make_speech()
    said, _ = heard_in(speech, [*tokens_of("ab"), END])
    assert (said[0].text, speech.cut) == ("ab", False)


def test_tokens_come_with_their_text_and_those_that_a_stop_cuts_off_do_not():
    speech = make_speech(["END"], by_token=True)
    said, _ = heard_in(speech, *([token] for token in tokens_of("ab\N{EURO SIGN}cEND")))
    assert [each.tokens for each in said[:3]] == [("a",), ("b",), ()]
    assert said[4].tokens == ("\ufffd",) * 3
    assert [each.offset for each in said[:2]] == [0, 1]
    assert [value for each in said for value in each.logprobs] == [0, -1, -2, -3, -4, -5]


@pytest.mark.parametrize("by_token", [False, True])
@example(text="\N{EURO SIGN}ab", stops=["\N{EURO SIGN}a"], cuts=[3])
@given(
    text=st.text("abE\N{EURO SIGN}\U0001f600\ufffd ", max_size=30),
    stops=st.lists(st.text("abE\N{EURO SIGN}", min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 5), max_size=60),
)
def test_however_it_is_heard_the_same_is_said(by_token, text, stops, cuts):
    tokens, parts, at = tokens_of(text), [], 0
    for size in cuts:
        parts.append(tokens[at : at + size])
        at += size
    parts.append(tokens[at:])
    speech = make_speech(stops, by_token)
    said, rest = heard_in(speech, *parts)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert "".join(each.text for each in said) + rest.text == text[: min(found, default=None)]
    assert speech.cut == bool(found)
    whole = make_speech(stops, by_token)
    (one,), end = heard_in(whole, tokens)
    pieces = [*said, rest]
    assert (one + end).text == "".join(each.text for each in pieces)
    assert (one + end).tokens == tuple(token for each in pieces for token in each.tokens)
    assert (one + end).logprobs == tuple(value for each in pieces for value in each.logprobs)
    if by_token and not found:
        assert len((one + end).tokens) == len(tokens)
