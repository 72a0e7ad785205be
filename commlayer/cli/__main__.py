"""``python -m commlayer.cli``."""

from __future__ import annotations

from commlayer.cli import main

main()
