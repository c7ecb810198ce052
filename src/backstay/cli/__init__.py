"""The ``backstay`` command. Nothing here is imported by the library; ``main`` imports each command when it is used."""
