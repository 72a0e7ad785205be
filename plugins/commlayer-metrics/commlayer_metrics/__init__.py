"""Figures of every connection for Prometheus; found through the entry point ``prometheus``."""
