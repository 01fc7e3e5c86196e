"""Turns the sources of images into pixels that a worker can read.

Other packages use `Media` (which constructs the rest), `DecodePool`, `ImageCollector` and the `EncodedImage` that it
returns, `PixelPreparer` and `PixelResend`, and `FileStore`.
"""
