"""Documentation is tested: every Python block runs, every error and public name is mentioned, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import backstay
from backstay import errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)\)")
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
]

PUBLIC = re.compile(
    r"backstay(\.(errors|messages|thread|retry|maintenance|bundle|langgraph|codec|testing(\.\w+)?"
    r"|engine(\.(reducers|triggers|sinks|events))?|compat\.(sessions|workflow|backend|graph)))?"
)
"""The modules that users import. Everything else may change at any time."""

FOR_STORE_AUTHORS = {"backstay.store.base", "backstay.store.memory"}
"""What a new store is made of; only CONTRIBUTING.md imports these."""


@pytest.mark.parametrize("block", BLOCKS)
def test_the_example_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")


KILL = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.mark.parametrize(
    ("before", "dies"),
    [
        pytest.param("    return {", f"    if len(messages) == 3: {KILL}\n    return {{", id="in the model"),
        pytest.param(
            "        turn.append(", f"        if turn.iteration == 3: {KILL}\n        turn.append(", id="after it"
        ),
    ],
)
def test_the_readmes_loop_is_killed_and_resumes(tmp_path: Path, before: str, dies: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(text for text in BLOCK.findall(readme) if "call_model" in text)
    killed = block.replace(before, dies)
    assert killed != block
    runs = [  # the second one does not wait for the lease of the first, which would take 30 seconds
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=25
        )
        for code in (killed, block, block)
    ]

    assert [(run.returncode, run.stdout) for run in runs] == [
        (-signal.SIGKILL, ""),
        (0, "5 messages after turn 4\n"),
        (0, "5 messages after turn 4\n"),
    ]


def test_pages_and_examples_import_public_modules_only() -> None:
    sources = {
        page: BLOCK.findall(text)
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        if "decisions" not in page.parts
    }
    sources |= {path: [path.read_text(encoding="utf-8")] for path in sorted((ROOT / "examples").glob("*.py"))}
    private = [
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for path, codes in sources.items()
        for code in codes
        for module, name in imports(code)
        if not is_public(module, name) and not (path.name == "CONTRIBUTING.md" and module in FOR_STORE_AUTHORS)
    ]

    assert private == []


def imports(code: str) -> list[tuple[str, str]]:
    """Return the modules of ours that a program imports, each with the name that it takes from there."""
    nodes = list(ast.walk(ast.parse(code)))
    plain = [(alias.name, "") for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    taken = [
        (node.module or "", each.name) for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names
    ]
    return [(module, name) for module, name in plain + taken if module.split(".")[0] == "backstay"]


def is_public(module: str, name: str) -> bool:
    if PUBLIC.fullmatch(f"{module}.{name}"):
        return True
    return bool(PUBLIC.fullmatch(module)) and name in {"", *getattr(importlib.import_module(module), "__all__", [name])}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:[\w]+/)+\w+\.(?:py|sql|toml))`", page.read_text(encoding="utf-8"))

    assert [
        name for name in named if not (ROOT / name).exists() and not (ROOT / "src" / "backstay" / name).exists()
    ] == []


def test_there_are_examples_to_run() -> None:
    assert len(BLOCKS) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_error_is_in_the_guide_and_in_the_drawn_tree() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.BackstayError) and value is not errors.BackstayError
    ]

    assert [name for name in classes if f"`{name}`" not in guide] == []
    assert [name for name in classes if name not in (errors.__doc__ or "")] == []


def test_every_public_name_is_shown_somewhere() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)

    assert [name for name in backstay.__all__ if name not in text and name != "__version__"] == []


def test_the_version_is_in_the_changelog() -> None:
    assert f"## {backstay.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(line for line in readme.splitlines() if ".[test]" in line and line.startswith("python3 -m venv"))

    assert [part for part in command.split(" && ") if part not in script] == []


def test_no_machine_path_or_lock_file_is_in_the_tree() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing to look at")
    names = listed.stdout.split("\0")[:-1]
    private = re.compile(r"(^|[^A-Za-z0-9_])/(work|farm|root|home)/")
    bad = [
        name
        for name in names
        if not name.startswith("tests/") and private.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
    ]

    assert "uv.lock" not in names
    assert bad == []
