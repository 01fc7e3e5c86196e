"""Grammars of requests: read from their fields, tried in a limited child, and cached.

Other packages use `RequestGrammars` (the constructor), the `AnswerGrammar` that it returns, and the readers of fields.
"""
