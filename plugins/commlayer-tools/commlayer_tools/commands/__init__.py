"""Commands, found by ``commlayer`` through entry points."""
