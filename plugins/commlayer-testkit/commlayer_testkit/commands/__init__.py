"""Commands of the kit, found by ``commlayer`` through entry points."""
