"""Programs that are kept on disk: the same numbers, whatever happened to the files."""

import hashlib
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from soapjax.jit import kept_programs, programs
from soapjax.jit.programs import QUICKLY, PlannerProgram, program_folder, side_by_side


def double_of_sines(x):
    return {"y": 2 * jnp.sin(x) + jnp.arange(4.0)}


X = np.linspace(0, 1, 4, dtype=np.float32)


@pytest.fixture(autouse=True)
def no_cache_of_jax():
    """These tests tell what is compiled from what is read: on a slow machine JAX's cache keeps programs as small as theirs."""
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", kept)
    reset_cache()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SOAPJAX_CACHE", str(tmp_path))
    monkeypatch.delenv("SOAPJAX_PROGRAM_CACHE", raising=False)
    return tmp_path / "programs"


def right(program: PlannerProgram) -> bool:
    return np.allclose(program(jnp.asarray(X))["y"], 2 * np.sin(X) + np.arange(4), rtol=1e-6)


def test_the_second_is_loaded_and_equal(folder):
    before = jax.config.jax_compilation_cache_dir
    assert right(PlannerProgram(double_of_sines))
    (kept,) = folder.iterdir()
    written = kept.stat().st_mtime_ns
    assert right(PlannerProgram(double_of_sines))
    assert [f.stat().st_mtime_ns for f in folder.iterdir()] == [written], "it was compiled again"
    assert jax.config.jax_compilation_cache_dir == before


def test_an_option_that_the_compiler_does_not_know_is_left_out(folder, monkeypatch):
    monkeypatch.setattr(programs, "QUICKLY", {"xla_of_a_later_version": True})
    assert right(PlannerProgram(double_of_sines, is_urgent=True))
    monkeypatch.setattr(programs, "QUICKLY", QUICKLY)
    assert right(PlannerProgram(double_of_sines, is_urgent=True))
    assert len(list(folder.iterdir())) == 2, "other options, other programs"


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:40] + b"x" + b[41:]])
def test_a_damaged_file_is_compiled_anew(folder, damage):
    assert right(PlannerProgram(double_of_sines))
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert right(PlannerProgram(double_of_sines))
    assert len(kept.read_bytes()) > len(whole) // 2, "and kept again"
    assert right(PlannerProgram(double_of_sines))


def test_another_program_is_another_file(folder):
    assert right(PlannerProgram(double_of_sines))
    assert np.allclose(PlannerProgram(lambda x: 3 * x)(jnp.asarray(X)), 3 * X)
    assert len(list(folder.iterdir())) == 2


def test_what_nothing_reads_counts_too(folder):
    """An argument that is not used is in no program's text, and is passed all the same."""
    used, unused = jnp.asarray(X), (jnp.zeros(3), jnp.zeros((2, 5)))
    for other in unused:
        found = PlannerProgram(lambda x, _: 2 * x)(used, other)
        np.testing.assert_allclose(found, 2 * X)


def test_nothing_is_kept_where_the_user_wants_none(folder, monkeypatch):
    monkeypatch.setenv("SOAPJAX_PROGRAM_CACHE", "off")
    assert program_folder() is None
    assert right(PlannerProgram(double_of_sines))
    assert not folder.exists()


