"""The `soapjax` command, which `python -m soapjax` is too. Nothing heavy is imported before Ctrl-C is handled."""

import sys

from soapjax.helpers import interrupts


def main() -> None:
    with interrupts.handled():
        try:
            from soapjax import cli

            cli.main()
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else int(e.code is not None)
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (AttributeError, OSError, ValueError):
                    pass
            # At once: taking the interpreter down takes seconds, in which Ctrl-C would find no handler, and crashes where threads
            # of an interrupted search are still in C++.
            interrupts.end(status)


if __name__ == "__main__":
    main()
