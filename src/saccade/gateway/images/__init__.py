"""Turns image sources into pixels that a worker can read.

`Media` constructs the collector, the caches and the file store around a `DecodePool`. Other packages also use
`ImageCollector` and the `EncodedImage` that it returns, `PromptImages`, `PixelPreparer`, `PixelResend` and the stores
of files.
"""
