"""Can these ranks deadlock?  Decided from their schedules and the declared facts, without running.

`check` decides, `repair` proposes cures, `plans` writes the schedules of a pipeline, `files`
reads schedules from TOML or JSON.
"""
