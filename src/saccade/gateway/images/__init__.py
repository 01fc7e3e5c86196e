"""From the sources of images to pixels that a worker can read.

Other rooms use `Media` (the constructor of all this), `DecodePool`, `ImageCollector` and the `EncodedImage` that it
returns, `PixelPreparer` and `PixelResend`, and `FileStore`.
"""
