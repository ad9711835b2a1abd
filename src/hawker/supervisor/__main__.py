"""`python -m hawker.supervisor DIRECTORY [--no-cgroups]`: started by drivers, not by people."""

import sys

from hawker.supervisor.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], cgroups="--no-cgroups" not in sys.argv[2:]))
