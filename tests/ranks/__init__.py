"""Run functions as the ranks of a distributed job, each in a process of its own.

`pool.Ranks` is what the fixture ``ranks`` hands to a test; `here` is what a
function may call while it runs as a rank; `forkserver` is the process that ranks
are forked from.
"""
