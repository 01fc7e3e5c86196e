"""Measure how right answers are: `tasks` of `rows`, asked by `ask`, with `scoring`, `report`, `page`; and `batch`."""
