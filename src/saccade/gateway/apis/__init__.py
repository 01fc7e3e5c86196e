"""The endpoints of the HTTP API: each API in a room of its own, its wire format, reader and writer together."""
