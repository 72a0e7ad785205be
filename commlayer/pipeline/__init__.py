"""What pipeline-parallel engines otherwise write by hand.

- `topology`: which rank holds which chunk, and who sends to whom on which channel
- `loop`: the stages of one rank, for several batches in flight
- `deferred`: a broadcast that is posted early and taken where it is used;
  `rows`: the same, written to rows that may have changed hands
- `lazy`: a received dict that waits at first access
- `slices`: tensor dicts that the ranks of a group send in parts
"""
