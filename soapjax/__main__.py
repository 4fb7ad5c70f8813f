"""`python -m soapjax` is the `soapjax` command."""

from soapjax.cli import main

if __name__ == "__main__":
    main()
