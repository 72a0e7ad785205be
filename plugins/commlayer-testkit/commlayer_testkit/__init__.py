"""The test kit: everything that shows that a backend, or the library itself, keeps its promise.

`sim` is the deterministic simulator, `conformance` the rules and probes that certify a
backend, `schedule` the static deadlock checker, `scaffold` what `commlayer new-plugin`
renders, `commands` the commands that all of these add to ``commlayer``.
"""
