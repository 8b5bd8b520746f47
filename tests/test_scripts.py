"""The scripts find a Python that runs, and take a half-made .venv for what it is."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASH = shutil.which("bash")


@pytest.fixture
def project(tmp_path) -> Path:
    """A root with what the environment is made from, and no .venv."""
    root = tmp_path / "project"
    for name in ("scripts/_env.sh", "pyproject.toml", "requirements/lock.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def commands(tmp_path) -> Path:
    """A PATH on which there is nothing but what the scripts themselves need."""
    directory = tmp_path / "commands"
    directory.mkdir()
    for name in ("dirname", "cat", "env"):
        (directory / name).symlink_to(str(shutil.which(name)))
    return directory


def bash(project: Path, commands: Path, line: str, **environment: str):
    return subprocess.run(
        [str(BASH), "-c", f"source '{project}/scripts/_env.sh'; {line}"],
        env={"PATH": str(commands), "HOME": str(project)} | environment,
        capture_output=True,
        text=True,
    )


def write_command(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)


def test_a_python_that_refuses_to_run_is_passed_over(project, commands):
    # What a version manager leaves for a version that is not selected.
    write_command(commands / "python3.12", "echo 'command not found' >&2; exit 127")
    write_command(commands / "python3.14", f'exec "{sys.executable}" "$@"')
    done = bash(project, commands, "find_python")
    assert (done.returncode, done.stdout, done.stderr) == (0, "python3.14\n", "")


def test_pyenvs_versions_are_found(project, commands):
    python = project / ".pyenv/versions/3.13.0/bin/python"
    write_command(python, f'exec "{sys.executable}" "$@"')
    done = bash(project, commands, "find_python")
    assert done.stdout == f"{python}\n"


def test_uvs_python_is_found(project, commands):
    write_command(commands / "uv", f"echo '{sys.executable}'")
    assert bash(project, commands, "find_python").stdout == f"{sys.executable}\n"


def test_no_python_is_one_line_that_says_what_to_install(project, commands):
    done = bash(project, commands, "use_venv lock")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.12 or newer")
    assert "apt-get install python3 python3-venv" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_given_python_that_is_too_old_is_refused(project, commands):
    # An older Python answers the question "are you older than 3.12?" with 1.
    write_command(commands / "old", "exit 1")
    write_command(commands / "python3.12", f'exec "{sys.executable}" "$@"')
    done = bash(project, commands, "find_python", PYTHON="old")
    assert done.returncode == 1
    assert done.stderr.startswith("error: PYTHON=old: expected a Python 3.12 or newer")


def test_a_directory_that_is_no_environment_is_kept(project, commands):
    (project / ".venv").mkdir()
    (project / ".venv" / "mine").write_text("")
    write_command(commands / "python3.12", f'exec "{sys.executable}" "$@"')
    done = bash(project, commands, "use_venv lock")
    assert done.returncode == 1
    assert "is not a virtual environment: move it away" in done.stderr
    assert (project / ".venv" / "mine").exists()


@pytest.fixture
def installed(project, commands) -> Path:
    """The project with a .venv that counts as installed to the end."""
    venv.create(project / ".venv", symlinks=True)
    done = bash(project, commands, "set_digest lock")
    (project / ".venv" / "installed-lock").write_text(done.stdout)
    return project


def test_a_current_environment_is_left_alone_in_silence(installed, commands):
    done = bash(installed, commands, "use_venv lock; echo $VENV_PYTHON")
    assert done.stderr == ""
    assert done.stdout == f"{installed}/.venv/bin/python\n"


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements/lock.txt"])
def test_a_changed_lock_or_project_is_installed_again(installed, commands, changed):
    with open(installed / changed, "a") as file:
        file.write("\n")
    assert bash(installed, commands, "is_current lock").returncode == 1


def test_an_environment_without_a_mark_is_installed_again(installed, commands):
    assert bash(installed, commands, "is_current lock").returncode == 0
    os.remove(installed / ".venv" / "installed-lock")
    assert bash(installed, commands, "is_current lock").returncode == 1


def test_a_moved_environment_is_installed_again(installed, commands, tmp_path):
    installed.rename(tmp_path / "moved")
    assert bash(tmp_path / "moved", commands, "is_current lock").returncode == 1


def test_the_lock_is_held_until_it_is_given_back(project, commands):
    line = (
        f"lock '{project}/file' '{sys.executable}'; "
        f"'{sys.executable}' -c '"
        "import fcntl, sys\n"
        "try: fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        f'except BlockingIOError: print("held")\' {project}/file; '
        f"unlock; '{sys.executable}' -c '"
        "import fcntl, sys\n"
        "fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        f'print("free")\' {project}/file'
    )
    assert bash(project, commands, line).stdout == "held\nfree\n"
