"""The bytes of a checkpoint file: indented JSON that a person can read, with a checksum over all of it.

The checksum is the last key. It is the SHA-256 of the whole file, taken with 64 zeros in its own place, so every byte
counts, blanks too. ``_version`` says that there must be one. A file with neither was written by another program of the
same format: it is read, and reported as unchecked. Whoever edits a file by hand removes both keys.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from backstay.compat.workflow.checkpoint import Checkpoint
from backstay.errors import Corrupted, DecodeError, EncodeError, InvalidInput, StoreRefused

VERSION = 1
_OURS = ("_version", "_checksum")
_ZEROS = b"0" * 64
_CHECKSUM = re.compile(rb'"_checksum": "sha256:([0-9a-f]{64})"\n}\n\Z')


@dataclass(frozen=True, slots=True)
class Document:
    """What a file holds, and whether a checksum vouches for it."""

    checkpoint: Checkpoint
    checked: bool


def to_bytes(plain: dict[str, Any]) -> bytes:
    """Return the file of a checkpoint in its wire form."""
    for key in _OURS:
        if key in plain:
            raise InvalidInput(f"extra holds {key!r}, which the file itself uses", hint="Choose another name")
    whole = {**plain, "_version": VERSION, "_checksum": f"sha256:{_ZEROS.decode()}"}
    try:
        blank = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError as error:  # all else was checked before; Python writes no number of more than 4,300 digits
        raise EncodeError(f"Failed to serialize checkpoint: {error}", checkpoint=plain["id"]) from error
    found = _CHECKSUM.search(blank)
    assert found is not None
    digest = hashlib.sha256(blank).hexdigest().encode()
    return blank[: found.start(1)] + digest + blank[found.end(1) :]


def from_bytes(data: bytes, name: str) -> Document:
    """Return what the file of checkpoint ``name`` holds.

    Raises DecodeError if it cannot be parsed, Corrupted if it fails its checksum, StoreRefused if it is something else.
    """
    plain = _parsed(data, name)
    checked = _is_checked(data, plain, name)
    for key in _OURS if type(plain) is dict else ():
        plain.pop(key, None)
    try:
        checkpoint = Checkpoint.from_dict(plain if type(plain) is dict else {})
    except DecodeError as error:
        raise StoreRefused(
            f"{name}.json is no checkpoint: {error.what}", hint="It belongs to another program and is left alone"
        ) from error
    if checkpoint.id != name:
        raise StoreRefused(
            f"{name}.json holds checkpoint {checkpoint.id!r}",
            hint="It was copied or renamed: give it its own name back",
        )
    return Document(checkpoint, checked)


def begins_like_ours(data: bytes, name: str) -> bool:
    """Tell whether what is left of a damaged file shows that it was the file of this checkpoint."""
    return re.match(rb'\{\s*"id":\s*"%s"' % re.escape(name.encode()), data) is not None


def _parsed(data: bytes, name: str) -> Any:
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one too
        raise DecodeError(
            f"Failed to parse checkpoint {name}: {type(error).__name__}",
            checkpoint=name,
            hint="The file is damaged: save the checkpoint again, or delete it",
        ) from error


def _is_checked(data: bytes, plain: Any, name: str) -> bool:
    """Tell whether the file has a checksum, and raise Corrupted if it has one that is not its own."""
    found = _CHECKSUM.search(data)
    if found is None:
        if type(plain) is not dict or not any(key in plain for key in _OURS):
            return False
    elif hashlib.sha256(data[: found.start(1)] + _ZEROS + data[found.end(1) :]).hexdigest().encode() == found[1]:
        return True
    raise Corrupted(
        f"checkpoint {name}: its file does not match its checksum",
        checkpoint=name,
        hint="Save it again, or delete it. If you edited it by hand, remove _version and _checksum",
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and infinities are no JSON
