#!/bin/bash
set -e
cd /app
python3 - <<'PY'
from pathlib import Path

file = Path("ledger/book.py")
text = file.read_text()
text = text.replace('''    whole, _, part = text.strip().partition(".")
    return int(whole or 0) * 100 + int(part or 0)
''', '''    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    whole, _, part = text.lstrip("+-").partition(".")
    return sign * (int(whole or 0) * 100 + int(part.ljust(2, "0") or 0))
''')
text = text.replace("accounts={}", "accounts=None").replace("self.accounts = accounts", "self.accounts = {} if accounts is None else accounts")
text = text.replace('''        self.deposit(target, cents)
        if self.accounts.get(source, 0) <= cents or cents < 0:
            raise ValueError(f"{source} has less than {cents}")
''', '''        if self.accounts.get(source, 0) < cents or cents <= 0:
            raise ValueError(f"{source} has less than {cents}, or that isn't positive")
        self.deposit(target, cents)
''')
file.write_text(text)
PY
python3 -m unittest discover -s tests
