"""`python -m milepost`: the command line."""

from milepost.cli import main

if __name__ == "__main__":
    main()
