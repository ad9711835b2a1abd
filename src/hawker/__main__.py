"""`python -m hawker` is the `hawker` command."""

from hawker.cli.main import main

if __name__ == "__main__":
    main()
