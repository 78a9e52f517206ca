import sys
import unittest

sys.path.append("/work")
import numbers_of


class Fibonacci(unittest.TestCase):
    def test_first_numbers(self):
        assert [numbers_of.fibonacci(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]

    def test_a_large_number(self):
        assert numbers_of.fibonacci(90) == 2880067194370816120


if __name__ == "__main__":
    unittest.main()
