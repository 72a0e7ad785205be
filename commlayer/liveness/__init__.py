"""Who is alive: a plain TCP connection with every peer, which the kernels at both ends watch."""
