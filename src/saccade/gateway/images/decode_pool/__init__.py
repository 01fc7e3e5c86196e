"""Decode processes, which turn encoded images into patches in shared memory."""
