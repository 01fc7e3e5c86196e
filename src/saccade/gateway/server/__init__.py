"""The HTTP server, independent of any API: connections, middleware, bodies, event streams.

Other packages use `Connections`, `guarded` (an application inside all middleware), `BodyReader`, `EventStream` and
`WholeResponse`, the access log, the bodies of errors, and the keys of the ASGI scope.
"""
