"""What README, CONTRIBUTING and docstrings name exists, and the commands they show parse."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kgen.cli.main import build_parser
from kgen.runtime import gemm
from kgen.shapes import FIELDS

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS)
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("kgen", "tests", "tools", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
#: Made by a command, or lying elsewhere.
NOT_IN_THE_REPOSITORY = ("tuning.db", ".venv", ".wheels", "~/", "/tmp", "/dev", "/proc")

_TICKED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.~/-]+")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def looks_like_path(text: str) -> bool:
    known = re.search(r"\.(py|md|txt|j2|cuh|json|toml|db|csv)$", text)
    return bool(_PATH.fullmatch(text)) and ("/" in text or known is not None) and "//" not in text


def path_exists(text: str) -> bool:
    """Whether a path stands in the repository, as written or below kgen or tests."""
    if text.startswith(NOT_IN_THE_REPOSITORY):
        return True
    folders = ("", "kgen", "kgen/templates", "tests", "results", "results/experiments")
    return any((ROOT / folder / text).exists() for folder in folders)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names a module defines at its top, its classes' members, and `Class.member`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names |= set(_bound(node))
        if isinstance(node, ast.ClassDef):
            members = {name for child in node.body for name in _bound(child)}
            names |= members | {f"{node.name}.{member}" for member in members}
    return frozenset(names)


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.Assign():
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from ((alias.asname or alias.name) for alias in node.names)


def symbol_exists(dotted: str) -> bool | None:
    """Whether a module's or a member's name exists, with or without kgen in front.

    None when it is not kgen's. `settings.compiler`, said of a value, stands for the class's
    member.
    """
    parts = dotted.split(".")
    if parts[0] == "kgen":
        parts = parts[1:]
    elif not ((ROOT / "kgen" / parts[0]).is_dir() or (ROOT / "kgen" / f"{parts[0]}.py").is_file()):
        return None
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath("kgen", *parts[:end])
        rest = ".".join(parts[end:])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return not rest or rest in names_in(file)
    return False


def wrong_names(text: str) -> list[str]:
    """What a text puts in backticks that does not exist."""
    wrong = []
    for ticked in _TICKED.findall(text):
        if looks_like_path(ticked):
            if not path_exists(ticked):
                wrong.append(ticked)
        elif _DOTTED.fullmatch(ticked) and symbol_exists(ticked) is False:
            wrong.append(ticked)
    return wrong


def docstrings(path: Path) -> str:
    """Docstrings and comments of a file, one text."""
    text = path.read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
    return "\n".join(docs + comments)


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    found = _FENCE.findall((ROOT / page).read_text())
    return [body for kind, body in found if kind == language]


def commands(page: str) -> list[str]:
    """Command lines of the console blocks, without prompt and comment."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line[:2] == "$ "]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page: str) -> None:
    assert wrong_names((ROOT / page).read_text()) == []


@pytest.mark.parametrize("source", SOURCES)
def test_docstrings_name_what_exists(source: str) -> None:
    if Path(__file__).name not in source:  # this file shows made-up names
        assert wrong_names(docstrings(ROOT / source)) == []


@pytest.mark.parametrize("source", [source for source in SOURCES if source.startswith("kgen/")])
def test_every_module_and_public_name_is_described(source: str) -> None:
    tree = ast.parse((ROOT / source).read_text())
    assert ast.get_docstring(tree), f"{source} has no docstring"
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text()
    ):
        file = folder / target if target else ROOT / page
        assert file.exists(), target
        titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [
            re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
        ]


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "kgen":
            args = build_parser().parse_args(words[1:])
            for name in getattr(args, "shapes", None) or []:
                shipped = ROOT / "shapes" / f"{name}.txt"
                assert (ROOT / name).is_file() or shipped.is_file(), command
        elif words[0] == "make":
            target = next(word for word in words[1:] if "=" not in word)
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), command
            variables = [word.split("=")[0] for word in words[1:] if "=" in word]
            assert all(re.search(rf"^{v} \?=", makefile, re.MULTILINE) for v in variables), command
        else:
            assert words[0] in ("pip", "python3", "export", ".ci/run"), command


def test_readme_lists_every_command() -> None:
    parser = build_parser()
    shown = set(
        re.findall(r"^\| `kgen ([\w-]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    actions = next(a for a in parser._actions if isinstance(a.choices, dict))
    assert isinstance(actions.choices, dict)
    assert shown == set(actions.choices)


def test_pages_show_commands() -> None:
    shown = {page for page in PAGES if commands(page)}
    assert shown >= {"README.md", "CONTRIBUTING.md", "docs/grouped.md", "docs/recipes.md"}


@pytest.mark.parametrize("page", [page for page in DOCS if blocks(page, "python")])
def test_examples_run_as_they_stand(page: str) -> None:
    for example in blocks(page, "python"):
        exec(compile(example, page, "exec"), {"__name__": page})


def test_every_variable_has_its_row() -> None:
    read = set(re.findall(r"KGEN_[A-Z_]*[A-Z]", (ROOT / "kgen/settings.py").read_text()))
    rows = re.findall(r"^\| (KGEN_\w+) \|", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    assert read == set(rows)


def test_every_field_and_call_has_its_row() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in text and name != "kind"] == []
    gemms = (
        "gemm_",
        "bf16_gemm_",
        "mm_",
        "m_grouped_",
        "dgrad_",
        "wgrad_",
        "k_grouped_",
        "per_",
        "Kgen",
    )
    calls = [name for name in gemm.__all__ if not name.startswith(gemms)]
    assert [name for name in calls if f"`{name}(" not in text] == []


def test_readme_example_runs() -> None:
    (example,) = blocks("README.md", "python")
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    import torch

    out = scope["out"]
    assert isinstance(out, torch.Tensor)
    assert out.isfinite().all()
    assert out.float().std() > 1


def test_the_rules_catch_what_is_wrong() -> None:
    assert wrong_names("`kgen/no_such.py`, `config.GemmConfig`, `shapes/deepseek_v3.txt`") == [
        "kgen/no_such.py"
    ]
    assert wrong_names("`kgen.config.NoSuch` `config.Resources.threads` `os.path`") == [
        "kgen.config.NoSuch"
    ]
    assert symbol_exists("kgen.runtime.nowhere") is False
