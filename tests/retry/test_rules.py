"""The category of an error: by rule, status, type and cause; by whole words last."""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import errno
import os
import urllib.error
from email.message import Message

import pytest

import backstay.errors
from backstay.errors import (
    Conflict,
    Corrupted,
    EffectUnknown,
    Fenced,
    GraphMismatch,
    InvalidInput,
    NodeFailed,
    NotFound,
    OutcomeUnknown,
    Rejected,
    StoreBusy,
    StoreFull,
    StoreRefused,
)
from backstay.model.category import _TYPES
from backstay.retry import ErrorCategory, Failure, Rules, classify

C = ErrorCategory


class Unspecific(Exception):
    """An error whose type says nothing."""


class WithStatus(Exception):
    """An error as clients of web services raise it."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("the server answered")
        self.__dict__.update(attributes)


class Response:
    """An answer, as clients of web services keep it in their errors."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/mnt/disk/auth.txt")


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (TimeoutError(), C.TRANSIENT),
        (ConnectionRefusedError(), C.TRANSIENT),
        (StoreBusy("locked"), C.TRANSIENT),
        (system(errno.EAGAIN), C.TRANSIENT),
        (system(errno.EHOSTUNREACH), C.TRANSIENT),
        (system(errno.ENOSPC), C.RESOURCE),
        (system(errno.EMFILE), C.RESOURCE),
        (system(errno.EACCES), C.CONFIGURATION),
        (system(errno.ENOENT), C.CONFIGURATION),
        (system(errno.EIO), C.SYSTEM),
        (MemoryError(), C.RESOURCE),
        (StoreFull("no space"), C.RESOURCE),
        (ImportError("no module"), C.CONFIGURATION),
        (StoreRefused("not ours"), C.CONFIGURATION),
        (GraphMismatch(1, 2), C.CONFIGURATION),
        (ValueError("timeout"), C.LOGIC),
        (KeyError("memory"), C.LOGIC),
        (TypeError(), C.LOGIC),
        (ZeroDivisionError(), C.LOGIC),
        (InvalidInput("no"), C.LOGIC),
        (NotFound("x"), C.LOGIC),
        (Conflict("head moved"), C.LOGIC),
        (Fenced("timeout", epoch=1, current=2), C.SYSTEM),
        (OutcomeUnknown("timeout"), C.SYSTEM),
        (EffectUnknown("timeout", record=None), C.SYSTEM),
        (Corrupted("disk"), C.SYSTEM),
        (Unspecific("who knows"), C.SYSTEM),
        (Rejected("no"), C.USER_INTERRUPT),
        (KeyboardInterrupt(), C.USER_INTERRUPT),
        (SystemExit(429), C.USER_INTERRUPT),
        (asyncio.CancelledError(), C.USER_INTERRUPT),
        (concurrent.futures.CancelledError(), C.USER_INTERRUPT),
    ],
    ids=lambda value: value.value if isinstance(value, C) else f"{type(value).__name__} {value!s:.30}",
)
def test_the_type_of_an_error_says_what_it_is(error: BaseException, category: ErrorCategory) -> None:
    assert classify(error) is category


@pytest.mark.parametrize(
    ("status", "category"),
    [
        (429, C.TRANSIENT),
        (408, C.TRANSIENT),
        (500, C.TRANSIENT),
        (503, C.TRANSIENT),
        (529, C.TRANSIENT),
        (507, C.RESOURCE),
        (401, C.CONFIGURATION),
        (403, C.CONFIGURATION),
        (400, C.LOGIC),
        (404, C.LOGIC),
        (501, C.LOGIC),
    ],
)
def test_the_status_of_a_web_service_counts_wherever_its_client_keeps_it(status: int, category: ErrorCategory) -> None:
    of_urllib = urllib.error.HTTPError("http://a/b", status, "no", Message(), None)
    try:
        found = [
            classify(error)
            for error in (
                WithStatus(status_code=status),
                WithStatus(status=status),
                WithStatus(response=Response(status)),
                of_urllib,
            )
        ]
    finally:
        of_urllib.close()

    assert found == [category] * 4


def test_values_that_only_look_like_a_status_are_ignored() -> None:
    assert classify(WithStatus(status=True)) is C.SYSTEM
    assert classify(WithStatus(status_code="429")) is C.SYSTEM
    assert classify(WithStatus(code=7)) is C.SYSTEM
    assert classify(WithStatus(code=200)) is C.SYSTEM


