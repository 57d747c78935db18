#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
#
# Runs pytest twice: the Triton kernels and the V2 runner, which need Triton's
# interpreter switched on before vllm is imported, and all other tests, which need it
# off. Arguments go to both. A run that selects no test (pytest's code 5) is fine if
# the other one has some.
#
#     run_tests.sh PYTHON [pytest arguments]
set -u
python=$1
shift

"$python" -m pytest tests/kernels tests/v2 "$@"
first=$?
if [ $first -ne 0 ] && [ $first -ne 5 ]; then
    exit $first
fi
"$python" -m pytest "$@"
second=$?
if [ $second -eq 5 ]; then
    exit $first
fi
exit $second
