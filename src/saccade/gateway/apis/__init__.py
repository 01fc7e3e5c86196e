"""The endpoints of the HTTP API: each API in a room of its own, its wire format, reader and writer together.

Other packages use `Apis` (which constructs all endpoints and their routes), `Admin`, and `server_version`.
"""
