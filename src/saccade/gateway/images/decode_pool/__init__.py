"""Decode processes: encoded images in, patches in shared memory out."""
