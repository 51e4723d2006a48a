"""The laboratory: workloads, and what is read off them.

It runs against whichever commit of the package is installed, so that all of history is measured with
the same, today's, instruments. It imports neither asv nor pytest.
"""
