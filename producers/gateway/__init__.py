"""The gateway: any agent that speaks the OpenAI protocol becomes a producer, without a change.

`protocol` says what a request may ask and how it is answered, `reading` what of a growing text may be shown, `turns`
how a turn comes about and who saw it, `attempts` what of an episode goes to the log, `lessee` which episodes there are,
`app` speaks HTTP, `serving` puts a replica behind it.
"""
