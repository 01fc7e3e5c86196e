"""Decode processes: encoded pictures in, patches in shared memory out."""
