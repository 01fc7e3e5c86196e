"""Grammars of requests: read from their fields, tried in a limited child, and kept.

Other rooms use `RequestGrammars` (the constructor), the `AnswerGrammar` that it returns, and what reads the fields.
"""
