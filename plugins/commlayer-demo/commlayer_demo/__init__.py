"""A small language model, pipeline-parallel over processes: what ``commlayer demo`` runs.

`model` is the decoder, `weights` where its numbers come from (`unpack` reads a
packed file of them), `text` what turns prompts into tokens and back, `schedule`
which requests are computed when, `pipeline` one rank's loop over a communicator,
`worker` the process of a rank, `launch` what starts them, `figures` what a run
amounts to and `screen` how that is printed.
"""
