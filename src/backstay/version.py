"""The version, and how to install this package: the two things that a release changes."""

__version__ = "0.1.0"


def install_hint(extra: str = "") -> str:
    """Return the command that installs Backstay, with an extra. It is not on PyPI yet, so this is for a checkout."""
    return f"In a checkout of Backstay: pip install '.[{extra}]'" if extra else "In a newer checkout: pip install ."
