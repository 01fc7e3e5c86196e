"""The endpoints of the HTTP API: each API is a package with its wire format, reader and writer.

The gateway uses `Apis`, which constructs all endpoints and their routes; its admin port also uses `route` and `page`.
The package `saccade.llm` uses the chat API's reader, writer and wire format.
"""
