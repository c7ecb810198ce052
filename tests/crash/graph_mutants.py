"""Engines that are wrong on purpose."""
from collections.abc import Callable
MUTANTS: dict[str, Callable[[], None]] = {"": lambda: None}
