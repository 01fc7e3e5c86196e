"""Scores a server's answers to the questions of benchmarks.

`tasks` makes questions from `rows`, `ask` sends them, `scoring` rates the answers, and `report` and `page` show the
scores. `batch` runs files of requests, without scores.
"""
