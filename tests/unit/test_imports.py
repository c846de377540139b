"""The layer table, enforced on the syntax trees of kgen: imports anywhere in a file count.

A module imports only from lower layers, or from a name listed before it in its own group.
Groups of one layer do not know each other. Packages from outside the standard library are
allowed by module. Add a new module here, in the lowest layer that serves it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kgen"

#: Layers from the lowest; a layer's groups; a group's modules, of which each may use the former.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors settings intervals",),
    ("problem device config cover validity shapes shape_writer model_configs model_shapes",),
    (
        "model space heuristic",
        "cache.keys",
        "cache.records",
        "cache.container cache.trust",
        "reference quant cases grouped_reference grouped_cases wgrad_reference wgrad_cases",
        "elf",
    ),
    (
        "render foreign",
        "nvcc nvrtc toolchain compiler",
        "sass",
        "disasm",
        "cache.artifacts",
        "cache.liveness cache.sqlite cache.rows cache.schema cache.connect cache.handle cache.db "
        "cache.transfer cache.bundle_rows cache.suggest cache.census "
        "cache.lessons",
        "runtime.driver runtime.tma runtime.kernel runtime.grouped_kernel runtime.wgrad_kernel "
        "runtime.kernels",
        "runtime.operands runtime.cast_options runtime.ops runtime.cast_out runtime.moe_ops "
        "runtime.grouped_operands runtime.grouped_ops runtime.bf16_ops "
        "runtime.wgrad_operands runtime.wgrad_ops",
        "runtime.stats runtime.record",
        "runtime.guard",
        "runtime.nvtx",
    ),
    ("build", "verify grouped_verify wgrad_verify", "runtime.lookup", "cache.bundles"),
    (
        "nvml measure",
        "search.strategy search.optuna_strategy search.model_strategy search.strategies",
        "search.history search.importance",
        "explain",
        "search.tables",
        "search.ties",
        "search.control",
        "search.events",
        "search.stop search.child search.gpu_lock",
    ),
    (
        "search.plan search.gpu_worker search.compile_pool search.builder search.gpu_cases "
        "search.gpu_body "
        "search.gpu_backend search.run search.session search.finals search.offline "
        "search.campaign search.tune "
        "search.gpu_run search.recheck search.rerun search.race search.refresh "
        "search.dispatch_table search.profile_target search.profile search.recorder",
        "search.replay",
        "runtime.counting runtime.dispatch runtime.plain runtime.cast_launch "
        "runtime.turn runtime.swiglu runtime.casts runtime.routing "
        "runtime.moe runtime.copies runtime.calls runtime.grouped runtime.bf16 runtime.dgrad "
        "runtime.wgrad runtime.gemm",
    ),
    ("bench",),  # nn, compat, serve: to come
    (
        "cli.output cli.arguments cli.board cli.progress cli.trial_log cli.refresh cli.tune "
        "cli.dispatch_table "
        "cli.best cli.show cli.render cli.explain cli.run_trial cli.race cli.profile cli.host_cost "
        "cli.cast_speed "
        "cli.bench cli.plot cli.shapes cli.misses cli.replay cli.db_bundles cli.db cli.doctor "
        "cli.main",
    ),
)

#: Packages from outside the standard library, by module or folder of modules.
THIRD_PARTY: dict[str, set[str]] = {
    "reference": {"torch"},
    "quant": {"torch"},
    "render": {"jinja2"},
    "nvrtc": {"cuda"},
    "cache.schema": {"sqlalchemy"},
    "cache.sqlite": {"sqlalchemy"},
    "cache.connect": {"sqlalchemy"},
    "cache.handle": {"sqlalchemy"},
    "cache.db": {"sqlalchemy"},
    "cache.transfer": {"sqlalchemy"},
    "cache.bundle_rows": {"sqlalchemy"},
    "cache.suggest": {"sqlalchemy"},
    "cache.census": {"sqlalchemy"},
    "cache.lessons": {"sqlalchemy"},
    "cache.bundles": {"sqlalchemy"},
    "cache.trust": {"cryptography"},
    "runtime.driver": {"cuda", "torch"},
    "runtime.tma": {"torch"},
    "runtime.kernel": {"torch"},
    "cases": {"torch"},
    "verify": {"torch"},
    "grouped_reference": {"torch"},
    "grouped_cases": {"torch"},
    "grouped_verify": {"torch"},
    "wgrad_reference": {"torch"},
    "wgrad_cases": {"torch"},
    "wgrad_verify": {"torch"},
    "runtime.wgrad_kernel": {"torch"},
    "runtime.wgrad_operands": {"torch"},
    "runtime.wgrad_ops": {"torch"},
    "runtime.wgrad": {"torch"},
    "runtime.grouped_kernel": {"torch"},
    "runtime.grouped_operands": {"torch"},
    "runtime.grouped_ops": {"torch"},
    "runtime.grouped": {"torch"},
    "runtime.bf16": {"torch"},
    "runtime.bf16_ops": {"torch"},
    "runtime.dgrad": {"torch"},
    "measure": {"torch"},
    "search.importance": {"optuna"},
    "search.optuna_strategy": {"optuna"},
    "search.model_strategy": {"numpy"},
    "search.gpu_body": {"torch"},
    "search.gpu_cases": {"torch"},
    "runtime.operands": {"torch"},
    "runtime.ops": {"torch"},
    "runtime.cast_options": {"torch"},
    "runtime.plain": {"torch"},
    "runtime.cast_launch": {"torch"},
    "runtime.turn": {"torch"},
    "runtime.swiglu": {"torch"},
    "runtime.routing": {"torch"},
    "runtime.cast_out": {"torch"},
    "runtime.moe_ops": {"torch"},
    "runtime.casts": {"torch"},
    "runtime.moe": {"torch"},
    "runtime.copies": {"torch"},
    "runtime.calls": {"torch"},
    "runtime.guard": {"torch"},
    "runtime.nvtx": {"torch"},
    "runtime.dispatch": {"torch"},
    "runtime.gemm": {"torch"},
    "bench": {"torch"},
    "bench.triton_gemm": {"triton"},
    "bench.plot": {"matplotlib"},
    "cli": {"rich"},
}

#: What must not be reached from a module, however many imports lie between.
NEVER_REACHED: dict[str, set[str]] = {
    "space": {"torch", "cuda", "jinja2", "optuna", "sqlalchemy", "numpy"},
    "heuristic": {"torch", "cuda", "jinja2", "optuna", "sqlalchemy", "numpy"},
    "shapes": {"torch", "cuda", "jinja2", "optuna", "sqlalchemy", "numpy"},
    "shape_writer": {"torch", "cuda", "jinja2", "optuna", "sqlalchemy", "numpy"},
    "model_shapes": {"torch", "cuda", "jinja2", "optuna", "sqlalchemy", "numpy"},
    "render": {"torch", "cuda", "optuna", "sqlalchemy"},
    "compiler": {"torch", "jinja2", "optuna", "sqlalchemy", "kgen.cache", "kgen.runtime"},
    "runtime.kernel": {"optuna", "sqlalchemy", "jinja2", "kgen.cache", "kgen.build", "kgen.search"},
    "runtime.dispatch": {"optuna", "kgen.search", "kgen.verify", "kgen.measure", "kgen.bench"},
    "runtime.gemm": {"optuna", "kgen.search", "kgen.verify", "kgen.measure", "kgen.bench"},
    "explain": {"torch", "cuda", "optuna", "kgen.search"},
    "search.strategies": {"kgen.build", "kgen.verify", "kgen.measure", "kgen.cache", "torch"},
    "search.events": {"torch", "cuda", "optuna", "sqlalchemy"},
    "search.tune": {"torch"},
    "search.recheck": {"torch"},
    "search.gpu_run": {"torch"},
    "search.race": {"torch"},
    "search.refresh": {"torch"},
    "search.dispatch_table": {"torch"},
    "search.profile": {"torch"},
    # What a bundle brings is never run, built or even rendered on its way in.
    "cache.bundles": {"torch", "cuda", "jinja2", "kgen.build", "kgen.runtime", "kgen.search"},
    "cache.container": {"sqlalchemy", "pickle"},
}


@cache
def modules() -> dict[str, Path]:
    """Dotted name below kgen to file; a package stands for its __init__ file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(name: str) -> frozenset[str]:
    """Full names of the modules that a module of kgen imports, wherever in its file."""
    tree = ast.parse(modules()[name].read_text())
    return frozenset(target for node in ast.walk(tree) for target in _targets(node))


