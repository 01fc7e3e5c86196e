"""Stands in for the package that llama.cpp's tests would download models with: nothing is downloaded."""


def download(url: str, out: str | None = None) -> str:
    """Refuse."""
    raise OSError(f"{url} is not downloaded: the server has its model.")
