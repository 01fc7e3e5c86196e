"""Workers of SGLang and TokenSpeed, which speak SMG's wire."""
