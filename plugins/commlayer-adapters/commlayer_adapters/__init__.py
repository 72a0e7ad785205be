"""Point-to-point calls of known engines, on commlayer: one module an engine."""
