"""The gateway's database: SQLite in a folder, or PostgreSQL. It keeps what the server has acknowledged.

Other packages mainly use `State`, its `Items`, and `StateSettings`.
"""
