"""Ranks in processes of their own, over gloo; see `commlayer_testkit.conformance.ranks`."""
