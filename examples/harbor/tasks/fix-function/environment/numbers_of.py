"""Numbers of Fibonacci."""


def fibonacci(n):
    """Return the n-th number: 0, 1, 1, 2, 3, 5, and so on."""
    a, b = 0, 1
    for _ in range(n - 1):
        a, b = b, a + b
    return a
