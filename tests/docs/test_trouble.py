"""docs/trouble.md quotes what the source says, and leaves nothing out that a user can meet."""

import ast
import itertools
import re
from pathlib import Path

from echo2p2p.errors import Violation
from echo2p2p.rollouts.trajectory import Reason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8")
SOURCES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("echo2p2p", "peer", "coordinator")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "testing" not in path.parts
}
GAP = "…"
ERRORS = {"ConfigError", "StoreError", "RefusedError", "HttpError", "EngineError", "PlotError"}
SILENT = {
    "the engine has no weights": "our bug: the keeper loads before it asks",
    "the engine was not started": "our bug: the keeper starts it before it asks",
    "the engine is being started again": "the cause was told before",
}
"""Fixed parts of errors that no user meets, and why."""
CHOSEN = {"make_folders", "chosen_error"}
"""What makes a `ConfigError` of a path that a user has chosen; the setting comes first."""
TABLES = {"_MENDS", "mends"}
"""Names of dictionaries from error numbers to words."""


def quotes():
    """Return what stands in backticks on the page."""
    return re.findall(r"`([^`\n]+)`", PAGE)


def texts_of(node, names):
    """Return what a string expression can be, `GAP` for what differs; nothing: it is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return joined([texts_of(value, names) for value in values])
        case ast.FormattedValue(value=inner):
            return texts_of(inner, names)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return latest(names.get(name, []), node.lineno)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return joined([texts_of(left, names), texts_of(right, names)])
        case ast.IfExp(body=body, orelse=orelse):
            return [*texts_of(body, names), *texts_of(orelse, names)]
    return []


def joined(variants):
    """Return every way to join one of each."""
    return ["".join(each) for each in itertools.product(*(texts or [GAP] for texts in variants))]


def latest(values, line):
    """Return the texts that were given last before a line."""
    return next((texts for at, texts in reversed(values) if at <= line), [])


def functions(tree):
    """Yield the functions of a module, and the module itself for what is outside of any."""
    yield tree
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


def assigned(scope, known=()):
    """Return what the names of a scope are set to, by name: (line, texts) in their order."""
    found = {name: list(values) for name, values in dict(known).items()}
    kinds = ast.Assign | ast.AnnAssign
    nodes = [node for node in ast.walk(scope) if isinstance(node, kinds) and node.value]
    for node in sorted(nodes, key=lambda node: node.lineno):
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and (texts := texts_of(node.value, found)):
            found.setdefault(target.id, []).append((node.lineno, texts))
    return found


def constants(tree):
    """Return the strings of a module's own constants, as if they were set before any line."""
    own = assigned(ast.Module(body=[n for n in tree.body if not hasattr(n, "body")]))
    return {name: [(0, values[-1][1])] for name, values in own.items()}


IMPORTED = {name: each for tree in SOURCES.values() for name, each in constants(tree).items()}


def called(node):
    function = getattr(node, "func", None)
    return getattr(function, "id", None) or getattr(function, "attr", None)


def errors():
    """Yield (place, what is called, what each argument can be) of every error that is made."""
    seen = set()
    for file, tree in SOURCES.items():
        for scope in reversed(list(functions(tree))):
            names = assigned(scope, IMPORTED | constants(tree))
            for node in ast.walk(scope):
                kind = called(node)
                place = f"{file}:{getattr(node, 'lineno', 0)}"
                if kind not in {*ERRORS, *CHOSEN, "refusal", "ValueError"} or place in seen:
                    continue
                if kind == "ValueError" and not file.endswith("/config.py"):
                    continue
                seen.add(place)
                yield place, kind, [texts_of(argument, names) or [GAP] for argument in node.args]


