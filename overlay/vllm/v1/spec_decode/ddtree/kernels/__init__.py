# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""Triton kernels of DDTree. The PyTorch reference of each is one package level up."""
