"""``echo2-peer``: take part in a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Final

import trio

from echo2p2p.cli import load_settings
from echo2p2p.errors import ConfigError, EchoError
from echo2p2p.log import LOG_HELP, LogFlags, open_journal, take_log_flags
from echo2p2p.net.ports import Endpoint, Journal
from echo2p2p.net.program import FAILED, OK, USAGE, run_program
from echo2p2p.net.system import SystemClock
from echo2p2p.terminal import open_screen
from peer.app import PeerApp, PeerPorts
from peer.config import PeerSettings
from peer.machine import open_identity, open_machine
from peer.metrics import serve_metrics
from peer.serve import ModelServer, parse_address, serve_model
from peer.view import show_figures, tally_text

Machine = Callable[[PeerSettings, Journal], AbstractAsyncContextManager[PeerPorts]]
USAGE_TEXT: Final = """\
usage: echo2-peer join URL --token T [options]

Joins the run at URL, generates rollouts and relays weights until the run ends.
--serve [HOST:PORT] lets programs talk to the model (OpenAI's interface).
--engine auto|vllm|transformers|none chooses what generates.
`echo2-peer join --help` lists all settings; --config FILE reads them from TOML.
"""
SHORT: Final = {"--engine": "--engine.kind", "--serve": "--serve.address"}
SERVE_ADDRESS: Final = "127.0.0.1:8000"
"""Where vLLM's own server listens by default, so that many clients look there."""
MODEL_SERVED: Final = "model.served"
METRICS_SERVED: Final = "metrics.served"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in {"-h", "--help"}:
        print(USAGE_TEXT, end="")
        return OK
    if not words or words[0] != "join":
        print(USAGE_TEXT, end="", file=sys.stderr)
        return USAGE
    try:
        flags, rest = take_log_flags(full_words(words[1:]))
        if rest and not rest[0].startswith("-"):
            rest = ["--url", *rest]
        settings = load_settings(
            PeerSettings, rest, program="echo2-peer join URL", presets={}, notes=LOG_HELP
        )
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return run_program(lambda: join(settings, flags=flags))


def full_words(words: list[str]) -> list[str]:
    """Let ``--engine vllm`` stand for ``--engine.kind vllm``, and ``--serve`` for its address."""
    found: list[str] = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        full = SHORT.get(name, name)
        found.append(full + equals + value)
        following = words[place + 1 : place + 2]
        if word == "--serve" and (not following or following[0].startswith("-")):
            found.append(SERVE_ADDRESS)
    return found


async def join(
    settings: PeerSettings, *, machine: Machine = open_machine, flags: LogFlags | None = None
) -> int:
    """Take part until the run ends.

    Args:
        settings: Validated.
        machine: Opens the world, by default the real one.
        flags: What the terminal shows.
    """
    flags = flags or LogFlags()
    folder = Path(settings.folder).expanduser()
    identity = open_identity(folder)
    with (
        open_screen(sys.stdout, live=False) as screen,
        open_journal(
            sys.stderr,
            SystemClock(),
            form=flags.form,
            lowest=flags.lowest,
            file=folder / "events.jsonl",
        ) as journal,
    ):
        async with machine(settings, journal) as ports, AsyncExitStack() as stack:
            app = PeerApp(settings, ports, identity)
            if settings.metrics.port is not None and ports.make_http_server is not None:
                server = serve_metrics(
                    ports.make_http_server(), settings.metrics.port, app.figures, app.fills
                )
                real = await stack.enter_async_context(server)
                journal.event(METRICS_SERVED, url=f"http://{real.host}:{real.port}/metrics")
            if settings.serve.address is not None:
                real = await stack.enter_async_context(await _serving(settings, ports, app))
                journal.event(MODEL_SERVED, url=f"http://{real.host}:{real.port}/v1")
            async with trio.open_nursery() as nursery:
                if flags.shows_progress:
                    nursery.start_soon(show_figures, app.figures, screen.line)
                outcome = await app.run()
                nursery.cancel_scope.cancel()
        if flags.shows_progress:
            screen.line(f"the run has {outcome}: {tally_text(app.figures().tally)}")
    return OK if outcome == "finished" else FAILED


async def _serving(
    settings: PeerSettings, ports: PeerPorts, app: PeerApp
) -> AbstractAsyncContextManager[Endpoint]:
    """Return what serves the model.

    Raises:
        ConfigError: This peer has nothing to serve, or nowhere.
    """
    asked = settings.serve
    assert asked.address is not None
    assert ports.make_http_server is not None
    endpoint = parse_address(asked.address, key=asked.key)
    if ports.make_engine is None:
        raise ConfigError("serve.address", "a peer without an engine has no model to serve")
    assert ports.open_tokenizer is not None
    if asked.tokenizer is not None or settings.model_dir is not None:
        open_tokenizer = ports.open_tokenizer
        app.tokenizer = await ports.offload.run(lambda: open_tokenizer(None))
    model = ModelServer(
        speaker=lambda: app.keeper,
        tokenizer=lambda: app.tokenizer,
        key=asked.key,
        tokens_max=asked.tokens_max,
        clock=ports.clock,
        entropy=ports.entropy,
        offload=ports.offload,
        journal=ports.journal,
    )
    return serve_model(ports.make_http_server(), endpoint, model)
