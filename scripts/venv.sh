# shellcheck shell=bash
# Sourced by the other scripts. Decides where the virtual environment is and when it must be installed again; leaves
# which packages to pyproject.toml and where they come from to pip's own settings.
#   PYTHON  interpreter to make it with (default: the first Python 3.11+ of python3, python3.13, python3.12, python3.11)
#   VENV    its folder (default: .venv in the repository)
#   VENV_EXTRAS  of pyproject.toml, beside the package itself (default: dev)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        elif [ "$candidate" = "${PYTHON:-}" ]; then
            echo "PYTHON=$PYTHON does not run or is older than Python 3.11" >&2
            return 2
        fi
    done
    echo "no Python 3.11 or later found: install one, or set PYTHON to it" >&2
    return 2
}

# Makes or reuses $VENV with this package (editable) and its development tools, and sets VENV_PYTHON.
# The stamp keeps a second run fast: nothing is installed while pyproject.toml and this repository's place are the same.
ensure_venv() {
    local python stamp wanted lock
    VENV_PYTHON=$VENV/bin/python
    stamp=$VENV/.dmuon-installed
    wanted="$(cksum <"$ROOT/pyproject.toml") $ROOT"
    if [ -x "$VENV_PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || return
    lock=$VENV.lock   # two scripts started together: the second waits for the first (where flock exists)
    if command -v flock >/dev/null && [ -z "${DMUON_VENV_LOCKED:-}" ]; then
        (exec 9>"$lock" && flock 9 && DMUON_VENV_LOCKED=1 ensure_venv) || return
        return
    fi
    if [ ! -x "$VENV_PYTHON" ]; then
        if [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
            echo "VENV=$VENV holds other files and is left as it is: name a new folder" >&2
            return 2
        fi
        echo "making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV" || { echo "'$python -m venv' failed (on Debian: install python3-venv)" >&2; return 2; }
    fi
    echo "installing into $VENV (the first time this takes some minutes)"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -e "${ROOT}[${VENV_EXTRAS:-dev}]" || return
    echo "$wanted" >"$stamp"
}
