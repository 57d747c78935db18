# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""DDTree: tree speculative decoding from one DFlash drafter pass.

The drafter's L per-position distributions become a tree of N nodes (Ringel and
Romano, arXiv 2604.12989), the target verifies all nodes in one forward under an
ancestor mask, and a walk along the target's own tokens picks the accepted path.
"""

__version__ = "0.1.0"
