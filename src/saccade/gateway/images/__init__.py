"""From the sources of images to pixels that a worker can read."""
