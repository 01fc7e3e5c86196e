"""Score a server's answers: `tasks` of `rows`, asked by `ask`, with `scoring`, `report`, `page`; and `batch`."""
