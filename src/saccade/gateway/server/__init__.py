"""HTTP without the API: connections, middleware, bodies, event streams."""
