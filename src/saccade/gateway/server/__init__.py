"""The HTTP server, independent of any API: connections, middleware, bodies, event streams.

Other packages mainly use `Connections`, `BodyReader`, `EventStream` and `WholeResponse`, the access log, error bodies,
and the keys of the ASGI scope. `guarded` wraps an application in all middleware.
"""
