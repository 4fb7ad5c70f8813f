"""The `soapjax` command, which `python -m soapjax` is too. Nothing heavy is imported before Ctrl-C is handled."""

import sys

from soapjax.helpers import interrupts
from soapjax.helpers.garbage import fewer_collections


def main() -> None:
    # A plan of many layers is reported and written beside all that it was made from: collecting would go through that again.
    with interrupts.handled(), fewer_collections():
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
