"""The oracles: other people's libraries, run once to make tests/golden/.

Needs torch and friends (requirements.txt), so it runs in its own environment
through scripts/oracles and is never imported by the test suite.
"""
