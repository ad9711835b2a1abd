"""`python -m hawker.supervisor DIRECTORY [OPTION...]`: started by drivers, not by people."""

import sys

from hawker.supervisor.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
