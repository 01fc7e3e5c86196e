"""Which worker serves a request: what the fleet is, what its caches hold, and the choice."""
