# Sourced by the scripts beside it. `use_venv` makes .venv when it is missing or
# out of date and names its Python in VENV_PYTHON; with a current .venv it is
# silent and takes a few milliseconds.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"

die() {
  echo "error: $*" >&2
  exit 1
}

say() {
  echo "ddtree_jax: $*" >&2
}

# Whether $1 runs, is new enough and can make environments. Version managers
# leave commands of this name that exist and refuse to run; Debian ships Python
# without ensurepip.
python_is_usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
    >/dev/null 2>&1
}

# Prints a usable Python; 3.12 first, on which the project is developed.
find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    python_is_usable "$PYTHON" ||
      die "PYTHON=$PYTHON: expected a Python 3.12 or newer that runs and has venv and ensurepip"
    echo "$PYTHON"
    return
  fi
  local pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions"
  for candidate in python3.12 python3.13 python3.14 python3 \
    "$pyenv"/3.12*/bin/python "$pyenv"/3.13*/bin/python "$pyenv"/*/bin/python; do
    if python_is_usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  if candidate="$(uv python find '>=3.12' 2>/dev/null)" &&
    python_is_usable "$candidate"; then
    echo "$candidate"
    return
  fi
  die "no Python 3.12 or newer with venv and ensurepip was found: install one" \
    "(Debian: apt-get install python3 python3-venv; macOS: brew install python@3.13;" \
    "pyenv: pyenv install 3.13) or set PYTHON to it"
}

# Takes the lock file $1 until `unlock`, by the Python $2. flock(1) is not on
# macOS; a lock taken through an inherited descriptor lasts until this shell closes it.
lock() {
  exec 9>"$1"
  "$2" -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("ddtree_jax: waiting for another script to finish", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
'
}

unlock() {
  exec 9>&-
}

# Prints a digest of the words and files given: `digest WORD… -- FILE…`.
digest() {
  "$VENV_PYTHON" -I -S -c '
import hashlib, sys
words, files = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
parts = [w.encode() for w in words] + [open(f, "rb").read() for f in files]
print(hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest())
' "$@"
}

# Whether the set named $1 was installed to the end from these very files. The
# root counts too: an environment does not survive being moved.
is_current() {
  [[ -f "$VENV/installed-$1" ]] &&
    [[ "$(cat "$VENV/installed-$1")" == "$(set_digest "$1")" ]]
}

set_digest() {
  digest "$ROOT" -- "$ROOT/pyproject.toml" "$ROOT/requirements/$1.txt"
}

# Makes .venv a working virtual environment with pip; keeps what is in it.
make_venv() {
  local python
  if [[ -e "$VENV" && ! -f "$VENV/pyvenv.cfg" ]]; then
    die "$VENV is not a virtual environment: move it away"
  fi
  if ! "$VENV_PYTHON" -c '' 2>/dev/null; then
    python="$(find_python)"
    say "making .venv with $python ($("$python" -V))"
    # --clear: what is there, if anything, belongs to a Python that does not run.
    "$python" -m venv --clear "$VENV"
  fi
  "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    die "$VENV has $("$VENV_PYTHON" -V), expected 3.12 or newer: move it away"
  # An environment made by uv has no pip.
  "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 ||
    "$VENV_PYTHON" -m ensurepip >&2
}

# Installs the lock file named $1. The mark is taken off first and put on last,
# so an install that was interrupted is done again.
install_set() {
  say "installing requirements/$1.txt into .venv (the first time takes some minutes)"
  rm -f "$VENV/installed-$1"
  "$VENV_PYTHON" -m pip install --disable-pip-version-check \
    --require-hashes -r "$ROOT/requirements/$1.txt" >&2
  "$VENV_PYTHON" -m pip install --disable-pip-version-check --quiet \
    --no-deps --no-build-isolation -e "$ROOT" >&2
  set_digest "$1" >"$VENV/installed-$1.new"
  mv "$VENV/installed-$1.new" "$VENV/installed-$1"
}

# Makes the sets named current: `use_venv lock [lock-cuda12]`.
use_venv() {
  local name
  for name in "$@"; do
    is_current "$name" || make_current "$name"
  done
}

make_current() {
  local python="$VENV_PYTHON"
  "$python" -c '' 2>/dev/null || python="$(find_python)"
  lock "$ROOT/.venv.lock" "$python"
  # Another script may have done it while this one waited.
  if ! is_current "$1"; then
    make_venv
    install_set "$1"
  fi
  unlock
}

# Makes .venv-aot: compilers for GPUs that are not there, out of the sight of JAX
# (tests/support/aot.py). They exist for Linux only.
use_aot() {
  local name=lock-aot target="$ROOT/.venv-aot"
  if [[ "$(uname -s)" != Linux ]] || aot_is_current; then
    return
  fi
  lock "$ROOT/.venv.lock" "$VENV_PYTHON"
  if ! aot_is_current; then
    say "installing requirements/$name.txt into .venv-aot"
    rm -rf "$target"
    "$VENV_PYTHON" -m pip install --disable-pip-version-check --quiet --no-deps \
      --require-hashes --target "$target" -r "$ROOT/requirements/$name.txt" >&2
    aot_digest >"$target/installed-$name"
  fi
  unlock
}

aot_is_current() {
  local mark="$ROOT/.venv-aot/installed-lock-aot"
  [[ -f "$mark" && "$(cat "$mark")" == "$(aot_digest)" ]]
}

# The Python counts: a plugin has one extension for each version.
aot_digest() {
  digest "$("$VENV_PYTHON" -V)" -- "$ROOT/requirements/lock-aot.txt"
}

# Prints the sets that a program needs which uses the accelerator, if there is one.
sets_for_device() {
  echo lock
  if [[ "${JAX_PLATFORMS:-}" != cpu ]] && has_gpu; then
    echo lock-cuda12
  fi
}

has_gpu() {
  nvidia-smi -L >/dev/null 2>&1
}
