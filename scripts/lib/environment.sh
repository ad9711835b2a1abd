# Finds a Python and keeps this checkout's virtual environment. Sourced by the commands in scripts/, never run.
#
#   root               the checkout; the command that sources this file sets it first
#   venv               where the environment is: .venv in the checkout, or $HAWKER_VENV
#   make_venv runtime  the package and what it needs to run
#   make_venv dev      the same, and the tools of the dependency group "dev" in pyproject.toml
#   can_apt            whether packages may be installed: as root, where there is apt, and unless apt=no is set
#   apt_install PKG... installs Debian packages
#   have PROGRAM       whether it is there
#   container_packages the Debian packages that containers still lack here, a line each, with its reason
#   unpack_guest_kernel  has a kernel for the guests of microVMs, in $HAWKER_GUEST_KERNEL or /var/lib/hawker/guest
#
# An environment is reused until a file that decides its contents changes: its stamp holds their checksum.

venv=${HAWKER_VENV:-$root/.venv}
command_name=${0##*/}

say() { printf '%s: %s\n' "$command_name" "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

can_apt() { [ "${apt:-yes}" = yes ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

apt_install() {
    if [ -z "${apt_lists_are_fresh:-}" ]; then
        DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 update >&2 || return
        apt_lists_are_fresh=yes
    fi
    # A freshly booted server may hold apt's lock for its own updates: wait for it.
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 -o Acquire::Retries=3 \
        install --no-install-recommends "$@" >/dev/null
}

have() { command -v "$1" >/dev/null 2>&1; }

container_packages() {
    have crun || echo crun
    have cc || echo gcc libc6-dev       # the program that is process 1 in machines is compiled on first use
    have busybox || echo busybox-static # what the images made here hold
    have nft || echo nftables           # brings libnftables, which filters machines' traffic
}

# Debian's kernel for virtual machines. It is only unpacked: installed, it would become a kernel of this machine, with an
# initial file system to make and a boot loader to tell.
unpack_guest_kernel() {
    guest=${HAWKER_GUEST_KERNEL:-/var/lib/hawker/guest}
    for kernel in "$guest"/boot/vmlinuz-*-cloud-amd64 /boot/vmlinuz-*-cloud-amd64; do
        if [ -e "$kernel" ]; then return 0; fi
    done
    [ "$(dpkg --print-architecture)" = amd64 ] || return 1
    say "unpacking a kernel for microVMs into $guest"
    archives=$(mktemp -d) && mkdir -p "$archives/partial" "$guest" || return
    apt_install --download-only -o Dir::Cache::archives="$archives" -o APT::Sandbox::User=root linux-image-cloud-amd64 &&
        dpkg-deb -x "$archives"/linux-image-[0-9]*-cloud-amd64_*.deb "$guest"
    status=$?
    rm -rf "$archives"
    return "$status"
}

# Sets `python` to one that can make virtual environments, or to nothing. `bare_python` is one that is new enough and
# cannot: Debian and Ubuntu keep that part of Python in a package of its own.
find_python() {
    python='' bare_python=''
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3.11 python3.12 python3.13 python3.14 python3
    fi
    for candidate; do
        # Run it: a name in PATH may be a version manager's shim with nothing behind it.
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
        if "$candidate" -c 'import venv; from ensurepip import bootstrap' >/dev/null 2>&1; then
            python=$candidate
            return
        fi
        bare_python=${bare_python:-$candidate}
    done
}

require_python() {
    find_python
    [ -z "$python" ] || return 0
    if [ -z "$bare_python" ]; then
        fail "no Python 3.11 or newer found${PYTHON:+ at $PYTHON}; on Debian or Ubuntu install the packages" \
            "python3.11 and python3.11-venv, or name one with PYTHON=/path/to/python3."
    fi
    package=$("$bare_python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if can_apt; then
        say "installing $package with apt"
        apt_install "$package" && find_python
    fi
    [ -n "$python" ] || fail "$bare_python cannot make virtual environments; install the package $package (or python3-venv)."
}

# What decides the contents of an environment: the requirements, their pinned versions, and where the checkout is.
venv_checksum() {
    { cat "$root/pyproject.toml" "$root"/scripts/requirements*.txt && printf '%s\n' "$root"; } | cksum
}

make_venv() {
    # Settings of the caller's Python must not leak into ours. Without bytecode kept, each process compiles Hawker anew.
    unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
    checksum=$(venv_checksum)
    for stamp in "$venv/.hawker-dev" "$venv/.hawker-$1"; do # what holds the tools holds the package too
        if [ "$(cat "$stamp" 2>/dev/null)" = "$checksum" ] && "$venv/bin/python" -c 'import hawker' 2>/dev/null; then
            return 0
        fi
    done

    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none yet, or its Python has gone
        require_python
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv" || fail "could not make $venv"
    fi
    say "installing what pyproject.toml asks for; the first time takes about half a minute"
    rm -f "$venv"/.hawker-*
    if [ "$1" = dev ]; then
        pip_install --require-hashes --requirement "$root/scripts/requirements.txt" \
            --requirement "$root/scripts/requirements-dev.txt"
    else
        pip_install --require-hashes --requirement "$root/scripts/requirements.txt"
    fi
    pip_install --no-deps --no-build-isolation --editable "$root" # with the pinned hatchling
    printf '%s\n' "$checksum" >"$venv/.hawker-$1"
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install what pyproject.toml asks for"
}
