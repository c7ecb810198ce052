"""The ``backstay`` command. The library imports nothing from here."""
