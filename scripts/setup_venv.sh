# Sourced by demo.sh and test.sh: enters the checkout and activates its .venv, which is
# made on the first call and brought up to date when the project's requirements change.
#
# PYTHON names the interpreter to make .venv with (default python3, at least 3.11).
# A torch that .venv holds already is kept, whatever its build. So for a GPU that needs
# another torch than the tested one, make .venv and install that torch before the first call.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The activate script is the last thing that making a virtual environment writes.
if [ ! -e .venv/bin/activate ]; then
    echo "Making .venv"
    if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "batchgen needs Python 3.11 or later: set PYTHON to one." >&2
        exit 2
    fi
    if ! "${PYTHON:-python3}" -m venv --clear .venv; then
        echo "Could not make .venv. On Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
fi

# The path is part of the stamp: a moved checkout has an editable install that points elsewhere.
wanted="$({
    pwd
    .venv/bin/python -VV
    cat constraints.txt pyproject.toml
} | .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"

if [ "$(cat .venv/batchgen-stamp 2>/dev/null)" != "$wanted" ]; then
    echo "Installing batchgen and its requirements into .venv"
    constraints=constraints.txt
    if [ ! -e .venv/batchgen-tested-torch ] && .venv/bin/python -c 'import torch' 2>/dev/null; then
        constraints=.venv/constraints-own-torch.txt
        grep -v -E '^(torch|triton)==' constraints.txt >"$constraints"
    else
        touch .venv/batchgen-tested-torch
        .venv/bin/python -m pip install --quiet --no-compile -c constraints.txt \
            "$(grep '^torch==' constraints.txt)"
    fi
    .venv/bin/python -m pip install --quiet --no-compile -c "$constraints" -e '.[demo,test]'
    # pip would compile these ten thousand files on one core. A few of them are no valid Python.
    .venv/bin/python -m compileall -qq -j 0 .venv/lib || true
    echo "$wanted" >.venv/batchgen-stamp
fi

# A moved checkout's activate script would name the old place, so the PATH is set here.
VIRTUAL_ENV="$PWD/.venv"
PATH="$VIRTUAL_ENV/bin:$PATH"
export VIRTUAL_ENV PATH
unset PYTHONHOME
