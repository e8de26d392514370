#!/usr/bin/env bash
# Makes and checks in a new folder what a first upload needs, from the last commit: the source distribution, a wheel of
# this Python, their metadata, the bill of materials, and the name of the image. Nothing is uploaded.
#   make_release.sh FOLDER [https://github.com/OWNER/NAME]       without an address the package names none
set -euo pipefail
mkdir "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
commit=$(git rev-parse HEAD)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive HEAD | tar x -C "$work"
python3 -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
cd "$work"
python tools/prepare_release.py "${2:-}" "v$version" "$commit"
pip install -q build
python -m build -q --outdir "$folder/dist" # the wheel from the source distribution
tools/check_release.sh "$folder/dist"
ls "$folder/dist" "$folder"/*.json
echo "image: cumem-sleep:$version, from examples/deploy/image/Containerfile with these wheels in dist/"
