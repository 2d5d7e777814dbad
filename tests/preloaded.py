"""Imported last by the process from which programs of tests are forked; see tests/forked.py."""

import gc

from lambda_det.detection import first_batch, matches

# To draw what it writes to first_batch.jpg takes as long as its steps
first_batch._PICTURES, first_batch._SIDE = 1, 64
# So do the test sets that are drawn for the interval of an AP, see tests/fixtures.py
matches._REPLICATES = 4

# What is imported stays: no forked process looks through it for garbage, or copies it by that
gc.collect()
gc.freeze()
gc.set_threshold(20_000)  # as in fixtures.py
