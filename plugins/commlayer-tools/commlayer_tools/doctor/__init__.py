"""``commlayer doctor``: can ranks talk here, and if not, what is in the way?

`machine` looks at this process and host, `selftest` lets two new processes talk over
each backend, `agreement` compares the ranks of a job.
"""
