"""Loads files that a stranger may have written, under an audit hook, and prints what Python did meanwhile as JSON.

A process of its own, since a hook cannot be taken out again. Everything is done once before, with other files, so that what
soapjax and JAX import when they are first used is imported.

    python audited_worker.py FOLDER    with warm.json, plan.json, warm.toml, box.toml and profile.json; the cache is FOLDER/cache
"""

import json
import os
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp

from soapjax import Plan, load_topology
from soapjax.cli import arguments, commands
from soapjax.costs.measured.profile import load_profile
from soapjax.errors import SoapjaxError
from soapjax.jit.programs import PlannerProgram, program_folder

FOLDER = Path(sys.argv[1])
SEEN = {
    "open", "import", "exec", "compile", "marshal.loads", "pickle.find_class", "ctypes.dlopen", "os.system", "subprocess.Popen",
    "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect", "socket.bind", "shutil.rmtree", "os.remove", "os.rename",
    "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.putenv", "code.__new__",
}  # fmt: skip
events: list[tuple[str, str]] = []
is_on = False


def hook(event, args):
    if is_on and event in SEEN and not (event == "open" and isinstance(args[0], int)):  # a descriptor was opened before
        events.append((event, str(args[0])[:300] if args else ""))


def command(parsed):
    """Status of a command, its line parsed already: tyro, which parses it, evaluates annotations of our own."""
    try:
        return commands.run(parsed, None)[2]
    except SoapjaxError:
        return 2


def doubled():
    """A program that is in the cache, or goes there."""
    return float(PlannerProgram(lambda x: 2 * x + 1)(jnp.float32(3)))


def watched(name, act):
    global is_on
    events.clear()
    is_on = True
    try:
        result = act()
    finally:
        is_on = False
    report[name] = {"result": result, "events": list(events)}


os.chdir(FOLDER)
warm, plan = "warm.json", "plan.json"
assert command(arguments.SimulateCommand(warm)) == 0
assert command(arguments.VerifyCommand(warm)) == 2
Plan.load(warm), load_topology("warm.toml"), load_profile("profile.json"), doubled(), doubled()

report: dict = {}
sys.addaudithook(hook)
watched("plan", lambda: Plan.load(plan).num_devices)
watched("topology", lambda: load_topology("box.toml").num_devices)
watched("profile", lambda: len(load_profile("profile.json").operators))
for name, kind in {"simulate": arguments.SimulateCommand, "run": arguments.RunCommand, "verify": arguments.VerifyCommand}.items():
    watched(name, lambda kind=kind: command(kind(plan)))
watched("own cache", doubled)
if os.geteuid() == 0:
    os.chown(program_folder(), 12345, -1)
else:
    program_folder().chmod(0o702)
watched("another user's cache", doubled)
shutil.rmtree(program_folder())
print(json.dumps(report))