def test_a_cause_counts_if_the_error_itself_says_nothing() -> None:
    assert classify(caused(Unspecific(), TimeoutError())) is C.TRANSIENT
    assert classify(caused(Unspecific(), caused(Unspecific(), MemoryError()))) is C.RESOURCE
    assert classify(caused(ValueError(), TimeoutError())) is C.LOGIC
    assert classify(NodeFailed("n", 1, ConnectionError())) is C.TRANSIENT
    assert classify(urllib.error.URLError(TimeoutError())) is C.TRANSIENT


def test_causes_that_go_in_circles_are_left_alone() -> None:
    first, second = Unspecific(), Unspecific()
    first.__cause__, second.__cause__ = second, first

    assert classify(first) is C.SYSTEM


def test_a_group_is_retryable_only_if_every_error_in_it_is() -> None:
    assert classify(ExceptionGroup("both", [TimeoutError(), MemoryError()])) is C.TRANSIENT
    assert classify(ExceptionGroup("both", [TimeoutError(), ValueError()])) is C.LOGIC


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("request timed out", C.TRANSIENT),
        ("Timeout while reading", C.TRANSIENT),
        ("network is down", C.TRANSIENT),
        ("rate limit reached", C.TRANSIENT),
        ("out of memory", C.RESOURCE),
        ("the disk is full", C.RESOURCE),
        ("no API key", C.CONFIGURATION),
        ("auth failed", C.CONFIGURATION),
        ("bad config", C.CONFIGURATION),
        ("invalid request", C.LOGIC),
        ("unknown parameter", C.LOGIC),
        ("an invalid timeout argument", C.LOGIC),
        ("cancelled by the operator", C.USER_INTERRUPT),
        ("aborted", C.USER_INTERRUPT),
        ("the author is unknown", C.SYSTEM),
        ("cannot read /mnt/disk/memory/auth.txt", C.SYSTEM),
        (r"cannot read C:\disk\auth", C.SYSTEM),
        ("no such entry: 'api key'", C.SYSTEM),
        ("preauth, multidisk, reconfig", C.SYSTEM),
        ("diskette, memoryless, networking, timeouted, disk-image", C.SYSTEM),
        ("something broke", C.SYSTEM),
    ],
)
def test_words_count_last_and_only_as_whole_words(text: str, category: ErrorCategory) -> None:
    assert classify(Unspecific(text)) is category


def test_rules_of_the_program_count_before_ours() -> None:
    rules = Rules().add(ValueError, "transient").add(lambda error: "quota" in str(error), C.RESOURCE)

    assert rules.classify(ValueError()) is C.TRANSIENT
    assert rules.classify(Unspecific("over quota")) is C.RESOURCE
    assert rules.classify(caused(Unspecific(), ValueError())) is C.TRANSIENT
    assert Rules().classify(ValueError()) is C.LOGIC


@pytest.mark.parametrize("wrong", [("ValueError", "transient"), (int, "transient"), (ValueError, "sometimes")])
def test_wrong_rules_are_refused(wrong: tuple[object, object]) -> None:
    with pytest.raises(InvalidInput):
        Rules().add(*wrong)  # type: ignore[arg-type]  # that is the point


def test_every_category_has_a_hint_and_only_two_are_worth_another_try() -> None:
    hints = {category.hint for category in C}

    assert len(hints) == len(C) == 6
    assert all(hints)
    assert [category for category in C if category.is_retryable] == [C.TRANSIENT, C.RESOURCE]


def test_every_type_of_ours_and_of_python_in_the_table_exists() -> None:
    packages = {"builtins": builtins, "backstay": backstay.errors, "concurrent": concurrent.futures}
    named = [name.split(".") for names in _TYPES.values() for name in names.split()]
    missing = [name for package, name in named if package in packages and not hasattr(packages[package], name)]

    assert missing == []
    assert len(named) > 40


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("ConnectionRefusedError", C.TRANSIENT),
        ("KeyError", C.LOGIC),
        ("StoreFull", C.RESOURCE),
        ("CancelledError", C.USER_INTERRUPT),
        ("APIConnectionError", C.TRANSIENT),
        ("PermissionError", C.SYSTEM),  # without the number nothing is known about it
        ("NeverHeardOf", C.SYSTEM),
    ],
)
def test_an_error_of_an_earlier_process_is_classified_by_its_name(name: str, category: ErrorCategory) -> None:
    assert Failure.of_name(name).category is category


def test_a_failure_holds_no_values() -> None:
    secret = "hunter2"
    told = [
        Failure.of(error, Rules())
        for error in (
            ValueError(secret),
            OSError(errno.ENOENT, os.strerror(errno.ENOENT), secret),
            OSError(errno.ENOENT, secret),
            WithStatus(status_code=503, body=secret),
            Unspecific(secret),
        )
    ]

    assert [each.message for each in told] == ["", os.strerror(errno.ENOENT), "", "HTTP status 503", ""]
    assert secret not in repr(told)
