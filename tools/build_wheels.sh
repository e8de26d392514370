#!/usr/bin/env bash
# Builds the wheels for this machine's architecture and every supported Python into dist/, and tests each. Needs Docker.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install -q 'cibuildwheel==4.3.*'
exec python3 -m cibuildwheel --output-dir dist
