"""Makes `python -m launch_server` work, from a checkout as from an installation."""

import sys

from launch.launch_server import main

if __name__ == "__main__":
    sys.exit(main())
