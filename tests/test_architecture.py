"""The architecture as a test: the folder list is the order of imports, and style is not debated but run."""

from __future__ import annotations

import ast
import functools
import statistics
from collections.abc import Callable
from pathlib import Path

from measure import repeated_classes, used_once

import backstay

ROOT = Path(backstay.__file__).parent

LAYERS = [
    "version",
    "errors",
    "messages",
    "model",
    "codec",
    "pieces",
    "store",
    "operations",
    "maintenance",
    "thread",
    "retry",
    "engine",
    "bundle",
    "compat",
    "cli",
    "testing",
    "langgraph",
]
"""Imports go up this list only: a module may import from its own layer and from those before it."""

TOP = {"cli", "testing", "langgraph", "__init__"}
"""Nothing below may import these."""

LAZY_IMPORTS = {
    ("codec/arrays.py", "numpy"),  # only needed once an array is met, and not a dependency
    ("cli", "backstay"),  # a command imports what it needs, so that --version stays fast
    ("cli", "rich"),
    ("cli", "click"),
    ("store/open.py", "backstay"),  # PostgreSQL's driver is an extra; and who uses one store should not load the others
    ("langgraph/importer/importer.py", "backstay"),  # PostgreSQL's driver is an extra
    ("compat/backend/transfer.py", "backstay"),  # the same
    ("__init__.py", "backstay"),  # loads the public names when one is first used
    # The first save of a program waits for every import, so it leaves out what few programs need or need later:
    ("thread", "backstay"),  # maintenance
    ("thread", "asyncio"),
    ("operations", "asyncio"),
    ("operations", "concurrent"),
    ("operations", "difflib"),
    ("operations", "socket"),
    ("operations", "html"),
    ("model", "html"),
    ("maintenance", "json"),
    ("store/sqlite/files.py", "ctypes"),
}
"""(file or layer, package): the only imports inside functions. Each has its reason."""

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 60
ONE_USE_PERCENT_MAX = 10
"""Private functions that are called once, of all functions. Most of them only interrupt the reader."""

BANNED_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "importlib.util", "apsw"}


@functools.cache
def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"), str(path))) for path in sorted(ROOT.rglob("*.py"))]


def layer_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [node.module or ""]
    return []


def checking_types_only(tree: ast.Module) -> set[ast.AST]:
    """Return what stands under ``if TYPE_CHECKING``: it does not run."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found.update(ast.walk(node))
    return found


def is_declared_lazy(path: Path, name: str) -> bool:
    relative, package = path.relative_to(ROOT).as_posix(), name.partition(".")[0]
    return (relative, package) in LAZY_IMPORTS or (layer_of(path), package) in LAZY_IMPORTS


def test_imports_go_up_the_list_of_layers_only() -> None:
    wrong = []
    for path, tree in modules():
        layer = layer_of(path)
        if layer == "__init__":
            continue
        for node in ast.walk(tree):
            for name in imported(node):
                if not name.startswith("backstay."):
                    continue
                target = name.split(".")[1]
                if LAYERS.index(target) > LAYERS.index(layer) or (target in TOP and target != layer):
                    wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} imports {name}")

    assert wrong == []


def test_every_file_belongs_to_a_layer() -> None:
    assert {layer_of(path) for path, _ in modules()} <= {*LAYERS, "__init__"}


def test_there_is_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path, tree in modules():
        name = ".".join(("backstay", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        skipped = checking_types_only(tree)
        graph[name] = {target for node in ast.walk(tree) if node not in skipped for target in targets(node)}
    seen: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in seen:
            for target in graph.get(name, ()):
                visit(target, (*trail, name))
            seen.add(name)

    for name in graph:
        visit(name, ())


def targets(node: ast.AST) -> list[str]:
    """Return the modules of ours that an import statement may load."""
    names = [name for name in imported(node) if name.startswith("backstay.")]
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("backstay"):
        below = [f"{node.module}.{alias.name}" for alias in node.names]
        files = [name for name in below if (ROOT / Path(*name.split(".")[1:])).with_suffix(".py").exists()]
        return files or names
    return names


def test_no_import_hides_inside_a_function_unless_declared() -> None:
    hidden = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
        for path, tree in modules()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node)
        if not is_declared_lazy(path, name)
    ]

    assert hidden == []


def test_nothing_in_the_package_can_run_code_it_was_given() -> None:
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}")
            found += [
                f"{path.relative_to(ROOT)} imports {name}"
                for name in imported(node)
                if name in BANNED_MODULES or name.partition(".")[0] in BANNED_MODULES
            ]

    assert found == []


def test_no_block_that_holds_a_lock_starts_with_try() -> None:
    """An interrupt at that line comes after the lock was taken and before Python knows that it must be released."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and isinstance(node.body[0], ast.Try)
        if any(word in ast.unparse(item.context_expr) for item in node.items for word in ("lock", "_turn", "_writer"))
    ]

    assert wrong == []


def test_no_sql_is_put_together_with_values() -> None:
    """Only the store's own named statements reach ``execute``; a formatted text there is a hole in the making."""
    wrong = []
    for path, tree in modules():
        if "sqlite" not in path.parts:
            continue
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr in ("execute", "executemany") and node.args:
                text = node.args[0]
                if isinstance(text, ast.JoinedStr) and not _only_constants(text):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert wrong == []


def _only_constants(text: ast.JoinedStr) -> bool:
    """Tell whether a formatted text holds nothing but names of module constants and version numbers."""
    names = [value.value for value in text.values if isinstance(value, ast.FormattedValue)]
    return all(isinstance(name, ast.Name) and (name.id.isupper() or name.id == "version") for name in names)


def function_sizes() -> list[tuple[int, str]]:
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}")
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_and_functions_stay_small(record_property: Callable[[str, object], None]) -> None:
    files = [(len(path.read_text(encoding="utf-8").splitlines()), str(path.relative_to(ROOT))) for path, _ in modules()]
    functions = function_sizes()
    report = (
        f"{len(files)} files, {sum(size for size, _ in files)} lines, largest {max(files)}; "
        f"{len(functions)} functions, "
        f"median {statistics.median(size for size, _ in functions)} lines, largest {max(functions)}"
    )
    record_property("sizes", report)

    assert [entry for entry in files if entry[0] > FILE_LINES_MAX] == [], report
    assert [entry for entry in functions if entry[0] > FUNCTION_LINES_MAX] == [], report


def test_few_private_functions_are_called_only_once(record_property: Callable[[str, object], None]) -> None:
    once = sum(used_once(tree) for _, tree in modules())
    percent = 100 * once / len(function_sizes())
    report = f"{once} private functions are called once: {percent:.1f} % of {len(function_sizes())}"
    record_property("one use", report)

    assert percent <= ONE_USE_PERCENT_MAX, report


def test_a_class_name_means_one_thing() -> None:
    assert repeated_classes({path.relative_to(ROOT): tree for path, tree in modules()}) == {}


def test_every_file_begins_by_saying_what_it_is() -> None:
    assert [str(path.relative_to(ROOT)) for path, tree in modules() if not ast.get_docstring(tree)] == []


def test_no_file_is_named_for_having_no_name() -> None:
    nameless = {"utils", "util", "helpers", "helper", "misc", "common"}

    assert [path.name for path, _ in modules() if path.stem.strip("_") in nameless] == []
