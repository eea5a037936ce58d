"""Money between accounts, in whole cents."""

from .book import Book, parse_amount

__all__ = ["Book", "parse_amount"]
