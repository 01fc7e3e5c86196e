"""Reads grammars from requests' fields, tries them in a limited child, and caches them.

Other packages use `RequestGrammars`, the `AnswerGrammar` that it returns, and the functions that read fields.
"""
