"""Operations from post to release: ledger, policies, and the engines that drive lanes."""
