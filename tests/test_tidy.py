"""House style as far as a machine can see it, and documents that speak of what exists."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("echo2p2p", "peer", "coordinator", "scenarios")
CORES = ("wire", "weights", "broadcast", "capacity", "rollouts", "tasks")
LINES_MAX = 500
TEST_LINES_MAX = 650  # a test file is a list of stories: longer is not harder to read
FUNCTION_LINES_MAX = 70
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}

MACHINE_PATH = re.compile(r"(?<![\w.:/<>{}~$*-])/(?:home|root|work|tmp|mnt|opt|srv|Users)/\w")
REGISTRIES = re.compile(
    r"\b(?:[\w-]+\.)*(?:pypi\.org|pythonhosted\.org|pytorch\.org|huggingface\.co|hf\.co"
    r"|anaconda\.(?:org|com)|npmjs\.(?:org|com)|docker\.(?:io|com)|ghcr\.io|quay\.io|crates\.io"
    r"|golang\.org|jfrog\.io|nexus[\w-]*\.\w+\.\w+)\b"
)
ALLOWED_HOST = ("Makefile", "download.pytorch.org")
"""The one place from which CPU builds of torch come."""


def ignored_names():
    """Return what .gitignore leaves out, so that no git is needed to tell ours from the rest."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    return [".git", *(line.strip("/") for line in lines)]


def repository_files():
    ignored = ignored_names()
    found = []
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored):
                continue
            if path.is_dir():
                folders.append(path)
            else:
                found.append(path)
    return found


