"""The `hawker` command, which is also `python -m hawker`.

Little is imported here: Ctrl-C ends the program without a word while the rest is, and once the command has ended. In
between the command itself says what becomes of it.
"""

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line's command and exit."""
    minded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody has it ignored
    if minded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hawker.cli.main import INTERRUPTED, run

    try:
        if minded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
        if minded:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # where `run` listens to none any more
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
