"""Any bytes whatever: a value or DecodeError, and nothing imported, executed, opened or started meanwhile."""

from __future__ import annotations

import ast
import ipaddress
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import TZPATH, ZoneInfo, available_timezones

import numpy as np
import ormsgpack
import pytest

import backstay
import backstay.codec
from backstay import register
from backstay.codec import decode, encode
from backstay.errors import DecodeError, EncodeError

INPUTS_MIN = 25_000
SECONDS_MAX = 1.0
FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "open",
    "subprocess.",
    "os.system",
    "pickle.find_class",
    "socket.",
    "marshal.",
)


@register
@dataclass(frozen=True)
class Sample:
    a: Any
    b: Any


def examples() -> list[Any]:
    return [
        {"messages": [{"role": "user", "content": "hi" * 20, "n": 5}] * 3, "x": None},
        (1, (2.5, "a"), {3: {4}, None: frozenset({b"x"})}),
        [2**200, -(2**100), Decimal("1.5E+10"), Fraction(1, 3), UUID(int=7), 1 + 2j],
        [datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), datetime.now(UTC), date(2024, 1, 1)],
        [Sample(1, [Sample(2, (3,))]), {"k": Sample("a", b"b")}],
        [bytearray(b"abc"), OrderedDict(a=1, b=[2]), defaultdict(list, a=[1]), Counter({"a": -1}), deque([1, 2], 3)],
        [range(1, 10, 3), Path("/a/b"), PureWindowsPath("c:/a"), ipaddress.ip_address("fe80::1%eth0")],
        [ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_interface("fe80::1%e/64"), ipaddress.ip_address(1)],
        [np.arange(6).reshape(2, 3), np.float64(1.5), np.array(["a", "bc"]), np.array([True]), np.datetime64("2024")],
    ]


class _Guard:
    """An audit hook cannot be removed, so it is switched."""

    on = False
    seen: list[str] = []

    @classmethod
    def hook(cls, event: str, args: tuple[Any, ...]) -> None:
        # A key of the machine's own zone database may be read: that file and no other.
        if cls.on and event.startswith(FORBIDDEN) and not (event == "open" and str(args[0]).startswith(TZPATH)):
            cls.seen.append(event)


sys.addaudithook(_Guard.hook)


@contextmanager
def guarded() -> Iterator[None]:
    available_timezones()
    for value in examples():
        decode(encode(value))
    _Guard.seen.clear()
    _Guard.on = True
    try:
        yield
    finally:
        _Guard.on = False
    assert _Guard.seen == []


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        choice = rng.randrange(5)
        if choice == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif choice == 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif choice == 2:
            del out[at : at + rng.randint(1, 8)]
        elif choice == 3:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            out[at:at] = out[: rng.randint(1, 20)]
    return bytes(out)


def inputs(rng: random.Random) -> Iterator[bytes]:
    valid = [encode(value) for value in examples()]
    for data in valid:
        yield from (data[:cut] for cut in range(len(data)))
    codes = [*range(0, 35), 64, 127, 128, 255]
    for _ in range(9_000):
        yield mutated(rng, rng.choice(valid))
    for _ in range(9_000):
        payload = rng.randbytes(rng.randint(0, 40))
        yield bytes([0xC7, len(payload), rng.choice(codes)]) + payload
    for _ in range(8_000):
        yield rng.randbytes(rng.randint(0, 60))


def test_any_bytes_give_a_value_or_a_decode_error_and_touch_nothing() -> None:
    seed = 20_240_611
    sys.stdout.write(f"seed {seed}\n")
    count = refused = 0
    slowest = 0.0
    with guarded():
        for data in inputs(random.Random(seed)):
            count += 1
            start = time.perf_counter()
            try:
                decode(data)
            except DecodeError:
                refused += 1
            slowest = max(slowest, time.perf_counter() - start)

    assert count > INPUTS_MIN
    assert 0 < refused < count
    assert slowest < SECONDS_MAX


