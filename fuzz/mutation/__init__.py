# SPDX-License-Identifier: Apache-2.0
"""A check of the tests themselves: small faults put into the code, one at a time.

`operators` says which faults there are, `cover` which tests run a line, `hunt` runs those tests
with one fault in place, `record` keeps what became of it; `SURVIVORS.md` says what survived and
why. No mutation tool that was looked at fits: they copy the tree (our tests check the tree) or
need the whole suite per fault.
"""
