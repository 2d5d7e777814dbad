"""Imported last by the process from which programs of tests are forked; see tests/forked.py."""

import functools
import gc

from lambda_det.training import start

# What a run writes to environment.txt takes a quarter of a second
start.collect_env_info = functools.cache(start.collect_env_info)
start.collect_env_info()

# What is imported stays: no forked process looks through it for garbage, or copies it by that
gc.collect()
gc.freeze()