def test_what_mutated_bytes_decode_to_can_be_encoded_again_or_is_refused() -> None:
    rng = random.Random(7)
    valid = [encode(value) for value in examples()]
    for _ in range(3_000):
        try:
            value = decode(mutated(rng, rng.choice(valid)))
        except DecodeError:
            continue
        try:
            again = encode(value)
        except EncodeError as error:
            pytest.fail(f"decoded but not encodable: {error}")
        assert encode(decode(again)) == again


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        b"cos\nsystem\n(S'id'\ntR.",
        b'{"lc": 2, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": "id"}}',
        ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(["os", "system", ["id"]]))),
        ormsgpack.packb(ormsgpack.Ext(64, ormsgpack.packb(["os.system", 1, ["id"]]))),
        ormsgpack.packb(ormsgpack.Ext(64, ormsgpack.packb(["builtins.eval", 1, "1"]))),
        ormsgpack.packb({"__reduce__": ["os.system", "id"], "py/object": "os.system"}),
    ],
)
def test_public_payloads_run_nothing(payload: bytes) -> None:
    with guarded():
        for code in [None, *range(0, 35), 64]:
            data = payload if code is None else ormsgpack.packb(ormsgpack.Ext(code, payload))
            try:
                decode(data)
            except DecodeError:
                continue


def ext(code: int, payload: Any) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(code, payload if type(payload) is bytes else ormsgpack.packb(payload)))


FORGED: dict[str, bytes] = {
    "dict that is not an array": ext(11, {"a": 1}),
    "key without a value": ext(11, ["a", 1, "b"]),
    "the same key twice": ext(11, ["a", 1, "a", 2]),
    "key that cannot be hashed": ext(11, [[], 1]),
    "defaultdict without a factory": ext(12, []),
    "factory that is no builtin type": ext(12, ["eval", "a", 1]),
    "factory that is a list": ext(12, [[], "a", 1]),
    "factory that is True": ext(12, [True]),
    "the same key twice in a defaultdict": ext(12, [None, "a", 1, "a", 2]),
    "counter with a key twice": ext(13, ["a", 1, "a", 1]),
    "deque without a maxlen": ext(14, []),
    "deque longer than its maxlen": ext(14, [1, "a", "b"]),
    "deque with a negative maxlen": ext(14, [-1]),
    "deque with a maxlen that is True": ext(14, [True, "a"]),
    "deque with a maxlen beyond any": ext(14, [2**63, "a"]),
    "range with step 0": ext(15, [0, 5, 0]),
    "range of two": ext(15, [0, 5]),
    "range of floats": ext(15, [0.0, 5.0, 1.0]),
    "range of bools": ext(15, [False, True, True]),
    "path with a step that means nothing": ext(22, b"a/./b"),
    "path with a slash at its end": ext(22, b"a/"),
    "empty path": ext(22, b""),
    "path that is not text": ext(24, b"\xff"),
    "windows path with slashes": ext(23, b"c:/a"),
    "windows path of this or another platform": ext(25, b"a/b"),
    "IPv4 of 3 bytes": ext(26, bytes(3)),
    "IPv4 of 5 bytes": ext(26, bytes(5)),
    "IPv4 with a scope": ext(26, bytes(4) + b"eth0"),
    "IPv6 of 15 bytes": ext(27, bytes(15)),
    "IPv6 with a scope that has two parts": ext(27, bytes(16) + b"a%b"),
    "IPv6 with a scope that has a prefix": ext(27, bytes(16) + b"a/64"),
    "IPv6 with a scope that is not text": ext(27, bytes(16) + b"\xff"),
    "network without a prefix": ext(28, bytes(4)),
    "network with a prefix of 33": ext(28, bytes(4) + b"\x21"),
    "network with bits beyond its prefix": ext(28, bytes([10, 0, 0, 1, 8])),
    "IPv6 network with a prefix of 129": ext(29, bytes(16) + b"\x81"),
    "interface with a prefix of 33": ext(30, bytes(4) + b"\x21"),
    "IPv6 interface without a prefix": ext(31, bytes(16)),
    "fraction with denominator 0": ext(7, [1, 0]),
    "fraction with a negative denominator": ext(7, [1, -2]),
    "fraction that is not reduced": ext(7, [2, 4]),
    "fraction of floats": ext(7, [1.0, 2.0]),
    "fraction of three": ext(7, [1, 2, 3]),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_value_of_a_built_in_type_is_refused(forged: bytes) -> None:
    inside = ormsgpack.unpackb(forged, ext_hook=ormsgpack.Ext)

    with guarded():
        for data in (forged, ormsgpack.packb({"a": [inside]}), ext(1, b"\x91" + forged), ext(14, b"\x92\xc0" + forged)):
            with pytest.raises(DecodeError):
                decode(data)


@pytest.mark.parametrize("value", [range(2**64 - 1), range(-(10**300), 10**300), deque(maxlen=sys.maxsize)], ids=repr)
def test_a_large_number_allocates_nothing(value: Any) -> None:
    data = encode(value)
    tracemalloc.start()
    try:
        loaded = decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert repr(loaded) == repr(value)
    assert peak < 64 * 1024


WITHOUT_NUMPY = """
import sys
if sys.argv[2] == "absent":
    sys.modules["numpy"] = None
from backstay.codec import decode, encode
array, scalar = decode(bytes.fromhex(sys.argv[1]))
print(array.name, scalar.name)
print(array.value[:3])
print(encode([array, scalar]).hex())
print(sys.modules.get("numpy"))
if sys.argv[2] == "later":
    import numpy
    array, scalar = decode(bytes.fromhex(sys.argv[1]))
    print(type(array) is numpy.ndarray, array.tolist(), type(scalar) is numpy.float64)
"""


@pytest.mark.parametrize("numpy", ["absent", "later"])
def test_arrays_come_back_opaque_until_the_program_imports_numpy(numpy: str) -> None:
    data = encode([np.arange(3), np.float64(1)])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, data.hex(), numpy], capture_output=True, text=True, check=True
    )
    lines = ["numpy.ndarray numpy.generic", "['<i8', [3], 'C']", data.hex(), "None"]

    assert done.stdout.splitlines() == lines + ["True [0, 1, 2] True"] * (numpy == "later")