@pytest.mark.parametrize("said, at", [("", None), ("on", None), ("/kept", "/kept"), ("kept", "kept")])
def test_programs_are_kept_where_the_user_says(said, at, monkeypatch, tmp_path):
    """A relative path, too, is a path."""
    monkeypatch.setenv("SOAPJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("SOAPJAX_PROGRAM_CACHE", said)
    assert program_folder() == (tmp_path / "programs" if at is None else Path.cwd() / at)


def test_a_folder_that_cannot_be_made_is_no_harm(folder):
    folder.parent.joinpath("programs").write_text("a file in its place")
    assert right(PlannerProgram(double_of_sines))


def compiled(monkeypatch) -> list[str]:
    """Names of the programs that were handed to the compiler, as they are."""
    names, compile_one = [], programs.compiled_with

    def counted(lowered, options):
        names.append(lowered.as_text().split("@", 1)[1].split()[0])
        return compile_one(lowered, options)

    monkeypatch.setattr(programs, "compiled_with", counted)
    return names


def test_prepared_by_shape(folder, monkeypatch):
    names = compiled(monkeypatch)
    program = PlannerProgram(double_of_sines)
    program.prepare(jax.ShapeDtypeStruct((4,), "float32"))
    assert len(names) == 1 and right(program) and len(names) == 1, "compiled before its first call, and not again"


def test_programs_side_by_side_take_each_others_results_by_shape(folder, monkeypatch):
    names = compiled(monkeypatch)
    first, second = PlannerProgram(double_of_sines), PlannerProgram(lambda of, x: of["y"] - x)
    with side_by_side() as prepare:
        shapes = prepare(first, X)
        prepare(second, shapes, X)
    assert shapes["y"].shape == (4,) and len(names) == 2
    np.testing.assert_allclose(second(first(X), X), 2 * np.sin(X) + np.arange(4) - X, rtol=1e-6)
    assert len(names) == 2, "both were ready"


def test_what_cannot_be_compiled_side_by_side_is_told(folder, monkeypatch):
    def refused(lowered, options):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(programs, "compiled_with", refused)
    with pytest.raises(RuntimeError, match="out of registers"), side_by_side() as prepare:
        prepare(PlannerProgram(double_of_sines), X)


# --- whose files are read


def planted(folder):
    """A program that is kept, as the user would keep it."""
    assert right(PlannerProgram(double_of_sines))
    (kept,) = folder.iterdir()
    return kept


@pytest.fixture
def unpickled(monkeypatch):
    """How many executables were loaded."""
    found, load = [], programs.serialize_executable.deserialize_and_load
    monkeypatch.setattr(programs.serialize_executable, "deserialize_and_load", lambda *a, **k: found.append(1) or load(*a, **k))
    return found


def test_folder_and_file_are_the_users_own(folder, unpickled):
    before = os.umask(0)
    try:
        kept = planted(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(kept.stat().st_mode) == 0o600
    folder.chmod(0o755)  # as older versions left it: nobody else could write there
    assert right(PlannerProgram(double_of_sines)) and len(unpickled) == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def linked(path, folder):
    """In its place a link to it."""
    away = folder.parent / "away"
    path.rename(away)
    path.symlink_to(away)


DOUBTFUL = {
    "group may write the folder": lambda folder, kept: folder.chmod(0o770),
    "all may write the folder": lambda folder, kept: folder.chmod(0o1777),
    "group may write the file": lambda folder, kept: kept.chmod(0o660),
    "all may write the file": lambda folder, kept: kept.chmod(0o602),
    "the folder is a link": lambda folder, kept: linked(folder, folder),
    "the file is a link": lambda folder, kept: linked(kept, folder),
    "a fifo": lambda folder, kept: (kept.unlink(), os.mkfifo(kept)),
}


@pytest.mark.parametrize("how", DOUBTFUL)
def test_what_others_may_have_written_is_not_read(how, folder, unpickled, caplog, monkeypatch):
    kept = planted(folder)
    monkeypatch.setattr(kept_programs, "_told", set())
    DOUBTFUL[how](folder, kept)
    assert right(PlannerProgram(double_of_sines)) and not unpickled
    assert right(PlannerProgram(double_of_sines))
    lines = [r.getMessage() for r in caplog.records if "programs kept in" in r.getMessage()]
    assert len(lines) == 1 and str(folder) in lines[0] and "\n" not in lines[0]


def test_another_users_are_not_read(folder, unpickled, monkeypatch, caplog):
    planted(folder)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert right(PlannerProgram(double_of_sines)) and not unpickled and f"belongs to user {me}" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_was_given_away_is_not_read(which, folder, unpickled):
    kept = planted(folder)
    os.chown(folder if which == "folder" else kept, 12345, -1)
    assert right(PlannerProgram(double_of_sines)) and not unpickled
    assert kept.stat().st_uid == 0, "a file of another user's is replaced by an own one"


def test_another_programs_file_under_its_name_is_not_called(folder, unpickled):
    assert np.allclose(PlannerProgram(lambda x: 3 * x)(jnp.asarray(X)), 3 * X)
    (other,) = folder.iterdir()
    assert right(PlannerProgram(double_of_sines))
    (mine,) = set(folder.iterdir()) - {other}
    mine.write_bytes(other.read_bytes())
    assert right(PlannerProgram(double_of_sines)) and not unpickled
    assert right(PlannerProgram(double_of_sines)) and len(unpickled) == 1, "and kept again"


def test_a_sum_without_the_key_is_not_enough(folder, unpickled):
    kept = planted(folder)
    body = kept.read_bytes()[32:]
    kept.write_bytes(hashlib.sha256(body).digest() + body)
    assert right(PlannerProgram(double_of_sines)) and not unpickled


def test_what_killed_writers_left_is_swept_after_a_day(folder, monkeypatch):
    kept = planted(folder)
    old, new = folder / ".writing-old", folder / ".writing-new"
    for path, age_s in ((old, 90_000), (new, 3_600)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    monkeypatch.setattr(kept_programs, "_swept", set())
    assert right(PlannerProgram(double_of_sines))
    assert set(folder.iterdir()) == {kept, new}


def test_other_files_in_the_folder_are_not_swept(folder, monkeypatch):
    """A user may name any folder, their home say."""
    kept = planted(folder)
    others = {folder / name for name in (".profile", ".tmpabcdef", "thesis.tex", "0" * 63)}
    for path in others:
        path.write_bytes(b"x" * 2000)
        os.utime(path, (time.time() - 1e7,) * 2)
    monkeypatch.setattr(kept_programs, "_swept", set())
    monkeypatch.setattr(kept_programs, "MAX_BYTES", kept.stat().st_size)
    assert right(PlannerProgram(double_of_sines))
    assert set(folder.iterdir()) == {kept, *others}


def test_a_full_disk_leaves_nothing(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert right(PlannerProgram(double_of_sines)) and not list(folder.iterdir())


def test_what_jax_read_from_a_cache_of_its_own_is_not_kept(folder, monkeypatch):
    """XLA writes it down without its functions: the next process could not run it."""
    compile_one = programs.compiled_with

    def from_cache(lowered, options):
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compile_one(lowered, options)

    with monkeypatch.context() as patched:
        patched.setattr(programs, "compiled_with", from_cache)
        assert right(PlannerProgram(double_of_sines))
    assert not folder.exists()
    assert right(PlannerProgram(double_of_sines)) and len(list(folder.iterdir())) == 1


def test_what_was_kept_and_does_not_run_is_made_anew_once(folder, monkeypatch):
    kept = planted(folder)
    before = kept.stat().st_mtime_ns

    def broken(*_, **__):
        def call(*_):
            raise jax.errors.JaxRuntimeError("INTERNAL: Function fusion not found")

        return call

    with monkeypatch.context() as patched:
        patched.setattr(programs.serialize_executable, "deserialize_and_load", broken)
        program = PlannerProgram(double_of_sines)
        assert right(program) and right(program)
    assert kept.stat().st_mtime_ns > before
    names = compiled(monkeypatch)
    assert right(PlannerProgram(double_of_sines)) and not names


def test_an_error_of_the_program_itself_is_told(folder, monkeypatch):
    planted(folder)
    with pytest.raises((TypeError, ValueError)):
        PlannerProgram(double_of_sines)(jnp.zeros(4), jnp.zeros(4))


def test_it_computes_in_32_bits_whatever_the_step_does(folder):
    """The same program serves a step in double precision and the next one in single, in either order."""
    x = np.arange(4, dtype=np.float32)
    for order in ((False, True, False), (True, False)):
        program = PlannerProgram(lambda a: jnp.cumsum(a) / 3)
        for is_wide in order:
            with jax.enable_x64(is_wide):
                found = program(jnp.asarray(x, float))
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, np.cumsum(x) / 3, rtol=1e-6)


@pytest.mark.parametrize("is_struct", [True, False])
def test_it_is_prepared_in_32_bits_from_any_thread(is_struct):
    """A thread does not have what the user enabled for the one that plans."""
    program = PlannerProgram(lambda a: jnp.full(3, 1.5, a.dtype) + a.astype(jnp.float32))
    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:
        x = jnp.arange(3.0)
        given = jax.ShapeDtypeStruct(x.shape, x.dtype) if is_struct else x
        assert given.dtype == np.float64
        pool.submit(program.prepare, given).result()
        assert program(x).dtype == np.float32


def test_no_dtype_is_promoted_unasked():
    """But for programs that call libraries which do."""

    def mixed(x, is_counted):
        return x * is_counted

    x, is_counted = jnp.arange(3, dtype=jnp.float32), jnp.array([True, False, True])
    with pytest.raises(jax.dtypes.TypePromotionError):
        PlannerProgram(mixed)(x, is_counted)
    np.testing.assert_array_equal(PlannerProgram(mixed, promotes=True)(x, is_counted), [0, 0, 2])


def test_results_are_written_over_an_argument(folder, monkeypatch):
    """And so they are by what is read from disk."""
    names = compiled(monkeypatch)

    def added(x, over):
        return over.at[: len(x)].set(x)

    x = jnp.arange(3, dtype=jnp.float32)
    program = PlannerProgram(added, name="added", results=0, over=1)
    for _ in range(2):
        over = jnp.zeros(1 << 16)
        first = program(x, over)
        place = first.unsafe_buffer_pointer()
        again = program(x + 1, first)
        assert again.unsafe_buffer_pointer() == place and first.is_deleted()
        np.testing.assert_array_equal(again[:4], [1, 2, 3, 0])
        program = PlannerProgram(added, name="added", results=0, over=1)
    assert len(names) == 1


def test_a_program_of_one_device_is_kept_for_any_number_of_them(folder, monkeypatch):
    """Processes of a job, which have one device each, load what a process of eight compiled; another flag is another program."""
    monkeypatch.setattr(programs, "_surroundings", programs._surroundings.__wrapped__)

    def key(flags):
        monkeypatch.setenv("XLA_FLAGS", flags)
        return PlannerProgram(double_of_sines, name="doubled")._key([X])

    many, other = "--xla_force_host_platform_device_count=8 --xla_dump_to=a", "--xla_dump_to=b"
    assert key(many) == key("--xla_dump_to=a") != key(other)


def test_processes_whose_devices_have_other_numbers_keep_programs_of_their_own(folder, monkeypatch):
    """An executable runs on the device that it was compiled for: under one name ranks of a job would compile it by turns."""
    names = compiled(monkeypatch)
    for _ in range(2):
        for device in jax.devices()[:2]:
            with jax.default_device(device):
                assert right(PlannerProgram(double_of_sines))
                assert right(PlannerProgram(double_of_sines, name="sines", results={"y": 0}))
    assert len(names) == len(list(folder.iterdir())) == 4