def _targets(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full.removeprefix("kgen.") in modules() else module
        case ast.Call(args=[ast.Constant(value=str(value)), *_]) if "import_module" in ast.unparse(
            node.func
        ):
            yield value


def place(name: str) -> tuple[int, int, int] | None:
    """(layer, group, position) of a module, or None when the table does not list it."""
    for layer, groups in enumerate(LAYERS):
        for group, names in enumerate(groups):
            for position, listed in enumerate(names.split()):
                if name == listed or name.startswith(f"{listed}."):
                    return layer, group, position
    return None


def may_import(name: str, target: str) -> bool:
    """Whether the table lets one module of kgen import another."""
    here, there = place(name), place(target)
    if here is None or there is None:
        return target in ("", "__init__")
    return there[0] < here[0] or (there[:2] == here[:2] and there[2] <= here[2])


def kgen_imports(name: str) -> set[str]:
    """Modules of kgen that a module imports, by their name below kgen."""
    prefixed = (target for target in imports_of(name) if target.split(".")[0] == "kgen")
    return {target.removeprefix("kgen").removeprefix(".") for target in prefixed}


def outside_imports(name: str) -> set[str]:
    """Packages from outside kgen and the standard library that a module imports."""
    heads = {target.split(".")[0] for target in imports_of(name)}
    return heads - {"kgen"} - sys.stdlib_module_names


def reached_from(name: str) -> set[str]:
    """Every module of kgen (by its full name) and every outside package in a module's closure."""
    seen: set[str] = set()
    waiting = [name]
    outside: set[str] = set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in modules():
            continue
        seen.add(current)
        outside |= outside_imports(current)
        waiting += kgen_imports(current)
    return {f"kgen.{module}" for module in seen if module} | outside


def of_a_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


CODE = [name for name in modules() if not of_a_package(name)]


@pytest.mark.parametrize("name", CODE)
def test_every_module_is_in_the_table(name: str) -> None:
    assert place(name) is not None, f"add kgen.{name} to LAYERS in {__file__}"


@pytest.mark.parametrize("name", CODE)
def test_imports_point_downwards(name: str) -> None:
    wrong = sorted(target for target in kgen_imports(name) if not may_import(name, target))
    assert not wrong, f"kgen.{name} must not import {wrong}"


@pytest.mark.parametrize("name", CODE)
def test_outside_packages_are_allowed_ones(name: str) -> None:
    allowed: set[str] = set()
    for listed, packages in THIRD_PARTY.items():
        if name == listed or name.startswith(f"{listed}."):
            allowed |= packages
    assert outside_imports(name) <= allowed


@pytest.mark.parametrize("name", [name for name in NEVER_REACHED if name in modules()])
def test_what_is_never_reached(name: str) -> None:
    reached = reached_from(name)
    bad = {
        module
        for module in reached
        for banned in NEVER_REACHED[name]
        if module == banned or module.startswith(f"{banned}.")
    }
    assert not bad, f"kgen.{name} reaches {sorted(bad)}"


@pytest.mark.parametrize("name", [name for name in modules() if of_a_package(name)])
def test_package_files_import_nothing(name: str) -> None:
    tree = ast.parse(modules()[name].read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    allowed = {"__future__", "typing"}
    assert all(isinstance(node, ast.ImportFrom) and node.module in allowed for node in top)


def uses(name: str, *spellings: str) -> list[int]:
    """Lines of a module where an expression is spelled in one of these ways."""
    lines = []
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in spellings:
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            lines += [node.lineno] * bool(named & set(spellings))
    return lines


@pytest.mark.parametrize("name", [name for name in CODE if name != "settings"])
def test_only_settings_reads_the_environment(name: str) -> None:
    assert not uses(name, "os.environ", "os.environb", "os.getenv", "os.getenvb")


@pytest.mark.parametrize("name", [name for name in CODE if not name.startswith("cli.")])
def test_only_cli_prints(name: str) -> None:
    assert not uses(name, "print", "sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")


def test_the_rules_catch_what_they_forbid() -> None:
    assert not may_import("config", "space")
    assert not may_import("render", "compiler")
    assert not may_import("cache.artifacts", "cache.db")
    assert not may_import("runtime.gemm", "search.tune")
    assert not may_import("problem", "config")
    assert may_import("config", "problem")
    assert may_import("build", "render")
    assert may_import("cli.main", "cli.tune")
    call = ast.parse("importlib.import_module('kgen.search.tune')").body[0]
    assert isinstance(call, ast.Expr)
    assert list(_targets(call.value)) == ["kgen.search.tune"]


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys, kgen.cli.main as m; m.build_parser().format_help(); "
        "heavy = {'torch', 'cuda.bindings', 'optuna', 'sqlalchemy', 'jinja2', 'numpy'}; "
        "print(*heavy & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
