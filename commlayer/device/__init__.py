"""Device streams and events, and transports that complete on them."""
