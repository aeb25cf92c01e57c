"""Benchmarks of cuflash beside its peers: timing, cases, contenders, and the programs that write the records.

``python -m bench.run`` in a checkout; the package is ``cuflash.bench`` in an installed wheel.
"""
