"""How to talk to a worker, of any kind."""