LOADS = """
import sys
import backstay
before = set(sys.modules)
with backstay.open(sys.argv[1]) as store:
    checkpoint = store.thread("t").latest()
    store.thread("t").append({"log": ["one more"]})
    print(checkpoint.state["array"].name)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""


def test_a_process_that_only_loads_and_saves_imports_nothing_for_a_stored_value(tmp_path: Path) -> None:
    """What a load leads to is our own modules and the store's; and the array is there afterwards as it was."""
    path = str(tmp_path / "store.db")
    with backstay.open(path) as store:
        store.thread("t").save({"array": np.arange(3), "log": [], "when": datetime.now(UTC), "n": Decimal("1.5")})
    done = subprocess.run([sys.executable, "-c", LOADS, path], capture_output=True, text=True, check=True)
    name, imported = done.stdout.splitlines()
    with backstay.open(path) as store:
        found = store.thread("t").latest()

    assert name == "numpy.ndarray"
    assert {each for each in imported.split() if not each.startswith("_")} <= {
        "backstay",
        "backports",
        "ormsgpack",
    }
    assert found is not None
    assert found.step == 2
    assert found.state["array"].tolist() == [0, 1, 2]


BANNED_NAMES = {"eval", "exec", "__import__", "import_module", "compile"}
ALLOWED = {
    # Modules that a closed list or the program itself has named, never stored bytes; its tests prove that.
    ("langgraph/serde/trusted.py", "import_module"),
    # The closed table of public names.
    ("__init__.py", "import_module"),
    # The graph that a test of the user names.
    ("testing/kills.py", "import_module"),
    ("testing/victim.py", "import_module"),
}
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "jsonpickle"}


def banned_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in BANNED_MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in BANNED_MODULES or BANNED_NAMES & {name.name for name in names}:
                    yield module
            case ast.Name(id=name) if name in BANNED_NAMES:
                yield name
            case ast.Attribute(attr=("import_module" | "__import__") as name):
                yield name


def test_no_source_file_uses_pickle_marshal_eval_exec_or_a_dynamic_import() -> None:
    source = Path(backstay.codec.__file__).parents[1]
    files = sorted(source.rglob("*.py"))

    found = [
        f"{file}: {use}"
        for file in files
        for use in banned_uses(ast.parse(file.read_text()))
        if (file.relative_to(source).as_posix(), use) not in ALLOWED
    ]
    assert len(files) > 10
    assert found == []
