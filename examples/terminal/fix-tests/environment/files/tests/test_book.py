import unittest

from ledger import Book, parse_amount


class Amounts(unittest.TestCase):
    def test_cents_are_read(self):
        self.assertEqual(parse_amount("12.50"), 1250)
        self.assertEqual(parse_amount("12.5"), 1250)
        self.assertEqual(parse_amount("3"), 300)

    def test_sign_holds_for_cents_too(self):
        self.assertEqual(parse_amount("-0.05"), -5)
        self.assertEqual(parse_amount("-2.50"), -250)


class Books(unittest.TestCase):
    def test_books_are_apart(self):
        Book().deposit("ada", 5)
        self.assertEqual(Book().accounts, {})

    def test_all_that_is_there_may_be_moved(self):
        book = Book({"ada": 100})
        book.transfer("ada", "bo", 100)
        self.assertEqual(book.accounts, {"ada": 0, "bo": 100})

    def test_refused_transfer_moves_nothing(self):
        book = Book({"ada": 100})
        with self.assertRaises(ValueError):
            book.transfer("ada", "bo", 101)
        self.assertEqual(book.total(), 100)
        with self.assertRaises(ValueError):
            book.transfer("ada", "bo", -1)
        self.assertEqual(book.accounts, {"ada": 100})
