"""Identity of a trial: its key, and the digest of the code that it runs.

:mod:`~vitlab.identity.trial` holds a trial as a value and hashes it, :mod:`~vitlab.identity.code` digests the modules
that train it, whose source text :mod:`~vitlab.identity.source` reads.
"""
