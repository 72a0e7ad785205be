"""Ranks in processes of their own, over gloo; see `commlayer.conformance.ranks`."""
