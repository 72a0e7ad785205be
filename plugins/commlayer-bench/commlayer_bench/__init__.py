"""What `commlayer bench` measures: commlayer beside what its users would write without it.

`contenders` are the ways to send, `workloads` what is done with them.  `rank` is
one process of a run: per workload and case it gives every contender a turn in
each round, so that all of them meet the same machine.  `launch` starts the
ranks, `run` plans a benchmark and collects `records`, which `tables` and
`plots` show.
"""
