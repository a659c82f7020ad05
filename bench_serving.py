"""Makes `python -m bench_serving` work, from a checkout as from an installation."""

import sys

from bench.bench_serving import main

if __name__ == "__main__":
    sys.exit(main())
