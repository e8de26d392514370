#!/usr/bin/env bash
# Makes a Debian with Python 3.11 and no compiler in a new folder: the base of an image without a GPU. Needs root and
# debootstrap.
#   debian-root.sh FOLDER
set -euo pipefail
suite=bookworm
# The mirror that this system uses itself, if it is a Debian.
# shellcheck disable=SC2016 # apt puts in the name
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $suite" 2>/dev/null | head -n 1)
debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$1" ${mirror:+"$mirror"}
chroot "$1" python3 -m venv /opt/venv