def told_in_tables():
    """Yield (place, words) of what error numbers are translated to, and of the HTTP client."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
            if getattr(target, "id", None) in TABLES and isinstance(node.value, ast.Dict):
                for value in node.value.values:
                    yield f"{file}:{value.lineno}", value.value
            if file == "echo2p2p/net/aio/client.py" and getattr(node, "name", "") == "_cause":
                for answer in (each for each in ast.walk(node) if isinstance(each, ast.Return)):
                    for text in texts_of(answer.value, {}):
                        yield f"{file}:{answer.lineno}", text


def parts(text):
    """Return the fixed parts of a message, punctuation at their ends left out."""
    found = (part.strip(" :;,()'\"[]{}") for part in text.split(GAP))
    return [part for part in found if len(part) > 7]


ALL = list(errors())
WORDS = [
    *(text for _, _, arguments in ALL for texts in arguments for text in texts),
    *(text for _, text in told_in_tables()),
]
QUOTED = "\n".join(quotes())


def literals():
    """Return every string of the source, docstrings left out, as one text."""
    found = []
    for tree in SOURCES.values():
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        skipped = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and ast.get_docstring(node) is not None
        }
        for node in ast.walk(tree):
            if id(node) not in skipped:
                found += texts_of(node, IMPORTED)
    return "\n".join([*found, *WORDS])


def config_paths():
    """Return the first part of every `ConfigError`, as it is shown."""
    kinds = {"ConfigError", *CHOSEN}
    made = [arguments for _, kind, arguments in ALL if kind in kinds and len(arguments) > 1]
    return {path for paths, *_ in made for path in paths if path.strip(GAP)}


def test_the_search_finds_the_errors():
    kinds = {kind for _, kind, _ in ALL}
    assert kinds == {*ERRORS, *CHOSEN, "refusal", "ValueError"}
    assert len(ALL) > 100
    assert {"url", "token", f"task.options.{GAP}", "relay.listen", "run.folder"} <= config_paths()


def test_every_fixed_part_that_the_page_quotes_as_a_message_is_in_the_source():
    source = literals()
    paths = sorted((path.replace(GAP, "") for path in config_paths()), key=len, reverse=True)
    settings = r"(?:[a-z_]+\.)+[a-z_]+: "
    missing = {}
    for row in (line for line in PAGE.splitlines() if line.startswith("| `")):
        for message in re.findall(r"`([^`]+)`", row.split("|")[1]):
            bare = re.sub(rf"^(?:{settings}|(?:{'|'.join(map(re.escape, paths))}): )", "", message)
            bare = re.sub(r"^(?:[a-z_]+|task worker): ", "", bare)
            lost = [part for part in parts(bare.replace(": ", GAP)) if part not in source]
            if lost:
                missing[message] = lost
    assert not missing, missing


def test_every_error_that_a_user_can_meet_is_on_the_page():
    missing = {}
    for place, kind, arguments in ALL:
        if kind in CHOSEN:
            continue
        skipped = {"refusal": 2, "ConfigError": 1, "RefusedError": 1}.get(kind, 0)
        paths = arguments[0] if kind == "ConfigError" else [""]
        for texts in arguments[skipped:]:
            if not any(is_on_the_page(path, text) for path in paths for text in texts):
                missing[place] = texts
    assert not missing, missing


def is_on_the_page(path, text):
    """Say whether one quote has all fixed parts of a message, and begins with its path."""
    # Settings' names move in front of their message; see `echo2p2p.cli`.
    wanted = parts(re.sub(r"^[a-z]+\.[a-z_]+ ", "", text))
    if not wanted or any(part in SILENT for part in wanted):
        return True
    begin = "" if path == GAP else path
    return any(
        quote.startswith(begin) and all(part in quote for part in wanted) for quote in quotes()
    )


def test_every_word_for_a_systems_error_is_on_the_page():
    lost = {
        place: text
        for place, text in told_in_tables()
        if any(part not in QUOTED for part in parts(text))
    }
    assert not lost, lost


def test_every_code_of_a_refusal_and_every_reason_is_on_the_page():
    given = {code for _, kind, arguments in ALL if kind == "refusal" for code in arguments[1]}
    given |= {code for _, kind, arguments in ALL if kind == "RefusedError" for code in arguments[0]}
    codes = {code for code in given if re.fullmatch("[a-z_]+", code)}
    assert {"intake_full", "busy", "no_such_path", "wrong_run"} <= codes
    named = {re.split(r": ", quote)[0] for quote in quotes()}
    wanted = codes | {each.value for each in (*Reason, *Violation)}
    assert not wanted - named, wanted - named


def test_every_path_of_a_setting_that_can_be_refused_is_on_the_page():
    shown = {quote.partition(": ")[0] for quote in quotes()}
    assert not config_paths() - shown, config_paths() - shown


def test_nothing_is_called_silent_that_the_source_does_not_say():
    assert not [text for text in SILENT if text not in WORDS]
