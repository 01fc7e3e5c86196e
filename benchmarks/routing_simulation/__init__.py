"""Routing over simulated workers, with the router's own classes: what a weight of the cost gains and loses."""
