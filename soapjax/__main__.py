"""The `soapjax` command, which `python -m soapjax` is too. Nothing heavy is imported before Ctrl-C is handled."""

import os
import sys

from soapjax import interrupts


def main() -> None:
    with interrupts.handled():
        try:
            from soapjax import cli

            cli.main()
        except SystemExit as e:
            if not interrupts.came():
                raise
            # Threads of an interrupted search may still be in C++, under which the interpreter must not be taken down.
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (AttributeError, OSError, ValueError):
                    pass
            os._exit(interrupts.STATUS if e.code is None else e.code)


if __name__ == "__main__":
    main()
