import sys
import unittest

sys.path.insert(0, "/app")

from ledger import Book, parse_amount  # noqa: E402


class Hidden(unittest.TestCase):
    def test_amounts(self) -> None:
        for text, cents in {"0.5": 50, "-1": -100, "-1.05": -105, "10.00": 1000, " 7.25 ": 725}.items():
            self.assertEqual(parse_amount(text), cents, text)

    def test_given_accounts_are_used(self) -> None:
        book = Book({"a": 3})
        book.deposit("a", 4)
        self.assertEqual(book.accounts, {"a": 7})
        self.assertEqual(Book().accounts, {})

    def test_refusals_leave_everything(self) -> None:
        for amount in (4, 0, -5):
            book = Book({"a": 3})
            with self.assertRaises(ValueError):
                book.transfer("a", "b", amount)
            self.assertEqual(book.accounts, {"a": 3})

    def test_transfers_add_up(self) -> None:
        book = Book({"a": 3, "b": 1})
        book.transfer("a", "b", 2)
        self.assertEqual((book.accounts, book.total()), ({"a": 1, "b": 3}, 4))


unittest.main()
