# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""The apply tool: a patch series and an overlay on a pinned upstream."""

__version__ = "0.1.0"