def text_of(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


FILES = {path.relative_to(ROOT).as_posix(): path for path in repository_files()}
TEXTS = {name: text for name, path in FILES.items() if (text := text_of(path)) is not None}
SOURCES = {name: text for name, text in TEXTS.items() if name.endswith(".py")}
OURS = {name: text for name, text in SOURCES.items() if name.split("/")[0] in PACKAGES}
TREES = {name: ast.parse(text, name) for name, text in SOURCES.items()}
DOCUMENTS = {name: text for name, text in TEXTS.items() if name.endswith(".md")}
FOLDERS = {parent.as_posix() for name in FILES for parent in Path(name).parents}


def functions(tree):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def is_core(name):
    return name.startswith(tuple(f"echo2p2p/{core}/" for core in CORES))


# --- source -------------------------------------------------------------------------------------


def test_the_search_finds_the_sources():
    assert "echo2p2p/wire/messages.py" in OURS
    assert "tests/test_tidy.py" in SOURCES
    assert not any("site-packages" in name for name in FILES)


def test_no_source_file_is_long():
    def limit(name):
        return TEST_LINES_MAX if name.startswith("tests/") else LINES_MAX

    long = {
        name: n for name, text in SOURCES.items() if (n := len(text.splitlines())) > limit(name)
    }
    assert not long, f"over {LINES_MAX} lines, or {TEST_LINES_MAX} in tests"


def test_no_function_is_long():
    long = {
        f"{name}:{node.lineno} {node.name}": lines
        for name, tree in TREES.items()
        for node in functions(tree)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert not long, f"over {FUNCTION_LINES_MAX} lines"


def test_every_module_has_a_name_that_says_something():
    assert not [name for name in SOURCES if NAMELESS & set(name.removesuffix(".py").split("/"))]


def test_imports_are_absolute():
    assert not [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def test_cores_do_not_print():
    assert not [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if is_core(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "print"
    ]


def does_something(tree):
    """Say whether a module has a function with a body: declarations need no test of their own."""
    for node in functions(tree):
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if any(not is_ellipsis(statement) for statement in body):
            return True
    return False


def is_ellipsis(statement):
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and value.value is ...


def imported_by_tests(folder):
    """Return the modules of ours that the test files of a folder import by name."""
    return {
        node.module
        for name, tree in TREES.items()
        if name.startswith(f"{folder}/test_")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }


def test_every_core_module_has_a_test_file_that_mirrors_it_or_a_neighbour_that_tests_both():
    untested = set()
    for name, tree in TREES.items():
        path = Path(name)
        folder = f"tests/{path.parent.name}"
        if not is_core(name) or path.name == "__init__.py" or not does_something(tree):
            continue
        module = name.removesuffix(".py").replace("/", ".")
        if f"{folder}/test_{path.name}" not in FILES and module not in imported_by_tests(folder):
            untested.add(name)
    assert not untested
    assert does_something(TREES["echo2p2p/wire/codec.py"])
    assert not does_something(TREES["echo2p2p/broadcast/effects.py"])


def test_every_module_has_a_header():
    bare = [name for name in OURS if not ast.get_docstring(TREES[name])]
    assert not bare


def test_tests_are_no_packages_and_have_no_conftest():
    assert not [
        name
        for name in FILES
        if name.startswith("tests/") and Path(name).name in {"__init__.py", "conftest.py"}
    ]


# --- all texts ----------------------------------------------------------------------------------


def lines_with(pattern):
    for name, text in TEXTS.items():
        if name == "tests/test_tidy.py":
            continue  # it has to name what it looks for
        for number, line in enumerate(text.splitlines(), 1):
            for match in pattern.finditer(line):
                yield name, number, match.group()


def test_no_text_has_a_path_of_one_machine():
    assert not [f"{name}:{number} {found}" for name, number, found in lines_with(MACHINE_PATH)]


def test_no_text_names_a_package_registry():
    found = {(name, host) for name, _, host in lines_with(REGISTRIES)}
    assert not found - {ALLOWED_HOST}


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        (MACHINE_PATH, "see /home/me/x", True),
        (MACHINE_PATH, "cd /work/main", True),
        (MACHINE_PATH, "GET /chunk/{manifest}/{index}", False),
        (MACHINE_PATH, "docs/work/x and https://host/tmp/x", False),
        (REGISTRIES, "https://pypi.org/simple", True),
        (REGISTRIES, "files.pythonhosted.org", True),
        (REGISTRIES, "https://host:port", False),
    ],
)
def test_the_patterns_find_what_they_should(pattern, text, is_found):
    assert bool(pattern.search(text)) is is_found


def test_texts_end_with_a_newline_and_have_no_carriage_returns():
    assert not [name for name, text in TEXTS.items() if text and not text.endswith("\n")]
    assert not [name for name in TEXTS if b"\r" in FILES[name].read_bytes()]


# --- documents ----------------------------------------------------------------------------------


def quoted(text):
    """Return what stands in single backticks, fenced blocks left out."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def exists(name):
    plain = name.rstrip("/")
    if "*" in plain or "<" in plain:
        pattern = re.sub(r"<[^>]*>", "*", plain)
        return any(fnmatch.fnmatch(each, pattern) for each in FILES)
    return plain in FILES or plain in FOLDERS


def missing_files(text):
    """Return the names of repository files in ``text`` that do not exist."""
    top = {name.split("/")[0] for name in FILES}
    missing = []
    for words in quoted(text):
        for word in re.findall(r"(?<![\w/.@-])[\w.<>*-]+(?:/[\w.<>*-]+)*/?(?![\w(])", words):
            is_path = "/" in word and word.split("/")[0] in top
            is_source = word.endswith((".py", ".md"))
            if is_path and not exists(word):
                missing.append(word)
            elif is_source and not is_path:
                ends = any(f"/{name}".endswith(f"/{word}") for name in FILES)
                if not (ends or "<" in word or "*" in word):
                    missing.append(word)
    return missing


def missing_modules(text):
    """Return the dotted names of ours in ``text`` that name nothing.

    Outside of ``echo2p2p`` such a name may be an event's or a host's instead of a module's.
    """
    missing = []
    for words in quoted(text):
        for dotted in re.findall(r"\b(?:echo2p2p|peer|coordinator|scenarios)(?:\.\w+)+", words):
            parts = dotted.split(".")
            at = 1
            while at < len(parts) and "/".join(parts[: at + 1]) in FOLDERS:
                at += 1
            if at == len(parts) or Path(*parts[:at], "__init__").as_posix() + ".py" not in FILES:
                continue
            module = "/".join(parts[: at + 1]) + ".py"
            if at == 1 and parts[0] != "echo2p2p" and module not in FILES:
                continue
            init = "/".join(parts[:at]) + "/__init__.py"
            rest = parts[at + 1 :]
            source = TEXTS.get(module)
            if source is None:
                source, rest = TEXTS[init], parts[at:]
            if rest and not re.search(rf"\b{rest[0]}\b", source):
                missing.append(dotted)
    return missing


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_document_names_no_file_that_does_not_exist(name):
    assert not missing_files(DOCUMENTS[name])


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_the_links_of_a_document_lead_somewhere(name):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", DOCUMENTS[name])
    here = Path(name).parent
    assert not [target for target in targets if not exists((here / target).as_posix())]


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_document_names_no_make_target_that_does_not_exist(name):
    there = set(re.findall(r"^(\w+):", TEXTS["Makefile"], re.MULTILINE))
    words = quoted(DOCUMENTS[name])
    assert not {target for each in words for target in re.findall(r"^make (\w+)", each)} - there


def test_documents_and_sources_name_no_module_that_does_not_exist():
    texts = DOCUMENTS | OURS
    missing = {name: found for name, text in texts.items() if (found := missing_modules(text))}
    assert not missing


def test_the_searches_of_documents_find_what_they_should():
    assert missing_files("see `echo2p2p/wire/nothing.py` and `echo2p2p/wire/codec.py`") == [
        "echo2p2p/wire/nothing.py"
    ]
    assert missing_files("`codec.py`, `nothing.py`, `tests/golden/`, `tests/silver/`") == [
        "nothing.py",
        "tests/silver/",
    ]
    assert missing_files("`tests/golden/<tag>.hex` `coordinator/presets/*.toml` `x/y.toml`") == []
    assert missing_modules("`echo2p2p.wire.codec.encode` `echo2p2p.wire.codec.scramble`") == [
        "echo2p2p.wire.codec.scramble"
    ]
    assert missing_modules("`echo2p2p.wire.nothing`") == ["echo2p2p.wire.nothing"]
