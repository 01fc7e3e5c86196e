"""A gateway whose block keys are not those of the workers, for the control of a gate that must then fail.

`python -m benchmarks.fleet.broken_gateway gateway ...` takes the arguments of `saccade`. The keys of this process are
those of another tenant, so they name blocks that no worker holds. Nothing in `src` can be switched so.
"""

from saccade.identity import blocks

_root_key = blocks.root_key
blocks.root_key = lambda fingerprint, salt: _root_key(fingerprint, salt + b"another tenant")

if __name__ == "__main__":
    from saccade.cli.main import main  # what it imports finds the function that stands above

    main()
