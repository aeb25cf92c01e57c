"""What PyTorch's test classes are built on; their cases of attention use nothing of it beyond unittest."""

import unittest


class TestCase(unittest.TestCase):
    pass
