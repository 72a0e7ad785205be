"""Operations in flight: who holds them, who completes them, when they are released."""
