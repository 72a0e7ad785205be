"""A small language model, pipeline-parallel over processes: what ``commlayer demo`` runs.

`model` is the decoder, `weights` where its numbers come from, `schedule` who
computes what and when, `pipeline` one stage's loop over a communicator,
`launch` the processes, `report` what is printed.
"""
