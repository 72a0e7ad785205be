"""Lanes: what threads do with messages, between this rank and its peers."""
