"""Plain English as a test: messages, documentation and code use the common word, and this table says which one it is.

Everything a user reads is checked: the README and the other pages, the texts and hints of our errors and warnings, and
the findings of a check. So is what a contributor reads: the docstrings and comments of the package. A finding names the
file, the line, the word and what to say instead.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from backstay import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "backstay"

WORDS = {
    r"anew": "again, from scratch, new",
    r"mend(s|ed|ing)?": "fix, repair",
    r"lack(s|ed|ing)?": "is missing, has no",
    r"besides?": "next to, in addition to",
    r"told|tells?|telling": "report, notify, raise, say",
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"(begin|begins|began|begun|beginning)": "start",
    r"(some|no|any|every)body": "name who it is: a person, another process, no process",
    r"whoever|whomever": "name who it is: the process that …, anyone who …",
    r"stands?": "is",
    r"(is|are) (not )?there": "exists, does not exist",
    r"of which": "whose, or a second sentence",
    r"the ones? (that|which|who)": "name the thing",
    r"at all": "leave it out",
    r"puts? (it |them )?right": "fix, repair",
    r"by hand": "manually, yourself",
    r"whatever|whichever": "any, or say which",
    r"without a word|in silence": "silently",
    r"no longer goes|comes? to an end": "ends",
    r"in the place of": "instead of",
    r"therein|thereof|thereby|hereby": "in it, of it, so",
    r"(?-i:(?:^|(?<=[.;:-] ))Who)": "name who it is (a sentence does not start with 'who')",
    r"(?-i:(?:^|(?<=[.;:-] ))What)": "name the thing (a sentence does not start with 'what')",
}
"""A pattern, and what to say instead. Patterns match whole words, in any case unless they say otherwise."""

PATTERN = re.compile(
    "|".join(f"(?P<w{number}>(?<![\\w-])(?:{word})(?![\\w-]))" for number, word in enumerate(WORDS)),
    re.IGNORECASE | re.MULTILINE,
)

PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
PAGES += sorted((ROOT / "examples").glob("*.py"))

QUOTES = re.compile(r"<!-- quotes -->.*?<!-- end of quotes -->", re.DOTALL)
"""Parts of a page that quote the words which we do not use."""

SPEAKERS = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
SPEAKERS |= {"warn", "Finding", "StoreWarning", "ValueChanged"}
"""What carries a text to the user. Classes of ours that derive from these are added as they are found."""


CODE = re.compile(r"``[^`]+``")
"""Names and code in docstrings and comments."""


def better(found: re.Match[str]) -> str:
    return list(WORDS.values())[int((found.lastgroup or "w0")[1:])]


def findings(text: str, place: str, line: int = 1) -> list[str]:
    """Return the words of a text that have a better one, each with its place."""
    return [
        f"{place}:{line + text.count(chr(10), 0, found.start())}: {found[0]!r}: say {better(found)}"
        for found in PATTERN.finditer(text)
    ]


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@functools.cache
def speakers() -> frozenset[str]:
    """Return the names of all classes and functions that carry a text to the user."""
    known = set(SPEAKERS)
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {each.name for each in classes if any(name_of(base) in known for base in each.bases)} - known
        if not more:
            return frozenset(known)
        known |= more


def constants(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts inside an expression, those of formatted strings included."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each


def values(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Return what the names of a file may mean: values assigned to a variable, values that a function returns."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found.setdefault(name_of(target), []).append(node.value)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            found.setdefault(node.name, []).extend(returned)
    return found


def messages(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every text that a file passes to an error, a warning or a finding, also by a variable or a function."""
    meanings = values(tree)
    used: dict[int, ast.Constant] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        carries = name_of(node.func) in speakers()
        arguments = [*node.args] if carries else []
        arguments += [keyword.value for keyword in node.keywords if carries or keyword.arg == "hint"]
        for argument in arguments:
            named = [meaning for each in ast.walk(argument) for meaning in meanings.get(name_of(each), ())]
            used |= {id(text): text for part in [argument, *named] for text in constants(part)}
    yield from used.values()


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def message_findings(path: Path) -> list[str]:
    place = place_of(path)
    if path.name == "errors.py":
        return findings(path.read_text(encoding="utf-8"), place)
    texts = messages(trees()[path])
    return sorted({found for text in texts for found in findings(str(text.value), place, text.lineno)})


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Yield every text that is a statement, with its line: docstrings, and the texts that describe a variable."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)


def comments(code: str) -> Iterator[tuple[int, str]]:
    """Yield every comment with its line."""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def prose_findings(code: str, place: str) -> list[str]:
    """Return the findings in the docstrings and comments of a file, without the code that they quote."""
    texts = sorted([*docstrings(code), *comments(code)])
    return [finding for line, text in texts for finding in findings(CODE.sub("``", text), place, line)]


def test_pages_use_plain_words() -> None:
    found = []
    for page in PAGES:
        text = QUOTES.sub(lambda quoted: "\n" * quoted[0].count("\n"), page.read_text(encoding="utf-8"))
        text = re.sub(r"^#+ .*", "", text, flags=re.MULTILINE)  # a heading may ask what something is
        found += findings(text, place_of(page))

    assert not found, "\n".join(found)


def test_error_messages_use_plain_words() -> None:
    found = [finding for path in trees() for finding in message_findings(path)]

    assert not found, "\n".join(found)


def test_docstrings_and_comments_use_plain_words() -> None:
    found = [
        finding for path in trees() for finding in prose_findings(path.read_text(encoding="utf-8"), place_of(path))
    ]

    assert not found, "\n".join(found)


def test_the_check_sees_messages_in_every_form() -> None:
    code = """
HINT = "mend it"
raise Conflict(f"a {thing} lacks {part}", hint=HINT)
def refused(): return NotFound("nobody knows", thread="t")
class Special(StoreError): ...
error = fail("fine", hint="go on with resume")
def advice(): return "begin"
def check():
    problem = f"{path} is there"
    raise InvalidInput(problem, hint=self.advice())
"""
    texts = sorted(str(text.value) for text in messages(ast.parse(code)))

    assert texts == [" is there", " lacks ", "a ", "begin", "go on with resume", "mend it", "nobody knows", "t"]
    assert findings("one\nWho comes second, is told.", "page") == [
        "page:2: 'Who': say name who it is (a sentence does not start with 'who')",
        "page:2: 'told': say report, notify, raise, say",
    ]
    assert findings("A standard beginner withstands a bodybuilder.", "page") == []


def test_the_check_sees_docstrings_and_comments() -> None:
    code = '''
"""One line.

    What is told.
"""
LIMIT = 3  # whatever it is
"""The limit lacks a unit; ``begin`` is a name."""

class Store:
    def go(self) -> None:
        """Go on."""
        # Nobody reads "mend" here.
        print("mend it")
'''
    found = [finding.split(": say")[0] for finding in prose_findings(code, "file")]

    assert found == [
        "file:4: 'What'",
        "file:4: 'told'",
        "file:6: 'whatever'",
        "file:7: 'lacks'",
        "file:11: 'Go on'",
        "file:12: 'Nobody'",
        "file:12: 'mend'",
    ]
