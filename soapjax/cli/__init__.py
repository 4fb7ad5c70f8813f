"""The command line. Nothing outside this package imports it but `soapjax.__main__`."""

from soapjax.cli.command_line import main as main
