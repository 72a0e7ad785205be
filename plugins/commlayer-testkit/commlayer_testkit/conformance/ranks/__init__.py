"""Run functions as the ranks of a distributed job, each in a process of its own.

`pool.Ranks` starts them and talks with them; `here` is what a function may call
while it runs as a rank; `forkserver` is the process that ranks are forked from.
"""
