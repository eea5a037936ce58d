"""`make chaos`: a run on three brokers that are killed, paused and restarted, as are its roles, by a seeded schedule.

At the end the ledger must close, and every closure and content hash must equal those of a calm run on the same input.
`python -m tests.chaos --help` tells the options; `faults` says what is done to the run, `crew` who does its work,
`load` what the work is, `outcome` what is compared.
"""
