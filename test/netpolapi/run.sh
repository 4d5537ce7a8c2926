#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The conformance tests of the ClusterNetworkPolicy profile against a lab, as
# root. Arguments go to go test. WEFT_FAMILIES=4 or 6 runs one family only.
set -euo pipefail
cd "$(dirname "$0")"
../proberlab/clean.sh npa go test -count=1 -timeout 14m "$@"
