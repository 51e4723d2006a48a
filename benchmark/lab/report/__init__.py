"""The page: what asv measured along history, as one HTML file that needs no network.

`lab.report.data` says what it takes; reading that out of asv's files is the business of
``scripts/report.py``. `lab.report.noise` has the statistics, `lab.report.changes` holds commits against
each other, `lab.report.texts` says in words what plots show, `lab.report.plots` draws, and
`lab.report.page` puts it together.
"""
