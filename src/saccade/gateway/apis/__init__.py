"""The endpoints of the HTTP API: each API is a package with its wire format, reader and writer.

Other packages use `Apis` (which constructs all endpoints and their routes) and `Admin`.
"""
