"""From the sources of pictures to pixels that a worker can read."""
