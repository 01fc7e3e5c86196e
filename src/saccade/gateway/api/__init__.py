"""The endpoints of the HTTP API, from a request's body to its answer."""
