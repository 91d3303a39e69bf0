# SPDX-License-Identifier: Apache-2.0
"""Any secondary tier behind a proof: nothing it brings is ready before it is opened."""
