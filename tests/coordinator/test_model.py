"""The built-in model's folder and the tokenizer that needs no torch."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model import CHARACTERS, TINY_QWEN3, prepare_model
from echo2p2p.errors import ConfigError
from echo2p2p.net.tokenizer import REPLACEMENT, FolderTokenizer
from echo2p2p.tasks.base import Message, Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    prepare_model(TINY_QWEN3, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return FolderTokenizer(folder)


def test_a_prompt_is_a_bos_and_one_token_a_character(tokenizer):
    assert tokenizer.encode(Prompt(text="4132=")) == [1, 8, 5, 7, 6, 17]
    assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.positions_max) == (64, (2,), 128)


@settings(deadline=None)
@given(st.text(CHARACTERS, max_size=40))
def test_text_survives_a_round_trip(tokenizer, text):
    tokens = tokenizer.encode_answer(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode(Prompt(text=text)) == [1, *tokens]


@settings(deadline=None)
@given(st.lists(st.integers(0, 63), max_size=12))
def test_only_an_answer_of_plain_characters_reads_like_plain_characters(tokenizer, tokens):
    text = tokenizer.decode(tokens)
    plain = all(4 <= token < 4 + len(CHARACTERS) for token in tokens)
    assert (len(text) == len(tokens) and REPLACEMENT not in text) == plain


def test_unknown_tokens_show(tokenizer):
    assert tokenizer.decode([5, 60, 6, 0, 7]) == f"1{REPLACEMENT}2<PAD>3"
    assert tokenizer.decode([]) == ""


def test_messages_go_through_the_chat_template(tokenizer):
    prompt = Prompt(messages=(Message("system", "sort"), Message("user", "21")))
    tokens = tokenizer.encode(prompt)
    assert tokens[0] == 1
    assert tokens.count(1) == 1
    assert tokenizer.decode(tokens[1:]) == "sort\n21\n"


def rewrite(folder, target, **changes):
    """Copy a model folder, with other contents for some JSON files; ``None`` leaves one out."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, value in changes.items():
        file = target / f"{name}.json"
        if value is None:
            file.unlink()
        else:
            old = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**old, **value}))
    return target


def test_stop_ids_come_from_the_generation_settings_and_the_tokenizer(folder, tmp_path):
    changed = rewrite(
        folder,
        tmp_path,
        generation_config={"eos_token_id": [7, 9]},
        tokenizer_config={"eos_token": {"content": "<UNK>"}},
    )
    assert FolderTokenizer(changed).stop_ids == (7, 9, 3)


def test_a_template_may_refuse_and_may_not_reach_out(folder, tmp_path):
    changed = rewrite(folder, tmp_path)
    prompt = Prompt(messages=(Message("user", "1"),))
    for template, detail in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ]:
        (changed / "chat_template.jinja").write_text(template)
        with pytest.raises(ConfigError, match=detail):
            FolderTokenizer(changed).encode(prompt)
    (changed / "chat_template.jinja").write_text("{{ messages | tojson }}{{ eos_token }}")
    assert FolderTokenizer(changed).encode(prompt)[-1] == 2


def test_a_model_without_a_template_takes_no_messages(folder, tmp_path):
    changed = rewrite(folder, tmp_path, tokenizer_config={"chat_template": None})
    with pytest.raises(ConfigError, match="chat template"):
        FolderTokenizer(changed).encode(Prompt(messages=(Message("user", "1"),)))


@pytest.mark.parametrize("missing", ["config", "tokenizer"])
def test_an_incomplete_folder_is_refused_by_name(folder, tmp_path, missing):
    changed = rewrite(folder, tmp_path, **{missing: None})
    with pytest.raises(ConfigError, match=f"has no {missing}.json"):
        prepare_model(str(changed), changed)


def test_unknown_presets_are_refused_and_a_folder_is_left_alone(folder, tmp_path):
    with pytest.raises(ConfigError, match="@tiny-qwen3"):
        prepare_model("@huge", tmp_path)
    changed = rewrite(folder, tmp_path, config={"vocab_size": 80})
    prepare_model(TINY_QWEN3, changed)
    assert FolderTokenizer(changed).vocab_size == 80


def test_a_broken_json_file_is_named(folder, tmp_path):
    changed = rewrite(folder, tmp_path)
    (changed / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json holds no JSON object"):
        FolderTokenizer(changed)


@pytest.mark.slow
def test_tokenizing_does_not_import_torch(folder):
    code = (
        "import sys, pathlib, echo2p2p.net.tokenizer as m, coordinator.task_worker;"
        f"m.FolderTokenizer(pathlib.Path({str(folder)!r})); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert not {b"torch", b"transformers"} & set(done.stdout.split())
