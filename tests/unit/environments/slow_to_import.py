"""A module that takes longer to import than a sample may take to be scored."""

import time

time.sleep(2.0)
VALUE = 1.0
