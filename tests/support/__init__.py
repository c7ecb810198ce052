"""What the tests share: rigs, child processes, and programs that are run on every store."""
